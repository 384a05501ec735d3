"""The sections of `gpu_check.py`: each gives plain values for the report."""

import ast
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import monitor_overhead
import torch
import tuner as by_size
from gpu_cases import measure, reading
from gpu_models import Subject, subjects
from models import GPT, tokens

from lightning_ckpt import BatchSizeTuner, estimate_memory
from lightning_ckpt.fake_step import DeviceType
from lightning_ckpt.hardware import peak_flops
from lightning_ckpt.memory import GIB, Interval, MemoryReader, release_unused
from lightning_ckpt.oom import is_out_of_memory

ROOT = Path(__file__).resolve().parent.parent
ESTIMATED = ("none", "full", "selective")


@dataclass
class Check:
    """One run of the script: where it runs, until when, and what it has found by section."""

    device: torch.device
    tiny: bool
    until: float = float("inf")
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left(self) -> float:
        """The seconds that are left."""
        return self.until - time.monotonic()

    @property
    def room(self) -> int:
        """The bytes of the device."""
        return 0 if self.device.type == "cpu" else properties(self.device).total_memory

    @property
    def peaks(self) -> dict[str, float]:
        """The FLOP/s of the device by format."""
        return peak_flops(device_name(self.device))

    def subjects(self) -> dict[str, Subject]:
        return subjects(self.tiny, self.room)


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
        run: does it, and returns what is said of it; of what can't be done on this device, why it is `left out`.
        seconds: that it takes on a large GPU, at most.
    """

    run: Callable[[Check], dict[str, Any]]
    seconds: float


def tests(check: Check) -> dict[str, Any]:
    """The tests that need a device, in a process of their own."""
    return tested(["tests/test_on_gpu.py"] if check.tiny else ["tests"], max(1.0, min(check.left(), 300)))


def tested(paths: Sequence[str | Path], seconds: float) -> dict[str, Any]:
    """What the tests marked `gpu` show: how many passed, which failed, and which were skipped, with their reasons.

    Raises:
        RuntimeError: pytest found none, or did not come to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junitxml={outcome}", *paths],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=seconds,
        )
        cases = list(ElementTree.parse(outcome).iter("testcase")) if outcome.exists() else []
    outcomes: dict[str, dict[str, str]] = {}
    for case in cases:  # two of one name where a test fails and its teardown too
        parts = outcomes.setdefault(f"{case.get('classname')}::{case.get('name')}", {})
        parts.update({part.tag: _reason(part) for part in case})
    failed = [name for name, parts in outcomes.items() if parts.keys() & {"failure", "error"}]
    skipped = {name: parts["skipped"] for name, parts in outcomes.items() if "skipped" in parts and name not in failed}
    if not outcomes or done.returncode != bool(failed):
        said = (done.stdout + done.stderr).strip() or "it said nothing"
        raise RuntimeError(f"pytest ended with {done.returncode}: {said.splitlines()[-1]}\n{said[-2000:]}")
    passed = len(outcomes) - len(failed) - len(skipped)
    said = done.stdout[-20_000:] if failed else ""
    return {"passed": passed, "skipped": skipped, "failed": failed, "output": said}


def _reason(part: ElementTree.Element) -> str:
    """What pytest says of a test, in one line."""
    said = part.get("message", "")
    if said == "collection skipped" and part.text:  # a file that skips itself: (path, line, why)
        said = ast.literal_eval(part.text)[-1].removeprefix("Skipped: ")
    return " ".join(said.split())


def of_model(name: str) -> Callable[[Check], dict[str, Any]]:
    """Every way of checkpointing one model; with tiny ones only as much as shows that it runs."""

    def run(check: Check) -> dict[str, Any]:
        less: dict[str, Any] = {"rounds": 1, "fractions": (0.5,)} if check.tiny else {}
        return measure(check.subjects()[name], check.device, check.peaks, check.left, **less)

    return run


def estimates(check: Check) -> dict[str, Any]:
    """Estimated peaks against those that the sections before have measured."""
    if check.device.type not in get_args(DeviceType):
        return {"left out": f"estimate_memory knows {' and '.join(get_args(DeviceType))} alone, no {check.device.type}"}
    rows = []
    for name, subject in check.subjects().items():
        cases = check.found.get(name, {}).get("cases", {})
        real = {case: cases[case]["peak_allocated"] for case in ESTIMATED if "peak_allocated" in cases.get(case, {})}
        if not real:
            continue
        with torch.device("meta"):
            model = subject.workload.make()
        batch = subject.workload.batch()
        for how in ("uncounted", "measure"):
            release_unused(check.device)
            estimate = estimate_memory(
                model,
                batch,
                subject.workload.loss,
                policy=list(real),
                optimizer=torch.optim.AdamW,
                blocks=subject.workload.blocks,
                precision="bf16-mixed",
                device=check.device.type,
                workspaces=how,
            )
            for policy, peak in real.items():
                row = {"model": name, "policy": policy, "workspaces": how, "estimated": estimate[policy].peak}
                rows.append(row | {"real": peak, "error": estimate[policy].peak / peak - 1})
    if not rows:
        raise RuntimeError("no model was measured, so there is nothing to hold estimates to")
    return {"rows": rows}


