"""What blocks let go, against the memory of plain and checkpointed passes; what replays take, against their clocks."""

import time
from collections.abc import Callable
from itertools import count, pairwise

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks, replay_meter
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Policy
from lightning_ckpt.recompute import CheckpointedBlocks, checkpointed_forwards
from lightning_ckpt.replay_meter import ReplayMeter
from lightning_ckpt.treatments import Treatment
from zoo import GPT, ResNet


def metered(handle: CheckpointedBlocks, model: nn.Module, mark: Callable[[], float] = time.perf_counter) -> ReplayMeter:
    meter = ReplayMeter(mark)
    for forward in checkpointed_forwards(model):
        forward.how.meter = meter
    return meter


def kept(model: nn.Module, batch: Tensor, meter: ReplayMeter | None = None) -> int:
    """Bytes there are between forward and backward, beyond those there were before: exact."""
    with AllocatorReader() as reader:
        output = model(batch)
        nbytes = reader.current()
        if meter:
            meter.forward_over()
        output.sum().backward()
    return nbytes


def chain(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(*[layer() for layer in layers]) for _ in range(12)])


def square() -> nn.Module:
    return nn.Linear(32, 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: GPT(depth=6), lambda: torch.randint(0, 50, (32, 16))),
    "resnet": (ResNet, lambda: torch.randn(128, 1, 8, 8)),
    "outputs that are saved": (lambda: chain(square, nn.ReLU, square, nn.ReLU), lambda: torch.randn(2048, 32)),
    "inputs that plain does not keep": (
        lambda: chain(lambda: nn.Dropout(0.1), square, nn.GELU),
        lambda: torch.randn(2048, 32),
    ),
}


