"""What would help a training step that ran out of memory, by estimates on fake tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ckpt.estimation import PLAIN, Estimate, StepMemory, estimate_memory
from lightning_ckpt.policies import MemoryBudget, Policy

# What has to stay free for a change to count as one that fits: estimates know no workspaces and no fragments.
_MARGIN = 0.05
_MOST = 3


@dataclass(frozen=True)
class Change:
    """One thing to change, and what a step would then take.

    Attributes:
        words: what to change, as a user writes it.
        peak: bytes of the step with it, as estimated.
        saves: bytes less than the step that failed.
        fits: whether it would fit.
    """

    words: str
    peak: int
    saves: int
    fits: bool


@dataclass(frozen=True)
class Relief:
    """What a step takes, and the changes most likely to make it fit, the first of them first.

    Attributes:
        step: the step that failed, as estimated.
        changes: three at most: those that fit, the least costly first, then those that save most.
    """

    step: StepMemory
    changes: tuple[Change, ...]


def relief(
    module: nn.Module,
    batch: Any,
    *,
    policy: Policy | None,
    blocks: Sequence[str] | None,
    precision: str,
    accumulate: int,
    limit: int | None,
) -> Relief:
    """Estimate the step that failed and what might be done about it.

    Args:
        module: a `LightningModule`.
        batch: what the step took.
        policy: how its blocks were checkpointed; `None` for not at all.
        blocks: which blocks; `None` for those that repeat.
        precision: the trainer's.
        accumulate: batches an optimizer step.
        limit: bytes that the process can hold; `None` when nobody knows.

    Raises:
        ValueError, CannotEstimate: as `estimate_memory`.
    """

    def estimate(policies: Sequence[str | Policy], precision: str = precision) -> Estimate:
        return estimate_memory(
            module, batch, policy=policies, blocks=blocks, precision=precision, accumulate=accumulate
        )

    # A budget's plan replays no more than all, so what the step took was at least that.
    now: str | Policy = PLAIN if policy is None else "full" if isinstance(policy, MemoryBudget) else policy
    more = ("selective", "full") if policy is None else () if _is_full(now) else ("full",)
    estimated = estimate([now, *more])
    step = estimated.steps[0]
    room = min(limit or step.peak, step.peak - 1)
    candidates = [
        *_of_policies(estimated, more),
        *_of_precision(estimate, now, precision),
        *_of_batch(estimated, room, accumulate),
    ]
    judged = [Change(words, peak, step.peak - peak, _fits(peak, room)) for words, peak in candidates]
    helping = [change for change in judged if change.saves > 0]
    ordered = sorted(helping, key=lambda change: (not change.fits, 0 if change.fits else -change.saves))
    return Relief(step, tuple(ordered[:_MOST]))


def _is_full(policy: str | Policy) -> bool:
    return str(policy) in ("full", "Full()")


def _of_policies(estimated: Estimate, policies: Sequence[str]) -> Iterator[tuple[str, int]]:
    """To replay more: training stays what it is, and takes longer. `policies` begins with the cheapest."""
    for step, policy in zip(estimated.steps[1:], policies, strict=True):
        yield f'ActivationCheckpointing("{policy}")', step.peak


def _of_precision(estimate: Callable[..., Estimate], now: str | Policy, precision: str) -> Iterator[tuple[str, int]]:
    """Half the bytes for most activations; faster too, where the device has units for it, and not the same training."""
    if precision == "32-true":
        yield 'Trainer(precision="bf16-mixed")', estimate([now], precision="bf16-mixed").steps[0].peak


def _of_batch(estimated: Estimate, room: int, accumulate: int) -> Iterator[tuple[str, int]]:
    """A smaller batch, as checkpointed as now and as checkpointed as can be; more of them keep a step's samples."""
    size = estimated.steps[0].batch_size or 1
    halves = [half for half in (size // 2, size // 4, size // 8) if half]
    found = [estimated.at(half).steps for half in halves]
    for index in dict.fromkeys((0, len(estimated.steps) - 1)):
        fitting = (place for place, steps in enumerate(found) if _fits(steps[index].peak, room))
        if (place := next(fitting, len(found) - 1)) >= 0:
            also = f' and ActivationCheckpointing("{estimated.steps[index].policy}")' if index else ""
            yield _words_of_batch(halves[place], size, accumulate) + also, found[place][index].peak


def _words_of_batch(fitting: int, size: int, accumulate: int) -> str:
    times = accumulate * -(-size // fitting)
    return f"a batch of {fitting} instead of {size}, with accumulate_grad_batches={times}"


def _fits(peak: int, room: int) -> bool:
    return peak <= (1 - _MARGIN) * room
