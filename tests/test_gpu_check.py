"""`benchmarks/gpu_check.py` goes on a CPU the way it goes on a GPU, and one part that fails loses no other."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import gpu_models
import gpu_sections
import overhead
import pytest
import torch
from gpu_cases import Case, figures
from gpu_models import Subject
from gpu_page import page
from gpu_sections import SECTIONS, Check, Section

from lightning_ckpt.flops import Flops
from lightning_ckpt.memory import GIB

ROOT = Path(__file__).parents[1]


def report_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("gpu_check_*.json")
    return json.loads(file.read_text("utf-8"))


@pytest.mark.slow
def test_the_whole_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every section has figures, and they make sense."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", tmp_path]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # so that the tests are skipped, with a GPU too
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_in(tmp_path)
    assert {"device", "versions", "commit", "command"} <= report.keys()
    sections = report["sections"]
    assert list(sections) == list(SECTIONS)
    for name in ("GPT", "GPT-2 of Hugging Face", "ViT", "U-Net"):
        make_sense(sections[name]["cases"])
    reasons = set(sections["tests"]["skipped"].values())
    assert reasons == {"needs a CUDA device: torch.cuda.is_available() is False"}
    assert len(sections["estimates"]["rows"]) == 4 * 3 * 2
    measured = [row for row in sections["estimates"]["rows"] if row["workspaces"] == "measure"]
    assert all(abs(row["error"]) <= 0.05 for row in measured)
    size = sections["batch size"]
    assert 0.8 <= size["share"] <= 1
    assert size["peak"] <= (1 - size["headroom"]) * size["limit"]
    assert size["out_of_memory_errors"] == 0
    assert set(sections["monitor"]["arms"]) >= {"nothing", "StepMonitor", "ThroughputMonitor"}
    (file,) = tmp_path.glob("*.md")
    written = file.read_text("utf-8")
    assert all(f"## {name}\n" in written for name in sections)
    assert "FAILED" not in written


def make_sense(cases: dict[str, Any]) -> None:
    """Who keeps less peaks lower, plans keep to their budgets, and a rate is what was done in the time it took."""
    peaks = {name: case["peak_allocated"] for name, case in cases.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert peaks["full"] <= peaks["auto, 50%"] <= cases["auto, 50%"]["budget"]
    other = peaks[next(name for name in peaks if name in ("torch's wrapper", "Hugging Face's"))]
    assert peaks["full"] == pytest.approx(other, rel=0.02)
    for case in cases.values():
        low, high = case["step_seconds_quartiles"]
        assert 0 < low <= case["step_seconds"] <= high
        assert case["tflops_per_second"] > 0
        assert case["mfu"] is None  # nobody knows what this CPU could do


def failing(check: Check) -> dict[str, Any]:
    raise RuntimeError("the card is on fire")


def sound(check: Check) -> dict[str, Any]:
    return {"passed": 1, "skipped": {}, "failed": []}


def run(folder: Path, sections: dict[str, Section], *more: str) -> tuple[int, dict[str, Any], str]:
    ended = gpu_check.main(["--device", "cpu", "--tiny", "--out", str(folder), *more], sections)
    (file,) = folder.glob("*.md")
    return ended, report_in(folder)["sections"], file.read_text("utf-8")


def test_a_section_that_fails_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error is in both files and on stderr, what comes after it runs, and the exit code is 1."""
    ended, said, written = run(tmp_path, {"first": Section(failing, 5), "tests": Section(sound, 5)})
    assert ended == 1
    assert said["first"]["error"] == "RuntimeError: the card is on fire"
    assert said["tests"]["passed"] == 1
    assert "## first\n\nFAILED: RuntimeError: the card is on fire" in written
    assert "1 passed, 0 failed, 0 skipped" in written
    assert "the card is on fire" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", [{"passed": 1, "skipped": {}, "failed": ["test_it"]}, {"cases": {"none": {"error": "out of memory"}}}]
)
def test_a_failed_test_and_a_failed_case_count(said: dict[str, Any]) -> None:
    """The exit code tells of them too."""
    check = Check(torch.device("cpu"), tiny=True)
    assert not gpu_check.run_all(check, {"tests": Section(lambda check: said, 0)}, lambda: None)


