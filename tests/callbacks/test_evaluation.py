"""Validation among the trials: what it bounds, which loaders follow the size, and that nothing of it remains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_ckpt import BatchSizeTuner
from lightning_ckpt.memory import AllocatorReader, use_reader
from lightning_ckpt.search import NothingFits
from recording import Meter, Rowed

MIB = 2**20
pytestmark = pytest.mark.usefixtures("quick_collection")


def rows(count: int = 256) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(1)))


class Net(LightningModule):
    """A training step takes a MiB a sample, a validation step two; loaders are made by the hooks, at the same size."""

    def __init__(self, meter: Meter, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size, self.meter = batch_size, meter
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.mean, self.seen = MeanMetric(), []  # type: ignore[var-annotated]
        self.epochs = 0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.meter.use(len(batch[0]) * MIB)
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        assert not self.net.training
        assert not torch.is_grad_enabled()
        VALIDATED.append(len(batch[0]))
        self.meter.use(2 * len(batch[0]) * MIB)
        self.seen.append(len(batch[0]))
        self.mean.update(self.net(batch[0]).mean())
        self.log("val_loss", self.net(batch[0]).square().mean())
        self.log("val_mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        ENDED.append(getattr(self, "batch_size", 0))
        self.epochs += not self.trainer.sanity_checking
        self.seen.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size)


VALIDATED: list[int] = []
ENDED: list[int] = []
"""Sizes of all validation batches, and those at the ends of validation; no attributes, which would be put back."""


@pytest.fixture
def meter() -> Any:
    VALIDATED.clear()
    ENDED.clear()
    with use_reader(Meter(limit=100 * MIB)) as reader:
        yield reader


def fit(module: LightningModule, tuner: BatchSizeTuner | None, *loaders: Any, **options: Any) -> Trainer:
    seed_everything(3, verbose=False)
    options = {"max_epochs": 1, "log_every_n_steps": 1, "logger": False, **options}
    datamodule = options.pop("datamodule", None)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[tuner] if tuner else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, *loaders, datamodule=datamodule)
    return trainer


@pytest.mark.parametrize(("evaluation", "settled"), [(True, 45), (False, 90)])
def test_the_higher_peak_counts(evaluation: bool, settled: int, meter: Meter) -> None:
    """Of 90 MiB a validation batch of two MiB a sample leaves 45 samples; unasked, it is not tried."""
    tuner, module = BatchSizeTuner(evaluation=evaluation), Net(meter)
    fit(module, tuner)
    assert tuner.batch_size == module.batch_size == settled
    tried = VALIDATED[: len(tuner.trials)]
    assert (tried == [trial.size for trial in tuner.trials]) == evaluation
    assert set(ENDED) == {settled}


def test_training_is_what_it_would_have_been(meter: Meter) -> None:
    """Weights, logged rows, metrics, counters, modes, random numbers: as with the size set by hand."""
    left = []
    for size, tuner in ((8, BatchSizeTuner(evaluation=True)), (45, None)):
        torch.manual_seed(5)
        module, logger = Net(meter, size), Rowed()
        trainer = fit(module, tuner, logger=logger, max_epochs=2)
        calls = [call for call in logger.calls if "batch_size/per_device" not in call[1]]
        modes = [part.training for part in module.modules()]
        state = {name: value.tolist() for name, value in module.state_dict().items()}
        limits = (trainer.limit_val_batches, trainer.num_sanity_val_steps, trainer.global_step)
        left.append(
            (calls, modes, state, repr(module.mean.metric_state), module.epochs, limits, torch.get_rng_state().tolist())
        )
    assert left[0] == left[1]
    assert left[0][4] == 2


def test_parts_in_eval_mode_stay_there(meter: Meter) -> None:
    """A frozen BatchNorm is as it was after the trials, and the rest trains."""

    class Frozen(Net):
        def on_fit_start(self) -> None:
            self.modes = [part.training for part in self.net]

    module = Frozen(meter)
    module.net[1].eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        fit(module, BatchSizeTuner(evaluation=True))
    assert module.modes == [True, False, True, True]


class Noisy(Dataset[Any]):
    """Validation data with random numbers of their own, which a module keeps."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return (torch.full((4,), float(self.rng.random())),)


