"""`benchmarks/gpu_check.py` goes on a CPU the way it goes on a GPU, and one part that fails loses no other."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_sections import SECTIONS, Check, Section

ROOT = Path(__file__).parents[1]


def report_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("gpu_check_*.json")
    return json.loads(file.read_text("utf-8"))


@pytest.mark.slow
def test_the_whole_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every section has figures, and they make sense."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_in(tmp_path)
    assert {"device", "versions", "commit", "command"} <= report.keys()
    sections = report["sections"]
    assert list(sections) == list(SECTIONS)
    for name in ("GPT", "GPT-2 of Hugging Face", "ViT", "U-Net"):
        make_sense(sections[name]["cases"])
    assert sections["tests"]["skipped"] >= 9
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
    return {"passed": 1, "skipped": 0, "failed": []}


def run(folder: Path, sections: dict[str, Section], *more: str) -> tuple[int, dict[str, Any], str]:
    ended = gpu_check.main(["--device", "cpu", "--tiny", "--out", str(folder), *more], sections)
    (page,) = folder.glob("*.md")
    return ended, report_in(folder)["sections"], page.read_text("utf-8")


def test_a_section_that_fails_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error is in both files and on stderr, what comes after it runs, and the exit code is 1."""
    ended, said, page = run(tmp_path, {"first": Section(failing, 5), "tests": Section(sound, 5)})
    assert ended == 1
    assert said["first"]["error"] == "RuntimeError: the card is on fire"
    assert said["tests"]["passed"] == 1
    assert "## first\n\nFAILED: RuntimeError: the card is on fire" in page
    assert "1 passed, 0 failed, 0 skipped" in page
    assert "the card is on fire" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", [{"passed": 1, "skipped": 0, "failed": ["test_it"]}, {"cases": {"none": {"error": "out of memory"}}}]
)
def test_a_failed_test_and_a_failed_case_count(said: dict[str, Any]) -> None:
    """The exit code tells of them too."""
    check = Check(torch.device("cpu"), tiny=True)
    assert not gpu_check.run_all(check, {"tests": Section(lambda check: said, 0)}, lambda: None)


def test_what_no_longer_fits_is_left_out_and_said() -> None:
    """By what a section takes at most, and what is left of the minutes; that is no failure."""
    check = Check(torch.device("cpu"), tiny=False, until=time.monotonic() + 30)
    assert gpu_check.run_all(check, {"long": Section(failing, 60), "tests": Section(sound, 5)}, lambda: None)
    assert check.found["long"]["left out"].endswith("s were left, and it takes up to 60")
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
