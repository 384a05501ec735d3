"""The phases of a step, and what a first step tells of a second."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt.callbacks._batch_size import BatchSize
from lightning_ckpt.callbacks._phases import Held, Phases
from lightning_ckpt.callbacks._trials import Trials
from lightning_ckpt.memory import AllocatorReader, HostReader, use_reader
from lightning_ckpt.search import Phase


class Net(LightningModule):
    """Weights that matter beside the activations."""

    def __init__(self, accumulate: int = 1, manual: bool = False) -> None:
        super().__init__()
        self.batch_size, self.accumulate = 4, accumulate
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.net(batch).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(64, 64), batch_size=self.batch_size)  # type: ignore[arg-type]

    def on_fit_start(self) -> None:
        place = BatchSize(self.trainer, self, "batch_size")
        with Trials(self.trainer, place) as trials:
            trials.prepare(4)
            hint = trials.warm_up(4)[0]  # and let its batch go, which would count
            measured = [trials.run(size)[0] for size in (4, 8)]
        self.hint, self.measured, self.floor = hint, measured, trials.floor


def tried(module: Net, tmp_path: Path) -> Net:
    with AllocatorReader() as reader, use_reader(reader):
        trainer = Trainer(
            max_steps=1,
            accumulate_grad_batches=module.accumulate,
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module)
    return module


@pytest.mark.parametrize(("accumulate", "count"), [(1, 3), (2, 4)])
def test_a_first_step_tells_the_peaks_of_a_second(accumulate: int, count: int, tmp_path: Path) -> None:
    """To the byte, in every phase, though it had neither gradients of before nor optimizer state."""
    torch.manual_seed(0)
    module = tried(Net(accumulate), tmp_path)
    assert module.hint is not None
    assert module.hint == module.measured[0]
    assert len(module.hint.phases) == count
    assert module.hint.peak == max(phase.peak for phase in module.hint.phases)


def test_the_forward_pass_stands_on_gradients_too(tmp_path: Path) -> None:
    """Gradients of the step before are let go after the forward pass, so that only its floor has them."""
    module = tried(Net(), tmp_path)
    forward, backward, update = module.measured[1].phases
    assert forward.floor == module.floor + sum(parameter.nbytes for parameter in module.parameters())
    assert backward.floor == update.floor == module.floor
    assert all(phase.peak >= phase.floor for phase in module.measured[1].phases)


def test_of_manual_optimization_a_first_step_tells_nothing(tmp_path: Path) -> None:
    """Nobody knows where it lets gradients go; its phases are told apart all the same."""
    module = tried(Net(manual=True), tmp_path)
    assert module.hint is None
    assert [phase.floor for phase in module.measured[1].phases] == [module.floor] * 3


class Tape:
    """A reader whose peaks are written down before."""

    def __init__(self, *peaks: int) -> None:
        self.left = list(peaks)

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.left.pop(0)

    def limit(self) -> int:
        return 100


def step(phases: Phases, *ends: str) -> None:
    def run() -> None:
        for end in ends:
            {"backward": phases.on_before_backward, "optimizer": phases.on_before_optimizer_step}[end]()

    phases.around(run)()


def test_of_several_steps_the_highest_peak_of_each_phase_counts() -> None:
    phases = Phases(Tape(0, 5, 9, 4, 0, 7, 8, 6))
    for _ in range(2):
        step(phases, "backward", "optimizer")
    assert phases.peaks(floor=1, gradients=2) == (Phase(7, 3), Phase(9, 1), Phase(6, 1))
    phases.forget()
    assert phases.peaks(floor=1, gradients=2) == ()


def test_steps_of_different_phases_are_told_as_wholes() -> None:
    phases = Phases(Tape(0, 5, 9, 4, 0, 7, 8))
    step(phases, "backward", "optimizer")
    step(phases, "backward")
    assert phases.peaks(floor=0, gradients=0) == ()


@pytest.mark.parametrize("ends", [("backward",), ("backward", "optimizer", "backward", "optimizer"), ()], ids=str)
def test_a_step_that_is_not_forward_backward_and_optimizer_tells_nothing_of_a_second(ends: tuple[str, ...]) -> None:
    phases = Phases(Tape(*range(20)))
    step(phases, *ends)
    nothing = Held(0, 0)
    assert phases.as_if_later(2, before=nothing, after=nothing, floor=0) is None


def test_a_resident_size_tells_no_phases() -> None:
    phases = Phases(HostReader())
    step(phases, "backward", "optimizer")
    assert phases.peaks(floor=0, gradients=0) == ()
