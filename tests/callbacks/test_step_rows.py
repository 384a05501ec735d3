"""Rows reach every logger, once, complete and in order, from one rank and from several."""

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import StepMonitor
from lightning_ckpt.callbacks import _clock, _step_rows
from lightning_ckpt.callbacks._ranks import AcrossRanks, Reduced
from lightning_ckpt.callbacks._step_rows import KEYS, LAG, PAUSE, Row, Rows, TimedStep
from lightning_ckpt.callbacks._trainer import batch_share, wandb_names
from lightning_ckpt.throughput import Step
from recording import Clock, Module, Rowed, Samples, fit, trainer


def test_no_logger_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a logger nothing is measured, and nothing fails."""
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    monitor = StepMonitor(batch_size_fn=lambda batch: pytest.fail("measured for nobody"))
    trainer([monitor], False).fit(Module(), loader)


def test_the_documented_keys_are_those_logged() -> None:
    """README's table, the monitor's docstring and the rows have the same keys, in the same order."""
    table = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split("## What it logs")[1]
    documents = table.split("\n## ")[0], str(StepMonitor.__doc__)
    groups = r"`((?:memory|throughput|checkpointing|batch_size)/\w+)`"
    for document in documents:
        assert re.findall(groups, document) == list(KEYS)


def test_fast_dev_run() -> None:
    """The trainer's dry run, with its logger that logs nothing, runs."""
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    running = trainer([StepMonitor()], True, fast_dev_run=True)
    running.fit(Module(), loader)
    assert running.global_step == 1


