"""Growing the batch size while training: which samples are seen, which sizes they come in, and what is left behind."""

import contextlib
import copy
import csv
import itertools
import logging
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, StepMonitor
from lightning_ckpt.callbacks._growing_loader import GrowingLoader
from lightning_ckpt.memory import AllocatorReader, use_reader
from sample_meter import MIB, SampleMeter, metered, seen
from two_ranks import on_two_ranks

SAMPLES = 400
pytestmark = pytest.mark.usefixtures("quick_collection")


class Rows(Dataset[Any]):
    """Rows that say which they are."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.values = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.values[index], index


class Stream(IterableDataset[Any]):
    """The same rows as a stream, of which each worker gives a part."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part = slice(None) if info is None else slice(info.id, None, info.num_workers)
        return iter([self.rows[index] for index in range(len(self.rows))[part]])


class LongStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.rows)


class Net(LightningModule):
    """Remembers what it was given."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Linear(6, 1)
        self.seen: list[tuple[int, list[int]]] = []  # the epoch, and the rows of a batch
        self.last: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, rows = batch
        seen(len(values))
        self.seen.append((self.trainer.current_epoch, rows.tolist()))
        self.last.append(self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
        loss = self.net(values).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(32), batch_size=16)

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for _, rows in self.seen]

    def of_epoch(self, epoch: int) -> list[list[int]]:
        return [rows for at, rows in self.seen if at == epoch]


def run(
    module: LightningModule,
    callbacks: Sequence[Callback],
    folder: Path,
    *,
    loaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(7)
    options = {"max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False} | options
    trainer = Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder, "", ""),
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_model_summary=False,
        callbacks=list(callbacks),
        **({"devices": 1} | options),
    )
    trainer.fit(module, loaders, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def loader(count: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(count), **({"batch_size": 8, "shuffle": True} | options))


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


class OfUnknownLength:
    """A sampler that does not tell how many samples it draws."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


LOADERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda workers: loader(shuffle=False, num_workers=workers),
    "shuffled": lambda workers: loader(num_workers=workers),
    "own generator": lambda workers: loader(num_workers=workers, generator=torch.Generator().manual_seed(3)),
    "persistent": lambda workers: loader(num_workers=workers, persistent_workers=workers > 0),
    "far ahead": lambda workers: loader(num_workers=workers, prefetch_factor=8 if workers else None),
    "out of order": lambda workers: loader(num_workers=workers, in_order=False),
    "batch sampler": lambda workers: DataLoader(
        Rows(), num_workers=workers, batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 8, False)
    ),
    "sampler without a length": lambda workers: loader(shuffle=False, sampler=OfUnknownLength(), num_workers=workers),
    "stream": lambda workers: DataLoader(Stream(), batch_size=8, num_workers=workers),
    "stream with a length": lambda workers: DataLoader(LongStream(), batch_size=8, num_workers=workers),
    "persistent stream": lambda workers: DataLoader(
        Stream(), batch_size=8, num_workers=workers, persistent_workers=workers > 0
    ),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_sample_of_an_epoch_is_seen_once_while_batches_grow(
    make: Callable[[int], Any], workers: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """Two steps a size, then the size that fits, to the end; the epoch's last batch is announced as the last."""
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    run(module, [tuner], tmp_path, loaders=make(workers))
    for epoch in range(2):
        assert sorted(flat(module.of_epoch(epoch))) == list(range(SAMPLES))
    first = len(module.of_epoch(0))
    assert [at for at, last in enumerate(module.last) if last] == [first - 1, len(module.seen) - 1]
    # Where the length is unknown one batch is drawn ahead, so that each new size comes one batch later.
    growing = [2, 2, 4, 4, 40, 40] if sized_len(make(0)) else [2, 2, 2, 4, 4, 4, 40]
    assert module.sizes[: len(growing)] == growing
    assert set(module.sizes[len(growing) : first - 1]) == {40}
    assert set(module.sizes[first:]) == {40}
    assert tuner.batch_size == module.batch_size == 40
    assert [(trial.size, trial.peak, trial.outcome) for trial in tuner.trials] == [
        (2, 1040 * MIB, "fits"),
        (4, 1080 * MIB, "fits"),
        (40, 1800 * MIB, "fits"),
    ]
    assert all(trial.seconds > 0 for trial in tuner.trials)


def test_a_given_distributed_sampler_keeps_its_share_and_its_epochs(meter: SampleMeter, tmp_path: Path) -> None:
    sampler = DistributedSampler(Rows(), num_replicas=2, rank=1, shuffle=True)
    module = Net()
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(shuffle=False, sampler=sampler))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert flat(module.of_epoch(epoch)) == list(sampler)
    assert max(module.sizes) == 40


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_stream_too_what_is_dropped_is_less_than_a_batch(workers: int, meter: SampleMeter, tmp_path: Path) -> None:
    """Nobody knows its length, so that a larger batch than what is left is begun; it is not given."""
    module = Net()
    run(
        module, [BatchSizeTuner(mode="grow")], tmp_path, max_epochs=3,
        loaders=DataLoader(Stream(70), batch_size=8, drop_last=True, num_workers=workers),
    )  # fmt: skip
    assert [[len(rows) for rows in module.of_epoch(epoch)] for epoch in range(3)] == [
        [2, 2, 2, 4, 4, 4, 40],
        [40],
        [40],
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_dropped_is_less_than_a_batch(workers: int, meter: SampleMeter, tmp_path: Path) -> None:
    """Where a larger batch would not fill, the epoch ends with batches of the size before."""
    module = Net()
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(70, drop_last=True, num_workers=workers))
    first, second = module.of_epoch(0), module.of_epoch(1)
    assert [len(rows) for rows in first] == [2, 2, 4, 4, 40]
    assert [len(rows) for rows in second] == [40]
    assert all(len(set(flat(rows))) == len(flat(rows)) for rows in (first, second))
    module = Net()
    run(module, [BatchSizeTuner(mode="grow")], tmp_path / "b", loaders=loader(39, drop_last=True), max_epochs=4)
    assert [len(rows) for rows in module.of_epoch(0)] == [2, 2, *[4] * 8]
    assert [len(rows) for rows in module.of_epoch(3)] == [39]
    assert [len(rows) for rows in module.of_epoch(1)] == [39]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders_grow_together(mode: Any, meter: SampleMeter, tmp_path: Path) -> None:
    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            others.append((self.trainer.current_epoch, None if batch["b"] is None else batch["b"][1].tolist()))
            return super().training_step(batch["a"], batch_idx)

    others: list[tuple[int, list[int] | None]] = []
    module = Pairs()
    loaders = CombinedLoader({"a": loader(300), "b": loader(100, num_workers=2)}, mode)
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, loaders=loaders)
    pairs = [(rows, other) for (_, rows), (_, other) in zip(module.seen, others, strict=True)]
    assert [len(rows) for rows, _ in pairs[:6]] == [len(other or ()) for _, other in pairs[:6]] == [2, 2, 4, 4, 40, 40]
    if mode == "min_size":
        assert sorted(flat([other or [] for epoch, other in others if epoch == 0])) == list(range(100))
    else:
        assert all(sorted(flat(module.of_epoch(epoch))) == list(range(300)) for epoch in range(2))
    first = len(module.of_epoch(0))
    assert [at for at, last in enumerate(module.last) if last] == [first - 1, len(module.seen) - 1]
    assert [leaf.batch_size for leaf in loaders.flattened] == [8, 8]


