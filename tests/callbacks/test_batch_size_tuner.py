"""The batch size tuner: what it finds, and that nothing else is changed by it."""

import csv
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner
from lightning_ckpt.callbacks._global_batch import GlobalBatch
from lightning_ckpt.callbacks._loaders import MOST_BATCHES
from lightning_ckpt.callbacks._trials import Trials
from lightning_ckpt.memory import AllocatorReader, HostReader, use_reader
from lightning_ckpt.search import NothingFits
from sample_meter import MIB, SampleMeter, metered, seen

SAMPLES = 400
pytestmark = pytest.mark.usefixtures("quick_collection")


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator))


class Net(LightningModule):
    """Dropout, BatchNorm, a metric, attributes that count, a schedule planned from the number of batches."""

    def __init__(self, batch_size: int = 8, count: int = SAMPLES, shuffle: bool = True) -> None:
        super().__init__()
        self.batch_size, self.count, self.shuffle = batch_size, count, shuffle
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.mean_loss, self.steps, self.losses, self.batches = MeanMetric(), 0, [], []  # type: ignore[var-annotated]
        self.register_buffer("moving", torch.zeros(1), persistent=False)
        self.calls: list[str] = []

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        seen(len(batch[0]))
        loss = (self.net(batch[0]) - batch[1]).square().mean() * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
        self.steps += 1
        self.losses.append(loss.item())
        self.moving = 0.9 * self.moving + loss.detach()
        self.mean_loss.update(loss.detach())
        self.log_dict({"loss": loss, "moving": self.moving[0]})
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.calls.append("on_train_start")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return DataLoader(samples(self.count), batch_size=self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(32), batch_size=16)