def test_several_loggers_get_the_same_rows(tmp_path: Path) -> None:
    """CSV, TensorBoard and a logger of one's own, all at once; the CSV file has every row at the loss's step."""
    own, files = Rowed(), CSVLogger(tmp_path, name=None, version="csv")
    loggers = [own, files, TensorBoardLogger(tmp_path, name=None, version="board")]
    loader = DataLoader(Samples(6), batch_size=2, collate_fn=torch.stack)
    trainer([StepMonitor()], loggers).fit(Module(), loader)
    with (tmp_path / "csv/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    written = [row for row in table if row["throughput/step_time_ms"]]
    assert [int(row["step"]) for row in written] == [int(row["step"]) for row in table if row["loss"]] == [0, 1, 2]
    for (_, expected), row in zip(own.rows(), written, strict=True):
        assert {key: float(row[key]) for key in expected} == pytest.approx(expected)


def test_prefix(clock: Clock) -> None:
    """Every key is written behind the prefix, for a baseline beside another run's keys."""
    logger = fit(StepMonitor(prefix="baseline/"), clock=clock)
    own = [row for _, row in logger.calls if "loss" not in row]
    assert len(own) == 4
    assert all(key.startswith("baseline/") for row in own for key in row)


def leet(*arguments: str) -> str:
    program = Path(sys.executable).with_name("wandb")
    return subprocess.run(
        [str(program), "leet", "inspect", "--json", *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_a_real_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run read back: each step's row on the trainer's axis, one a step, axis and summaries declared."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="test", offline=True)
    loader = DataLoader(Samples(12), batch_size=2, collate_fn=lambda rows: {"input_ids": torch.stack(rows).long()})

    class Tokens(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["input_ids"].float(), batch_idx)

    trainer([StepMonitor()], logger, accumulate_grad_batches=2).fit(Tokens(), loader)
    logger.experiment.finish()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    records = [json.loads(line) for line in leet(str(run)).splitlines()]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    rows = [row for row in history if "throughput/step_time_ms" in row]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2]
    assert [row["trainer/global_step"] for row in history if "loss" in row] == [0, 1, 2]
    here = {
        *("memory/peak_rss_gib", "memory/headroom_gib", "memory/peak_fraction"),
        *("throughput/step_time_ms", "throughput/data_wait_ms", "throughput/samples_per_sec"),
        *("throughput/tokens_per_sec", "throughput/batches_per_sec", "throughput/tflops_per_sec"),
        *("batch_size/per_device", "batch_size/global"),
    }
    for row in rows:
        assert {key for key in row if "/" in key} - {"trainer/global_step"} == here
        assert all(math.isfinite(row[key]) for key in here)
    declared = {record["metric"]["name"]: record["metric"] for record in records if "name" in record.get("metric", {})}
    assert {key: set(declared[key]["summary"]) for key in here} == {key: {KEYS[key].summary} for key in here}
    assert {declared[key]["step_metric"] for key in here} == {"trainer/global_step"}
    summary = json.loads(leet("--summary", str(run)))["summary"]
    assert summary["memory/peak_rss_gib"]["max"] == max(row["memory/peak_rss_gib"] for row in rows)
    mean = sum(row["throughput/samples_per_sec"] for row in rows) / len(rows)
    assert summary["throughput/samples_per_sec"]["mean"] == pytest.approx(mean)


@pytest.mark.slow
def test_wandb_is_imported_for_wandb_only() -> None:
    """A run with another logger never imports wandb."""
    program = """
import sys, torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_ckpt import StepMonitor
trainer = Trainer(accelerator="cpu", logger=CSVLogger(sys.argv[1]), callbacks=[StepMonitor()], max_steps=2,
                  log_every_n_steps=1, limit_val_batches=0, enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(BoringModel())
assert trainer.global_step == 2
assert "wandb" not in sys.modules
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- figures that come late: accelerators and several ranks ---


class Late:
    """A device's clock on a CPU: a mark is known once the device has come to it."""

    def __init__(self) -> None:
        self.made, self.reached, self.waits = 0, -1, 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def seconds(self, spans: Any) -> float | None:
        return None if spans[-1][1] > self.reached else float(sum(end - start for start, end in spans))

    def wait(self, spans: Any) -> None:
        self.waits += 1
        self.reached = max(self.reached, spans[-1][1])


@dataclass
class Stub:
    """As much of a trainer as rows need."""

    loggers: list[Logger]
    world_size: int = 1
    is_global_zero: bool = True


def late_row(axis: int) -> Row:
    return Row(axis, lambda: {"memory/ooms": axis}, [TimedStep(Step(math.nan, 0.0), [(axis, axis + 1)])])


class TestRows:
    def test_a_row_waits_for_its_time(self) -> None:
        """Rows are written in order under their own step once the device has come to their end, and not before."""
        clock, logger = Late(), Rowed()
        rows = Rows(Stub([logger]), clock, "")  # type: ignore[arg-type]
        for axis in range(3):
            rows.add(late_row(axis))
            rows.write_known()
        assert logger.calls == []
        clock.reached = 2
        rows.write_known()
        assert [step for step, _ in logger.calls] == [0, 1]
        assert logger.calls[1][1]["throughput/step_time_ms"] == 1000.0
        assert clock.waits == 0
        rows.flush()
        assert [step for step, _ in logger.calls] == [0, 1, 2]

    def test_ranks_reduce_at_the_same_step_whatever_they_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On several ranks a row is reduced when LAG more have followed, with its time or without."""
        clock, logger, reduced = Late(), Rowed(), []

        class Arrived:
            def __init__(self, figures: Mapping[str, float]) -> None:
                self.figures = lambda: dict(figures)
                self.ready = lambda: True
                self.wait = lambda: None

        def reduce(figures: Mapping[str, float]) -> Arrived:
            reduced.append(figures["memory/ooms"])
            return Arrived(figures)

        rows = Rows(Stub([logger]), clock, "")  # type: ignore[arg-type]
        rows._reduce = reduce  # type: ignore[assignment]
        for axis in range(LAG + 2):
            rows.add(late_row(axis))
            rows.write_known()
            clock.reached = 1
        assert reduced == [0, 1]
        assert [set(row) for _, row in logger.calls] == [
            {
                *("memory/ooms", "throughput/step_time_ms", "throughput/data_wait_ms"),
                *("throughput/batches_per_sec", "throughput/batches_per_sec_per_device"),
            },
            {"memory/ooms"},
        ]
        rows.flush()
        assert [step for step, _ in logger.calls] == list(range(LAG + 2))

    def test_rows_of_short_steps_are_written_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first one at once, then those of `PAUSE` seconds in one go, and what is left at the end."""
        clock, logger, time = Late(), Rowed(), Clock()
        monkeypatch.setattr(_step_rows, "perf_counter", time)
        time.sleep(1.0)
        rows = Rows(Stub([logger]), clock, "")  # type: ignore[arg-type]
        clock.reached = 100
        written = []
        for axis in range(6):
            rows.add(late_row(axis))
            rows.write_due()
            written.append(len(logger.calls))
            time.sleep(0.3 * PAUSE if axis < 4 else 2 * PAUSE)
        rows.add(late_row(6))
        rows.flush()
        assert written == [1, 1, 1, 1, 5, 6]
        assert [step for step, _ in logger.calls] == list(range(7))

    def test_only_rank_zero_writes(self) -> None:
        """Another rank's loggers are told nothing."""
        logger = Rowed()
        rows = Rows(Stub([logger], is_global_zero=False), _clock.HostClock(), "")  # type: ignore[arg-type]
        rows.add(late_row(0))
        rows.write_known()
        assert logger.calls == []


def test_reductions_over_ranks() -> None:
    """Each column its own way; a figure that one rank lacks is lacking; sums are scaled where ranks share a batch."""
    metric = AcrossRanks(["max", "min", "sum", "mean", "sum"], share=0.5)
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, math.nan]], dtype=torch.float64)
    assert metric._over_ranks(rows)[:4].tolist() == [3.0, 1.0, 2.0, 2.0]
    assert math.isnan(metric._over_ranks(rows)[4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_result_comes_from_the_device_when_it_is_ready() -> None:
    """A reduced row is copied without waiting, and is whole once its event is reached; NaN is left out."""
    row = torch.tensor([1.5, math.nan], dtype=torch.float64, device="cuda")
    reduced = Reduced(["memory/ooms", "throughput/mfu"], row)
    reduced.wait()
    assert reduced.ready()
    assert reduced.figures() == {"memory/ooms": 1.5}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("trainer/global_step", "")),
        ({"prefix": "big"}, ("trainer/global_step", "big-")),
        ({"sync_tensorboard": True}, ("global_step", "")),
    ],
)
def test_wandb_names(options: dict[str, Any], names: tuple[str, str]) -> None:
    """Axis and prefix are those the logger itself will use, and no run is started to learn them."""
    logger = WandbLogger(offline=True, **options)
    assert wandb_names(logger) == names
    assert logger._experiment is None


