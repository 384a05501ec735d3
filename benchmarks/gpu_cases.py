"""One model under one way of checkpointing after the other, measured: what `gpu_check.py` has for each of its models.

There is one model and one optimizer, and each way is applied to it and taken back, so that the memory of the others is
free. The peak is that of a step that begins with an empty cache, less what was held before the model was made; what is
reserved in that step is the allocator's whole. Timed steps of all ways are interleaved in rounds, in an order that
changes.
"""

import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_models import Subject, in_bf16
from overhead import timed
from planner import FRACTIONS, settle

from lightning_ckpt import checkpoint_blocks
from lightning_ckpt.flops import FlopCounter, Flops
from lightning_ckpt.memory import AcceleratorReader, AllocatorReader, Interval, MemoryReader, release_unused, use_reader
from lightning_ckpt.replay_state import is_recomputing
from lightning_ckpt.throughput import ideal_seconds

WARM_UP = 3  # checkpointed blocks learn which buffers change in so many forwards


@dataclass
class Case:
    """One way of treating the model, and what it takes; bytes, and seconds of a step."""

    name: str
    apply: Callable[[], AbstractContextManager[object]] = nullcontext
    budget: int | None = None
    predicted: int | None = None
    peak: int = 0
    reserved: int = 0
    flops: Flops | None = None
    seconds: list[float] = field(default_factory=list)
    error: str | None = None


class Training:
    """A model in training on a device."""

    def __init__(self, subject: Subject, device: torch.device, reader: MemoryReader) -> None:
        self.subject, self.device, self.reader = subject, device, reader
        self.workload = in_bf16(subject.workload, device)
        self.base = held(reader)
        torch.manual_seed(0)
        with device:
            self.model, self.batch = subject.workload.make().train(), subject.workload.batch()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.workload.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def cases(self) -> list[Case]:
        """All but those under a budget, which depends on what the first two take."""
        ours = {name: lambda name=name: self._checkpointed(name) for name in ("full", "selective")}
        others = {name: lambda apply=apply: apply(self.model) for name, apply in self.subject.others.items()}
        return [Case(name, apply) for name, apply in ({"none": nullcontext} | ours | others).items()]

    def plan(self, case: Case, budget: int) -> None:
        """Find the plan for a budget, in bytes beside what was held before, and let the case be that plan."""
        with self._checkpointed("auto") as handle:
            settled = settle(
                handle,
                self.model,
                self.workload,
                self.batch,
                self.base + budget,
                self.reader,
                self.optimizer,
                self.device,
            )

        @contextmanager
        def planned() -> Iterator[None]:
            with self._checkpointed("auto") as handle:
                handle.treat(settled.plan.treatments)
                yield

        case.apply, case.budget, case.predicted = planned, budget, settled.plan.peak - self.base

    def take(self, case: Case) -> None:
        """Measure the peak of one step of a case, and count its operations."""
        with case.apply():
            for _ in range(WARM_UP):
                self.step()
            release_unused(self.device)
            interval = Interval(self.reader)
            interval.reset_peak()
            self.step()
            counters = interval.counters()
            case.peak, case.reserved = counters.peak - self.base, counters.reserved
            with FlopCounter(is_recomputing) as counter:
                self.step()
            case.flops = counter.result()

    def time(self, cases: list[Case], rounds: int, left: Callable[[], float]) -> None:
        """Time steps of all cases in rounds, as many as there is time for, and one at least."""
        order, longest = random.Random(0), 0.0
        for number in range(rounds):
            if number and left() < longest:
                return
            began = time.perf_counter()
            order.shuffle(cases)
            for case in cases:
                self.attempt(case, self._time)
            longest = max(longest, time.perf_counter() - began)

    def _time(self, case: Case) -> None:
        with case.apply():
            for _ in range(WARM_UP):
                self.step()
            case.seconds += [timed(self.step, self.device) for _ in range(3)]

    def attempt(self, case: Case, *work: Callable[[Case], None]) -> None:
        """Do some work for a case that has not failed; an error becomes its own, and what it held is let go."""
        try:
            for part in work:
                if not case.error:
                    part(case)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            case.error = in_one_line(error)
            self.optimizer.zero_grad()
        if case.error:
            release_unused(self.device)

    def _checkpointed(self, policy: str) -> Any:
        return checkpoint_blocks(self.model, policy, blocks=self.workload.blocks)


@contextmanager
def reading(device: torch.device, limit: int | None = None) -> Iterator[MemoryReader]:
    """The reader of a device: the counters of an accelerator, or every byte of the CPU's allocator from here on."""
    if device.type != "cpu":
        yield AcceleratorReader(device)
        return
    with AllocatorReader(limit=limit or 2**40) as reader, use_reader(reader):
        yield reader


def held(reader: MemoryReader) -> int:
    """What is allocated now, in bytes."""
    reader.reset_peak()
    return reader.peak()


def measure(
    subject: Subject,
    device: torch.device,
    peaks: dict[str, float],
    left: Callable[[], float],
    *,
    rounds: int = 4,
    fractions: Sequence[float] = FRACTIONS,
) -> dict[str, Any]:
    """Everything about one model. A case that fails keeps its error, and the others go on.

    Args:
        subject: the model.
        device: where it trains.
        peaks: FLOP/s of the device by format, as `hardware.peak_flops` gives them; empty where unknown.
        left: tells the seconds that are left.
        rounds: of timed steps.
        fractions: budgets, as shares of the way from the peak of full checkpointing to that of none.
    """
    release_unused(device)
    with reading(device) as reader:
        training = Training(subject, device, reader)
        cases = training.cases()
        for case in cases:
            training.attempt(case, training.take)
        plain, full = cases[:2]
        if not plain.error and not full.error:
            for fraction in fractions:
                case, budget = Case(f"auto, {fraction:.0%}"), int(full.peak + fraction * (plain.peak - full.peak))
                training.attempt(case, partial(training.plan, budget=budget), training.take)
                cases.append(case)
    training.time(list(cases), rounds, left)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    return {
        "parameters": parameters,
        "samples": subject.samples,
        "tokens": subject.tokens,
        "cases": {case.name: figures(case, subject, peaks) for case in cases},
    }


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def figures(case: Case, subject: Subject, peaks: dict[str, float]) -> dict[str, Any]:
    """What is said of a case: bytes, seconds, and rates a second; None where unknown."""
    if case.error:
        return {"error": case.error}
    seconds = statistics.median(case.seconds)
    low, _, high = statistics.quantiles(case.seconds, n=4)
    model = case.flops.model if case.flops else {}
    replay = case.flops.replay if case.flops else {}
    every = {kind: model.get(kind, 0) + replay.get(kind, 0) for kind in {*model, *replay}}
    ideal, ideal_with_replay = (ideal_seconds(work, peaks) if work and peaks else None for work in (model, every))
    return {
        "peak_allocated": case.peak,
        "peak_reserved": case.reserved or None,
        "budget": case.budget,
        "planned_peak": case.predicted,
        "step_seconds": seconds,
        "step_seconds_quartiles": [low, high],
        "steps_timed": len(case.seconds),
        "samples_per_second": subject.samples / seconds,
        "tokens_per_second": subject.tokens and subject.tokens / seconds,
        "tflops_per_second": sum(model.values()) / seconds / 1e12 if model else None,
        "mfu": ideal and ideal / seconds,
        "hfu": ideal_with_replay and ideal_with_replay / seconds,
    }
