"""The peak of a real training step on a CPU, and the estimate that it is held against."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from lightning_ckpt import Full, checkpoint_blocks, estimate_memory
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Policy
from zoo import Specimen

POLICIES: tuple[str | Policy, ...] = ("none", "full", Full(every=2), Full(segment_size="sqrt"), "selective")
ADAMW = torch.optim.AdamW
# What a block's call keeps of the host's random numbers, which is no tensor of the model's.
RANDOM_STATE = torch.get_rng_state().nbytes


def enlarged(specimen: Specimen, times: int) -> Specimen:
    return replace(specimen, batch=lambda: specimen.batch().repeat(times, *[1] * (specimen.batch().dim() - 1)))


def real_peak(
    specimen: Specimen,
    policy: str | Policy,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = ADAMW,
    *,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
) -> int:
    """The allocator's peak in the third step, all included that the run has allocated."""
    torch.manual_seed(0)
    with AllocatorReader() as reader:
        model, batch = specimen.build().train(), specimen.batch()
        update = optimizer(model.parameters()) if optimizer else None
        checkpointed = nullcontext()
        if policy != "none":
            checkpointed = checkpoint_blocks(model, policy, blocks=specimen.blocks)
        with checkpointed:
            for number in range(3):
                if number == 2:
                    reader.reset_peak()
                for _ in range(accumulate):
                    with torch.autocast("cpu", autocast) if autocast else nullcontext():
                        loss = specimen.loss(model, batch)
                    loss.backward()
                    del loss
                if update:
                    update.step()
                model.zero_grad()
            return reader.peak()


def estimated(specimen: Specimen, policy: Any, optimizer: Any = ADAMW, **how: Any) -> Any:
    torch.manual_seed(0)
    return estimate_memory(
        specimen.build(),
        specimen.batch(),
        specimen.loss,
        policy=policy,
        optimizer=optimizer,
        blocks=specimen.blocks,
        **how,
    )
