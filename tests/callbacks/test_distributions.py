"""Lightning's other distribution: the same callbacks under a Trainer of `pytorch_lightning`."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner
from lightning_ckpt.callbacks._distributions import is_a, of
from modules import differences, fit
from sample_meter import SampleMeter, metered, seen
from zoo import GPT

other: Any = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
EITHER = [lightning.pytorch, other]
each = pytest.mark.parametrize("distribution", EITHER, ids=["lightning", "pytorch_lightning"])


def language(distribution: Any) -> Any:
    """A small GPT with dropout as a module of either distribution."""

    class Module(distribution.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.batch_size = GPT(depth=3, width=16), 4

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen(len(batch))
            loss = nn.functional.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.gpt(batch).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> DataLoader:
            rows = torch.randint(0, 50, (64, 9), generator=torch.Generator().manual_seed(0))
            return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    torch.manual_seed(0)
    return Module()


def left_by(distribution: Any, callbacks: list[Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train with a Trainer of either distribution; returns the module and all that training leaves."""
    module = language(distribution)
    options = {"limit_train_batches": 6, "limit_val_batches": 1} | options
    return module, fit(module, callbacks, kind=distribution.Trainer, **options)


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_checkpointing_and_monitor_leave_the_same_training(policy: str, tmp_path: Path) -> None:
    """With a plan too; every row of the monitor is in the other's logger, as it would be in Lightning's."""
    logger = other.loggers.CSVLogger(tmp_path)
    _, left = left_by(other, [ActivationCheckpointing(policy)], logger=logger, enable_progress_bar=True)
    _, expected = left_by(lightning.pytorch, [])
    assert not differences(left, expected)
    text = Path(logger.log_dir, "metrics.csv").read_text()
    assert "throughput/step_time_ms" in text.splitlines()[0]
    assert "activation_checkpointing" in Path(logger.log_dir, "hparams.yaml").read_text()


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("mode", ["search", "grow"])
def test_the_tuner_finds_the_same_size(mode: str) -> None:
    """Trials take the other's own loops, steps, validation and progress bar."""
    found = []
    for distribution in EITHER:
        with metered(SampleMeter()):
            tuner = BatchSizeTuner(mode, max_val=64)
            module, left = left_by(
                distribution,
                [ActivationCheckpointing(monitor=False), tuner],
                limit_train_batches=None,
                max_epochs=2,
                enable_progress_bar=True,
            )
        found.append((module.batch_size, left))
    assert 32 < found[0][0] == found[1][0] <= 40
    assert not differences(found[0][1], found[1][1])


def test_loaders_combined_by_the_other_are_seen() -> None:
    """A `CombinedLoader` handed to `fit` keeps its class and its mode."""
    module = language(other)
    loaders = other.utilities.CombinedLoader(
        {"a": module.train_dataloader(), "b": module.train_dataloader()}, "min_size"
    )
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx)
    with metered(SampleMeter()):
        fit(module, [BatchSizeTuner(max_val=8)], kind=other.Trainer, loaders=loaders, limit_val_batches=0)
    assert module.batch_size == 8


def test_its_callbacks_are_refused_as_lightnings() -> None:
    """A learning-rate finder beside the tuner, whose error is Lightning's own kind."""
    callbacks = [BatchSizeTuner(memory_limit="1GiB"), other.callbacks.LearningRateFinder()]
    with pytest.raises(MisconfigurationException, match="LearningRateFinder would run before BatchSizeTuner"):
        left_by(other, callbacks)


def test_kinds_are_told_across_distributions() -> None:
    """A class of `lightning` stands for its twin, and for nothing else; what a trainer is given is its own."""
    assert is_a(other.loggers.WandbLogger(offline=True), WandbLogger)
    assert is_a(WandbLogger(offline=True), WandbLogger)
    assert not is_a(other.loggers.CSVLogger("."), WandbLogger)
    assert is_a(other.utilities.CombinedLoader([]), CombinedLoader, CSVLogger)

    class Own(other.Trainer):  # type: ignore[misc]
        pass

    running = Own(barebones=True, accelerator="cpu")
    assert of(running, CSVLogger) is other.loggers.CSVLogger
    assert of(lightning.pytorch.Trainer(barebones=True, accelerator="cpu"), CSVLogger) is CSVLogger


def test_a_kind_that_the_other_does_not_have_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, which may have moved its class, or not have it yet."""
    monkeypatch.delattr("pytorch_lightning.loggers.wandb.WandbLogger")
    assert is_a(WandbLogger(offline=True), WandbLogger)
    assert not is_a(other.loggers.CSVLogger("."), WandbLogger)


@pytest.mark.slow
def test_a_module_of_the_other_is_measured_and_examined() -> None:
    """The command line trains it with a Trainer of its own distribution."""
    from lightning_ckpt.cli._measured import measure_target
    from lightning_ckpt.cli._measurement import Request
    from lightning_ckpt.cli._target import Target

    target = Target("test", language(other))
    measured = measure_target(target, Request(target="test", policy="full", steps=2, seed=0))
    assert measured.blocks == 3


@pytest.mark.slow
def test_where_the_other_is_loaded_first_the_callbacks_are_its_own(tmp_path: Path) -> None:
    """They are subclasses of its `Callback`, so its command line takes them; errors are caught as its own."""
    config = """
        trainer:
          accelerator: cpu
          fast_dev_run: 2
          enable_progress_bar: false
          callbacks:
            - class_path: lightning_ckpt.ActivationCheckpointing
              init_args: {policy: full}
            - class_path: lightning_ckpt.StepMonitor
    """
    (tmp_path / "config.yaml").write_text(textwrap.dedent(config))
    program = """
        import warnings

        import pytorch_lightning
        from pytorch_lightning.cli import LightningCLI
        from pytorch_lightning.demos.boring_classes import BoringModel
        from pytorch_lightning.utilities.exceptions import MisconfigurationException
        from torch import nn

        from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, StepMonitor

        class Module(BoringModel):
            def __init__(self):
                super().__init__()
                blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in "abc"]
                self.layer = nn.Sequential(*blocks, nn.Linear(32, 2))

        for kind in (ActivationCheckpointing, BatchSizeTuner, StepMonitor):
            assert issubclass(kind, pytorch_lightning.Callback), kind
        try:
            pytorch_lightning.Trainer(callbacks=[BatchSizeTuner(memory_limit="1GiB")], accelerator="cpu").fit(Module())
        except MisconfigurationException as error:
            print("caught", error)
        warnings.simplefilter("ignore")
        LightningCLI(Module, args=["fit", "--config", "config.yaml"], save_config_callback=None)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "caught BatchSizeTuner" in run.stdout
    assert "3 of 3 blocks" in run.stdout
