"""A checkpointed run beside its plain twin: everything that training can see, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import Full, checkpoint_blocks, is_recomputing
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.policies import Policy

Step = Callable[[nn.Module, Any], Tensor]
POLICIES: dict[str, str | Policy] = {"full": "full", "selective": "selective", "segments": Full(segment_size=2)}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def trace(model: nn.Module, batches: list[Any], step: Step, *, steps: int = 3) -> list[dict[str, Tensor]]:
    """Train with plain SGD and record, after each step, the loss, gradients, buffers and the random state."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen = []
    for batch in batches[:steps]:
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        record = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
        record |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        record |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
        seen.append(record)
        optimizer.step()
    return seen


def assert_equal(ours: list[dict[str, Tensor]], plain: list[dict[str, Tensor]]) -> None:
    """Every recorded value equal bit for bit, and the same values recorded."""
    for index, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine.keys() == theirs.keys()
        different = [key for key in mine if not torch.equal(mine[key], theirs[key])]
        assert not different, f"step {index}: {different} differ from the plain run"


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights, in training mode."""
    torch.manual_seed(0)
    model = build()
    return model.train(), copy.deepcopy(model).train()


def trains_as_plain(
    build: Callable[[], nn.Module],
    data: list[Any],
    step: Step,
    policy: str | Policy = "full",
    *,
    blocks: Blocks | None = None,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> tuple[nn.Module, nn.Module]:
    """Hold three steps of a checkpointed model to those of its plain twin; gives back both.

    `prepare` is called with each of them once the one is checkpointed.
    """
    ours, plain = twins(build)
    handle = checkpoint_blocks(ours, policy, blocks=blocks)
    prepare(ours)
    prepare(plain)
    assert_equal(trace(ours, data, step), trace(plain, data, step))
    assert handle.report().segments, "no call was checkpointed: the equality shows nothing"
    return ours, plain


class Replays:
    """Counts the calls of a block's parts, and those of them that are replays.

    Hooks on the block itself run once a step, outside of the replayed forward, so only its parts can tell.
    """

    def __init__(self, block: nn.Module) -> None:
        self.calls = self.replays = 0
        for part in block.modules():
            if part is not block:
                part.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        self.replays += is_recomputing()