@pytest.mark.parametrize("handed", [False, True])
def test_reading_for_trials_leaves_the_datas_own_random_numbers(handed: bool, meter: Meter) -> None:
    """Whether a hook makes the loaders or `fit` is given them."""

    class Kept(Net):
        def __init__(self, meter: Meter, size: int) -> None:
            super().__init__(meter, size)
            self.data = Noisy()

        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=self.batch_size)

    states = []
    for size, tuner in ((8, BatchSizeTuner(evaluation=True)), (45, None)):
        module = Kept(meter, size)
        loaders = (module.train_dataloader(), module.val_dataloader()) if handed else ()
        fit(module, tuner, *loaders)
        states.append(module.data.rng.bit_generator.state)
    assert states[0] == states[1]


class Failing(Net):
    """Runs out of memory above 16 samples in validation, above 64 in training, whatever its meter reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super().validation_step(batch, batch_idx)


def test_running_out_of_memory_in_validation_bounds_the_size(meter: Meter, tmp_path: Path) -> None:
    """Found, at most 16; the limit of validation batches holds, modes are as before, nothing is left on disk."""
    tuner, module = BatchSizeTuner(evaluation=True, memory_limit="1GiB"), Failing(meter)
    trainer = fit(module, tuner, limit_val_batches=3, default_root_dir=tmp_path, num_sanity_val_steps=0)
    assert 14 <= (tuner.batch_size or 0) <= 16
    assert "out of memory" in [trial.outcome for trial in tuner.trials]
    assert len([size for size in VALIDATED if size == tuner.batch_size]) <= 3 + 1
    assert trainer.limit_val_batches == 3
    assert all(part.training for part in module.modules())
    assert trainer.state.stage is None or not trainer.sanity_checking
    assert list(tmp_path.rglob("*")) == []


def test_validation_has_no_say_in_the_size_unasked(meter: Meter) -> None:
    """A validation loader of its own size, in memory for 64 samples of training."""

    class Apart(Failing):
        val_batch_size = 16

        def val_dataloader(self) -> Any:
            return DataLoader(rows(), batch_size=self.val_batch_size)

    tuner = BatchSizeTuner(memory_limit="1GiB")
    fit(Apart(meter), tuner)
    assert 55 <= (tuner.batch_size or 0) <= 64
    assert set(VALIDATED) == {16}


def test_two_sizes_stay_two(meter: Meter) -> None:
    """A validation loader that does not use the attribute is tried, and stays, at its own size."""

    class Two(Net):
        def __init__(self, meter: Meter) -> None:
            super().__init__(meter)
            self.train_batch_size, self.val_batch_size = 8, 32
            del self.batch_size

        def train_dataloader(self) -> Any:
            return DataLoader(rows(), batch_size=self.train_batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(rows(), batch_size=self.val_batch_size)

    module, tuner = Two(meter), BatchSizeTuner(evaluation=True, batch_arg_name="train_batch_size")
    fit(module, tuner)
    assert module.val_batch_size == 32
    assert 0.95 * 90 <= module.train_batch_size <= 90
    assert {trial.peak for trial in tuner.trials[:2]} == {64 * MIB}
    assert set(VALIDATED) == {32}


def test_no_size_is_blamed_for_validation_that_does_not_fit(meter: Meter) -> None:
    """The error names what ran out."""

    class Fixed(Net):
        def val_dataloader(self) -> Any:
            return DataLoader(rows(), batch_size=64)

    module = Fixed(meter)
    module.net[1] = nn.Identity()  # BatchNorm asks for two samples
    with pytest.raises(NothingFits, match="batch size of 1 fits: its validation batch has a measured peak of 128 MiB"):
        fit(module, BatchSizeTuner(evaluation=True))


def test_a_loader_that_drops_its_last_batch_is_left_one(meter: Meter) -> None:
    """Thirty samples of validation in batches of 45 would be none."""
    handed = DataLoader(rows(30), batch_size=10, drop_last=True)
    trainer = fit(Net(meter), BatchSizeTuner(evaluation=True), DataLoader(rows(), batch_size=8), handed)
    used: Any = trainer.val_dataloaders
    assert (used.batch_size, len(used)) == (30, 1)


@pytest.mark.parametrize(("evaluation", "expected"), [(True, 45), (False, 16)])
def test_loaders_handed_to_fit_get_the_size(evaluation: bool, expected: int, meter: Meter) -> None:
    """With everything else about them; without being asked, they are the user's own."""
    handed = DataLoader(rows(64), batch_size=16, drop_last=True)
    trainer = fit(Net(meter), BatchSizeTuner(evaluation=evaluation), DataLoader(rows(), batch_size=8), handed)
    used: Any = trainer.val_dataloaders
    assert (used.batch_size, used.drop_last, used.dataset is handed.dataset) == (expected, True, True)
    assert handed.batch_size == 16


