"""Blocks that break a careless replay: each trains as its plain twin does, or says what is wrong and where."""

import collections
import copy
import io
import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

import equality
from equality import Step, assert_equal, each_policy, trace, twins
from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks, find_blocks, is_recomputing
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.policies import Policy
from zoo import gpt2, llama, lora_llama, mlp

WIDTH = 8
# The first use of forward-mode differentiation compiles PyTorch's own decompositions.
from_torch_itself = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def rows() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, WIDTH) for _ in range(3)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Chain(nn.Module):
    """Two blocks behind a trainable scale, whose gradient is that of the first block's input."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def chain_of(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Builds a chain whose blocks hold two layers `one` and `two`, more `parts`, and run `forward(self, ...)`."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            for name, make in parts.items():
                setattr(self, name, make())

    Block.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs)  # type: ignore[method-assign]
    return partial(Chain, Block)


def chain_of_layers(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return partial(Chain, lambda: nn.Sequential(*[make() for make in layers]))


def trains_as_plain(
    build: Callable[[], nn.Module],
    step: Step = mean_square,
    data: list[Any] | None = None,
    policy: str | Policy = "full",
    blocks: Blocks = "blocks.*",
) -> nn.Module:
    """Hold three steps of a checkpointed model to those of its plain twin; gives back the checkpointed one."""
    return equality.trains_as_plain(build, rows() if data is None else data, step, policy, blocks=blocks)[0]


def patched_by_hand(
    build: Callable[[], nn.Module], blocks: Blocks = "blocks.*", use_reentrant: bool = False
) -> tuple[nn.Module, nn.Module]:
    """Twins, one under the plainest patch there is: `torch.utils.checkpoint` in the place of each forward."""
    by_hand, plain = twins(build)
    for _, block in find_blocks(by_hand, blocks):
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return by_hand, plain


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]


def assert_same(ours: list[Any], plain: list[Any]) -> None:
    assert len(ours) == len(plain)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


# --- changes in place ---


@each_policy
def test_a_view_changed_in_place_passes_the_gradient_on(policy: Any) -> None:
    """InstanceNorm returns a view, ReLU writes into it, and the gradient still reaches what is before the block."""
    data = [x.expand(3, 4, WIDTH) * torch.randn(3, 4, WIDTH) for x in rows()]
    trains_as_plain(
        chain_of_layers(lambda: nn.InstanceNorm1d(4), lambda: nn.ReLU(inplace=True)), data=data, policy=policy
    )


def _sliced(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y[:, 0] = 0.0
    return self.two(y)


def _written(y: Tensor) -> Tensor:
    return torch.mul(y, 2, out=y)


IN_PLACE = {
    "relu_": lambda self, x: self.two(self.one(x).relu_()),
    "add_": lambda self, x: self.two(self.one(x).add_(x)),
    "slice": _sliced,
    "dropout": lambda self, x: self.two(F.dropout(self.one(x), 0.5, inplace=True)),
    "out=": lambda self, x: self.two(_written(self.one(x).detach()) + self.one(x)),
    "parts": lambda self, x: torch.cat([part.tanh_() for part in self.one(x).unsafe_chunk(2, 1)], 1),
}


@each_policy
@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_a_block_computed_it_may_change_in_place(kind: str, policy: Any) -> None:
    """An activation, a residual, a slice or a dropout written into a layer's result, kept by the policy or not."""
    trains_as_plain(chain_of(IN_PLACE[kind]), policy=policy)


@each_policy
def test_the_caller_may_change_a_blocks_result_in_place(policy: Any) -> None:
    """`x = block(x); x += 1` between blocks, which plain autograd allows where the block's last layer kept nothing."""

    def step(model: Any, x: Tensor) -> Tensor:
        x = x * model.scale
        for block in model.blocks:
            x = block(x)
            x += 1
        return x.square().mean()

    trains_as_plain(chain_of(lambda self, x: self.two(self.one(x).tanh())), step, policy=policy)


@each_policy
def test_an_input_that_the_caller_changes_in_place_afterwards_is_an_error(policy: Any) -> None:
    """`x += block(x)` overwrites what the replay starts from: backward raises, it does not go on with other numbers."""

    def step(model: Any, x: Tensor) -> Tensor:
        x = x * model.scale
        for block in model.blocks:
            x += block(x.relu() * 1) + block(x)
        return x.square().mean()

    model = chain_of(lambda self, x: self.two(self.one(x.relu()).tanh()))()
    checkpoint_blocks(model, policy, blocks="blocks.*")
    with pytest.raises(RuntimeError, match=r"An input of block 'blocks\.1' was changed in place after"):
        step(model, rows()[0]).backward()