def test_what_no_longer_fits_is_left_out_and_said() -> None:
    """By what a section takes at most, and what is left of the minutes; that is no failure."""
    check = Check(torch.device("cpu"), tiny=False, until=time.monotonic() + 30)
    assert gpu_check.run_all(check, {"long": Section(failing, 60), "tests": Section(sound, 5)}, lambda: None)
    assert check.found["long"]["left out"].endswith("s were left, and it takes up to 60 s")
    assert check.found["tests"]["passed"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "mtia"], "--device mtia: there is "),
        (["--device", "cpu"], "a CPU takes hours for models of this size: add --tiny"),
    ],
)
def test_a_device_that_can_not_do_it_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with what to do instead."""
    with pytest.raises(SystemExit):
        gpu_check.main(arguments)
    assert text in " ".join(capsys.readouterr().err.split())


def without_gpu(monkeypatch: pytest.MonkeyPatch, built_for: str | None) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: built_for and torch.device(built_for))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("built_for", [None, "cuda"])
def test_what_pytorch_was_built_for_is_no_device(
    built_for: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no GPU, a build for CUDA goes on the CPU as any other, and says that there is none."""
    without_gpu(monkeypatch, built_for)
    assert gpu_check.chosen_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: there is no accelerator that this PyTorch can use here"):
        gpu_check.chosen_device("cuda")
    measured: list[torch.device] = []

    def measure(device: torch.device, *options: int) -> Any:
        measured.append(device)
        raise InterruptedError

    monkeypatch.setattr(overhead, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--no-write"])
    with pytest.raises(InterruptedError):
        overhead.main()
    assert measured == [torch.device("cpu")]


def test_a_device_without_memory_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody asked for it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    with pytest.raises(ValueError, match="--device mps: its memory is the host's, with no peak to read"):
        gpu_check.chosen_device(None)


def test_estimates_are_left_out_where_nothing_can_be_estimated(tmp_path: Path) -> None:
    """With the reason, and without failing."""
    check = Check(torch.device("xpu"), tiny=True)
    reason = "estimate_memory knows cpu and cuda alone, no xpu"
    assert gpu_sections.estimates(check) == {"left out": reason}
    ended, _, written = run(tmp_path, {"estimates": Section(lambda _: gpu_sections.estimates(check), 0)})
    assert ended == 0
    assert f"## estimates\n\nLeft out: {reason}.\n" in written


def test_versions_are_those_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing does not end the script, and the models that need it not are still there."""
    assert set(gpu_check.installed("torch", "no-such-distribution")) == {"torch"}
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = gpu_models.subjects(tiny=True, room=0)
    assert len(list(found["GPT"].workload.make().parameters())) > 0
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        found["GPT-2 of Hugging Face"].workload.make()


OUTCOMES = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    yield
    raise OSError("at the end")

def test_passes(): pass
def test_fails(): assert False
def test_passes_and_ends_badly(broken): pass
def test_fails_and_ends_badly(broken): assert False
@pytest.mark.skipif(True, reason="needs another device")
def test_skips(): pass
@pytest.mark.parametrize("size", [1, 2])
def test_sizes(size): pass
"""


def test_outcomes_of_tests_are_told_apart(tmp_path: Path) -> None:
    """By what pytest itself writes: each test once, whatever its teardown does, and why one was skipped."""
    Path(tmp_path, "test_it.py").write_text(OUTCOMES)
    Path(tmp_path, "test_of_peer.py").write_text("import pytest\npytest.importorskip('no_such_module')")
    said = gpu_sections.tested([tmp_path], 60)
    assert said["passed"] == 3
    failed = [name.partition("::")[2] for name in said["failed"]]
    assert failed == ["test_fails", "test_passes_and_ends_badly", "test_fails_and_ends_badly"]
    why = {name.rpartition("::")[2]: reason for name, reason in said["skipped"].items()}
    assert why.pop("test_skips") == "needs another device"
    (of_file,) = why.values()
    assert of_file.startswith("could not import 'no_such_module'")
    assert "at the end" in said["output"]
    lines = page_of({"tests": said}).splitlines()
    assert "3 passed, 3 failed, 2 skipped." in lines
    assert sum(line.startswith("- FAILED: `") for line in lines) == 3
    assert any(line.endswith("test_skips`: needs another device") for line in lines)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def test_of_a_cpu(): pass", "pytest ended with 5: 1 deselected"),
        ("import no_such_module", "pytest ended with 2: .*1 error"),
        ("import os; os._exit(0)", "pytest ended with 0: it said nothing"),
    ],
)
def test_no_outcome_is_no_success(code: str, text: str, tmp_path: Path) -> None:
    """Nothing found, a file that can't be read, an end in the middle: the section fails, with what pytest said."""
    Path(tmp_path, "test_it.py").write_text(code)
    with pytest.raises(RuntimeError, match=text):
        gpu_sections.tested([tmp_path], 60)