def test_a_loader_read_a_second_time_has_the_batches_of_the_first() -> None:
    """A short loader of several is begun again within the epoch: what it drops is no batch at a smaller size either."""
    ours = GrowingLoader(loader(11, drop_last=True), 4)
    assert [len(rows) for _, rows in ours] == [4, 4]
    assert len(next(iter(ours))[1]) == 4
    ours.resize(3)
    assert len(ours) == 2
    ours.end_epoch()
    assert len(ours) == 3


def test_a_copy_of_a_growing_loader_gives_its_batches() -> None:
    """Code that copies the trainer's loader gets one that stands by itself."""
    ours = GrowingLoader(loader(10, shuffle=False), 4)
    theirs = copy.deepcopy(ours)
    theirs.resize(5)
    assert [rows.tolist() for _, rows in theirs] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [rows.tolist() for _, rows in ours] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_workers_have_the_random_numbers_that_lightning_gives_them(
    meter: SampleMeter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With `seed_everything(workers=True)`: those of a run without the tuner, at one size."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    class Noisy(Rows):
        def __getitem__(self, index: int) -> Any:
            return self.values[index], random.random()

    given = []
    for callbacks in ([BatchSizeTuner(mode="grow", init_val=8, max_val=8)], []):
        module = Net()
        run(module, callbacks, tmp_path / str(len(callbacks)), loaders=DataLoader(Noisy(64), 8, num_workers=2))
        given.append(module.seen)
    assert given[0] == given[1]


CURVES: dict[str, tuple[Callable[[int], float], int]] = {
    "line": (lambda size: 1000 + 20 * size, 40),
    "steep": (lambda size: 100 + 90 * size, 18),
    "shallow": (lambda size: 1000 + 2.5 * size, 320),
    "hidden phase": (lambda size: max(1100 + size if size else 1000, 1000 + 8 * size), 100),
    "optimizer first": (lambda size: max(1300 if size else 1000, 1000 + 5 * size), 160),
    "two knees": (lambda size: max(1300 + size if size else 1000, 1150 + 4 * size, 1000 + 6 * size), 133),
}


@pytest.mark.parametrize(("curve", "most"), CURVES.values(), ids=CURVES)
def test_it_settles_on_nearly_all_that_fits_and_never_above(
    curve: Callable[[int], float], most: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """No step of the run runs out of memory: into the headroom at most, and out of it at once."""
    meter.curve = curve
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    run(module, [tuner], tmp_path, loaders=loader(4000), max_epochs=1)
    assert 0.95 * most <= (tuner.batch_size or 0) <= most
    assert len(tuner.trials) <= 8
    assert max(curve(size) for size in module.sizes) <= 2000
    assert sorted(flat(module.of_epoch(0))) == list(range(4000))
    too_large = [trial.size for trial in tuner.trials if trial.outcome == "too large"]
    assert all(Counter(module.sizes)[size] == 1 for size in too_large)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("BatchSizeTuner")]


def test_it_says_once_that_it_has_settled(meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(Net(), [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(), accumulate_grad_batches=2)
    assert told(caplog) == [
        "BatchSizeTuner: settled on a batch size of 40 after 6 steps, the largest measured within 1.758 GiB, of "
        "1.953 GiB less the headroom; an optimizer step takes 80 samples"
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_later_peak_into_the_headroom_shrinks_the_very_next_batch(
    workers: int, meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By as much as the peak asks for, with one line, and no sample is lost."""

    class Longer(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.seen) == 8:
                meter.curve = lambda size: 1000 + 32 * size
            return super().training_step(batch, batch_idx)

    module, tuner = Longer(), BatchSizeTuner(mode="grow")
    with caplog.at_level(logging.INFO):
        trainer = run(module, [tuner], tmp_path, loaders=loader(num_workers=workers), max_epochs=1)
    assert module.sizes[7:11] == [40, 40, 25, 25]
    assert sorted(flat(module.of_epoch(0))) == list(range(SAMPLES))
    assert tuner.batch_size == module.batch_size == trainer.logger.experiment.hparams["batch_size"] == 25  # type: ignore[union-attr]
    assert told(caplog)[1:] == [
        "BatchSizeTuner: a step with batches of 40 samples peaked at 2.227 GiB, and it may use 1.758 GiB, of 1.953 GiB "
        "less the headroom: from the next step on the batch size is 25"
    ]


def test_an_epoch_that_was_told_to_end_ends_whatever_its_last_batch_peaked_at(
    meter: SampleMeter, tmp_path: Path
) -> None:
    """What is left of the data would make a batch of the smaller size; it is dropped, as announced, and validated."""

    class Longer(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.current_epoch == 1:
                meter.curve = lambda size: 1000 + 32 * size
            return super().training_step(batch, batch_idx)

    module = Longer()
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(78, drop_last=True), max_epochs=3)
    assert module.sizes == [2, 2, 4, 4, 40, 40, 25, 25, 25]
    assert [at for at, last in enumerate(module.last) if last] == [4, 5, 8]
    assert [int(row["step"]) for row in rows(tmp_path, "val_loss")] == [4, 5, 8]


def test_a_resumed_run_shrinks_by_as_much_at_once(meter: SampleMeter, tmp_path: Path) -> None:
    """It has grown through no sizes, and knows all the same what is there without a batch."""
    file, module = tmp_path / "file.ckpt", Net()
    run(Net(), [BatchSizeTuner(mode="grow"), Save(file, 14, "on_train_epoch_end")], tmp_path / "a", loaders=loader())
    meter.curve = lambda size: 1000 + 32 * size
    run(module, [BatchSizeTuner(mode="grow")], tmp_path / "b", loaders=loader(), ckpt_path=file)
    assert module.sizes[:3] == [40, 25, 25]


def test_what_can_not_shrink_is_said_once(meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter.curve = lambda size: 1900
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    with caplog.at_level(logging.INFO):
        run(module, [tuner], tmp_path, loaders=loader(), max_steps=20)
    assert set(module.sizes[1:]) == {1}
    assert told(caplog)[0] == (
        "BatchSizeTuner: a step with batches of 1 samples, the smallest allowed, peaked at 1.855 GiB, and it may use "
        "1.758 GiB, of 1.953 GiB less the headroom; training goes on with it"
    )
    assert len(told(caplog)) == 2


class StepSizes(Callback):
    """Samples of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[int] = []
        self._samples = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._samples += len(batch[1])

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.steps.append(self._samples)
        self.epochs.append(trainer.current_epoch)
        self._samples = 0


@pytest.mark.parametrize(
    ("whole", "settles", "workers"), [(96, 32, 0), (120, 40, 2), (60, 30, 0), (39, 39, 0), (41, 1, 0), (400, 40, 2)]
)
def test_a_global_batch_is_held_in_every_step(
    whole: int, settles: int, workers: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """Whatever the batch size: only the last step of an epoch has what is left."""
    module, counts = Net(), StepSizes()
    tuner = BatchSizeTuner(mode="grow", global_batch_size=whole, init_val=1)
    trainer = run(module, [tuner, counts], tmp_path, loaders=loader(1000, num_workers=workers))
    for epoch in range(2):
        steps = [size for size, at in zip(counts.steps, counts.epochs, strict=True) if at == epoch]
        assert steps[:-1] == [whole] * (1000 // whole - (1000 % whole == 0))
        assert sum(steps) == 1000
        assert sorted(flat(module.of_epoch(epoch))) == list(range(1000))
    assert tuner.batch_size == settles
    assert whole % settles == 0
    assert trainer.accumulate_grad_batches == 1


def test_a_global_batch_is_held_while_it_shrinks(meter: SampleMeter, tmp_path: Path) -> None:
    """From the next step on, to a size whose steps Lightning's own count would not have met."""

    class Longer(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.seen) == 200:
                meter.curve = lambda size: 1000 + 32 * size
            return super().training_step(batch, batch_idx)

    module, counts = Longer(), StepSizes()
    tuner = BatchSizeTuner(mode="grow", global_batch_size=120)
    run(module, [tuner, counts], tmp_path, loaders=loader(4000), max_epochs=1)
    assert set(counts.steps[:-1]) == {120}
    assert tuner.batch_size == 24
    assert [size for size, _ in itertools.groupby(module.sizes)] == [2, 4, 40, 24, 16]


def test_schedules_step_with_the_global_batch(meter: SampleMeter, tmp_path: Path) -> None:
    """The number of optimizer steps is that of a run without the tuner, and so are rows and planned steps."""

    class Planned(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    ours = run(
        Planned(), [BatchSizeTuner(mode="grow", global_batch_size=40)], tmp_path / "a", loaders=loader(), max_epochs=3
    )
    plain = run(Planned(), [], tmp_path / "b", loaders=loader(batch_size=40), max_epochs=3)
    assert ours.global_step == plain.global_step == 30
    schedules = [trainer.lr_scheduler_configs[0].scheduler for trainer in (ours, plain)]
    assert [schedule.total_steps for schedule in schedules] == [30, 30]  # type: ignore[union-attr]
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert [row["step"] for row in rows(tmp_path / "a")] == [row["step"] for row in rows(tmp_path / "b")]


def rows(folder: Path, key: str = "loss") -> list[dict[str, str]]:
    return [row for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()) if row.get(key)]


@pytest.mark.parametrize(
    ("options", "validations"),
    [
        ({}, [13, 23]),
        ({"val_check_interval": 0.5}, [6, 13, 18, 23]),
        ({"val_check_interval": 5}, [4, 9, 18, 23]),
        ({"val_check_interval": 17, "check_val_every_n_epoch": None}, [16]),
    ],
    ids=["epoch", "half", "batches", "batches of all epochs"],
)
def test_validation_checkpoints_and_rows_come_as_usual(
    options: dict[str, Any], validations: list[int], meter: SampleMeter, tmp_path: Path
) -> None:
    """One row a step, none missing; validation within epochs of 14 and 10 batches, at their ends, or by neither."""
    module = Net()
    saver = ModelCheckpoint(tmp_path / "files", monitor="val_loss", save_top_k=-1)
    others = [saver, EarlyStopping("val_loss", patience=9), StepMonitor()]
    run(module, [BatchSizeTuner(mode="grow"), *others], tmp_path, loaders=loader(), **options)
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(24))
    assert [int(row["step"]) for row in rows(tmp_path, "val_loss")] == validations
    assert len(list((tmp_path / "files").glob("*.ckpt"))) == len(validations)
    assert [int(row["step"]) for row in rows(tmp_path, "batch_size/per_device")] == list(range(24))


@pytest.mark.parametrize(
    ("interval", "validations"),
    [({"days": 1}, []), (timedelta(microseconds=1), list(range(24)))],
    ids=["long", "short"],
)
def test_validation_by_the_clock_is_left_to_it(
    interval: Any, validations: list[int], meter: SampleMeter, tmp_path: Path
) -> None:
    """However many batches an epoch has come to."""
    run(Net(), [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(), val_check_interval=interval)
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(24))
    assert [int(row["step"]) for row in rows(tmp_path, "val_loss")] == validations


def test_an_interval_of_validation_longer_than_the_epoch_has_become_ends_with_it(
    meter: SampleMeter, tmp_path: Path
) -> None:
    run(Net(), [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(), val_check_interval=150, max_epochs=3)
    assert [int(row["step"]) for row in rows(tmp_path, "val_loss")] == [13, 23, 33]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_counts_to_the_real_end(bar: type[Any], meter: SampleMeter, tmp_path: Path) -> None:
    totals = []

    class Watcher(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            shown = trainer.progress_bar_callback
            task = shown.train_progress_bar
            totals.append((task.total, task.n) if isinstance(shown, TQDMProgressBar) else (task.total, task.completed))

    run(
        Net(), [BatchSizeTuner(mode="grow"), Watcher(), bar()], tmp_path, loaders=loader(), enable_progress_bar=True,
        limit_val_batches=0,
    )  # fmt: skip
    assert totals == [(14, 14), (10, 10)]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"limit_train_batches": 9}, [9, 9]),
        ({"limit_train_batches": 0.5}, [9, 5]),
        ({"max_steps": 17, "max_epochs": -1}, [14, 3]),
        ({"reload_dataloaders_every_n_epochs": 1}, [14, 10]),
        ({"overfit_batches": 0.5}, [9, 5]),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_limits_hold_while_batches_grow(
    options: dict[str, Any], batches: list[int], workers: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """A number of batches is that number; a share is that share of the samples."""
    module = Net()
    module.train_dataloader = lambda: loader(shuffle=False, num_workers=workers)  # type: ignore[method-assign]
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, limit_val_batches=0, **options)
    assert [len(module.of_epoch(epoch)) for epoch in range(2)] == batches
    for epoch in range(2):
        seen = flat(module.of_epoch(epoch))
        assert len(set(seen)) == len(seen)
    assert module.last.index(True) == batches[0] - 1
    if "reload_dataloaders_every_n_epochs" in options:
        assert all(sorted(flat(module.of_epoch(epoch))) == list(range(SAMPLES)) for epoch in range(2))


class Save(Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, file: Path, batches: int, hook: str = "on_train_batch_end") -> None:
        self.file, self.batches, self.seen = file, batches, 0
        setattr(self, hook, self.save)

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen += 1

    def save(self, trainer: Trainer, *args: Any) -> None:
        if self.seen == self.batches and not self.file.exists():
            trainer.save_checkpoint(self.file)


SEEDS = itertools.count()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda **options: loader(generator=torch.Generator().manual_seed(next(SEEDS)), **options),
        lambda **options: DataLoader(Stream(), batch_size=8, **options),
    ],
    ids=["indices", "own generator", "stream"],
)
@pytest.mark.parametrize("every", [3, 9])
def test_a_run_resumed_within_an_epoch_goes_on_with_what_was_not_seen(
    every: int, make: Callable[..., Any], workers: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """While growing and after: the size, and the samples of the epoch, each seen once over both runs."""
    first, second, tuner = Net(), Net(), BatchSizeTuner(mode="grow")
    file = tmp_path / "file.ckpt"
    run(first, [BatchSizeTuner(mode="grow"), Save(file, every)], tmp_path / "a", loaders=make(num_workers=workers))
    del first.seen[every:]
    torch.rand(3)  # another process draws other numbers
    trainer = run(second, [tuner], tmp_path / "b", loaders=make(num_workers=workers), ckpt_path=file)
    assert sorted(flat(first.of_epoch(0)) + flat(second.of_epoch(0))) == list(range(SAMPLES))
    assert sorted(flat(second.of_epoch(1))) == list(range(SAMPLES))
    assert second.last.index(True) == len(second.of_epoch(0)) - 1
    assert second.sizes[0] == (2 if every == 3 else 40)
    assert tuner.batch_size == 40
    assert trainer.current_epoch == 2
    assert trainer.global_step == every + len(second.seen)


class Late(SingleDeviceStrategy):
    """Loads a checkpoint once the model is set up, as strategies that shard it do."""

    restore_checkpoint_after_setup = True  # type: ignore[assignment]


@pytest.mark.parametrize("every", [3, 9])
def test_loaders_that_are_there_before_the_checkpoint_go_on_too(every: int, meter: SampleMeter, tmp_path: Path) -> None:
    """A schedule asks for the number of batches, which loads the loaders; the strategy loads the checkpoint later."""

    class Planned(Net):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    file, first, second = tmp_path / "file.ckpt", Planned(), Planned()
    for module, callbacks, resumed in ((first, [Save(file, every)], None), (second, [], file)):
        tuner = BatchSizeTuner(mode="grow")
        run(
            module, [tuner, *callbacks], tmp_path / str(resumed is None), loaders=loader(), ckpt_path=resumed,
            strategy=Late("cpu"),
        )  # fmt: skip
    del first.seen[every:]
    assert sorted(flat(first.of_epoch(0)) + flat(second.of_epoch(0))) == list(range(SAMPLES))
    assert second.sizes[0] == (2 if every == 3 else 40)


def test_a_batch_that_failed_is_seen_by_the_resumed_run(meter: SampleMeter, tmp_path: Path) -> None:
    """The checkpoint of an exception counts what training was done with."""

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.seen) == 9:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    file, first, second = tmp_path / "file.ckpt", Fails(), Net()
    saving = [BatchSizeTuner(mode="grow"), Save(file, 10, "on_exception")]
    with pytest.raises(ValueError, match="mine"):
        run(first, saving, tmp_path / "a", loaders=loader(num_workers=2))
    run(second, [BatchSizeTuner(mode="grow")], tmp_path / "b", loaders=loader(num_workers=2), ckpt_path=file)
    assert sorted(flat(first.of_epoch(0)) + flat(second.of_epoch(0))) == list(range(SAMPLES))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_epochs": 2},
        {"max_epochs": -1, "max_steps": 24},
        {"max_epochs": 2, "val_check_interval": 7, "check_val_every_n_epoch": None},
    ],
    ids=["epochs", "steps", "validation by batches of all epochs"],
)
def test_a_run_resumed_where_an_epoch_was_over_begins_the_next(
    hook: str, limits: dict[str, Any], meter: SampleMeter, tmp_path: Path
) -> None:
    """Also where the epoch had more batches than one has at the size that was settled."""
    file, first, second = tmp_path / "file.ckpt", Net(), Net()
    run(first, [BatchSizeTuner(mode="grow"), Save(file, 14, hook)], tmp_path / "a", loaders=loader(), **limits)
    trainer = run(
        second, [BatchSizeTuner(mode="grow")], tmp_path / "b", loaders=loader(), ckpt_path=file, **limits
    )  # fmt: skip
    assert len(first.of_epoch(0)) == 14
    assert second.sizes == [40] * 10
    assert sorted(flat([rows for _, rows in second.seen])) == list(range(SAMPLES))
    assert trainer.global_step == 24
    assert [at for at, last in enumerate(second.last) if last] == [9]
    # Where an epoch's end is saved under `max_steps`, Lightning counts one step too many, with and without the tuner.
    first_step = 15 if hook == "on_train_epoch_end" and "max_steps" in limits else 14
    assert [int(row["step"]) for row in rows(tmp_path / "b")] == list(range(first_step, first_step + 10))
    assert len(rows(tmp_path / "b", "val_loss")) >= 1


def test_a_resumed_run_with_a_global_batch_counts_on_from_the_change(meter: SampleMeter, tmp_path: Path) -> None:
    """Saved within an epoch whose steps had 60 micro-batches, then 30, then 3."""
    file, counts = tmp_path / "file.ckpt", StepSizes()
    first, second = Net(), Net()
    make = {"mode": "grow", "global_batch_size": 120, "init_val": 2}
    run(first, [BatchSizeTuner(**make), Save(file, 189)], tmp_path / "a", loaders=loader(2000), max_epochs=1)  # type: ignore[arg-type]
    run(
        second, [BatchSizeTuner(**make), counts], tmp_path / "b", loaders=loader(2000), ckpt_path=file, max_epochs=1
    )  # type: ignore[arg-type]  # fmt: skip
    assert first.sizes[:189] == [2] * 120 + [4] * 60 + [40] * 9
    assert counts.steps == [120] * 9 + [80]
    assert sorted(flat([rows for _, rows in first.seen[:189] + second.seen])) == list(range(2000))


def test_a_checkpoint_of_growing_can_be_resumed_without_the_tuner(meter: SampleMeter, tmp_path: Path) -> None:
    file = tmp_path / "file.ckpt"
    run(Net(), [BatchSizeTuner(mode="grow"), Save(file, 14, "on_train_epoch_end")], tmp_path / "a", loaders=loader())
    module = Net()
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        run(module, [], tmp_path / "b", loaders=loader(), ckpt_path=file)
    assert module.sizes == [8] * 50


def test_a_settled_size_is_kept_by_a_second_fit(
    meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuner, data = BatchSizeTuner(mode="grow"), loader()
    trainer = run(Net(), [tuner], tmp_path, loaders=data, max_epochs=1)
    trials = list(tuner.trials)
    module = Net()
    trainer.fit_loop.max_epochs = 2
    caplog.clear()
    with caplog.at_level(logging.INFO):
        trainer.fit(module, data)
    assert module.sizes == [40] * 10
    assert tuner.trials == trials
    assert told(caplog) == []
    assert data.batch_size == 8


class DataByHyperparameter(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.hparams["batch_size"])

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(32), batch_size=16)


def test_the_size_is_written_everywhere_it_lives_and_logged(meter: SampleMeter, tmp_path: Path) -> None:
    """At every change, so that code that reads it in a step is right."""

    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            used: Any = self.trainer.train_dataloader
            read.append((self.batch_size, data.hparams["batch_size"], used.batch_size))
            return super().training_step(batch, batch_idx)

    read: list[tuple[int, int, int]] = []
    module, data = Reads(), DataByHyperparameter()
    trainer = run(module, [BatchSizeTuner(mode="grow")], tmp_path, datamodule=data, max_epochs=1)
    assert read[:7] == [(size, size, size) for size in (2, 2, 4, 4, 40, 40, 40)]
    assert trainer.logger.experiment.hparams["batch_size"] == 40  # type: ignore[union-attr]


@pytest.mark.parametrize("ends", ["well", "with an error", "before it began"])
def test_everything_replaced_is_put_back(ends: str, meter: SampleMeter, tmp_path: Path) -> None:
    class Fails(Net):
        def on_fit_start(self) -> None:
            if ends == "before it began":
                raise ValueError("mine")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if ends == "with an error" and len(self.seen) == 8:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    trainers: list[Trainer] = []

    class Keeper(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            trainers.append(trainer)

    data = loader(num_workers=2)
    with contextlib.nullcontext() if ends == "well" else pytest.raises(ValueError, match="mine"):
        tuner = BatchSizeTuner(mode="grow", global_batch_size=40)
        run(Fails(), [Keeper(), tuner], tmp_path, loaders=data)
    [trainer] = trainers
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "_accumulated_batches_reached" not in vars(trainer.fit_loop.epoch_loop)
    assert trainer.accumulate_grad_batches == 1
    assert data.batch_size == 8
    assert not torch.multiprocessing.active_children()
    used: Any = trainer.train_dataloader
    if ends == "before it began":
        assert used is None
    else:
        assert type(used) is DataLoader
        assert used.dataset is data.dataset


def test_running_out_of_memory_in_a_real_step_is_said_and_resumed_below(
    meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint knows the size that was measured to fit, not the one that failed."""

    class Limited(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[1]) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

    file = tmp_path / "file.ckpt"
    with caplog.at_level(logging.INFO), pytest.raises(torch.OutOfMemoryError):
        run(Limited(), [BatchSizeTuner(mode="grow"), Save(file, 4)], tmp_path / "a", loaders=loader())
    assert told(caplog) == [
        "BatchSizeTuner: memory ran out in a real step of 40 samples, which can't be taken back; 4 was measured to "
        "fit. Resume from the last checkpoint with max_val below 40, or with more headroom"
    ]
    module, tuner = Limited(), BatchSizeTuner(mode="grow", max_val=20)
    run(module, [tuner], tmp_path / "b", loaders=loader(), ckpt_path=file)
    assert module.sizes[:2] == [4, 4]
    assert tuner.batch_size == 20


def test_a_run_too_short_to_settle_says_so(
    meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run(Net(), [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(), max_steps=3)
    assert told(caplog) == [
        "BatchSizeTuner: training ended before the batch size was settled; 2 is the largest measured to fit, and a "
        "resumed run goes on from it"
    ]


def test_short_and_skipped_steps_do_not_count(meter: SampleMeter, tmp_path: Path) -> None:
    """The odd end of an epoch, and steps that the gradient scaler skipped."""
    from lightning.pytorch.plugins import MixedPrecision

    module, tuner = Net(), BatchSizeTuner(mode="grow", init_val=5, max_val=5)
    run(module, [tuner], tmp_path / "a", loaders=loader(7), max_epochs=2)
    assert [trial.size for trial in tuner.trials] == [5]
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    run(
        module, [tuner], tmp_path / "b", loaders=loader(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )  # fmt: skip
    skipped = module.sizes.index(4) - 2
    assert skipped > 0
    assert tuner.batch_size == 40


def test_manual_optimization_of_several_optimizers_grows(meter: SampleMeter, tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx) + self.critic(batch[0]).square().mean()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters()) for part in (self.net, self.critic)]

    module = Manual()
    run(module, [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader())
    assert module.sizes[:10] == [2] * 4 + [4] * 4 + [40] * 2
    assert all(sorted(flat(module.of_epoch(epoch))) == list(range(SAMPLES)) for epoch in range(2))


def test_checkpointing_and_the_monitor_go_beside_it(meter: SampleMeter, tmp_path: Path) -> None:
    """Each reads its own peak of the same memory."""
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    callbacks = [tuner, ActivationCheckpointing(blocks=nn.Linear), StepMonitor()]
    run(module, callbacks, tmp_path, loaders=loader(), max_epochs=1)
    assert tuner.batch_size == 40
    peaks = [float(row["memory/peak_fraction"]) for row in rows(tmp_path, "memory/peak_fraction")]
    assert peaks[8] == pytest.approx(1800 / 2000)


class OfItsOwn(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("callbacks", "options", "loaders", "message"),
    [
        ([ActivationCheckpointing("auto", monitor=False)], {}, loader(), 'policy that stays$'),
        ([GradientAccumulationScheduler({0: 2})], {"global_batch_size": 8}, loader(), "leave one of them out$"),
        ([], {}, DataLoader(Rows(), batch_sampler=OfItsOwn(RandomSampler(range(9)), 2, False)),
         'batches of a OfItsOwn anew while it is read: use mode="search", or give the DataLoader a sampler'),
        ([], {}, [[torch.zeros(2, 6), torch.zeros(2)]], "found no DataLoader with a batch size among the train"),
    ],
    ids=["auto", "scheduler", "batch sampler", "no loader"],
)  # fmt: skip
def test_what_does_not_go_together_is_said(
    callbacks: list[Callback], options: dict[str, Any], loaders: Any, message: str, meter: SampleMeter, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        run(Net(), [BatchSizeTuner(mode="grow", **options), *callbacks], tmp_path, loaders=loaders)


def test_a_global_batch_in_manual_optimization_is_refused(meter: SampleMeter, tmp_path: Path) -> None:
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="does not use in manual optimization: leave global_batch_size"):
        run(module, [BatchSizeTuner(mode="grow", global_batch_size=8)], tmp_path, loaders=loader())


@pytest.mark.parametrize("option", [{"probe": "longest"}, {"stop_at_plateau": 0.1}, {"evaluation": True}], ids=str)
def test_what_only_a_search_can_do_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave probe, stop_at_plateau and evaluation out, or use"):
        BatchSizeTuner(mode="grow", **option)


def test_the_two_modes_take_each_others_settled_size(meter: SampleMeter, tmp_path: Path) -> None:
    """A search's size is not grown again; a size that was still growing is not taken for a search's."""
    run(Net(), [BatchSizeTuner(), Save(tmp_path / "a.ckpt", 2)], tmp_path / "a", loaders=loader())
    module, tuner = Net(), BatchSizeTuner(mode="grow")
    run(module, [tuner], tmp_path / "b", loaders=loader(), ckpt_path=tmp_path / "a.ckpt")
    assert set(module.sizes) == {40}
    for batches, tried in ((9, [2, 4, 40, 40]), (3, [2, 40])):
        file, searching = tmp_path / f"{batches}.ckpt", BatchSizeTuner()
        folder = tmp_path / str(batches)
        run(Net(), [BatchSizeTuner(mode="grow"), Save(file, batches)], folder / "a", loaders=loader())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            run(Net(), [searching], folder / "b", loaders=loader(), ckpt_path=file)
        assert searching.batch_size == 40
        assert [trial.size for trial in searching.trials] == tried


def test_the_settled_size_is_logged_in_one_row(meter: SampleMeter, tmp_path: Path) -> None:
    """As after a search: per device and of an optimizer step, where no monitor logs them in each row."""
    run(Net(), [BatchSizeTuner(mode="grow")], tmp_path, loaders=loader(), accumulate_grad_batches=2)
    [row] = rows(tmp_path, "batch_size/per_device")
    assert (row["step"], row["batch_size/per_device"], row["batch_size/global"]) == ("5", "40.0", "80.0")


def test_a_global_batch_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size=0: give a whole number of at least 1"):
        BatchSizeTuner(mode="grow", global_batch_size=0)


def _grow(rank: int, whole: int | None, folder: Path) -> None:
    """The second rank has less memory."""
    torch.manual_seed(0)
    module, tuner, counts = Net(), BatchSizeTuner(mode="grow", global_batch_size=whole), StepSizes()
    with metered(SampleMeter(limit=2000 - 400 * rank)):
        run(
            module, [tuner, counts], folder / str(rank), loaders=loader(2000), devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=2,
        )  # fmt: skip
    torch.save((module.seen, tuner.batch_size, counts.steps, module.net.weight.detach()), folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "settles"), [(None, 22), (160, 20)])
def test_two_ranks_grow_alike_to_what_fits_the_one_with_less_memory(
    whole: int | None, settles: int, tmp_path: Path
) -> None:
    """Equal sizes in every step, equal weights; an epoch's samples are seen once over both."""
    on_two_ranks(_grow, whole, tmp_path)
    (seen, size, steps, weight), (other_seen, other_size, other_steps, other_weight) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    assert [(epoch, len(rows)) for epoch, rows in seen] == [(epoch, len(rows)) for epoch, rows in other_seen]
    assert size == other_size
    assert 0.95 * settles <= size <= settles
    assert torch.equal(weight, other_weight)
    for epoch in range(2):
        both = flat([rows for at, rows in seen + other_seen if at == epoch])
        assert sorted(both) == list(range(2000))
    if whole:
        assert set(steps[:12]) == set(other_steps[:12]) == {whole // 2}


@pytest.mark.slow
def test_a_gpt_settles_on_what_really_fits_by_the_allocators_own_bytes(tmp_path: Path) -> None:
    """The target is the peak of 96 samples: nearly as many are found, with no step above the limit."""
    from modules import Language

    class Text(Language):
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.batch_size = batch_size

        def _loader(self) -> DataLoader[Any]:
            return DataLoader([{"input_ids": torch.arange(9)} for _ in range(2000)], batch_size=self.batch_size)  # type: ignore[arg-type]

        train_dataloader = val_dataloader = _loader

    class Peaks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            reader.reset_peak()

        def on_train_batch_end(self, *args: Any) -> None:
            peaks.append(reader.peak())

    def fit(size: int, callbacks: list[Callback], steps: int) -> list[int]:
        nonlocal reader
        peaks.clear()
        with AllocatorReader() as reader, use_reader(reader):
            run(Text(size), [*callbacks, *([] if callbacks else [Peaks()])], tmp_path / f"{size}{len(callbacks)}",
                max_steps=steps, limit_val_batches=0)  # fmt: skip
        return list(peaks)

    reader, peaks = AllocatorReader(), []
    target = max(fit(96, [], 3))
    limit = math.ceil(target / 0.95)
    tuner = BatchSizeTuner(mode="grow", headroom=0.05, memory_limit=limit)
    fit(4, [tuner], 25)
    assert tuner.batch_size is not None
    assert 0.95 * 96 <= tuner.batch_size <= 96
    assert max(trial.peak for trial in tuner.trials) <= limit
    assert max(fit(tuner.batch_size, [], 3)) <= target