def test_an_optimizer_that_steps_during_backward_trains_the_same() -> None:
    """Each parameter is updated as soon as its gradient is whole: after the replay of its block, never before."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        def update(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)

        for parameter in model.parameters():
            if not parameter._post_accumulate_grad_hooks:
                parameter.register_post_accumulate_grad_hook(update)
        return model(x).square().mean()

    trains_as_plain(chain_of(lambda self, x: self.two(self.one(x).tanh()) + self.two(x)), step)


# --- autograd inside a block, and around it ---


def _uses_the_slope(self: Any, x: Tensor) -> Tensor:
    z = self.one(x).tanh()
    (slope,) = torch.autograd.grad(z.sum(), self.one.weight, create_graph=True)
    return self.two(z) + slope.sum(0)


def _forces(self: Any, x: Tensor) -> Tensor:
    place = x.detach().requires_grad_()
    energy = self.two(self.one(place).tanh()).square().sum()
    (force,) = torch.autograd.grad(energy, place, create_graph=True)
    return x + force


def _learns_at_once(self: Any, x: Tensor) -> Tensor:
    fast = self.one.weight.detach().clone().requires_grad_()
    F.linear(x.detach(), fast).square().mean().backward()
    return self.two(F.linear(x, self.one.weight - 0.1 * fast.grad)).tanh()


WITH_AUTOGRAD_INSIDE = {"slope": _uses_the_slope, "forces": _forces, "test-time update": _learns_at_once}


@each_policy
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", WITH_AUTOGRAD_INSIDE)
def test_a_block_may_differentiate_inside_its_forward(kind: str, early_stop: bool, policy: Any) -> None:
    """Penalties, energies with forces, and an update at test time: `autograd.grad` and `backward` in forward.

    A replay that does not stop early saves more than the forward had saved by then.
    """
    with set_checkpoint_early_stop(early_stop):
        trains_as_plain(chain_of(WITH_AUTOGRAD_INSIDE[kind]), policy=policy)


class _Cubic(torch.autograd.Function):
    """x * y * y, whose backward asks for its saved tensors twice, one of them neither input nor output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y, x * y)
        return x * y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = ctx.saved_tensors
        _, product = ctx.saved_tensors
        return grad * y * y, 2 * grad * product


def _cubic(self: Any, x: Tensor) -> Tensor:
    return _Cubic.apply(self.one(x), self.two(x)).tanh()


@pytest.mark.parametrize("policy", ["full", Full(segment_size=2)], ids=["full", "segments"])
def test_a_custom_function_may_unpack_what_it_saved_twice(policy: Any) -> None:
    """Plain `torch.utils.checkpoint` refuses that; here the second look is replayed too."""
    by_hand, _ = patched_by_hand(chain_of(_cubic))
    with pytest.raises(CheckpointError, match="already unpacked once"):
        mean_square(by_hand, rows()[0]).backward()
    trains_as_plain(chain_of(_cubic), policy=policy)


