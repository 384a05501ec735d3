"""`make demo`: what a stranger types first, its offline W&B run read back with W&B's own reader."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
STEPS = 6

pytestmark = pytest.mark.slow

EVERYWHERE = {
    "throughput/step_time_ms",
    "throughput/data_wait_ms",
    "throughput/samples_per_sec",
    "throughput/tokens_per_sec",
    "throughput/tflops_per_sec",
    "batch_size/per_device",
    "batch_size/global",
}
HOST = {"memory/peak_rss_gib", "memory/headroom_gib", "memory/peak_fraction"}
ACCELERATOR = {
    "memory/peak_allocated_gib",
    "memory/peak_reserved_gib",
    "memory/headroom_gib",
    "memory/peak_fraction",
    "memory/alloc_retries",
    "memory/ooms",
}


def run(*command: str, cwd: Path) -> str:
    # A run in this process leaves its service's address in the environment: the demo's would be written over there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_MODE": "offline", "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def demo_command() -> list[str]:
    """The demo's own line of the Makefile, with this interpreter and this folder."""
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/python (\S+) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return [sys.executable, str(ROOT / recipe[1]), *recipe[2].split()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder and what it printed, with fewer steps and a smaller model."""
    folder = tmp_path_factory.mktemp("demo")
    small = ["--steps", str(STEPS), "--depth", "3", "--width", "32", "--context", "32"]
    return folder, run(*demo_command(), *small, cwd=folder)


@pytest.fixture(scope="module")
def records(demo: tuple[Path, str]) -> list[dict[str, object]]:
    folder, _ = demo
    (log,) = folder.glob("runs/wandb/offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    return [
        json.loads(line) for line in run(str(wandb), "leet", "inspect", "--json", str(log), cwd=folder).splitlines()
    ]


@pytest.fixture(scope="module")
def steps(records: list[dict[str, object]]) -> dict[int, dict[str, float]]:
    """What was logged, by the trainer's step."""
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        if record["type"] == "history":
            item = record["history"]["item"]
            by_step[item["trainer/global_step"]].update(item)
    return by_step


def test_every_step_of_the_trainer_is_a_row(steps: dict[int, dict[str, float]]) -> None:
    """One row an optimizer step, on the loss's own axis, and none from the tuner's trials."""
    assert list(steps) == list(range(STEPS))
    assert all("train/loss" in row for row in steps.values())


def test_every_key_with_a_meaning_here_is_in_every_step(steps: dict[int, dict[str, float]]) -> None:
    """The host's or the accelerator's memory, throughput, batch size: none is missing in any step."""
    keys = EVERYWHERE | (ACCELERATOR if torch.accelerator.is_available() else HOST)
    assert {step: sorted(keys - set(row)) for step, row in steps.items()} == {step: [] for step in steps}


def test_a_key_without_a_meaning_here_is_left_out(steps: dict[int, dict[str, float]]) -> None:
    """A host has no allocator to ask, and nobody knows its peak FLOP/s."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator: its keys have a meaning")
    without = {"memory/peak_allocated_gib", "memory/alloc_retries", "memory/ooms", "throughput/mfu", "throughput/hfu"}
    assert set().union(*steps.values()) & without == set()


def test_the_values_are_plausible(steps: dict[int, dict[str, float]]) -> None:
    """Rates are positive, agree with each other, and waiting is part of a step."""
    for row in steps.values():
        assert row["throughput/tokens_per_sec"] == pytest.approx(32 * row["throughput/samples_per_sec"])
        assert 0 <= row["throughput/data_wait_ms"] <= row["throughput/step_time_ms"]
        assert row["throughput/tflops_per_sec"] > 0
        assert row["batch_size/per_device"] == row["batch_size/global"] >= 1


def test_wandb_is_told_the_axis_and_the_plan(records: list[dict[str, object]]) -> None:
    """The metrics' axis is the trainer's step, and the run's config names the policy."""
    axes = {
        record["metric"].get("name") or record["metric"]["glob_name"]: record["metric"].get("step_metric")
        for record in records
        if record["type"] == "metric"
    }
    ours = {name: axis for name, axis in axes.items() if name.startswith(("memory/", "throughput/"))}
    assert ours
    assert set(ours.values()) == {"trainer/global_step"}
    assert "activation_checkpointing" in json.dumps([record for record in records if record["type"] == "config"])


def test_the_demo_says_what_it_showed_and_where_to_look(demo: tuple[Path, str]) -> None:
    """The last lines are the loss, the batch size, and two commands to paste."""
    folder, printed = demo
    assert re.search(rf"Loss \d\.\d\d -> \d\.\d\d in {STEPS} steps", printed)
    assert re.search(r"The tuner started from a batch size of \d+ and settled on \d+", printed)
    place = re.search(r"The run is in (\S+)", printed)
    assert place is not None
    assert (folder / place[1]).is_dir()
    assert f"wandb leet {place[1]}" in printed
    assert f"wandb sync {place[1]}" in printed