SUBJECT = Subject(workload=None, samples=8, tokens=1000)  # type: ignore[arg-type]
PEAKS = {"bf16": 100e12, "fp32": 50e12}


def case(flops: Flops | None, **changed: Any) -> Case:
    return Case("full", peak=2 * GIB, flops=flops, seconds=[0.2, 0.1, 0.4], **changed)


def page_of(sections: dict[str, Any]) -> str:
    about = dict.fromkeys(("device", "system", "commit", "date", "command"), "")
    return page(about | {"bytes_of_device": None, "tiny": False, "versions": {}, "sections": sections})


def test_rates_are_of_the_devices_peaks() -> None:
    """MFU by the model's operations, each format at its own peak; HFU with the replayed; reserved as it was read."""
    done = Flops(model={"bf16": 4 * 10**12, "fp32": 10**12}, replay={"bf16": 2 * 10**12})
    found = figures(case(done, reserved=3 * GIB, budget=4 * GIB), SUBJECT, PEAKS)
    assert found["step_seconds"] == 0.2
    assert found["mfu"] == pytest.approx((4 / 100 + 1 / 50) / 0.2)
    assert found["hfu"] == pytest.approx((6 / 100 + 1 / 50) / 0.2)
    assert found["tflops_per_second"] == pytest.approx(5 / 0.2)
    assert (found["samples_per_second"], found["tokens_per_second"]) == (40, 5000)
    assert (found["peak_allocated"], found["peak_reserved"]) == (2 * GIB, 3 * GIB)
    cases = {"none": figures(case(done), SUBJECT, {}), "full": found}
    table = page_of({"GPT": {"parameters": 10**6, "samples": 8, "tokens": 1000, "cases": cases}})
    rates = "200.0 (100.0 to 400.0) | 1.00 | 40.0 | 5,000"
    assert f"| none | 2 GiB |  |  | {rates} |  |  |\n" in table
    assert f"| full | 2 GiB | 3 GiB | 4 GiB (50.0% used) | {rates} | 30.0% | 40.0% |\n" in table


@pytest.mark.parametrize(
    ("flops", "peaks"),
    [
        (None, PEAKS),
        (Flops(model={}, replay={}), PEAKS),
        (Flops(model={"bf16": 1}, replay={}), {}),
        (Flops(model={"fp16": 1}, replay={}), PEAKS),
    ],
)
def test_what_can_not_be_known_is_none(flops: Flops | None, peaks: dict[str, float]) -> None:
    """No count, an empty one, a device nobody knows, a format without a peak; on a CPU nothing is reserved."""
    found = figures(case(flops), SUBJECT, peaks)
    assert found["mfu"] is found["hfu"] is found["peak_reserved"] is found["budget"] is None


def test_reserved_is_said_to_be_all_of_it() -> None:
    """The peak has the base taken off, reserved has not, and the page says which is which."""
    written = " ".join(page_of({}).split())
    assert "left out; reserved is all that the allocator held from the device in that step" in written