class _Doubled(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_custom_function_may_write_into_its_input() -> None:
    """`mark_dirty`, with a nonlinearity behind it that saves the result."""
    trains_as_plain(chain_of(lambda self, x: _Doubled.apply(self.one(x)).tanh()))


@each_policy
def test_a_hook_on_a_tensor_inside_fires_once_and_changes_the_gradient(policy: Any) -> None:
    """Gradient reversal and clipping hang on tensors of the forward; those of the replay go nowhere."""
    fired = []

    def reverse(grad: Tensor) -> Tensor:
        fired.append(grad)
        return -grad

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.one(x)
        y.register_hook(reverse)
        return self.two(y.tanh())

    trains_as_plain(chain_of(forward), policy=policy)
    assert len(fired) == 2 * 3 * 2  # runs, steps, blocks


@each_policy
def test_hooks_of_its_own_on_saved_tensors_stay_a_blocks_own(policy: Any) -> None:
    """A block that offloads or packs what it saves keeps it as it packed it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = self.one(x).tanh()
        return self.two(y).tanh()

    trains_as_plain(chain_of(forward), policy=policy)


@from_torch_itself
@each_policy
def test_forward_mode_differentiation_goes_through(policy: Any) -> None:
    """Primal, tangent and the backward pass on the primal are those of the plain model."""
    results = []
    ours, plain = twins(chain_of(lambda self, x: self.two(self.one(x).tanh())))
    checkpoint_blocks(ours, policy, blocks="blocks.*")
    x, direction, _ = rows()
    for model in (ours, plain):
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction)))
            primal.square().mean().backward()
        results.append([primal, tangent, *gradients(model)])
    assert_same(*results)


@from_torch_itself
@each_policy
def test_transforms_inside_a_block_go_through(policy: Any) -> None:
    """`vmap` over samples, and a Jacobian-vector product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        slope = torch.func.jvp(lambda v: self.two(v).tanh(), (x,), (torch.ones_like(x),))[1]
        return torch.vmap(self.one)(x) + slope

    trains_as_plain(chain_of(forward), policy=policy)


def test_anomaly_detection_can_stay_on() -> None:
    """Its checks of every backward step see nothing wrong."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return mean_square(model, x)

    trains_as_plain(chain_of(lambda self, x: self.two(self.one(x).tanh())), step)


# --- gradients that take another way ---


@each_policy
def test_features_taken_by_a_hook_inside_carry_their_gradient(policy: Any) -> None:
    """A loss on an inner layer's output, taken by a forward hook, one feature for each block and step."""

    def step(model: Any, x: Tensor) -> Tensor:
        taken: list[Tensor] = []

        def take(module: nn.Module, args: Any, output: Tensor) -> None:
            if not is_recomputing():
                taken.append(output)

        for block in model.blocks:
            block.one.register_forward_hook(take)
        counts.append(taken)
        return model(x).square().mean() + sum(feature.sin().mean() for feature in taken)

    counts: list[list[Tensor]] = []
    trains_as_plain(chain_of(lambda self, x: self.two(self.one(x).tanh())), step, [rows()[0]], policy)
    assert [len(taken) for taken in counts] == [2, 2]  # of ours after its backward pass, and of the plain run


def test_hooks_inside_a_block_can_tell_the_replay() -> None:
    """Hooks on children run again in a replay, and `is_recomputing` tells them so; the block's own run once."""
    model, fired = chain_of(lambda self, x: self.two(self.one(x).tanh()))(), collections.Counter()
    block = model.blocks[0]
    block.register_forward_hook(lambda *_: fired.update([("block", is_recomputing())]))
    block.one.register_forward_hook(lambda *_: fired.update([("child", is_recomputing())]))
    checkpoint_blocks(model, blocks="blocks.*")
    mean_square(model, rows()[0]).backward()
    assert fired == {("block", False): 1, ("child", False): 1, ("child", True): 1}


@each_policy
def test_results_left_in_a_list_of_the_model_carry_their_gradient(policy: Any) -> None:
    """An encoder that notes its hidden states in a list of its own, guarded, for a decoder to add up."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        if not is_recomputing():
            self.notes.append(hidden)
        return self.two(hidden)

    def step(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            block.notes.clear()
        return model(x).square().mean() + sum(note.mean() for block in model.blocks for note in block.notes)

    ours = trains_as_plain(chain_of(forward, notes=list), step, policy=policy)
    assert [len(block.notes) for block in ours.blocks] == [1, 1]


@pytest.mark.parametrize("use", ["detached input", "a part without gradients", "one output without a gradient"])
@each_policy
def test_gradients_that_stop_stop_where_they_did(use: str, policy: Any) -> None:
    """Detached inputs, parts under `no_grad`, and outputs that need no gradient."""

    def forward(self: Any, x: Tensor) -> Any:
        x = x.detach() if use == "detached input" else x
        with torch.set_grad_enabled(use != "a part without gradients"):
            y = self.one(x).tanh()
        out = self.two(y) + y
        return (out, y.argmax(-1)) if use == "one output without a gradient" else out

    def step(model: Any, x: Tensor) -> Tensor:
        if use != "one output without a gradient":
            return mean_square(model, x)
        y, best = model.blocks[0](x * model.scale)
        return model.blocks[1](y)[0].gather(1, best[:, None]).square().mean()

    trains_as_plain(chain_of(forward), step, policy=policy)


@each_policy
def test_one_branch_without_gradients_and_one_with(policy: Any) -> None:
    """A reference pass under `no_grad` through the same blocks, as preference tuning makes it, before the backward."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        chosen = model(x)
        with torch.no_grad():
            reference = model(x * 2)
        return (chosen - reference).square().mean()

    trains_as_plain(
        chain_of_layers(lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH)), step, policy=policy
    )


