"""A memory budget under `torch.compile`: the compiler chooses what to replay, and is told how much it may keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_ckpt._compat import is_compiled, set_activation_memory_budget
from lightning_ckpt.estimation import PLAIN, estimate_memory
from lightning_ckpt.fake_copy import CannotEstimate
from lightning_ckpt.sizes import format_size
from lightning_ckpt.training_step import LossFn


def all_compiled(model: nn.Module, blocks: Sequence[str]) -> bool:
    """Whether each of these blocks is compiled, in part or as part of something that is."""
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    return bool(blocks) and all(any(_related(block, name) for name in compiled) for block in blocks)


def _related(one: str, other: str) -> bool:
    """Whether one module lies in the other, or is it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or not other


@dataclass(frozen=True)
class CompiledBudget:
    """PyTorch's `activation_memory_budget`, from 0, only inputs are kept, to 1, nothing is replayed for memory's sake.

    Attributes:
        share: what it is set to.
        why: how that came about, in words.
    """

    share: float
    why: str

    def apply(self) -> Callable[[], None]:
        """Set it for what is compiled from here on, and return what puts back the value that was there."""
        return set_activation_memory_budget(self.share)


def compiled_budget(
    module: nn.Module, batch: Any, budget: int, *, precision: str = "32-true", loss_fn: LossFn | None = None
) -> CompiledBudget:
    """The share of its activations that a compiled model may keep, so that a step stays within a budget.

    What a plain step would keep is estimated on fake tensors, uncompiled: the share is what the budget leaves beside
    parameters, gradients, optimizer state and temporaries, over the activations.

    Args:
        module: a `LightningModule`, or any module with a `loss_fn`.
        batch: what the step takes.
        budget: bytes.
        precision: as a Trainer's.
        loss_fn: `loss_fn(module, batch)`, a scalar.
    """
    try:
        with torch.compiler.set_stance("force_eager"):
            step = estimate_memory(module, batch, loss_fn, policy=PLAIN, precision=precision)[PLAIN]
    except (CannotEstimate, ValueError, RuntimeError) as error:
        return CompiledBudget(0.5, f"half, since a step can't be estimated: {error}")
    rest = step.peak - step.activations
    share = min(1.0, max(0.0, (budget - rest) / max(1, step.activations)))
    why = (
        f"{format_size(budget)} less {format_size(rest)} of parameters, gradients, optimizer state and temporaries, "
        f"over {format_size(step.activations)} of activations, as estimated"
    )
    return CompiledBudget(share, why)
