"""What a checkpointed model keeps in memory, and how often its blocks run: exact bytes and exact counts."""

import collections
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from equality import Replays
from lightning_ckpt import Full, checkpoint_blocks
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Policy
from zoo import mlp

WIDTH, ROWS, DEPTH = 32, 256, 8
ACTIVATION = WIDTH * ROWS * 4  # bytes of one layer's result


class Net(nn.Module):
    """A trunk of eight blocks that keep four activations each, and a head."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*[_block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def _block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def step_bytes(policy: str | Policy | None, blocks: Blocks | None = None, classes: int = 4) -> tuple[int, int]:
    """Bytes that live after the forward pass, and the peak of forward and backward, of the second of two steps."""
    torch.manual_seed(0)
    model, x = Net(classes), torch.randn(ROWS, WIDTH)
    if policy is not None:
        checkpoint_blocks(model, policy, blocks=blocks)
    model(x).sum().backward()  # gradients exist from here on
    with AllocatorReader() as reader:
        out = model(x)
        kept = reader.current()
        out.sum().backward()
        del out
        return kept, reader.peak()


# --- which blocks to choose ---


def test_each_block_keeps_its_input_alone() -> None:
    """Plain, four activations a block live after forward; checkpointed, one, and one random state for all blocks."""
    plain, checkpointed = step_bytes(None)[0], step_bytes("full")[0]
    result = ROWS * 4 * 4
    assert plain == DEPTH * 4 * ACTIVATION + result
    assert checkpointed == DEPTH * ACTIVATION + torch.get_rng_state().nbytes + result


def test_one_region_round_everything_lowers_no_peak() -> None:
    """It keeps least after forward, and in backward all comes back at once; blocks lower the peak to less than half."""
    (kept_plain, peak_plain), (kept_whole, peak_whole) = step_bytes(None), step_bytes("full", "trunk")
    kept_blocks, peak_blocks = step_bytes("full")
    assert kept_whole < kept_blocks < kept_plain
    assert peak_whole > 0.95 * peak_plain
    assert peak_blocks < 0.5 * peak_plain


def test_the_table_says_that_one_block_for_everything_lowers_no_peak() -> None:
    """A user who names the whole net reads it there; with a head beside it, or with blocks, there is no such line."""
    texts = []
    for model, blocks in ((nn.Sequential(Net()), "0"), (Net(), "trunk"), (Net(), None)):
        console = Console(width=200, file=io.StringIO())
        console.print(checkpoint_blocks(model, blocks=blocks).report())
        texts.append("lowers no peak" in " ".join(console.file.getvalue().split()))
    assert texts == [True, False, False]


def test_stages_of_unlike_build_are_found_and_lower_the_peak() -> None:
    """A convolutional net without a repeated block: its stages are the blocks, and they keep a fraction of plain."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, padding=1)
            self.stage1 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Tanh())
            self.stage2 = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
            self.stage3 = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
            self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 10))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.stage3(self.stage2(self.stage1(self.stem(x).relu()))))

    kept = []
    for model in (Net(), Net()):
        if kept:
            assert checkpoint_blocks(model).blocks == ("stage1", "stage2", "stage3", "classifier")
        with AllocatorReader() as reader:
            out = model(torch.ones(8, 1, 32, 32))
            kept.append(reader.current())
        out.sum().backward()
    assert kept[1] < 0.7 * kept[0]


def test_regions_of_single_layers_keep_more_than_blocks() -> None:
    """Every layer's input is kept then, which is all there was; the blocks found by default keep a quarter of it."""
    leaves = step_bytes("full", lambda name, module: not list(module.children()))[0]
    assert leaves >= step_bytes(None)[0]
    assert step_bytes("full")[0] < leaves / 3


def test_leaving_the_last_block_out_costs_the_peak_little() -> None:
    """Its replay comes at once, when all other inputs still live; leaving it out saves the time and 5 % are lost."""
    every, all_but_last = step_bytes("full")[1], step_bytes(Full(select="first-7"))[1]
    assert all_but_last <= 1.05 * every
    assert step_bytes(Full(select="first-4"))[1] > 1.2 * every  # more blocks left out do cost it


@pytest.mark.parametrize("policy", [Full(every=2), Full(select=4)], ids=["every", "spread"])
def test_part_of_the_blocks_takes_part_of_the_way(policy: Full) -> None:
    """Half of the blocks: memory between all and none, and as many more forward runs as blocks."""
    kept = [step_bytes(either)[0] for either in ("full", policy, None)]
    assert kept == sorted(set(kept))
    model = Net()
    handle = checkpoint_blocks(model, policy)
    assert handle.blocks == tuple(f"trunk.{i}" for i in (0, 2, 4, 6))
    counts = [Replays(block) for block in model.trunk]
    model(torch.randn(4, WIDTH)).sum().backward()
    assert [count.calls for count in counts] == [10, 5] * 4
    assert [count.replays for count in counts] == [5, 0] * 4