@each_policy
def test_a_block_used_three_times_gets_one_whole_gradient(policy: Any) -> None:
    """Tied weights: a hook on the accumulated gradient fires once a backward pass; reentrant checkpoints fire three."""

    def step(model: Any, x: Tensor) -> Tensor:
        x = x * model.scale
        for _ in range(3):
            x = model.blocks[0](x)
        return model.blocks[1](x).square().mean()

    def count(model: Any) -> int:
        fired = []
        model.blocks[0].one.weight.register_post_accumulate_grad_hook(fired.append)
        step(model, rows()[0]).backward()
        return len(fired)

    build = chain_of(lambda self, x: self.two(self.one(x).tanh()))
    assert count(trains_as_plain(build, step, policy=policy)) == 1
    assert count(patched_by_hand(build, use_reentrant=True)[0]) == 3


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + self.adapter(x)).tanh()


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([_Adapter() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return x


@each_policy
def test_every_adapter_behind_a_frozen_embedding_learns(policy: Any) -> None:
    """No input of the first block requires a gradient, and it is trained all the same; reentrant would not."""
    data = [torch.randint(0, 5, (2, 3)) for _ in range(3)]
    ours = trains_as_plain(_Adapted, data=data, policy=policy)
    assert all(block.adapter.weight.grad.any() for block in ours.blocks)
    by_hand, _ = patched_by_hand(_Adapted, use_reentrant=True)
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        mean_square(by_hand, data[0]).backward()


# --- precision and modes ---


@pytest.mark.supports(strategy="single device", precision="bf16-mixed", policy=["full", "segments"], compile="no")
@pytest.mark.parametrize("policy", ["full", Full(segment_size=2)], ids=["full", "segments"])
def test_a_weight_that_autocast_has_cast_once_serves_several_blocks(policy: Any) -> None:
    """Shared inside and outside of blocks, and used without gradients in between: the cache of casts misleads none."""
    shared = nn.Linear(WIDTH, WIDTH)

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            offset = self.shared(x)
        return self.shared(x).tanh() + self.one(x) + offset

    def step(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(model.blocks[0].shared(x * model.scale))
        return y.float().square().mean()

    trains_as_plain(chain_of(forward, shared=lambda: shared), step, policy=policy)


@each_policy
def test_a_hook_that_casts_the_input_is_part_of_both_passes(policy: Any) -> None:
    """Mixed-precision hooks on the block itself run once; the replay starts from what they made."""
    kinds = []

    def cast(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        kinds.append(args[0].dtype)
        return (args[0].bfloat16(),)

    def build() -> nn.Module:
        chain = chain_of(lambda self, x: self.two(self.one(x).tanh()).float())()
        for block in chain.blocks:
            block.bfloat16().register_forward_pre_hook(cast)
        return chain

    trains_as_plain(build, policy=policy)
    assert kinds == [torch.float32] * 12  # runs, steps, blocks: not one more for the replays


@each_policy
def test_weights_that_hooks_gather_and_free_are_there_in_the_replay(policy: Any) -> None:
    """Sharding libraries gather before forward and before backward and free in between; the order is kept."""

    def build() -> nn.Module:
        chain = chain_of(lambda self, x: self.one(x).tanh())()
        for block in chain.blocks:
            whole = block.one.weight.detach().clone()
            block.register_forward_pre_hook(partial(_gather, whole))
            block.register_forward_hook(_free)
            block.register_full_backward_pre_hook(partial(_gather, whole))
        return chain

    trains_as_plain(build, data=rows()[:1], policy=policy)


def _gather(whole: Tensor, module: Any, *args: Any) -> None:
    module.one.weight.data = whole


def _free(module: Any, *args: Any) -> None:
    module.one.weight.data = torch.empty(0)


def test_weights_that_are_gone_in_the_replay_are_named_by_block() -> None:
    """A library that gathers in forward only: an error, not another gradient."""
    model = chain_of(lambda self, x: self.one(x).tanh())()
    for block in model.blocks:
        block.register_forward_hook(_free)
    checkpoint_blocks(model, blocks="blocks.*")
    loss = mean_square(model, rows()[0])
    with pytest.raises(CheckpointError, match=r"block 'blocks\.1' differs.*\(8, 8\) on cpu, and is .*\(0,\)"):
        loss.backward()


# --- random numbers ---


@each_policy
def test_a_block_that_seeds_or_skips_by_chance_is_replayed_as_it_ran(policy: Any) -> None:
    """Stochastic depth drawn inside the block, and a block that reseeds the generator for its own mask."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x
        state = torch.get_rng_state()
        torch.manual_seed(3)
        mask = torch.rand(WIDTH) < 0.5
        torch.set_rng_state(state)
        return x + F.dropout(self.two(self.one(x).tanh() * mask), 0.3)

    trains_as_plain(chain_of(forward), policy=policy)


class _Router(nn.Module):
    """Sends each row to one of two experts, by scores with noise from Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        noise = torch.tensor([[random.gauss(0, 3) for _ in range(2)] for _ in x])
        chosen = (scores + noise).topk(1).indices[:, 0]
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == index)
            out = out.index_add(0, mine, expert(x[mine]).tanh() * scores.softmax(-1)[mine, index, None])
        return x + out


def _seeded(model: nn.Module, x: Tensor) -> Tensor:
    random.seed(3)
    return mean_square(model, x)


def test_a_choice_that_flips_in_the_replay_is_named_by_block() -> None:
    """Other numbers of rows for an expert than in forward: an error that names the block, with the two shapes."""
    model = Chain(_Router)
    checkpoint_blocks(model, blocks="blocks.*")
    with pytest.raises(CheckpointError, match=r"block 'blocks\.[01]' differs from its forward: .* of shape"):
        _seeded(model, rows()[0]).backward()


@pytest.mark.parametrize("policy", ["selective", SelectiveOps(["aten.topk"])], ids=["compute", "topk"])
def test_a_kept_choice_does_not_flip(policy: Any) -> None:
    """With the router's top-k kept, rows go where they went in forward, whatever the noise is in the replay."""
    trains_as_plain(partial(Chain, _Router), _seeded, policy=policy)


# --- caches and containers ---


@each_policy
@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_key_value_cache_is_written_once(build: Callable[[], nn.Module], policy: Any) -> None:
    """A Hugging Face model that fills its cache while it trains: as long as in the plain run, and equal gradients."""
    results = []
    ours, plain = twins(build)
    checkpoint_blocks(ours, policy)
    ids = torch.randint(0, 50, (2, 7))
    for model in (ours, plain):
        torch.manual_seed(3)
        out = model(input_ids=ids, labels=ids, use_cache=True)
        out.loss.backward()
        results.append([out.loss, torch.tensor(out.past_key_values.get_seq_length()), *gradients(model)])
    assert results[0][1] == 7
    assert_same(*results)


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # the newer name is not yet everywhere
def test_two_chunks_may_share_a_cache() -> None:
    """The second chunk attends to the first one's keys, with gradients through both; by hand it is an error."""
    from transformers import DynamicCache

    def run(model: Any) -> list[Any]:
        torch.manual_seed(3)
        cache = DynamicCache(config=model.config)
        losses = [model(input_ids=ids, labels=ids, past_key_values=cache).loss for ids in chunks]
        sum(losses).backward()
        return [*losses, torch.tensor(cache.get_seq_length()), *gradients(model)]

    chunks = [torch.randint(0, 50, (2, 7)) for _ in range(2)]
    by_hand, _ = patched_by_hand(llama, blocks=lambda name, module: type(module).__name__ == "LlamaDecoderLayer")
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        run(by_hand)
    ours, plain = twins(llama)
    checkpoint_blocks(ours)
    assert_same(run(ours), run(plain))


def test_sampling_between_two_steps_gives_the_plain_tokens() -> None:
    """`generate` with its cache, greedy and drawn, in the middle of training."""

    def run(model: Any) -> list[Any]:
        torch.manual_seed(3)
        optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            model.eval()
            out += [model.generate(ids[:, :3], max_new_tokens=4, do_sample=d, pad_token_id=0) for d in (False, True)]
        return [*out, *gradients(model)]

    ids = torch.randint(4, 50, (2, 7))
    ours, plain = twins(llama)
    checkpoint_blocks(ours)
    assert_same(run(ours), run(plain))


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any, Tensor], None]]] = {
    "namespace": (lambda x: types.SimpleNamespace(x=x), lambda g: g.x, lambda g, y: setattr(g, "x", y)),
    "nested namespace": (
        lambda x: {"graph": types.SimpleNamespace(x=[x])},
        lambda g: g["graph"].x[-1],
        lambda g, y: g["graph"].x.append(y),
    ),
    "deque": (lambda x: collections.deque([x], maxlen=2), lambda d: d[-1] + d[0], lambda d, y: d.append(y)),
    "user dict": (lambda x: collections.UserDict(x=x), lambda d: d["x"], lambda d, y: d.update(x=y)),
    "default dict": (
        lambda x: collections.defaultdict(list, x=[x]),
        lambda d: sum(d["x"]),
        lambda d, y: d["x"].append(y),
    ),
}