def batch_size(check: Check) -> dict[str, Any]:
    """What `BatchSizeTuner` settles on, against the largest batch, to 2 %, with which steps go through."""
    depth, width, context = (4, 32, 64) if check.tiny else (8, 512, 256)
    kind = ("GPT", lambda: GPT(depth, width, context=context), lambda: tokens(1, context + 1)[0])
    limit = 48 * 2**20 if check.tiny else min(16 * GIB, check.room // 2)
    with tempfile.TemporaryDirectory() as folder, limited(check.device, limit) as reader:
        largest = by_size.largest_of(lambda size: (peak_at(size, kind, folder, check, reader) or limit + 1) <= limit)
        found = searched(kind, folder, check)
        settled = found["settled"]
        about = {"limit": limit, "largest": largest, "share": settled / largest}
        return about | found | {"peak": peak_at(settled, kind, folder, check, reader)}


def searched(kind: by_size.Kind, folder: str, check: Check) -> dict[str, Any]:
    """A search by `BatchSizeTuner`; what it trained is let go."""
    by_size.STEPS.clear()
    by_size.ERRORS.clear()
    tuner, end = BatchSizeTuner(), by_size.Searched()
    release_unused(check.device)
    began = time.perf_counter()
    train(by_size.Task(kind), [tuner, end], folder, check)
    return {
        "headroom": tuner.options.headroom,
        "settled": tuner.batch_size or 0,
        "steps": end.steps,
        "out_of_memory_errors": end.errors,
        "seconds_of_search": end.at - began,
    }


@contextmanager
def limited(device: torch.device, limit: int) -> Iterator[MemoryReader]:
    """Let memory end at a limit: an accelerator's allocator refuses more, on a CPU it is counted only."""
    backend: Any = torch.get_device_module(device)
    release_unused(device)
    if device.type != "cpu":
        backend.set_per_process_memory_fraction(limit / properties(device).total_memory, device)
    try:
        with reading(device, limit) as reader:
            yield reader
    finally:
        if device.type != "cpu":
            backend.set_per_process_memory_fraction(1.0, device)


def peak_at(size: int, kind: by_size.Kind, folder: str, check: Check, reader: MemoryReader) -> int | None:
    """The highest bytes in steps at a size; None where memory runs out."""
    release_unused(check.device)
    task = by_size.Task(kind)
    task.batch_size = size
    interval = Interval(reader)
    interval.reset_peak()
    try:
        train(task, [], folder, check)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return interval.peak()


def train(task: by_size.Task, callbacks: list[Any], folder: str, check: Check) -> None:
    by_size.trainer_of(callbacks, folder, max_steps=3, accelerator=check.device.type).fit(task)


def monitor(check: Check) -> dict[str, Any]:
    """What `StepMonitor` adds to a step of one small layer."""
    rounds, steps = (1, 20) if check.tiny else (4, 300)
    found = monitor_overhead.measure(rounds, steps, check.device.type)
    arms = {
        arm: {
            "step_seconds": statistics.median(seconds),
            "added_seconds": statistics.median(monitor_overhead.added(found, arm)),
            "beside": monitor_overhead.BESIDE[arm],
        }
        for arm, seconds in found.items()
    }
    return {"rounds": rounds, "steps": steps, "arms": arms}


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
    backend: Any = torch.get_device_module(device)
    return str(backend.get_device_name(device))


def properties(device: torch.device) -> Any:
    backend: Any = torch.get_device_module(device)
    return backend.get_device_properties(device)


SECTIONS: dict[str, Section] = {
    "tests": Section(tests, 120),
    "GPT": Section(of_model("GPT"), 60),
    "GPT-2 of Hugging Face": Section(of_model("GPT-2 of Hugging Face"), 45),
    "ViT": Section(of_model("ViT"), 45),
    "U-Net": Section(of_model("U-Net"), 45),
    "batch size": Section(batch_size, 45),
    "estimates": Section(estimates, 60),
    "monitor": Section(monitor, 40),
}
