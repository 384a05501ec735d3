"""Which blocks may share a replay where there are several ranks."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ckpt import Full, checkpoint_blocks, collectives
from lightning_ckpt.collectives import Speakers
from zoo import mlp


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As this room sees it; the compiler must not."""
    two = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(collectives, "dist", two)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_block_with_a_compiled_part_is_a_segment_of_its_own() -> None:
    """A part that allows no graph break runs; the others join as ever."""
    torch.compiler.reset()
    model = mlp(depth=4)
    whole = list(model.children())[1]
    next(part for part in whole.children() if list(part.parameters())).compile(backend="eager", fullgraph=True)
    handle = checkpoint_blocks(model, Full(segment_size=2))
    for _ in range(2):
        model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert handle.blocks[1:2] in handle.report().segments
    assert max(len(segment) for segment in handle.report().segments) == 2
    torch.compiler.reset()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, the other of which is none: collectives return at once."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("placement", "why"),
    [(Shard(0), "it speaks to other ranks, which may join other blocks"), (Replicate(), None)],
    ids=["gathers", "has all it needs"],
)
def test_sharded_tensors_are_heard_through(mesh: DeviceMesh, placement: Placement, why: str | None) -> None:
    """An operator on them gathers what is elsewhere, and is silent where each shard is computed alone."""
    speakers, block = Speakers(), nn.Identity()
    x, weight = (distribute_tensor(torch.randn(4, 4), mesh, [where]) for where in (Shard(0), placement))
    with speakers.listening_to("block", block):
        assert isinstance(x @ weight, DTensor)
    assert speakers.why_alone("block", block) == why


def test_a_block_is_heard_again_in_another_mode() -> None:
    """A synchronised norm speaks in training mode alone."""
    speakers, block = Speakers(), nn.BatchNorm1d(4).eval()
    assert speakers.why_alone("block", block) == ""
    with speakers.listening_to("block", block):
        block(torch.randn(2, 4))
    assert speakers.why_alone("block", block) is None
    assert speakers.why_alone("block", block.train()) == ""