@each_policy
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_is_refilled_between_blocks_is_replayed_as_it_was(kind: str, policy: Any) -> None:
    """Graph objects, windows of past states, batches: each block sees again what it saw, not what came later."""
    make, read, write = CONTAINERS[kind]

    def step(model: Any, x: Tensor) -> Tensor:
        holder = make(x * model.scale)
        for block in model.blocks:
            write(holder, block(holder))
        return read(holder).square().mean()

    trains_as_plain(chain_of(lambda self, holder: self.two(self.one(read(holder)).tanh())), step, policy=policy)


class _State(NamedTuple):
    hidden: Tensor
    count: Tensor


@each_policy
def test_a_recurrent_state_keeps_its_type_from_step_to_step(policy: Any) -> None:
    """A named tuple goes in and comes out of an unrolled cell, its fields used by name."""

    def forward(self: Any, x: Tensor, state: _State) -> tuple[Tensor, _State]:
        hidden = (self.one(x) + self.two(state.hidden)).tanh()
        return hidden * 2, state._replace(hidden=hidden, count=state.count + 1)

    def step(model: Any, x: Tensor) -> Tensor:
        state = _State(x * model.scale, torch.tensor(0))
        total = x.new_zeros(())
        for _ in range(4):
            for block in model.blocks:
                x, state = block(x, state)
                total = total + state.hidden.sin().mean()
        assert state.count == 8
        return total + x.square().mean()

    trains_as_plain(chain_of(forward), step, policy=policy)


# --- what tensors are, and modules ---


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH).tanh()


@each_policy
def test_complex_weights_get_their_gradients(policy: Any) -> None:
    """A Fourier block."""
    trains_as_plain(partial(Chain, _Spectrum), policy=policy)


