"""What `StepMonitor` adds to a step, beside what Lightning's own monitors add.

    python benchmarks/monitor_overhead.py              # prints, and writes a page to benchmarks/results
    python benchmarks/monitor_overhead.py --rounds 3 --no-write

A training step of four small layers, the worst case for a monitor, with a CSV logger that is written to at every step.
Fits with no monitor, `StepMonitor()`, Lightning's `ThroughputMonitor` and its `DeviceStatsMonitor(cpu_stats=True)`
alternate in one process, in an order that turns. A round is one fit of each, and gives one difference to the fit
without a monitor for each of them, so that a machine that slows down slows all. The time of a fit's step is the mean
over all steps but the first, since a logger writes its file at some of them.
"""

import argparse
import contextlib
import datetime
import io
import itertools
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import ActivationCheckpointing, StepMonitor

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 50
# Of what the two monitors of Lightning's add.
TARGETS = {"ThroughputMonitor": 0.5, "DeviceStatsMonitor": 0.25}

ARMS: dict[str, list[type[Callback]]] = {
    "nothing": [],
    "StepMonitor": [StepMonitor],
    "ThroughputMonitor": [ThroughputMonitor],
    "DeviceStatsMonitor": [DeviceStatsMonitor],
    "checkpointing": [ActivationCheckpointing],
    "checkpointing, StepMonitor": [ActivationCheckpointing, StepMonitor],
}
BESIDE = {arm: "checkpointing" if arm.startswith("checkpointing,") else "nothing" for arm in ARMS}


class Small(LightningModule):
    """Four blocks of one small layer each, on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Laps(Callback):
    """The time from the first step after the warm-up to the last."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self.began = time.perf_counter()
        self.ended = time.perf_counter()


def made(kind: type[Callback]) -> Callback:
    """Return a callback of this kind, as a user would have it at every step."""
    if kind is ThroughputMonitor:
        return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)
    if kind is DeviceStatsMonitor:
        return DeviceStatsMonitor(cpu_stats=True)
    return ActivationCheckpointing(blocks="blocks.*", monitor=False) if kind is ActivationCheckpointing else kind()


def seconds_a_step(arm: str, steps: int, accelerator: str = "cpu") -> float:
    """Return the mean time of a step of one fit."""
    laps = Laps()
    data = TensorDataset(torch.randn(4 * (steps + WARM_UP + 1), 8))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            callbacks=[laps, *map(made, ARMS[arm])],
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Small(), DataLoader(data, batch_size=4))
    return (laps.ended - laps.began) / steps


def measure(
    rounds: int, steps: int, accelerator: str = "cpu", arms: Collection[str] = tuple(ARMS)
) -> dict[str, list[float]]:
    """Return the seconds of a step of each arm, round by round."""
    for arm in arms:
        seconds_a_step(arm, 100, accelerator)
    orders = list(itertools.permutations(arms))
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_ in range(rounds):
        for arm in orders[round_ * 97 % len(orders)]:
            found[arm].append(seconds_a_step(arm, steps, accelerator))
    return found


def added(found: dict[str, list[float]], arm: str) -> list[float]:
    """Return what an arm adds to the step beside which it is measured, round by round."""
    return [one - other for one, other in zip(found[arm], found[BESIDE[arm]], strict=True)]


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """Return what `StepMonitor` adds as a share of what each of Lightning's monitors adds."""
    ours = statistics.median(added(found, "StepMonitor"))
    return {arm: ours / statistics.median(added(found, arm)) for arm in TARGETS}


def row(found: dict[str, list[float]], arm: str) -> str:
    """Return a table row: a step's time, and what the arm adds."""
    step = 1e6 * statistics.median(found[arm])
    if not ARMS[arm] or arm == "checkpointing":
        return f"| {arm} | {step:.0f} µs | |"
    low, middle, high = (1e6 * quartile for quartile in statistics.quantiles(added(found, arm), n=4))
    return f"| {arm} | {step:.0f} µs | {middle:.0f} µs ({low:.0f} to {high:.0f}) |"


def report(found: dict[str, list[float]], steps: int) -> str:
    """Return the result as a Markdown page."""
    shares = ratios(found)
    reached = all(shares[arm] <= most for arm, most in TARGETS.items())
    targets = "; ".join(f"{shares[arm]:.2f} of `{arm}`'s, at most {most}" for arm, most in TARGETS.items())
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    rounds, rows = len(found["nothing"]), "\n".join(row(found, arm) for arm in ARMS)
    return f"""# What a monitor adds to a step

A step of four small layers with a CSV logger written to at every step: {rounds} rounds of one fit of {steps} steps \
each, alternating.

| callbacks | step, median over rounds | added, median (quartiles) |
| --- | --- | --- |
{rows}

What `StepMonitor` adds: {targets}: {"reached" if reached else "NOT reached"}.

`StepMonitor` beside checkpointing also counts what blocks let go and times their replays.

- Device: cpu, {platform.machine()}, {torch.get_num_threads()} threads.
- torch {torch.__version__}, lightning {L.__version__}, psutil {psutil.__version__}, Python {platform.python_version()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/monitor_overhead.py --rounds {rounds} --steps {steps}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="fits of each, default 24")
    parser.add_argument("--steps", type=int, default=1000, help="steps a fit that count, default 1000")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # the tables of what is checkpointed
        found = measure(args.rounds, args.steps)
    page = report(found, args.steps)
    print(page)
    if not args.no_write:
        path = ROOT / f"benchmarks/results/monitor_overhead_cpu_{datetime.date.today():%Y%m}.md"
        path.write_text(page, encoding="utf-8")
        print(f"written to {path.relative_to(ROOT)}")
    return 0 if "NOT reached" not in page else 1


if __name__ == "__main__":
    sys.exit(main())
