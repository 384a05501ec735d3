"""Two processes: checkpointed and plain training give every rank the same gradients."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_ckpt import Full, checkpoint_blocks
from two_ranks import on_two_ranks
from zoo import GPT, ZOO, ResNet

pytestmark = pytest.mark.slow

Wrap = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_unused(model: nn.Module) -> nn.Module:
    model.unused = nn.Linear(2, 2)
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def sharded_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model, reshard_after_forward=True)


def sharded_in_bfloat16(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def gradients(model: nn.Module, kind: str, rank: int) -> list[Tensor]:
    """Those of two steps, whole, with different data on each rank."""
    torch.manual_seed(rank)
    data = [ZOO[kind].batch() for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for batch in data:
        optimizer.zero_grad()
        ZOO[kind].loss(model, batch).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
        optimizer.step()
    return [*seen, *[b.clone().float() for b in model.buffers()], torch.get_rng_state()]


def train(rank: int, wrap: Wrap, kind: str, policy: str, before: bool, out: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    plain: Any = {"gpt": lambda: GPT(depth=2), "resnet": ResNet}[kind]()
    ours = copy.deepcopy(plain)
    if before:
        checkpoint_blocks(ours, policy)
    wrapped = wrap(ours)
    if not before:
        checkpoint_blocks(ours, policy)
    results = [gradients(wrapped, kind, rank), gradients(wrap(plain), kind, rank)]
    torch.save(results, out / f"{rank}.pt")
    dist.destroy_process_group()


IN_BFLOAT16 = "FSDP2 mixed precision policy"


def shows(strategy: str, policy: str, precision: str = "32-true") -> pytest.MarkDecorator:
    return pytest.mark.supports(strategy=strategy, precision=precision, policy=policy, compile="no")


@pytest.mark.parametrize("before", [True, False], ids=["applied before", "applied after"])
@pytest.mark.parametrize(
    ("wrap", "kind", "policy"),
    [
        pytest.param(ddp, "resnet", "full", marks=shows("DDP", "full")),
        pytest.param(ddp_unused, "gpt", "selective", marks=shows("DDP", "selective")),
        pytest.param(sharded, "gpt", "full", marks=shows("FSDP2", "full")),
        pytest.param(sharded_whole, "gpt", "full", marks=shows("FSDP2", "full")),
        pytest.param(sharded_in_bfloat16, "gpt", "selective", marks=shows("FSDP2", "selective", IN_BFLOAT16)),
    ],
)
def test_two_ranks_get_the_gradients_of_plain_training(
    wrap: Wrap, kind: str, policy: str, before: bool, tmp_path: Path
) -> None:
    """DDP and FSDP2, checkpointing applied before and after the wrapping: bit for bit, and the same on both ranks."""
    on_two_ranks(train, wrap, kind, policy, before, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for ours, plain in ranks:
        assert len(ours) == len(plain) > 10
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    in_sync = len([t for t in ranks[0][0] if t.requires_grad or t.dtype.is_floating_point]) // 2
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0][:in_sync], ranks[1][0][:in_sync], strict=True))


class _Summed(torch.autograd.Function):
    """Summed over ranks, as a synchronised norm does it, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Speaking(nn.Module):
    """A block that speaks to the other ranks, before a layer whose input backward needs."""

    def __init__(self, speaks: bool) -> None:
        super().__init__()
        self.first, self.second, self.speaks = nn.Linear(8, 8), nn.Linear(8, 8), speaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.second(_Summed.apply(x) if self.speaks else x).tanh()


class Branching(nn.Module):
    """Clamps between blocks where values are large, as models in half precision do: on one rank alone."""

    def __init__(self, speaks: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Speaking(letter == "s") for letter in speaks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if dist.get_rank() == 1:
                x = x.clamp(-0.5, 0.5)
            x = block(x)
        return x


def join(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for speaks in ("ssss", "sqsq", "qsqs", "qqqq"):
        torch.manual_seed(0)
        plain = Branching(speaks)
        ours = copy.deepcopy(plain)
        handle = checkpoint_blocks(ours, Full(segment_size=4))
        wrapped = [DistributedDataParallel(model) for model in (ours, plain)]
        torch.manual_seed(rank)
        for x in torch.randn(3, 4, 8):
            grads = []
            for model in wrapped:
                model.zero_grad()
                model(x).square().sum().backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            assert all(map(torch.equal, *grads)), speaks
        torch.save(handle.report().segments, out / f"{speaks} {rank}.pt")
    dist.destroy_process_group()


def test_blocks_that_speak_to_other_ranks_share_no_replay(tmp_path: Path) -> None:
    """Where ranks would join other blocks, their replays would speak in other orders: wrong gradients, or a hang."""
    on_two_ranks(join, tmp_path)
    segments = {file.stem: torch.load(file) for file in tmp_path.glob("*.pt")}
    one = [("blocks.0",), ("blocks.1",), ("blocks.2",), ("blocks.3",)]
    assert [*map(tuple, segments["ssss 0"])] == one
    assert [*map(tuple, segments["qsqs 0"])] == one
    assert [*map(tuple, segments["qqqq 0"])] == [("blocks.0", "blocks.1", "blocks.2", "blocks.3")]
    assert [*map(tuple, segments["qqqq 1"])] == one