class Plateau(Net):
    """A schedule that waits for a monitored value, which no trial has."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Manual(Net):
    """Manual optimization of two optimizers and two schedules, the second stepped on every other batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.critic = nn.Linear(6, 1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[attr-defined,misc]
        schedules = self.lr_schedulers()
        for place, (optimizer, loss) in enumerate([(first, self.loss), (second, self.criticism)]):
            if place == 0 or batch_idx % 2:
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                schedules[place].step()  # type: ignore[index,union-attr,call-arg]

    def criticism(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.critic(batch[0]) - self.net(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.net, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]


class ByRate(Net):
    """A rate that follows the batch size, as people write it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-3 * self.batch_size, initial_accumulator_value=0.1)


def run(
    module: LightningModule,
    callbacks: Sequence[Callback],
    folder: Path,
    *,
    loaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """Train, and give back everything that training leaves behind."""
    seed_everything(3, verbose=False)
    options = {"max_epochs": 2, "log_every_n_steps": 1} | options
    logger = CSVLogger(folder, "", "")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, loaders, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer, left_behind(trainer, module, folder)


def left_behind(trainer: Trainer, module: Any, folder: Path) -> dict[str, Any]:
    metrics = folder / "metrics.csv"
    return {
        "rows": rows_without_the_size(metrics) if metrics.exists() else [],
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "moving": module.moving,
        "metric": repr(module.mean_loss.metric_state),
        "attributes": (module.steps, module.losses),
        "modes": [(part.training, [p.requires_grad for p in part.parameters()]) for part in module.modules()],
        "optimizers": repr([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedules": repr([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "random": repr([torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()]),
        "counters": (trainer.global_step, trainer.current_epoch, repr(trainer.fit_loop.state_dict())),
        "logged": repr(trainer.callback_metrics),
        "limits": (trainer.limit_val_batches, trainer.accumulate_grad_batches, trainer.should_stop),
    }


def rows_without_the_size(metrics: Path) -> list[dict[str, str]]:
    """Every logged row but the one that tells the size."""
    rows = [row for row in csv.DictReader(metrics.read_text().splitlines()) if not row.get("batch_size/per_device")]
    return [{key: value for key, value in row.items() if not key.startswith("batch_size/")} for row in rows]


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for key in plain:
        if key == "weights":
            assert ours[key].keys() == plain[key].keys()
            assert all(torch.equal(ours[key][name], value) for name, value in plain[key].items())
        else:
            assert ours[key] == plain[key], key


EXTRAS: dict[str, Callable[[Path], list[Callback]]] = {
    "alone": lambda folder: [],
    "with others": lambda folder: [
        LearningRateMonitor(),
        ModelCheckpoint(folder / "files", save_last=True),
        EarlyStopping("val_loss", patience=9),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Net, {}),
        (Net, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (Net, {"precision": "bf16-mixed"}),
        (Net, {"profiler": "simple", "num_sanity_val_steps": 0}),
        (Plateau, {}),
        (Manual, {}),
        (ByRate, {}),
    ],
    ids=["schedule", "accumulation", "bf16", "profiler", "plateau", "manual", "rate by size"],
)
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
def test_training_is_what_it_would_have_been_with_the_size_set_by_hand(
    kind: type[Net],
    options: dict[str, Any],
    extras: Callable[[Path], list[Callback]],
    meter: SampleMeter,
    tmp_path: Path,
) -> None:
    """Every logged row of 20 steps, weights, buffers, optimizers, schedules, random numbers, counters: bit for bit."""
    tuner = BatchSizeTuner()
    torch.manual_seed(5)
    tuned = kind(batch_size=8)
    _, ours = run(tuned, [tuner, *extras(tmp_path / "a")], tmp_path / "a", **options)
    torch.manual_seed(5)
    _, plain = run(kind(batch_size=40), extras(tmp_path / "b"), tmp_path / "b", **options)
    assert tuner.batch_size == tuned.batch_size == 40
    assert len(plain["rows"]) >= (8 if "accumulate_grad_batches" in options else 20)
    assert_same(ours, plain)


def test_a_straight_line_takes_a_first_step_and_a_jump(meter: SampleMeter, tmp_path: Path) -> None:
    """In the first, gradients and optimizer state come up; it is no trial, but tells how far the first may go."""
    tuner = BatchSizeTuner()
    run(Net(), [tuner], tmp_path)
    assert meter.sizes[: len(tuner.trials) + 1] == [2, *(trial.size for trial in tuner.trials)]
    assert [(trial.size, trial.peak, trial.outcome) for trial in tuner.trials] == [(40, 1800 * MIB, "fits")]
    assert all(trial.seconds > 0 for trial in tuner.trials)
    assert set(meter.sizes[len(tuner.trials) + 1 :]) == {40}


class OfModule(Net):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters()
        del self.batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.hparams["batch_size"], shuffle=True)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(32), batch_size=16)


class DataByHyperparameter(Data):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters()
        del self.batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.hparams["batch_size"], shuffle=True)


def without_size() -> Net:
    module = Net()
    del module.batch_size
    return module


@pytest.mark.parametrize("data", [Data, DataByHyperparameter])
def test_a_datamodule_gets_the_size_where_it_keeps_it(data: type[Data], meter: SampleMeter, tmp_path: Path) -> None:
    ours, plain = data(8), data(40)
    torch.manual_seed(5)
    first = without_size()
    second = without_size()
    second.load_state_dict(first.state_dict())
    _, left = run(first, [BatchSizeTuner()], tmp_path / "a", datamodule=ours)
    _, expected = run(second, [], tmp_path / "b", datamodule=plain)
    assert_same(left, expected)
    assert ours.hparams == plain.hparams
    assert getattr(ours, "batch_size", None) == getattr(plain, "batch_size", None)


def test_a_size_that_lives_in_several_places_is_written_to_all(meter: SampleMeter, tmp_path: Path) -> None:
    """Module attribute and hyperparameter, datamodule attribute and hyperparameter."""
    module, data = OfModule(), DataByHyperparameter()
    module.batch_size = data.batch_size = 8
    run(module, [BatchSizeTuner()], tmp_path, datamodule=data)
    found = (module.batch_size, module.hparams["batch_size"], data.batch_size, data.hparams["batch_size"])
    assert found == (40, 40, 40, 40)


def test_the_size_among_the_hyperparameters_is_found_logged_and_saved(meter: SampleMeter, tmp_path: Path) -> None:
    """Lightning logs the initial value; the logger's record in the end holds the size that was trained with."""
    module = OfModule()
    trainer, _ = run(module, [BatchSizeTuner(), ModelCheckpoint(tmp_path / "files")], tmp_path)
    assert module.hparams["batch_size"] == 40
    assert trainer.logger.experiment.hparams["batch_size"] == 40  # type: ignore[union-attr]
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)
    assert saved["hyper_parameters"]["batch_size"] == 40


def test_a_size_that_was_left_open_is_filled(meter: SampleMeter, tmp_path: Path) -> None:
    """None in the module, whose loader then gives single samples: these are no batches to try."""
    module = Net()
    module.batch_size = None  # type: ignore[assignment]
    tuner = BatchSizeTuner()
    run(module, [tuner], tmp_path)
    assert tuner.batch_size == module.batch_size == 40
    assert set(meter.sizes[len(tuner.trials) + 1 :]) == {40}


def test_another_name_for_the_size(meter: SampleMeter, tmp_path: Path) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rows = 8

        def train_dataloader(self) -> Any:
            return DataLoader(samples(), batch_size=self.rows)

    module = Other()
    trainer, _ = run(module, [BatchSizeTuner(batch_arg_name="rows")], tmp_path)
    assert (module.rows, module.batch_size) == (40, 8)
    assert trainer.logger.experiment.hparams == {"rows": 40}  # type: ignore[union-attr]


class Collate:
    """A collate function with a state of its own."""

    def __init__(self) -> None:
        self.calls, self.rng = 0, np.random.default_rng(0)

    def __call__(self, rows: list[Any]) -> list[Tensor]:
        self.calls += 1
        noise = float(self.rng.random())
        return [torch.stack([row[0] for row in rows]) + noise, torch.stack([row[1] for row in rows])]


class Loader(DataLoader[Any]):
    """A loader class with an argument that DataLoader does not have."""

    def __init__(self, *args: Any, name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


class Buckets:
    """A batch sampler of the user's own, with random numbers of its own."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count, self.batch_size, self.rng = count, batch_size, random.Random(7)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        self.rng.shuffle(order)
        return (order[at : at + self.batch_size] for at in range(0, self.count, self.batch_size))

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)


HANDED: dict[str, Callable[[int], Any]] = {
    "plain": lambda size: DataLoader(samples(), batch_size=size),
    "shuffled": lambda size: DataLoader(samples(), batch_size=size, shuffle=True),
    "generator": lambda size: DataLoader(
        samples(), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "sampler": lambda size: DataLoader(
        samples(),
        batch_size=size,
        sampler=RandomSampler(range(SAMPLES), True, 500, torch.Generator().manual_seed(4)),
    ),
    "collate, drop_last": lambda size: DataLoader(samples(630), batch_size=size, collate_fn=Collate(), drop_last=True),
    "own class": lambda size: Loader(samples(), batch_size=size, name="mine"),
    "batch sampler": lambda size: DataLoader(
        samples(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), size, drop_last=False)
    ),
    "own batch sampler": lambda size: DataLoader(samples(), batch_sampler=Buckets(SAMPLES, size)),  # type: ignore[arg-type]
    "workers": lambda size: DataLoader(samples(), batch_size=size, shuffle=True, num_workers=2),
    "list": lambda size: CombinedLoader(
        [DataLoader(samples(), batch_size=size), DataLoader(samples(100), batch_size=size)], "max_size_cycle"
    ),
    "beside batches": lambda size: CombinedLoader(
        [DataLoader(samples(), batch_size=size), [samples(3)[:], samples(5)[:]]], "max_size_cycle"
    ),
}


@pytest.mark.parametrize("make", HANDED.values(), ids=HANDED)
def test_a_loader_handed_to_fit_is_replaced_by_one_of_the_new_size(
    make: Callable[[int], Any], meter: SampleMeter, tmp_path: Path
) -> None:
    """Same samples in the same order, same generators afterwards, as a loader that was made with that size."""

    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch[0] if isinstance(batch[0], list | tuple) else batch)

    torch.manual_seed(5)
    first, second = Pairs(), Pairs()
    second.load_state_dict(first.state_dict())
    tuner = BatchSizeTuner()
    loader = make(8)
    trainer, ours = run(first, [tuner], tmp_path / "a", loaders=loader)
    _, plain = run(second, [], tmp_path / "b", loaders=make(40))
    assert tuner.batch_size == 40
    assert_same(ours, plain)
    assert type(trainer.train_dataloader) is type(loader if not isinstance(loader, CombinedLoader) else [])
    assert getattr(loader, "batch_size", 8) in (8, None)  # the user's own object is as it was


class Batches:
    """A loader of the user's own: no DataLoader, and so asked for anew at each size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return (samples()[at : at + self.size] for at in range(0, SAMPLES, self.size))

    def __len__(self) -> int:
        return -(-SAMPLES // self.size)


class OwnLoader(Net):
    def train_dataloader(self) -> Any:
        return Batches(self.batch_size)


def test_a_loader_of_the_users_own_is_made_by_the_hook_for_each_size(meter: SampleMeter, tmp_path: Path) -> None:
    """Nobody else could change its size; training is that with the size set by hand."""
    torch.manual_seed(5)
    first, second, tuner = OwnLoader(), OwnLoader(40), BatchSizeTuner()
    second.load_state_dict(first.state_dict())
    _, ours = run(first, [tuner], tmp_path / "a")
    _, plain = run(second, [], tmp_path / "b")
    assert tuner.batch_size == first.batch_size == 40
    assert meter.sizes[: len(tuner.trials) + 1] == [2, *(trial.size for trial in tuner.trials)]
    assert_same(ours, plain)


class Rarely(OwnLoader):
    """Steps its optimizer by itself, once in so many batches."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("every", "loaders", "batches"),
    [(3, None, 3), (16, None, 16), (100, DataLoader(samples(), batch_size=40), MOST_BATCHES)],
    ids=["few", "data end before", "no step"],
)
def test_a_trial_takes_batches_until_the_module_has_stepped(
    every: int, loaders: Any, batches: int, meter: SampleMeter, tmp_path: Path
) -> None:
    """Ten batches are all the data: they are read again, but a module that does not step is waited for no longer."""
    tuner = BatchSizeTuner(init_val=40, max_val=40)
    run(Rarely(every), [tuner], tmp_path, loaders=loaders, limit_train_batches=3, max_epochs=1)
    assert [trial.size for trial in tuner.trials] == [40]
    assert meter.sizes == [40] * (2 * batches + 3)  # a first step, the one that is measured, and training


def test_what_a_loader_carries_is_carried_over(meter: SampleMeter, tmp_path: Path) -> None:
    loader = Loader(samples(), batch_size=8, name="mine", collate_fn=Collate(), drop_last=True, pin_memory=False)
    trainer, _ = run(Net(), [BatchSizeTuner()], tmp_path, loaders=loader)
    used: Any = trainer.train_dataloader
    assert (used.batch_size, used.drop_last, used.name) == (40, True, "mine")
    assert used.dataset is loader.dataset
    assert used.collate_fn is loader.collate_fn


def test_reading_for_trials_leaves_the_datasets_own_random_numbers(meter: SampleMeter, tmp_path: Path) -> None:
    """A dataset that augments with a generator of its own gives the same samples as without trials."""

    class Noisy(Dataset[Any]):
        def __init__(self) -> None:
            self.rows, self.rng, self.reads = samples(), np.random.default_rng(0), 0

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return self.rows[index][0] + float(self.rng.random()), self.rows[index][1]

    torch.manual_seed(5)
    first, second = Net(), Net()
    second.load_state_dict(first.state_dict())
    ours, plain = Noisy(), Noisy()
    _, left = run(first, [BatchSizeTuner()], tmp_path / "a", loaders=DataLoader(ours, batch_size=8))
    _, expected = run(second, [], tmp_path / "b", loaders=DataLoader(plain, batch_size=40))
    assert_same(left, expected)
    assert ours.reads == plain.reads


def test_hooks_are_called_once_and_the_loader_once_more(meter: SampleMeter, tmp_path: Path) -> None:
    """`train_dataloader` for the size that was, `train_dataloader` for the size that is, `on_train_start`."""
    module = Net()
    hooks = []

    class Watcher(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            hooks.append((trainer.global_step, batch_idx))

        def on_before_zero_grad(self, *args: Any) -> None:
            hooks.append("zero")

    run(module, [BatchSizeTuner(), Watcher()], tmp_path, max_epochs=1)
    assert module.calls == ["train_dataloader", "train_dataloader", "on_train_start"]
    assert hooks == [entry for step in range(10) for entry in ((step, step), "zero")]


def test_a_schedule_sees_the_new_number_of_batches(meter: SampleMeter, tmp_path: Path) -> None:
    trainer, _ = run(Net(), [BatchSizeTuner()], tmp_path)
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == trainer.global_step == 2 * SAMPLES // 40  # type: ignore[union-attr]


def test_weight_averaging_is_as_without_trials(meter: SampleMeter, tmp_path: Path) -> None:
    results = []
    for size, callbacks in ((8, [BatchSizeTuner()]), (40, [])):
        torch.manual_seed(5)
        results.append(run(Net(size), [*callbacks, WeightAveraging()], tmp_path / str(size))[1])
    assert_same(*results)


def test_frozen_parts_stay_in_eval_mode_and_frozen(meter: SampleMeter, tmp_path: Path) -> None:
    class Frozen(Net):
        def on_fit_start(self) -> None:
            self.modes = [part.training for part in self.modules()]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net.train()
            return self.loss(batch)

    module = Frozen()
    module.net[1].eval()
    module.net[0].requires_grad_(False)
    before = [part.training for part in module.modules()]
    with pytest.warns(UserWarning, match="in eval mode"):
        run(module, [BatchSizeTuner()], tmp_path)
    assert module.modes == before
    assert not module.net[0].weight.requires_grad


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_is_never_larger_than_the_data(drop_last: bool, tmp_path: Path) -> None:
    """100 samples: at most 100, so that with drop_last one batch is left; in few trials however cheap the model."""
    tuner = BatchSizeTuner()
    loader = DataLoader(samples(100), batch_size=8, drop_last=drop_last)
    with use_reader(SampleMeter(lambda size: 10, limit=10**6)):
        trainer, _ = run(Net(), [tuner], tmp_path, loaders=loader, max_epochs=1)
    assert tuner.batch_size == 100
    assert len(tuner.trials) <= 4
    assert trainer.global_step == 1


@pytest.mark.parametrize("options", [{}, {"init_val": 25, "stop_at_plateau": 0.05}], ids=["larger", "all at first"])
def test_a_stream_bounds_the_size_by_what_it_holds(options: dict[str, Any], meter: SampleMeter, tmp_path: Path) -> None:
    """All that it holds is a size to try, once, however much memory there is."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(samples(25))

    tuner = BatchSizeTuner(**options)
    meter.curve = lambda size: 10
    module = Plateau()
    run(module, [tuner], tmp_path, loaders=DataLoader(Stream(), batch_size=8))
    assert tuner.batch_size == 25
    assert max(meter.sizes) == 25
    assert [trial.size for trial in tuner.trials] == [25]


def test_max_val_is_tried_and_not_passed(meter: SampleMeter, tmp_path: Path) -> None:
    meter.curve = lambda size: size
    tuner = BatchSizeTuner(max_val=100)
    run(Net(), [tuner], tmp_path)
    assert tuner.batch_size == 100
    assert 100 in [trial.size for trial in tuner.trials]


def test_the_size_is_a_multiple(meter: SampleMeter, tmp_path: Path) -> None:
    tuner = BatchSizeTuner(multiple_of=16)
    run(Net(), [tuner], tmp_path)
    assert tuner.batch_size == 32


def test_memory_limit_and_headroom_set_the_target(meter: SampleMeter, tmp_path: Path) -> None:
    tuner = BatchSizeTuner(memory_limit="4GiB", headroom=0.5)
    run(Net(), [tuner], tmp_path)
    assert tuner.batch_size == (2048 - 1000) // 20


class Limited(Plateau):
    """Runs out of memory above a size, as a device does."""

    def __init__(self, most: int, batch_size: int = 8, error: Exception | None = None) -> None:
        super().__init__(batch_size)
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory.")
        if most < 2:
            self.net[1] = nn.Identity()  # BatchNorm asks for two samples

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if len(batch[0]) > self.most:
            activations = torch.ones(10_000)
            BORN.append(weakref.ref(activations))
            raise self.error
        ALIVE.extend(reference() is not None for reference in BORN)
        BORN.clear()
        return loss


BORN: list[weakref.ref[Tensor]] = []
ALIVE: list[bool] = []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("any text"),
        RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("XPU out of memory."),
        MemoryError(),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false."),
        RuntimeError("could not create a primitive"),
    ],
    ids=repr,
)
def test_running_out_of_memory_bounds_the_search_and_leaves_nothing(
    error: Exception, meter: SampleMeter, tmp_path: Path
) -> None:
    """The next trial finds the failed one's tensors freed; training equals training at that size."""
    BORN.clear()
    ALIVE.clear()
    meter.curve = lambda size: 1000
    tuner = BatchSizeTuner()
    torch.manual_seed(5)
    first, second = Limited(50, error=error), Limited(50)
    second.load_state_dict(first.state_dict())
    _, ours = run(first, [tuner], tmp_path / "a")
    assert ALIVE
    assert not any(ALIVE)
    assert any(trial.outcome == "out of memory" for trial in tuner.trials)
    assert 43 <= (tuner.batch_size or 0) <= 50
    second.batch_size = tuner.batch_size or 0
    _, plain = run(second, [], tmp_path / "b")
    assert_same(ours, plain)


def test_what_no_size_has_passed_is_not_taken_for_too_much(meter: SampleMeter, tmp_path: Path) -> None:
    """A kernel's refusal of the first size: it may refuse every size."""
    error = RuntimeError("CUDA error: invalid configuration argument")
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        run(Limited(50, error=error), [BatchSizeTuner(init_val=60)], tmp_path)


def test_memory_that_others_held_for_once_bounds_nothing(meter: SampleMeter, tmp_path: Path) -> None:
    """Two steps fail, of two sizes and well within the target: each is tried once more, and the largest size found."""
    failed: set[int] = set()

    class Fluke(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if len(batch[0]) > 10 and len(batch[0]) not in failed and len(failed) < 2:
                failed.add(len(batch[0]))
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

    tuner = BatchSizeTuner(init_val=12)
    run(Fluke(), [tuner], tmp_path)
    assert len(failed) == 2
    assert tuner.batch_size == 40
    assert {trial.outcome for trial in tuner.trials} == {"fits"}


def test_a_size_far_too_large_at_the_start_goes_down(meter: SampleMeter, tmp_path: Path) -> None:
    meter.curve = lambda size: 100
    tuner = BatchSizeTuner(init_val=8)
    run(Limited(4), [tuner], tmp_path, max_steps=2)
    assert tuner.batch_size == 4
    assert tuner.trials[0].outcome == "out of memory"


def test_the_users_own_size_is_not_tried_first(meter: SampleMeter, tmp_path: Path) -> None:
    """60 in the module, memory for 50: it may be the very size that does not fit."""
    tuner = BatchSizeTuner()
    run(Limited(50, batch_size=60), [tuner], tmp_path)
    assert meter.sizes[0] == 2
    assert 1 < (tuner.batch_size or 0) <= 50


def test_nothing_fits(meter: SampleMeter, tmp_path: Path) -> None:
    """The measured peak of the smallest size is named, and the size stays what it was."""
    meter.curve = lambda size: 2048
    module = Limited(1)
    with pytest.raises(
        NothingFits, match=r"not even a batch size of 1 fits: its step has a measured peak of 2 GiB, and"
    ) as e:
        run(module, [BatchSizeTuner(memory_limit="2GiB", headroom=0.5)], tmp_path)
    assert "it may use 1 GiB, of 2 GiB less the headroom. Checkpoint more of the model" in str(e.value)
    assert module.batch_size == 8


def test_a_size_found_on_the_class_is_not_left_on_the_object(meter: SampleMeter, tmp_path: Path) -> None:
    """After a search that failed, of the module and of the datamodule."""

    class OfClass(Limited):
        batch_size = 8

    class DataOfClass(Data):
        batch_size = 8

    meter.curve = lambda size: 2048
    module, data = OfClass(1), DataOfClass()
    del module.batch_size, data.batch_size
    with pytest.raises(NothingFits):
        run(module, [BatchSizeTuner()], tmp_path, datamodule=data)
    assert 1 in meter.sizes
    assert not {"batch_size"} & (vars(module).keys() | vars(data).keys())


def test_nothing_fits_because_memory_runs_out_at_one(meter: SampleMeter, tmp_path: Path) -> None:
    with pytest.raises(NothingFits, match="batch size of 1 fits: its step ran out of memory after reaching 1020 MiB"):
        run(Limited(0), [BatchSizeTuner()], tmp_path)


@pytest.mark.parametrize("error", [ValueError("in the user's code"), KeyboardInterrupt("in the user's code")])
def test_any_other_error_comes_through_with_everything_put_back(
    error: BaseException, meter: SampleMeter, tmp_path: Path
) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 2:
                raise error
            return loss

    module = Fails()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tuner = BatchSizeTuner()
    trainers: list[Trainer] = []

    class Keeper(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            trainers.append(trainer)

    interrupt = signal.getsignal(signal.SIGINT)  # Lightning ignores it from the first one on
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
        run(module, [Keeper(), tuner], tmp_path)
    signal.signal(signal.SIGINT, interrupt)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert (module.batch_size, module.steps, module.losses) == (8, 0, [])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not trainers[0].optimizers[0].state
    assert len(trainers[0].callbacks) >= 2
    assert isinstance(trainers[0].logger, CSVLogger)
    assert tuner.batch_size is None
    assert "setup_optimizers" not in vars(trainers[0].strategy)


def test_nothing_is_left_on_disk(meter: SampleMeter, tmp_path: Path) -> None:
    run(Net(), [BatchSizeTuner()], tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["hparams.yaml", "metrics.csv"]


def test_a_resumed_run_uses_the_saved_size_after_one_trial(meter: SampleMeter, tmp_path: Path) -> None:
    """Step, epoch, optimizer and schedule go on, and equal those of a resumed run with the size set by hand."""
    results, tuner = [], BatchSizeTuner()
    for size, first, second in ((8, [BatchSizeTuner()], [tuner]), (40, [], [])):
        torch.manual_seed(5)
        folder = tmp_path / str(size)
        started, _ = run(Plateau(size), first, folder / "first", max_epochs=1)
        started.save_checkpoint(folder / "half.ckpt")
        resumed = Plateau(size)
        trainer, left = run(resumed, second, folder / "second", ckpt_path=folder / "half.ckpt", max_epochs=2)
        assert resumed.batch_size == 40
        assert trainer.global_step == 20
        results.append(left)
    assert tuner.batch_size == 40
    assert [trial.size for trial in tuner.trials] == [40, 40]
    assert_same(*results)


class Late(SingleDeviceStrategy):
    """Loads a checkpoint once the model is set up, as strategies that shard it do."""

    restore_checkpoint_after_setup = True  # type: ignore[assignment]


def test_a_size_that_is_settled_when_a_checkpoint_is_loaded_stays(meter: SampleMeter, tmp_path: Path) -> None:
    """The search comes first under such a strategy, and what it found is of this run's memory."""
    started, _ = run(Plateau(), [BatchSizeTuner()], tmp_path / "a", max_epochs=1)
    started.save_checkpoint(tmp_path / "half.ckpt")
    meter.curve = lambda size: 1000 + 40 * size
    tuner, module = BatchSizeTuner(), Plateau()
    run(module, [tuner], tmp_path / "b", ckpt_path=tmp_path / "half.ckpt", strategy=Late("cpu"))
    assert tuner.batch_size == module.batch_size == 20
    assert 40 not in [trial.size for trial in tuner.trials if trial.outcome == "fits"]
    assert set(meter.sizes[-3:]) == {20}


class InItsOwnWay(SingleDeviceStrategy):
    """Makes its optimizers by no method that anybody could notice."""

    def setup(self, trainer: Any) -> None:
        assert self.model is not None
        self.model_to_device()
        SingleDeviceStrategy.setup_optimizers(self, trainer)
        self.setup_precision_plugin()


def test_a_strategy_that_makes_optimizers_in_its_own_way_makes_them_again(meter: SampleMeter, tmp_path: Path) -> None:
    """A rate that follows the size is that of the settled one."""
    tuned, tuner = ByRate(), BatchSizeTuner()
    trainer, _ = run(tuned, [tuner], tmp_path, strategy=InItsOwnWay("cpu"))
    assert tuner.batch_size == 40
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.04)


class Draws(Callback):
    """Draws random numbers after the optimizers were made, and before the trials."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.rand(7)


def test_what_others_draw_before_the_trials_stays_drawn(meter: SampleMeter, tmp_path: Path) -> None:
    """Training has the random numbers that come after theirs, as with the size set by hand."""
    left = []
    for size, callbacks in ((8, [Draws(), BatchSizeTuner()]), (40, [Draws()])):
        torch.manual_seed(5)
        left.append(run(Net(size), callbacks, tmp_path / str(size))[1])
    assert_same(*left)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("known", [True, False], ids=["with its size", "of a run without a tuner"])
def test_a_run_resumed_within_an_epoch_takes_trials_there(known: bool, meter: SampleMeter, tmp_path: Path) -> None:
    """Trials take steps, nothing of them is counted, and what is left of the run is as with the size set by hand."""
    results, tuner = [], BatchSizeTuner()
    for size, second in ((8, [tuner]), (40, [])):
        torch.manual_seed(5)
        folder = tmp_path / str(size)
        first = [BatchSizeTuner()] if known and second else []
        started, _ = run(Plateau(size if known else 40), first, folder / "first", max_steps=6)
        started.save_checkpoint(folder / "within.ckpt")
        trainer, left = run(Plateau(size), second, folder / "second", ckpt_path=folder / "within.ckpt", max_epochs=2)
        results.append(left | {"global step": trainer.global_step})
    assert tuner.batch_size == 40
    assert [trial.size for trial in tuner.trials] == ([40, 40] if known else [40])
    assert_same(*results)


def test_the_checkpoint_a_run_resumes_from_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lightning holds it while trials run, and lets it go before training: a resident size would count it."""
    copies: list[int] = []
    enter = Trials.__enter__

    def entering(trials: Trials) -> Trials:
        enter(trials)
        copies.append(trials.copies)
        return trials

    monkeypatch.setattr(Trials, "__enter__", entering)
    tuner = partial(BatchSizeTuner, max_val=4)
    started, _ = run(Plateau(), [tuner()], tmp_path / "first", max_epochs=1)
    started.save_checkpoint(tmp_path / "half.ckpt")
    run(Plateau(), [tuner()], tmp_path / "second", ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    weights = sum(weight.nbytes for weight in saved["state_dict"].values())
    assert copies[1] >= copies[0] + weights  # and the optimizer's state


def test_a_saved_size_that_no_longer_fits_is_searched_anew(meter: SampleMeter, tmp_path: Path) -> None:
    started, _ = run(Plateau(), [BatchSizeTuner()], tmp_path / "a", max_epochs=1)
    started.save_checkpoint(tmp_path / "half.ckpt")
    meter.curve = lambda size: 1000 + 40 * size
    tuner, module = BatchSizeTuner(), Plateau()
    run(module, [tuner], tmp_path / "b", ckpt_path=tmp_path / "half.ckpt", max_epochs=3)
    assert tuner.batch_size == module.batch_size == 20
    assert (40, "too large") in [(trial.size, trial.outcome) for trial in tuner.trials]


def test_a_second_fit_keeps_the_settled_size(meter: SampleMeter, tmp_path: Path) -> None:
    """The loader handed to it anew is replaced again; one more trial shows that the size still fits."""
    tuner = BatchSizeTuner()
    loader = DataLoader(samples(), batch_size=8)
    trainer, _ = run(Net(), [tuner], tmp_path, loaders=loader, max_epochs=1)
    tried = len(tuner.trials)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader)
    assert len(tuner.trials) == tried + 1
    assert trainer.train_dataloader.batch_size == 40  # type: ignore[union-attr]


def test_it_stands_behind_activation_checkpointing_wherever_it_was_put(meter: SampleMeter, tmp_path: Path) -> None:
    """Blocks made in `configure_model` are checkpointed when the trials run."""
    from lightning_ckpt import is_recomputing

    class Blocks(Plateau):
        def configure_model(self) -> None:
            self.net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(6, 1))

    replays: list[bool] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            replays.append(is_recomputing())
            return self.linear(x).relu()  # type: ignore[no-any-return]

    tuner, checkpointing = BatchSizeTuner(max_val=4, init_val=4), ActivationCheckpointing(monitor=False)
    trainer, _ = run(Blocks(), [tuner, checkpointing], tmp_path, max_epochs=1, num_sanity_val_steps=0)
    assert replays[:6] == [False] * 3 + [True] * 3
    assert trainer.callbacks.index(tuner) == trainer.callbacks.index(checkpointing) + 1  # type: ignore[attr-defined]


def test_the_table_and_the_line_about_the_effective_batch(
    meter: SampleMeter, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run(Net(), [BatchSizeTuner()], tmp_path, accumulate_grad_batches=2)
    out = capsys.readouterr().out
    assert "Batch size: 40, the largest measured within" in out
    assert "1.758 GiB" in out
    lines = [record.message for record in caplog.records if record.message.startswith("BatchSizeTuner")]
    assert lines == [
        "BatchSizeTuner: an optimizer step now takes 80 samples, not 16 as before; the learning rate may want to follow"
    ]


@pytest.mark.parametrize(("samples", "size", "count"), [(96, 32, 3), (40, 40, 1), (74, 37, 2), (82, 2, 41)])
def test_an_optimizer_step_takes_the_samples_that_were_asked_for(
    samples: int, size: int, count: int, meter: SampleMeter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """40 samples fit: the largest size that divides is taken, and training is that with both numbers set by hand."""
    tuner = BatchSizeTuner(global_batch_size=samples)
    with caplog.at_level("INFO"):
        trainer, ours = run(Net(), [tuner], tmp_path / "ours")
    assert tuner.batch_size == size
    assert all(samples % trial.size == 0 for trial in tuner.trials)
    assert f"batch size {size}, accumulated {count} times, on 1 process;" in caplog.text
    assert trainer.accumulate_grad_batches == 1  # as the user had it
    _, plain = run(Net(size), [], tmp_path / "plain", accumulate_grad_batches=count)
    limits, by_hand = ours.pop("limits"), plain.pop("limits")
    assert (limits[0], limits[2]) == (by_hand[0], by_hand[2])
    assert_same(ours, plain)


@pytest.mark.parametrize(
    ("module", "samples", "callbacks", "options", "message"),
    [
        (Manual, 8, [], {}, "does not use in manual optimization: leave global_batch_size out"),
        (Net, 8, [GradientAccumulationScheduler({0: 2})], {}, "both set accumulate_grad_batches: leave one of them"),
        (Net, 8, [], {"accumulate_grad_batches": 4}, "by itself, and the trainer has 4: leave that out"),
    ],
    ids=["manual", "scheduler", "accumulation"],
)
def test_what_a_constant_number_of_samples_does_not_go_with_is_said(
    module: type[Net],
    samples: int,
    callbacks: list[Callback],
    options: dict[str, Any],
    message: str,
    meter: SampleMeter,
    tmp_path: Path,
) -> None:
    """Nothing is half applied: the trainer's own number of batches stays."""
    with pytest.raises(MisconfigurationException, match=message):
        run(module(), [BatchSizeTuner(global_batch_size=samples), *callbacks], tmp_path, **options)


def test_samples_that_can_not_be_shared_out_among_ranks_are_refused() -> None:
    """Before any of them trains."""
    two = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    with pytest.raises(
        MisconfigurationException, match=r"BatchSizeTuner\(global_batch_size=7\) can't be divided among 2 processes"
    ):
        GlobalBatch(two, Net(), 7)


@pytest.mark.parametrize("mode", ["search", "grow"])
def test_validation_test_and_fast_dev_run_are_left_alone(mode: Any, meter: SampleMeter, tmp_path: Path) -> None:
    """No trial, the size as it was, and nothing for a checkpoint."""
    tuner, module = BatchSizeTuner(mode), Net()
    run(module, [tuner], tmp_path, fast_dev_run=True)
    trainer = Trainer(callbacks=[tuner], logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    trainer.validate(module, DataLoader(samples(32), batch_size=16), verbose=False)
    assert tuner.trials == []
    assert tuner.state_dict() == {}
    assert module.batch_size == 8


class WithoutName(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=16)


class OfUnknownSize:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1]])


@pytest.mark.parametrize(
    ("make", "loaders", "message"),
    [
        (
            without_size,
            None,
            r"no attribute and no hyperparameter 'batch_size' on Net \(nor its hparams\), and no DataLoader handed",
        ),
        (WithoutName, None, "set batch_size=2, and `train_dataloader` still made a DataLoader with batch_size=16"),
        (Plateau, [[1, 2]], "can't change the batch size of what was handed to `fit`, a list"),
        (
            Plateau,
            DataLoader(samples(), batch_sampler=OfUnknownSize()),  # type: ignore[arg-type]
            "handed to `fit`, a DataLoader with a OfUnknownSize: hand a DataLoader with a batch_size",
        ),
        (
            Plateau,
            {"a": DataLoader(samples(), batch_size=4), "b": DataLoader(samples(), batch_size=8)},
            r"can't choose between the batch sizes \[4, 8\]",
        ),
    ],
    ids=["no size", "ignored", "no loader", "batch sampler", "two sizes"],
)
def test_what_it_can_not_do_is_said(
    make: Callable[[], Net], loaders: Any, message: str, meter: SampleMeter, tmp_path: Path
) -> None:
    module = make()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=message):
        run(module, [BatchSizeTuner()], tmp_path, loaders=loaders)


def test_data_too_short_for_one_multiple_is_said(meter: SampleMeter, tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"no multiple of multiple_of=8 .*; the train data has 5 samples"
    ):
        run(Net(count=5), [BatchSizeTuner(multiple_of=8)], tmp_path)


def test_an_unknown_memory_limit_is_said(tmp_path: Path) -> None:
    with (
        use_reader(SampleMeter(limit=None)),
        pytest.raises(MisconfigurationException, match="give memory_limit, in bytes or"),
    ):
        run(Net(), [BatchSizeTuner()], tmp_path)


def test_lazy_parameters_are_refused(meter: SampleMeter, tmp_path: Path) -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(3)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match="parameters that are made on the first batch"):
        run(Lazy(), [BatchSizeTuner()], tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (LearningRateFinder, "LearningRateFinder would run before BatchSizeTuner.*find the size first"),
        (BatchSizeFinder, "both set the batch size: leave one of them out"),
    ],
)
def test_finders_of_lightning_beside_it_are_refused(
    other: type[Callback], message: str, meter: SampleMeter, tmp_path: Path
) -> None:
    """In either order: Lightning moves them to the front."""
    for callbacks in ([BatchSizeTuner(), other()], [other(), BatchSizeTuner()]):
        with pytest.raises(MisconfigurationException, match=message):
            run(Net(), callbacks, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "power"}, 'mode=\'power\': accepted are "search" and "grow"'),
        ({"headroom": 1.0}, "headroom=1.0: give the share of memory to leave free, at least 0 and below 1"),
        ({"headroom": "10%"}, "headroom='10%'"),
        ({"batch_arg_name": "my size"}, "batch_arg_name='my size': give the name of an attribute"),
        ({"init_val": 0}, "init_val=0: give a whole number of at least 1"),
        ({"min_val": 2.5}, "min_val=2.5: give a whole number"),
        ({"max_trials": True}, "max_trials=True: give a whole number"),
        ({"multiple_of": -8}, "multiple_of=-8: give a whole number"),
        ({"min_val": 9, "max_val": 15, "multiple_of": 8}, "no multiple of multiple_of=8 lies between min_val=9 and"),
        ({"init_val": 4, "min_val": 8}, "init_val=4: give a size from min_val=8 to max_val=None"),
        (
            {"min_val": 9, "global_batch_size": 16, "max_val": 15},
            "that divides 16 lies between min_val=9 and max_val=15",
        ),
        ({"memory_limit": "600"}, "memory_limit='600' is 600 bytes: give at least a KiB"),
        ({"memory_limit": "40 GB"}, "memory_limit='40 GB' is not a size"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BatchSizeTuner(**arguments)


def test_sixteen_bit_precision_keeps_its_scale(meter: SampleMeter, tmp_path: Path) -> None:
    """The scaler's first scale overflows: the trial goes on until a step is taken, and the scale is put back."""
    from lightning.pytorch.plugins import MixedPrecision

    results = []
    for size, callbacks in ((8, [BatchSizeTuner()]), (40, [])):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
        torch.manual_seed(5)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        _, left = run(Plateau(size), callbacks, tmp_path / str(size), plugins=[precision])
        results.append(left | {"scale": scaler.state_dict()})
    assert_same(*results)


def test_a_step_that_the_gradient_scaler_never_takes_is_given_up(meter: SampleMeter, tmp_path: Path) -> None:
    """Gradients that are finite at no scale: so many batches for the first step, as many for the one measured."""
    from lightning.pytorch.plugins import MixedPrecision

    class Broken(ByRate):
        def loss(self, batch: Sequence[Tensor]) -> Tensor:
            return super().loss(batch) * math.nan

    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    tuner = BatchSizeTuner(init_val=4, max_val=4)
    run(Broken(), [tuner], tmp_path, plugins=[precision], limit_train_batches=3, max_epochs=1)
    assert meter.sizes == [4] * (2 * MOST_BATCHES + 3)


class Resident(SampleMeter, HostReader):
    """A host's resident size: of the same step it is larger each time, by `creeps`."""

    def __init__(self, creeps: float) -> None:
        SampleMeter.__init__(self)
        self.creeps, self.steps = creeps, 0

    def __del__(self) -> None:
        """Nothing of the kernel's is open."""

    def see(self, size: int) -> None:
        super().see(size)
        self.steps += 1

    def reset_peak(self) -> None:
        super().reset_peak()
        self.steps = 0

    def peak(self) -> int:
        return int(super().peak() * self.creeps ** max(self.steps - 1, 0))


@pytest.mark.parametrize(("creeps", "steps"), [(1.0, 1), (1.02, 4)])
def test_a_resident_size_is_followed_while_it_grows_and_not_for_ever(creeps: float, steps: int, tmp_path: Path) -> None:
    """Where it decides: one step more shows that it rests; four that each take two hundredths more are enough."""
    tuner = BatchSizeTuner(init_val=25, max_val=25, memory_limit="2000MiB")
    with metered(Resident(creeps)) as meter:
        run(Plateau(), [tuner], tmp_path, limit_train_batches=3, max_epochs=1)
    assert meter.sizes == [25] * (2 + steps + 3)  # a first step, the measured one, those that follow, and training
    assert [trial.peak for trial in tuner.trials] == [pytest.approx(1500 * MIB * creeps**steps, rel=1e-3)]


@pytest.mark.slow
def test_the_settled_size_really_fits_by_the_allocators_own_bytes(tmp_path: Path) -> None:
    """A GPT with a twentieth of headroom: the target is the peak of 96 samples, and nearly as many are found."""
    from modules import Language

    class Rows(Language):
        def _loader(self) -> DataLoader[Any]:
            return DataLoader([{"input_ids": torch.arange(9)} for _ in range(2000)], batch_size=self.batch_size)  # type: ignore[arg-type]

        train_dataloader = val_dataloader = _loader

    def fit(size: int, callbacks: list[Callback]) -> int:
        module = Rows()
        module.batch_size = size
        trainer = Trainer(
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            callbacks=callbacks,
            accelerator="cpu",
            devices=1,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with AllocatorReader() as reader, use_reader(reader):
            trainer.fit(module)
            return reader.peak()

    target = fit(96, [])
    tuner = BatchSizeTuner(headroom=0.05, memory_limit=math.ceil(target / 0.95))
    fit(4, [tuner])
    assert tuner.batch_size is not None
    assert len(tuner.trials) <= 6
    assert 0.95 * 96 <= tuner.batch_size <= 96
    assert fit(tuner.batch_size, []) <= target


SCRIPT = """
    import resource, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from lightning.pytorch import LightningModule, Trainer
    from lightning_ckpt import BatchSizeTuner
    from lightning_ckpt.memory import HostReader, release_unused

    torch.set_num_threads(1)

    class Wide(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 1))
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    options = dict(max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu", devices=1,
                   enable_progress_bar=False, enable_model_summary=False)
    loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=2)
    module = Wide()
    Trainer(**options).fit(module, loader)
    release_unused("cpu")
    before = HostReader().current()
    virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = virtual + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The reader's limit is the machine's memory, and knows nothing of the address space: memory does run out.
    tuner = BatchSizeTuner(init_val=2048, max_trials=12)
    trainer = Trainer(callbacks=[tuner], **options)
    trainer.fit(module, loader)
    release_unused("cpu")
    print("outcomes", [(t.size, t.outcome) for t in tuner.trials])
    print("result", tuner.batch_size, trainer.global_step, HostReader().current() / before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address-space limits are Linux's")
def test_a_real_out_of_memory_error_is_recovered_from(tmp_path: Path) -> None:
    """A gibibyte of address space: the first size fails in PyTorch's allocator, a smaller one is found and trained."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcomes, result = (line for line in done.stdout.splitlines() if line.startswith(("outcomes", "result")))
    assert "(2048, 'out of memory')" in outcomes
    _, size, steps, resident = result.split()
    assert 100 <= int(size) < 2048
    assert steps == "2"
    assert float(resident) <= 1.05


HOST = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from lightning.pytorch import LightningModule, Trainer
    from lightning_ckpt import BatchSizeTuner
    from lightning_ckpt.memory import HostReader, release_unused
    from zoo import GPT

    torch.set_num_threads(1)

    class Text(LightningModule):
        def __init__(self):
            super().__init__()
            self.gpt = GPT(depth=4, width=64)
        def training_step(self, batch, batch_idx):
            logits = self.gpt(batch[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    options = dict(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1,
                   enable_progress_bar=False, enable_model_summary=False)
    loader = DataLoader(torch.randint(0, 50, (20000, 9)), batch_size=2)
    Trainer(max_steps=1, **options).fit(Text(), loader)
    release_unused("cpu")
    limit = int((HostReader().current() + (300 << 20)) / 0.9)
    tuner = BatchSizeTuner(memory_limit=limit)
    trainer = Trainer(max_steps=3, callbacks=[tuner], **options)
    reader = HostReader()

    class Text(Text):
        def on_train_start(self):
            release_unused("cpu")
            reader.reset_peak()

    trainer.fit(Text(), loader)
    print("trials", [(t.size, t.peak >> 20, t.outcome) for t in tuner.trials])
    print("result", tuner.batch_size, len(tuner.trials), reader.peak() / (0.9 * limit))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the host's peak can't be reset here")
def test_a_real_search_on_the_host_leaves_its_headroom(tmp_path: Path) -> None:
    """A GPT by the kernel's own figures: training at the settled size peaks at or below the target, and near it."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HOST))
    paths = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trials, result = (line for line in done.stdout.splitlines() if line.startswith(("trials", "result")))
    _, _, tried, share = result.split()
    assert 0.85 <= float(share) <= 1.0, trials
    assert int(tried) <= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_search_on_a_gpu_leaves_its_headroom(tmp_path: Path) -> None:
    """The peak of training at the settled size is within the target, no trial ran out of memory, nothing is held."""

    class Wide(Plateau):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(6, 1 << 14), nn.ReLU(), nn.Linear(1 << 14, 1 << 10), nn.Linear(1 << 10, 1)
            )

    class Peak(Callback):
        def on_train_start(self, *args: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

        def on_train_end(self, *args: Any) -> None:
            peaks.append(torch.cuda.max_memory_allocated())

    peaks: list[int] = []
    tuner = BatchSizeTuner(memory_limit="1GiB")
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=3,
        callbacks=[tuner, Peak()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(Wide(), DataLoader(samples(100_000), batch_size=8))
    assert not any(trial.outcome == "out of memory" for trial in tuner.trials)
    assert 0.85 * 0.9 * 2**30 <= peaks[0] <= 0.9 * 2**30