@pytest.mark.parametrize(
    "policy", ["full", "selective", SelectiveOps("attention"), Full(every=2), Full(segment_size=3)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_the_savings_are_those_of_a_real_pair(name: str, policy: str | Policy) -> None:
    """Within 3 % of the difference in memory between a plain and a checkpointed pass: counted first, then remembered.

    A policy may keep what the plain pass does not (an output's product for the sum behind it), which saves less than
    nothing; that is no zero either.
    """
    model, batch = MODELS[name][0](), MODELS[name][1]()
    plain = kept(model, batch)
    handle = checkpoint_blocks(model, policy)
    kept(model, batch)  # buffers are learned
    meter = metered(handle, model)
    for _ in range(2):
        difference = plain - kept(model, batch, meter)
        assert meter.take().saved == pytest.approx(difference, rel=0.03)


def test_blocks_that_are_kept_save_nothing() -> None:
    """Of twelve equal blocks six are kept: half of what all of them save."""
    model, batch = chain(square, nn.Tanh, square), torch.randn(8, 32)
    with checkpoint_blocks(model) as handle:
        meter = metered(handle, model)
        model(batch).sum().backward()
        whole = meter.take().saved
        assert whole
        handle.treat({str(block): Treatment("everything") for block in range(0, 12, 2)})
        model(batch).sum().backward()
        half = meter.take()
        assert half.saved == whole / 2
        assert len(half.spans) == 6


def test_a_known_call_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are looked at in the first pass and for inputs of another shape, and in no other."""
    looks = []
    found = replay_meter._memory
    monkeypatch.setattr(replay_meter, "_memory", lambda tensor: looks.append(1) or found(tensor))
    model = chain(square, nn.Tanh)
    with checkpoint_blocks(model) as handle:
        meter = metered(handle, model)
        seen, saved = [], []
        for size in (8, 8, 4, 8):
            model(torch.randn(size, 32)).sum().backward()
            saved.append(meter.take().saved)
            seen.append(len(looks))
    assert 0 < seen[0] == seen[1] < seen[2] == seen[3]
    assert saved[0] == saved[1] == saved[3] == 2 * saved[2]


def test_lengths_without_end_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many calls are known they are counted anew, to the same bytes."""
    monkeypatch.setattr(replay_meter, "_MOST", 12 * 3)
    model, saved = chain(square, nn.Tanh), {}
    with checkpoint_blocks(model) as handle:
        meter = metered(handle, model)
        for size in (1, 2, 3, 4, 5, 6, 1):
            model(torch.randn(size, 32)).sum().backward()
            saved[size] = meter.take().saved
            assert len(meter._known) <= 12 * 4
    assert saved == {size: size * saved[1] for size in range(1, 7)}


class Graph(nn.Module):
    """Message passing along a sparse matrix, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.layer(x).tanh())


def test_a_sparse_matrix_is_not_counted() -> None:
    """It has no memory of one piece, and its owner holds it: what counts is what lies inside the block."""
    block, adjacency = Graph(), torch.eye(64).to_sparse()
    with checkpoint_blocks(nn.ModuleList([block]), blocks=Graph) as handle:
        meter = metered(handle, block)
        block(torch.randn(64, 32), adjacency).sum().backward()
    assert meter.take().saved == 64 * 32 * 4


def test_a_sharded_tensor_counts_by_the_shard_that_is_here() -> None:
    """One of two has half of the rows, and half the bytes."""
    batch, saved = torch.randn(8, 32), []
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for sharded in (False, True):
            model = chain(square, nn.Tanh)
            if sharded:
                distribute_module(model, mesh)
                batch = distribute_tensor(batch, mesh, [Shard(0)])
            with checkpoint_blocks(model) as handle:
                meter = metered(handle, model)
                model(batch).sum().backward()
                saved.append(meter.take().saved)
    finally:
        distributed.destroy_process_group()
    assert saved == [8 * 32 * 4, 4 * 32 * 4]


def test_what_never_goes_backward_is_forgotten() -> None:
    """A pass without a backward says nothing, and adds nothing to the next."""
    model, batch = chain(square, nn.Tanh), torch.randn(8, 32)
    with checkpoint_blocks(model) as handle:
        meter = metered(handle, model)
        model(batch)
        assert meter.take().saved is None
        model(batch).sum().backward()
        once = meter.take().saved
        model(batch)
        model(batch).sum().backward()
        assert once
        assert meter.take().saved == 2 * once  # of two passes that wait for one backward, both were let go
        model(batch).sum().backward()
        assert meter.take().saved == once


def test_micro_batches_count_for_the_largest() -> None:
    """Two passes with a backward each never wait at the same time."""
    model = chain(square, nn.Tanh)
    with checkpoint_blocks(model) as handle:
        meter = metered(handle, model)
        for size in (8, 4):
            model(torch.randn(size, 32)).sum().backward()
        both = meter.take().saved
        model(torch.randn(8, 32)).sum().backward()
        assert both == meter.take().saved


def test_each_replay_is_marked_once() -> None:
    """One span a block, none inside another, in a model with checkpointed blocks inside of checkpointed ones."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(3)]
    )
    ticks = count()
    with checkpoint_blocks(model, blocks="?") as outer, checkpoint_blocks(model, blocks="?.1") as inner:
        meter = metered(outer, model, lambda: float(next(ticks)))
        assert len(outer.blocks) == len(inner.blocks) == 3
        model(torch.randn(4, 8)).sum().backward()
        spans = meter.take().spans
    assert len(spans) == 6
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_call_that_fails_is_not_counted() -> None:
    """Whoever catches a block's error goes on without its bytes."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (x * x).exp()
            raise ValueError

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fails())
    with checkpoint_blocks(model, blocks=["0", "2"]) as handle:
        meter = metered(handle, model)
        x = model[1](model[0](torch.randn(2, 4)))
        with pytest.raises(ValueError):  # noqa: PT011 - the module's own
            model[2](x)
        x.sum().backward()
        assert meter.take().saved == 0  # a linear layer keeps its input and no more


def test_without_a_meter_nothing_is_marked() -> None:
    """Calls made while nobody monitors are replayed without a mark, also when somebody has begun to since."""
    model = chain(square, nn.Tanh)
    with checkpoint_blocks(model) as handle:
        loss = model(torch.randn(8, 32)).sum()
        meter = metered(handle, model)
        for forward in checkpointed_forwards(model):
            forward.how.meter = None
        loss.backward()
        taken = meter.take()
    assert (taken.saved, taken.spans) == (None, ())


class Waits(nn.Module):
    """Takes ten milliseconds, whatever else the cores do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return self.linear(x).exp()


def test_replays_take_what_checkpointing_adds() -> None:
    """Twelve equal blocks: the time of replays is within 10 % of the difference between the two steps, by the shortest.

    The blocks wait rather than compute: a plain step that computes loses time to cold caches and fresh pages that a
    checkpointed one saves, which is no part of its replays.
    """
    plain, ours = (nn.Sequential(*[Waits() for _ in range(12)]) for _ in range(2))
    meter = metered(checkpoint_blocks(ours), ours)

    def seconds(model: nn.Module) -> float:
        begun = time.perf_counter()
        model(torch.randn(4, 8)).sum().backward()
        return time.perf_counter() - begun

    without, checkpointed, replays = [], [], []
    for round_ in range(40):  # until the shortest of each is one that nothing else on the machine has held up
        without.append(seconds(plain))
        checkpointed.append(seconds(ours))
        replays.append(sum(end - begin for begin, end in meter.take().spans))
        if round_ >= 4 and min(replays) == pytest.approx(min(checkpointed) - min(without), rel=0.1):
            return
    pytest.fail(f"{min(replays)} s of replays, {min(checkpointed) - min(without)} s between the steps")