@each_policy
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_sparse_matrix_may_be_an_argument(layout: torch.layout, policy: Any) -> None:
    """The adjacency of a graph, in coordinates or in rows."""
    adjacency = (torch.rand(4, 4) < 0.5).float().to_sparse(layout=layout)

    def step(model: Any, x: Tensor) -> Tensor:
        x = x * model.scale
        for block in model.blocks:
            x = block(x, adjacency=adjacency)
        return x.square().mean()

    forward = lambda self, x, adjacency: torch.sparse.mm(adjacency, self.one(x)).tanh()  # noqa: E731
    trains_as_plain(chain_of(forward), step, policy=policy)


@each_policy
def test_a_nested_batch_goes_in_and_comes_out(policy: Any) -> None:
    """Rows of different lengths in one jagged tensor."""

    def step(model: Any, x: Tensor) -> Tensor:
        batch = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        for block in model.blocks:
            batch = block(batch)
        return (batch.values() * model.scale).square().mean()

    trains_as_plain(chain_of(lambda self, x: self.two(self.one(x).tanh())), step, policy=policy)


def test_a_sparse_gradient_stays_sparse() -> None:
    """That of an embedding inside a block, equal to the plain one."""
    forward = lambda self, x: self.two(x) + self.tokens(torch.arange(4))  # noqa: E731
    ours, plain = twins(chain_of(forward, tokens=lambda: nn.Embedding(5, WIDTH, sparse=True)))
    checkpoint_blocks(ours, blocks="blocks.*")
    for model in (ours, plain):
        mean_square(model, rows()[0]).backward()
    assert ours.blocks[0].tokens.weight.grad.is_sparse
    assert_same(gradients(ours), gradients(plain))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(1, WIDTH))])
