"""The largest samples, the plateau and validation among trials of two processes, which must decide alike."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_ckpt import BatchSizeTuner
from lightning_ckpt.callbacks import _trials
from lightning_ckpt.memory import use_reader
from modules import trainer
from recording import Clock, Meter, Rowed
from two_ranks import on_two_ranks

pytestmark = pytest.mark.slow

MIB = 2**20


class Net(LightningModule):
    """The first rank is faster; on the second validation of `fails_at` samples runs out of memory. Metrics wait."""

    def __init__(self, rank: int, clock: Clock, meter: Meter, fails_at: float) -> None:
        super().__init__()
        self.fails_at, self.rank, self.clock, self.meter, self.batch_size = fails_at, rank, clock, meter, 4
        self.net, self.mean = nn.Linear(6, 1), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.meter.use(len(batch[0]) * MIB)
        self.clock.sleep((1 + len(batch[0]) * self.rank) / 64)
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.rank == 1 and len(batch[0]) >= self.fails_at:
            raise torch.OutOfMemoryError("CUDA")
        self.mean(self.net(batch[0]).mean())
        self.log("mean", self.mean)
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.ones(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(400, 6)), batch_size=self.batch_size)

    val_dataloader = train_dataloader


def _search(rank: int, arguments: dict[str, Any], folder: Path) -> None:
    clock, meter, logger = Clock(), Meter(limit=200 * MIB), Rowed()
    _trials.perf_counter = clock  # type: ignore[assignment]
    tuner = BatchSizeTuner(**arguments)
    ddp = DDPStrategy(process_group_backend="gloo")
    running = trainer([tuner], devices=2, strategy=ddp, max_steps=2, limit_val_batches=2, logger=logger)
    with use_reader(meter):
        running.fit(Net(rank, clock, meter, 24 if tuner.options.evaluation else 1e9))
    told = tuner.batch_size, [(t.size, t.outcome, t.seconds) for t in tuner.trials], running.global_step
    torch.save((told, [row for _, row in logger.calls if "batch_size/global" in row]), folder / f"{rank}.pt")


def on_both(arguments: dict[str, Any], folder: Path) -> Any:
    """What both ranks found, and the row that the first one logged."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    on_two_ranks(_search, arguments, folder)
    (first, rows), (second, others) = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert others == []
    assert rows == [{"batch_size/per_device": float(first[0]), "batch_size/global": 2.0 * first[0]}]
    return first


def test_validation_that_fails_on_one_rank_bounds_both(tmp_path: Path) -> None:
    """Nobody waits for the metrics of the other, and training goes on."""
    size, trials, steps = on_both({"evaluation": True, "probe": "longest"}, tmp_path)
    assert 20 <= size < 24
    assert "out of memory" in [outcome for _, outcome, _ in trials]
    assert steps == 2


def test_the_slower_rank_decides_about_the_plateau(tmp_path: Path) -> None:
    """On the first rank samples per second grow for ever; the second's level off, and it is waited for in training."""
    size, trials, _ = on_both({"stop_at_plateau": 0.1}, tmp_path)
    assert [tried for tried, _, _ in trials] == [2, 8, 32]
    assert size == 32
    assert [seconds for _, _, seconds in trials] == [(1 + tried) / 64 for tried in (2, 8, 32)]