@pytest.mark.parametrize(
    ("strategy", "share"), [({"num_replicas": 2, "rank": 0}, 0.5), ({"num_replicas": 0}, 1), (None, 1)]
)
def test_ranks_that_share_a_batch(strategy: dict[str, int] | None, share: float) -> None:
    """Two data replicas on four ranks have half a batch a rank; strategies that don't say have one each."""
    parts = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs=strategy), world_size=4)
    assert batch_share(parts) == share  # type: ignore[arg-type]


RANKS = """
import os, sys, time, torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.memory import use_reader

first = os.environ.get("LOCAL_RANK", "0") == "0"  # a logger on rank zero only, as some write it

class Meter:
    # Rank 1 uses more, and only rank 0 knows its limit.
    def reset_peak(self): pass
    def peak(self): return (1 if first else 2) * 2**30
    def limit(self): return 8 * 2**30 if first else None

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0 if first else 0.03)
        return x.tanh()

class Uneven(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), Slow(), torch.nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        time.sleep(0.02 * self.global_rank)
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

logger = CSVLogger(sys.argv[1], name=None, version="csv") if first else False
monitor = StepMonitor(tokens_fn=lambda batch: len(batch) * (1 + trainer.global_rank))
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, log_every_n_steps=1, limit_val_batches=0,
    logger=logger, callbacks=[ActivationCheckpointing(blocks="layer"), monitor],
    enable_progress_bar=False, enable_checkpointing=False)
with use_reader(Meter()):
    trainer.fit(Uneven(), DataLoader(RandomDataset(32, 12), batch_size=2))
assert trainer.global_step == 3, trainer.global_step
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Two processes: one row a step, the worse rank's memory and time, both ranks' samples, no key one rank lacks."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "csv/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = [row for row in table if row["throughput/step_time_ms"]]
    assert [int(row["step"]) for row in rows] == [int(row["step"]) for row in table if row["loss"]] == [0, 1, 2]
    for row in rows:
        assert float(row["memory/peak_allocated_gib"]) == 2.0
        assert "memory/headroom_gib" not in row
        assert float(row["batch_size/per_device"]) == 2.0
        assert float(row["batch_size/global"]) == 4.0
        seconds = float(row["throughput/step_time_ms"]) / 1e3
        assert seconds >= 0.02
        # The replay of the slower rank; what a block lets go is the same on both.
        assert float(row["checkpointing/recompute_ms"]) >= 30
        assert 0 < float(row["checkpointing/overhead_fraction"]) <= 1
        assert float(row["checkpointing/saved_gib"]) * 2**30 == 2 * 8 * 4
        # Each rank's own rate, summed: none is slower than the slowest rank's.
        assert float(row["throughput/samples_per_sec"]) >= 4 / seconds * 0.999
        assert float(row["throughput/tokens_per_sec"]) > float(row["throughput/samples_per_sec"])
        assert float(row["throughput/batches_per_sec"]) == pytest.approx(float(row["throughput/samples_per_sec"]) / 2)
        for unit in ("samples", "tokens", "batches"):  # what each of two has
            rate, share = (float(row[f"throughput/{unit}_per_sec{of}"]) for of in ("", "_per_device"))
            assert share == pytest.approx(rate / 2)