def test_a_large_head_outside_of_every_block_stays() -> None:
    """Where the logits dominate, checkpointing the blocks lowers the peak by what the blocks kept and no more."""
    small = [step_bytes(policy)[1] for policy in (None, "full")]
    large = [step_bytes(policy, classes=2000)[1] for policy in (None, "full")]
    assert small[1] / small[0] < 0.5
    assert large[1] / large[0] > 0.5
    assert large[1] >= 2 * ROWS * 2000 * 4  # the logits and their gradient


# --- what stays alive ---


def test_a_dictionary_that_receives_the_result_makes_no_cycle() -> None:
    """`graph["y"] = block(graph)`, as graph libraries write it: everything is freed without a collection."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, graph: dict[str, Tensor]) -> Tensor:
            return self.layer(graph["x"]).tanh()

    model = nn.ModuleList([Block(), Block()])
    checkpoint_blocks(model)
    gc.collect()
    gc.disable()
    try:
        for went_backward in (True, False):
            graph = {"x": torch.randn(4, WIDTH, requires_grad=True)}
            for block in model:
                graph["x"] = block(graph)
            watched = weakref.ref(graph["x"])
            if went_backward:
                graph["x"].sum().backward()
            del graph
            assert watched() is None
    finally:
        gc.enable()


def test_nothing_is_left_of_a_step() -> None:
    """After forward and backward the allocator holds what it held before, to the byte, five times over."""
    model, x = Net(), torch.randn(ROWS, WIDTH)
    checkpoint_blocks(model)
    model(x).sum().backward()
    gc.disable()
    try:
        with AllocatorReader() as reader:
            for _ in range(5):
                model(x).sum().backward()
                assert reader.current() == 0
    finally:
        gc.enable()


def test_offloading_moves_the_blocks_inputs_and_no_weights() -> None:
    """Hooks on saved tensors round the model see what crosses the blocks' borders, nothing inside them."""
    seen: list[Tensor] = []
    model = mlp(depth=4, width=WIDTH)
    checkpoint_blocks(model)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
        loss = model(x).sum()
    assert [tuple(t.shape) for t in seen] == [(ROWS, WIDTH)] * 4
    weights = {p.data_ptr() for p in model.parameters()}
    assert not weights & {t.data_ptr() for t in seen}
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *model.parameters()]), expected))
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *model.parameters()]), expected))


class _Hoarder(torch.autograd.Function):
    """Keeps its input's copy on the context, where no one who looks at saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.big = x.clone()
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.big.tanh().square())


def test_what_a_custom_function_keeps_by_itself_is_not_freed_and_is_measured() -> None:
    """Gradients are right; its bytes stay until backward, beside the block's input, and the reader counts them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return _Hoarder.apply(self.layer(x)).neg()

    model, x = nn.ModuleList([Block()]), torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(model[0](x).sum(), [x, *model.parameters()])
    checkpoint_blocks(model, preserve_rng_state=False)
    with AllocatorReader() as reader:
        out = model[0](x)
        assert reader.current() == 2 * ACTIVATION  # its copy and the result
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, *model.parameters()]), expected))


# --- how often a block runs ---


def test_naming_parent_and_child_replays_each_block_once() -> None:
    """One level, so two runs of each part a step; nested by hand it would be three."""
    model = Net()
    checkpoint_blocks(model, blocks=["trunk.*", nn.Linear, "*.2"])
    counted = Replays(model.trunk[3])
    model(torch.randn(4, WIDTH)).sum().backward()
    assert (counted.calls, counted.replays) == (10, 5)


def test_the_last_layer_of_a_block_is_not_finished_in_a_replay() -> None:
    """Early stop ends it where the last needed tensor is saved; switched off, side effects at the end come again."""
    finished: collections.Counter[str] = collections.Counter()
    model = mlp(depth=2, width=WIDTH)
    for name, layer in zip(("first", "activation", "last"), model[0], strict=True):
        layer.register_forward_hook(lambda *_, name=name: finished.update([name]))
    checkpoint_blocks(model)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert finished == {"first": 2, "activation": 2, "last": 1}
    finished.clear()
    with set_checkpoint_early_stop(False):
        loss = model(torch.randn(4, WIDTH)).sum()
    loss.backward()
    assert finished == {"first": 2, "activation": 2, "last": 2}


def test_a_frozen_trunk_is_run_once_and_its_head_is_trained() -> None:
    """Nothing to save there: no block of it is replayed, whatever the batch."""
    model = Net()
    model.trunk[:4].requires_grad_(False)
    checkpoint_blocks(model)
    counts = [Replays(block) for block in model.trunk]
    model(torch.randn(4, WIDTH)).sum().backward()
    assert [count.replays > 0 for count in counts] == [False] * 4 + [True] * 4


def test_random_state_is_read_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its price on many tiny blocks is one read each in forward and a read and two writes in the replay; off, none."""
    calls: collections.Counter[str] = collections.Counter()
    get, put = torch.get_rng_state, torch.set_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: calls.update(["read"]) or get())
    monkeypatch.setattr(torch, "set_rng_state", lambda state: calls.update(["write"]) or put(state))
    for preserve, expected in ((True, {"read": 20, "write": 20}), (False, {})):
        model = mlp(depth=10, width=4)
        checkpoint_blocks(model, preserve_rng_state=preserve)
        calls.clear()
        model(torch.randn(2, 4)).sum().backward()
        assert calls == expected
