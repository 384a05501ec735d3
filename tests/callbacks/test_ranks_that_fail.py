"""One of two ranks fails in the middle of a run: the other ends too, and says which has failed."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, MemoryBudget, StepMonitor, budget_loop
from lightning_ckpt.callbacks import _probe
from lightning_ckpt.memory import AllocatorReader, use_reader
from lightning_ckpt.profiling import Profiler
from modules import Language, trainer
from recording import Rowed
from two_ranks import on_two_ranks

pytestmark = pytest.mark.slow


class Fails(Callback):
    """Raises when a batch has ended, after backward, when no rank waits for any other in a collective of PyTorch's."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        raise ValueError("this rank fails")


class Hangs(Fails):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        time.sleep(20)


class Breaks(nn.Module):
    """A block whose replay fails."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this rank fails")


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("this rank fails")


def _run(rank: int, where: str, failing: int, folder: Path) -> None:
    torch.manual_seed(0)
    module, callbacks, logger, seconds = Language(), [], None, 60
    if where in ("profiling", "planning", "forward", "hangs"):
        callbacks = [ActivationCheckpointing(MemoryBudget(2**30), monitor=False)]
    if where == "monitor":
        callbacks, logger = [StepMonitor()], Rowed()
    if where == "tuner":
        callbacks = [BatchSizeTuner()]
    if where == "hangs":
        seconds = 6
    if rank == failing:
        if where == "profiling":
            Profiler.profile = _raise  # type: ignore[method-assign]
        if where == "planning":
            budget_loop.PeakModel.observe = _raise  # type: ignore[method-assign]
        if where == "tuner":
            _probe.Probing.look = _raise  # type: ignore[method-assign]
        if where == "forward":
            module.gpt.blocks[1].mlp.append(Breaks())
        if where in ("monitor", "hangs"):
            callbacks.insert(0, Fails() if where == "monitor" else Hangs())
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=seconds))
    said, started = "", time.monotonic()
    try:
        with AllocatorReader(limit=2**40) as reader, use_reader(reader):
            trainer(callbacks, devices=2, strategy=strategy, max_epochs=4, logger=logger or False).fit(module)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    torch.save((said, time.monotonic() - started), folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("where", "failing", "who"),
    [
        ("profiling", 1, "ActivationCheckpointing"),
        ("planning", 0, "ActivationCheckpointing"),
        ("tuner", 1, "BatchSizeTuner"),
        ("monitor", 1, "StepMonitor"),
    ],
)
def test_the_other_rank_hears_which_has_failed_and_why(where: str, failing: int, who: str, tmp_path: Path) -> None:
    """While blocks are measured, between two plans, before the trials, beside the monitor's rows."""
    on_two_ranks(_run, where, failing, tmp_path)
    (said, waited), (raised, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (1 - failing, failing))
    assert raised == "ValueError: this rank fails"
    assert said == (
        f"RuntimeError: {who}: rank {failing} failed with ValueError: this rank fails. Rank {1 - failing} waits for it "
        "no longer; what that process printed says more"
    )
    assert waited < 60


def test_a_rank_that_hangs_is_named_when_the_strategys_timeout_has_passed(tmp_path: Path) -> None:
    """`DDPStrategy(timeout=...)` holds for our waits too."""
    on_two_ranks(_run, "hangs", 1, tmp_path)
    said, waited = torch.load(tmp_path / "0.pt")
    assert said.startswith("RuntimeError: ActivationCheckpointing: rank 0 waited in vain for rank 1 (")
    assert waited < 60


def test_a_failure_in_a_step_ends_the_other_rank_with_it(tmp_path: Path) -> None:
    """There the ranks wait in DDP's own reduction, which ends with the process that has failed."""
    on_two_ranks(_run, "forward", 1, tmp_path)
    (first, waited), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert second == "ValueError: this rank fails"
    assert first.startswith("RuntimeError")
    assert waited < 60