def test_a_block_that_holds_a_scripted_part_is_left_alone(compiled: Any) -> None:
    """One warning, the other block covered, and the model trains."""
    model = chain_of(lambda self, x: self.two(self.one(x).tanh()))()
    model.blocks[0].one = compiled(model.blocks[0].one)
    with pytest.warns(UserWarning, match=r"Left alone: blocks\.0: compiled by TorchScript"):
        handle = checkpoint_blocks(model, blocks="blocks.*")
    assert handle.blocks == ("blocks.1",)
    mean_square(model, rows()[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_parametrization_may_come_after_us() -> None:
    """It gives the block another class; the block's own forward is still the one that runs."""

    class Scaled(nn.Linear):
        pass

    def build() -> nn.Module:
        return Chain(lambda: Scaled(WIDTH, WIDTH))

    ours, plain = twins(build)
    handle = checkpoint_blocks(ours, blocks="blocks.*")
    for model in (ours, plain):
        for block in model.blocks:
            torch.manual_seed(5)
            parametrizations.orthogonal(block)
    data = rows()
    assert_equal(trace(ours, data, mean_square), trace(plain, data, mean_square))
    assert handle.report().segments
    assert parametrize.is_parametrized(ours.blocks[0])


def test_a_block_is_what_it_was_to_everybody() -> None:
    """`isinstance`, attributes read and written, methods, slices, iteration."""

    class Block(nn.Linear):
        factor = 1.0

        def doubled(self) -> float:
            return 2 * self.factor

    model = nn.Sequential(*[Block(WIDTH, WIDTH) for _ in range(3)])
    checkpoint_blocks(model, blocks=Block)
    model[0].factor = 3.0
    assert isinstance(model[0], Block)
    assert model[0].doubled() == 6.0
    assert [type(block) for block in model[1:]] == [Block, Block]
    assert len(model) == len(list(model.children())) == 3
    assert type(model[0]) is Block


def test_a_saved_module_loads_as_a_module_of_its_own() -> None:
    """`torch.save` of the whole model, as spawned processes and old scripts use it."""
    model, file = mlp(), io.BytesIO()
    checkpoint_blocks(model)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(4, 64)
    for chain in (model, loaded):
        mean_square(chain, x).backward()
    assert_same(gradients(loaded), gradients(model))
    with torch.no_grad():
        loaded[0][0].weight.zero_()
    assert model[0][0].weight.any()
    assert loaded[0].forward.block is loaded[0]


def test_a_copied_block_stacked_many_times_runs_each_its_own_weights() -> None:
    """`[deepcopy(block) for _ in range(n)]` of a block that is checkpointed already, as `nn.Transformer` clones."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    checkpoint_blocks(nn.ModuleList([block]), blocks="0")
    stack = nn.Sequential(*[copy.deepcopy(block) for _ in range(3)])
    for layer in stack:
        nn.init.normal_(layer[0].weight)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    plain.load_state_dict(stack.state_dict())
    for model in (stack, plain):
        mean_square(model, rows()[0]).backward()
    assert_same(gradients(stack), gradients(plain))


@each_policy
def test_a_patched_model_exports_as_the_plain_one(policy: Any) -> None:
    """`torch.export` and tracing, in evaluation mode, with gradients enabled and without."""
    ours, plain = twins(chain_of(lambda self, x: self.two(F.dropout(self.one(x).tanh(), training=self.training))))
    checkpoint_blocks(ours, policy, blocks="blocks.*")
    x = rows()[0]
    expected = plain.eval()(x)
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            exported = torch.export.export(ours.eval(), (x,))
        assert torch.equal(exported.module()(x), expected)
        assert list(exported.state_dict) == list(plain.state_dict())


@pytest.mark.supports(strategy="single device", precision="32-true", policy="full", compile=["whole", "by block"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at every tensor
@pytest.mark.parametrize("order", ["model first", "blocks first", "blocks in place"])
def test_compiling_before_or_after_gives_the_plain_gradients(order: str) -> None:
    """`torch.compile` of the model or of its blocks, ours applied afterwards; dropout is off, since masks differ."""
    build = chain_of(lambda self, x: self.two(self.one(x).tanh()).tanh())
    ours, plain = twins(build)
    model = ours
    if order == "model first":
        model = torch.compile(ours, backend="aot_eager")
    elif order == "blocks in place":
        for block in ours.blocks:
            block.compile(backend="aot_eager")
    handle = checkpoint_blocks(model, blocks=lambda name, module: name.removeprefix("_orig_mod.") in _BLOCK_NAMES)
    if order == "blocks first":
        for index in range(2):
            ours.blocks[index] = torch.compile(ours.blocks[index], backend="aot_eager")
    x = rows()[0]
    for either in (model, plain):
        mean_square(either, x).backward()
    assert len(handle.blocks) == 2
    assert_same(gradients(ours), gradients(plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # DDP's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@each_policy
def test_a_compiled_data_parallel_model_takes_a_step(policy: Any) -> None:
    """One process, the blocks checkpointed under DDP under the compiler: plain gradients, and names without a trace."""
    ours, plain = twins(chain_of(lambda self, x: self.two(self.one(x).tanh()).tanh()))
    checkpoint_blocks(ours, policy, blocks="blocks.*")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(ours)
        mean_square(torch.compile(parallel, backend="aot_eager"), rows()[0]).backward()
        mean_square(plain, rows()[0]).backward()
        names = [name for name, _ in parallel.named_parameters()]
        del parallel
    finally:
        distributed.destroy_process_group()
    assert names == [f"module.{name}" for name, _ in plain.named_parameters()]
    assert_same(gradients(ours), gradients(plain))


_BLOCK_NAMES = ("blocks.0", "blocks.1")


# --- the shapes of other fields ---


class _Diffusion(nn.Module):
    """Three stages, each called in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid, self.up = _Down(), _Mid(), _Up()
        self.time = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        temb = self.time(x.new_ones(1, 1))
        skip = self.down(x, temb)
        y = self.mid(skip, temb, ctx=None)
        return self.up(y, (skip, x), temb=temb, scale=0.5)


class _Down(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        return F.silu(super().forward(x) + temb)


class _Mid(_Down):
    def forward(self, x: Tensor, temb: Tensor, ctx: Tensor | None = None) -> Tensor:
        return F.dropout(super().forward(x, temb), 0.2) if ctx is None else x


class _Up(_Down):
    def forward(self, x: Tensor, skips: tuple[Tensor, ...], *, temb: Tensor, scale: float) -> Tensor:
        return super().forward(x + scale * sum(skips), temb)


@each_policy
def test_stages_with_signatures_of_their_own_train_the_same(policy: Any) -> None:
    """A diffusion U-Net: `(x, temb)`, `(x, temb, ctx=None)` and skips in a tuple, blocks named one by one."""
    trains_as_plain(_Diffusion, policy=policy, blocks=["down", "mid", "up"])


class _GraphConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor | None = None) -> Tensor:
        messages = F.dropout(self.layer(x[edges[0]]), 0.5, self.training)
        out = torch.zeros_like(x).index_add_(0, edges[1], messages)
        return (out if batch is None else out - out.mean(0)[None].expand(int(batch.max()) + 1, -1)[batch]).relu()


@each_policy
def test_message_passing_with_index_tensors_trains_the_same(policy: Any) -> None:
    """A graph network: scattered sums, dropout on messages, integer tensors left as they are."""
    edges, batch = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]), torch.tensor([0, 0, 1, 1])

    def step(model: Any, x: Tensor) -> Tensor:
        x = x * model.scale
        for block in model.blocks:
            x = block(x, edges, batch=batch)
        assert edges.dtype == batch.dtype == torch.int64
        return x.square().mean()

    trains_as_plain(partial(Chain, _GraphConv), step, policy=policy)


