"""A Fabric loop: blocks checkpointed before or after `fabric.setup` train as the plain loop does."""

import copy
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from equality import Replays
from lightning_ckpt import checkpoint_blocks
from zoo import GPT, ZOO


def loop(model: nn.Module, when: str, precision: Any, policy: str = "full", compiled: str = "no") -> list[Tensor]:
    """Three steps of a loop as Fabric's users write it; returns losses, gradients and weights.

    Args:
        model: a GPT.
        when: blocks are checkpointed `"before"` or `"after"` Fabric's setup, or not at all, `"never"`.
        precision: of Fabric.
        policy: of the checkpointing.
        compiled: `"whole"` compiles the model before it is set up.
    """
    torch.manual_seed(1)
    batches = [ZOO["gpt"].batch() for _ in range(3)]
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    if when == "before":
        assert checkpoint_blocks(model, policy).blocks == ("blocks.0", "blocks.1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = torch.compile(model, backend="aot_eager") if compiled == "whole" else model
    given, optimizer = fabric.setup(given, optimizer)
    if when == "after":
        assert len(checkpoint_blocks(given, policy, blocks="*.blocks.*").blocks) == 2
    left = []
    for batch in batches:
        optimizer.zero_grad()
        loss = ZOO["gpt"].loss(given, batch)
        fabric.backward(loss)
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*left, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.supports(
    strategy="single device",
    precision=["32-true", "bf16-mixed", "bf16-true"],
    policy=["full", "selective"],
    compile="no",
)
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_loop_of_fabrics_trains_as_the_plain_one(precision: str, when: str, policy: str) -> None:
    """Losses, gradients and weights bit for bit, dropout and autocast among it."""
    torch.manual_seed(0)
    ours = GPT(depth=2)
    plain = copy.deepcopy(ours)
    counted = Replays(ours.blocks[1])
    left, expected = loop(ours, when, precision, policy), loop(plain, "never", precision)
    assert all(torch.equal(a, b) for a, b in zip(left, expected, strict=True))
    assert counted.replays


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at every tensor
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_is_set_up_by_fabric(when: str) -> None:
    """Fabric takes the compiler's wrapper off and puts it on again; without dropout, since masks differ."""
    torch.manual_seed(0)
    ours = GPT(depth=2, dropout=0.0)
    plain = copy.deepcopy(ours)
    left = loop(ours, when, "32-true", compiled="whole")
    expected = loop(plain, "never", "32-true", compiled="whole")
    for mine, own in zip(left, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-6)