def test_every_validation_loader_is_tried(meter: Meter) -> None:
    """Each with its index, one batch of each for a trial, and no batch larger than its data."""
    calls: list[tuple[int, int]] = []

    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            calls.append((dataloader_idx, len(batch[0])))
            super().validation_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return [DataLoader(rows(), batch_size=self.batch_size), DataLoader(rows(3), batch_size=self.batch_size)]

    tuner = BatchSizeTuner(evaluation=True)
    fit(Several(meter), tuner)
    tried = [(0, trial.size) for trial in tuner.trials], [(1, min(trial.size, 3)) for trial in tuner.trials]
    assert calls[: 2 * len(tuner.trials)] == [call for pair in zip(*tried, strict=True) for call in pair]


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return CombinedLoader({"a": DataLoader(rows(), batch_size=self.batch_size)}, "min_size")


class Nested(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch["a"], batch_idx)


def test_a_datamodules_loaders_in_a_combination(meter: Meter) -> None:
    """The size lives in the datamodule, whose hook combines its loaders by itself."""
    data, tuner = Data(), BatchSizeTuner(evaluation=True)
    fit(Nested(meter), tuner, datamodule=data)
    assert data.batch_size == tuner.batch_size == 45


class Hookless(LightningModule):
    """What `Net` has, but no loader for validation."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.batch_size, self.meter, self.layer = 8, meter, nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.meter.use(len(batch[0]) * MIB)
        return self.layer(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size)


class WithStep(Hookless):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        VALIDATED.append(len(batch[0]))


class Empty(WithStep):
    def val_dataloader(self) -> Any:
        return []


@pytest.mark.parametrize("make", [Hookless, WithStep, Empty])
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero:UserWarning")
def test_where_there_is_nothing_to_validate_training_alone_is_tried(make: Any, meter: Meter) -> None:
    """No step for it, a step without a loader, a hook that returns no loader."""
    tuner = BatchSizeTuner(evaluation=True)
    fit(make(meter), tuner)
    assert tuner.batch_size == 90
    assert VALIDATED == []


def test_validation_that_is_off_is_not_tried(meter: Meter) -> None:
    """With `limit_val_batches=0` no validation batch will come."""
    tuner = BatchSizeTuner(evaluation=True)
    fit(Net(meter), tuner, limit_val_batches=0)
    assert tuner.batch_size == 90
    assert VALIDATED == []


def test_reloading_goes_on_as_set(meter: Meter) -> None:
    """Loaders made anew each epoch are made once for a trial."""
    asked: list[int] = []

    class Asked(Net):
        def val_dataloader(self) -> Any:
            asked.append(self.batch_size)
            return super().val_dataloader()

    tuner = BatchSizeTuner(evaluation=True)
    fit(Asked(meter), tuner, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert asked == [*(trial.size for trial in tuner.trials), 45, 45]


def test_real_validation_stays_within_the_target(meter: Meter) -> None:
    """By the allocator's own bytes, of validation that takes many times what training does."""

    class Wide(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            (self.net(batch[0]) * torch.ones(1, 1 << 14)).softmax(-1).sum()

    def peak(size: int, tuner: BatchSizeTuner | None) -> int:
        with AllocatorReader() as reader, use_reader(reader):
            fit(Wide(meter, size), tuner)
            return reader.peak()

    target = peak(100, None)
    tuner = BatchSizeTuner(evaluation=True, headroom=0.5, memory_limit=2 * target)
    peak(8, tuner)
    assert 95 <= (tuner.batch_size or 0) <= 100
    assert peak(tuner.batch_size or 0, None) <= target