@each_policy
def test_recurrent_layers_with_dropout_between_and_their_state(policy: Any) -> None:
    """An LSTM of two layers, from trainable initial states, both parts of its final state in the loss."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True) for _ in range(2)])
            self.start = nn.Parameter(torch.randn(2, 2, 4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            state = (self.start[0], self.start[1])
            y = x[:, None].repeat(1, 3, 1)
            for block in self.blocks:
                y, state = block(y, state)
            return y.mean() + state[0].sin() + state[1].cos()

    trains_as_plain(Recurrent, policy=policy)


@pytest.mark.parametrize("policy", ["full", Full(segment_size=2)], ids=["full", "segments"])
def test_an_unrolled_cell_in_chunks(policy: Any) -> None:
    """Back-propagation through time over chunks of four steps, each chunk one block."""

    def forward(self: Any, xs: Tensor, hidden: Tensor) -> Tensor:
        for x in xs:
            hidden = self.cell(x, hidden)
        return hidden

    def step(model: Any, x: Tensor) -> Tensor:
        hidden = x * model.scale
        for chunk, block in zip(torch.stack([x, -x] * 4).chunk(2), model.blocks, strict=True):
            hidden = block(chunk, hidden)
        return hidden.square().mean()

    trains_as_plain(chain_of(forward, cell=lambda: nn.GRUCell(WIDTH, WIDTH)), step, policy=policy)


@each_policy
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_that_overwrite_kept_results_are_replayed(kind: type[nn.RNNBase], policy: Any) -> None:
    """On a CPU they write into a matrix product's result where its version does not tell: by hand a GRU is wrong."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([kind(WIDTH, WIDTH, batch_first=True) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)[0]
            return x

    trains_as_plain(Recurrent, data=[torch.randn(2, 3, WIDTH)], policy=policy)


class _Backbone(nn.Module):
    """Four stages, the first two frozen, that return every scale; it refuses to be checkpointed by itself."""

    supports_gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        self.stages[:2].requires_grad_(False)

    def gradient_checkpointing_enable(self, one: int, two: str, *, three: float) -> None:
        raise AssertionError("nobody asked for this")

    def set_grad_checkpointing(self) -> None:
        raise AssertionError("nobody asked for this")

    def forward(self, x: Tensor) -> list[Tensor]:
        scales = []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        return scales


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = _Backbone()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(scale) for head, scale in zip(self.heads, self.backbone(x), strict=True)])


@pytest.mark.parametrize(
    "blocks", ["backbone.stages.*", "*.stages.*", lambda name, _: name.startswith("backbone.stages.")]
)
@each_policy
def test_a_backbone_of_many_scales_is_checkpointed_from_outside(blocks: Any, policy: Any) -> None:
    """Heads on every stage, the first ones frozen; the model's own switches are never touched."""
    ours = trains_as_plain(_Detector, policy=policy, blocks=blocks)
    assert [name for name, _ in find_blocks(ours, blocks)] == [f"backbone.stages.{i}" for i in range(4)]
    assert [stage[0].weight.grad is None for stage in ours.backbone.stages] == [True, True, False, False]


@each_policy
def test_a_roll_out_with_an_extra_pass_moves_the_statistics_exactly_as_often(policy: Any) -> None:
    """Three calls before one backward and one pass under `no_grad`: BatchNorm counts four; by hand it counts seven."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            model(x)
        for _ in range(3):
            x = model(x)
        return x.square().mean()

    build = chain_of_layers(lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH), nn.Tanh)
    ours = trains_as_plain(build, step, rows()[:1], policy)
    assert ours.blocks[0][1].num_batches_tracked == 4
    by_hand, _ = patched_by_hand(build)
    step(by_hand, rows()[0]).backward()
    assert by_hand.blocks[0][1].num_batches_tracked == 7


class _CountingSyncNorm(nn.SyncBatchNorm):
    """SyncBatchNorm as one process on a CPU can run it: it counts the collectives that it would start."""

    collectives = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.collectives += 1
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


@each_policy
def test_synchronised_statistics_move_once_and_every_replay_communicates_once(policy: Any) -> None:
    """The count of collectives depends on blocks and steps alone, so it is the same on every rank."""
    build = chain_of_layers(lambda: nn.Linear(WIDTH, WIDTH), lambda: _CountingSyncNorm(WIDTH), nn.Tanh)
    ours = trains_as_plain(build, policy=policy)
    assert [block[1].num_batches_tracked.item() for block in ours.blocks] == [3, 3]
    assert [block[1].collectives for block in ours.blocks] == [6, 6]


def test_an_adapted_model_trains_every_adapter() -> None:
    """LoRA on a frozen language model: as many non-zero gradients as in the plain run, from the first layer on."""
    ours = lora_llama()
    checkpoint_blocks(ours)
    ids = torch.randint(0, 50, (2, 7))
    ours(input_ids=ids, labels=ids).loss.backward()
    learning = [name for name, p in ours.named_parameters() if p.requires_grad and p.grad is not None and p.grad.any()]
    assert len(learning) == 3 * 2 * 2  # layers, projections, factors
