"""Buffers that a block changes in forward: replayed as they were, changed once a step."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import CheckpointError, checkpoint

from equality import assert_equal, trace, twins
from lightning_ckpt import checkpoint_blocks, is_recomputing


class Stateful(nn.Module):
    """A block whose output depends on buffers that its forward changes, in every way a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("hidden", torch.ones(8), persistent=False)
        self.register_buffer("late", torch.ones(8))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.mask
        self.ema.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)  # in place
        self.steps = self.steps + 1  # replaced
        self.hidden.data += 0.1  # behind autograd's back
        if self.steps > 2:
            self.late.mul_(1.5)  # only after some steps
        return (y + self.ema) * self.hidden * self.late / self.steps


class OwnNorm(nn.Module):
    """A BatchNorm of the user's own, whose statistics a native kernel moves without a trace, and which thaws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.calls = 0
        self.moving = False

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.calls += 1
            self.moving = self.calls > 2
        return nn.functional.batch_norm(self.layer(x), self.mean, self.var, training=self.moving).tanh()


class Codebook(nn.Module):
    """A vector quantiser's averages, written through `.data` from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.steps += 1
        nearest = torch.cdist(y, self.codes).argmin(1)
        quantised = self.codes[nearest] * y.tanh()
        if self.steps > 1:
            self.codes.data.index_add_(0, nearest, 0.1 * (y - self.codes[nearest]).detach())
        return y + quantised


class Lazily(nn.Module):
    """Buffers that are `None`, or not there at all, until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = y.detach().mean(0)
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        if not hasattr(self, "first"):
            self.register_buffer("first", mean.clone())
            y = y * 2
        return (y * self.average + self.first).tanh()


class TwoNames(nn.Module):
    """One buffer that two parts of the block hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.writes, self.reads = nn.Linear(8, 8), nn.Module(), nn.Module()
        self.writes.register_buffer("scale", torch.full((8,), 2.0))
        self.reads.register_buffer("scale", self.writes.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.writes.scale.mul_(0.9)
        return (self.layer(x) * self.reads.scale).tanh()


class Standardised(nn.Module):
    """A parametrization that standardises the weight with running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.scale.mul_(0.8).add_(0.2 * weight.detach().std())
        return (weight - weight.mean()) / self.scale


def standardised() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", Standardised())
    return nn.Sequential(layer, nn.Tanh())


class Draws(nn.Module):
    """Random numbers drawn aside, so that the state afterwards is the state before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            mask = torch.rand(8)
        return self.two((self.one(x) * mask).tanh())


def convolution_with(norm: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), norm(), nn.ReLU())


def stirred(layer: nn.Module) -> nn.Module:
    """Power iteration away from convergence: a converged estimate hides that it moves twice."""
    for name, buffer in layer.named_buffers():
        if name.endswith(("_u", "_v")):
            buffer.copy_(nn.functional.normalize(torch.randn_like(buffer), dim=0))
    return nn.Sequential(layer, nn.Tanh())


IMAGES = (3, 2, 4, 4)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "every way to change a buffer": (Stateful, (4, 8)),
    "batch norm": (lambda: convolution_with(lambda: nn.BatchNorm2d(2)), IMAGES),
    "batch norm, cumulative": (lambda: convolution_with(lambda: nn.BatchNorm2d(2, momentum=None)), IMAGES),
    "instance norm": (lambda: convolution_with(lambda: nn.InstanceNorm2d(2, track_running_stats=True)), IMAGES),
    "spectral norm": (lambda: stirred(parametrizations.spectral_norm(nn.Linear(8, 8))), (4, 8)),
    "spectral norm, old form": (lambda: stirred(spectral_norm(nn.Linear(8, 8))), (4, 8)),
    "a norm of the user's own that thaws": (OwnNorm, (4, 8)),
    "codebook written late through .data": (Codebook, (4, 8)),
    "buffers made in the first forward": (Lazily, (4, 8)),
    "one buffer under two names": (TwoNames, (4, 8)),
    "standardised weights with statistics": (standardised, (4, 8)),
    "random numbers drawn aside": (Draws, (4, 8)),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()), (4, 8)),
}
CHANGE_NOTHING = ("weight norm", "random numbers drawn aside")


def chain(build: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(build(), build())


def step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_five_steps_equal_those_of_the_plain_model(kind: str, policy: str) -> None:
    """Gradients and buffers, also of a buffer that starts to change in the third step."""
    build, shape = BLOCKS[kind]
    torch.manual_seed(0)
    data = [torch.randn(shape) for _ in range(5)]
    ours, plain = twins(lambda: chain(build))
    checkpoint_blocks(ours, policy, blocks=["0", "1"])
    assert_equal(trace(ours, data, step, steps=5), trace(plain, data, step, steps=5))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in CHANGE_NOTHING])
def test_plain_torch_checkpoint_differs_on_these_blocks(kind: str) -> None:
    """The models above do break a replay that takes no care, so the equality above can fail."""

    class ByHand(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    build, shape = BLOCKS[kind]
    torch.manual_seed(0)
    data = [torch.randn(shape) for _ in range(5)]
    by_hand, plain = twins(lambda: ByHand(build(), build()))
    plain.forward = lambda x: nn.Sequential.forward(plain, x)
    with pytest.raises(AssertionError, match=r"differ from the plain run"):
        assert_equal(trace(by_hand, data, step, steps=5), trace(plain, data, step, steps=5))


def test_passes_without_gradients_still_move_the_statistics() -> None:
    """Two passes under `no_grad` and a step count three times, as re-estimating BatchNorm expects."""
    ours, plain = twins(lambda: chain(lambda: convolution_with(lambda: nn.BatchNorm2d(2))))
    checkpoint_blocks(ours)
    x = torch.randn(IMAGES)
    for model in (ours, plain):
        with torch.no_grad():
            model(x)
            model(x * 2)
        model(x * 3).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))
    assert ours[0][1].num_batches_tracked == 3


def test_a_frozen_norm_that_thaws_is_seen() -> None:
    """BatchNorm in evaluation mode at first, in training mode later, with passes in between."""
    ours, plain = twins(lambda: chain(lambda: convolution_with(lambda: nn.BatchNorm2d(2))))
    checkpoint_blocks(ours)

    def thawing(model: nn.Module, x: Tensor) -> Tensor:
        model[0][1].train(bool(x.mean() > 0))
        with torch.no_grad():
            model(x + 1)
        return step(model, x)

    data = [torch.randn(IMAGES) + shift for shift in (-5, -5, 5, 5, -5)]
    assert_equal(trace(ours, data, thawing, steps=5), trace(plain, data, thawing, steps=5))


def test_several_forwards_before_one_backward_replay_each_from_its_own_buffers() -> None:
    """A roll-out of three calls, as weather and video models make, and a graph that never goes backward."""

    def rollout(model: nn.Module, x: Tensor) -> Tensor:
        model(x * 2)  # a graph that is thrown away
        total = x.new_zeros(())
        for _ in range(3):
            x = model(x)
            total = total + x.square().mean()
        return total

    kinds = ("batch norm", "instance norm", "spectral norm", "codebook written late through .data")
    for build, shape in (BLOCKS[kind] for kind in kinds):
        torch.manual_seed(0)
        data = [torch.randn(shape) for _ in range(3)]
        ours, plain = twins(lambda build=build: chain(build))
        checkpoint_blocks(ours, blocks=["0", "1"])
        assert_equal(trace(ours, data, rollout), trace(plain, data, rollout))


def test_live_buffers_come_back_when_a_replay_fails() -> None:
    """An error in backward leaves the very buffers that the forward left."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.norm(self.layer(x))
            if self.calls > 1:
                raise ArithmeticError("in the replay")
            return y.tanh()

    model = nn.Sequential(Fails())
    checkpoint_blocks(model, blocks=Fails)
    loss = model(torch.randn(3, 4)).sum()
    live = dict(model[0].norm.named_buffers())
    with pytest.raises(ArithmeticError, match="in the replay"):
        loss.backward()
    assert all(buffer is live[name] for name, buffer in model[0].norm.named_buffers())
    assert model[0].norm.num_batches_tracked == 1


def test_constant_buffers_are_copied_once_not_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes cloned per step: a mask's in the first alone, running statistics' in each."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
            self.register_buffer("mask", torch.ones(1024))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) * self.mask[:64]

    model = nn.Sequential(Masked(), Masked())
    checkpoint_blocks(model)
    clone, copied = Tensor.clone, []
    monkeypatch.setattr(Tensor, "clone", lambda t, **kw: copied.append(t.nbytes) or clone(t, **kw))
    statistics = 2 * 64 * 4 + 8  # mean, variance, count of batches
    mask = 1024 * 4
    sizes = []
    for _ in range(3):
        copied.clear()
        model(torch.randn(8, 64)).sum().backward()
        sizes.append(sum(copied))
    # Statistics twice: the copy that the forward takes, and the scratch that the replay moves.
    assert sizes == [2 * (mask + 2 * statistics), 4 * statistics, 4 * statistics]


@pytest.mark.parametrize(
    "buffer",
    [
        lambda: torch.eye(8).to_sparse(),
        lambda: torch.tensor([float("nan"), 1.0]),
        lambda: torch.empty(3, device="meta"),
        lambda: None,
    ],
    ids=["sparse", "nan", "meta", "none"],
)
def test_buffers_of_any_kind_are_no_obstacle(buffer: Callable[[], Tensor | None]) -> None:
    """What can't be compared, or compares as different from itself, is copied instead."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("held", buffer())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh()

    ours, plain = twins(lambda: nn.Sequential(Holds(), Holds()))
    checkpoint_blocks(ours)
    x = torch.randn(4, 8)
    for model in (ours, plain):
        for _ in range(2):
            model(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_model_with_constant_buffers_is_freed_without_garbage_collection() -> None:
    """What is remembered of a mask does not hold the block that holds it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.mask).tanh()

    model = nn.Sequential(Masked(), Masked())
    handle = checkpoint_blocks(model)
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
    watched = weakref.ref(model[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert watched() is None
    finally:
        gc.enable()
    handle.remove()


# --- parameters ---


def test_parameters_that_functional_call_puts_in_are_those_of_the_replay() -> None:
    """Meta-learning and hypernetworks: gradients reach the parameters that ran, not the module's own."""
    ours, plain = twins(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]))
    checkpoint_blocks(ours)
    x = torch.randn(4, 8)
    results = []
    for model in (ours, plain):
        given = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, given, (x,)).square().sum().backward()
        results.append([p.grad for p in given.values()])
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parameters_that_changed_since_are_an_error() -> None:
    """An optimizer's step before backward: plain autograd raises for a weight, and this for a bias too."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])
    checkpoint_blocks(model)
    loss = model(torch.randn(4, 8)).sum()
    with torch.no_grad():
        model[1][0].bias.add_(1)
    with pytest.raises(
        CheckpointError, match=r"Block '1' can't be replayed: parameters changed .*: bias\. Step the opt"
    ):
        loss.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own forward-mode rules
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jvp", "vmap"])
@pytest.mark.parametrize("check", ["default", "values"])
def test_function_transforms_run_the_blocks_plain(transform: str, check: str) -> None:
    """`torch.func` takes no saved-tensor hooks: under it nothing is replayed, and results are the plain model's."""
    ours, plain = twins(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]))
    checkpoint_blocks(ours, determinism_check=check)
    x = torch.randn(3, 8)

    def run(model: nn.Module) -> Any:
        if transform == "grad":
            return torch.func.grad(lambda x: model(x).sum())(x)
        if transform == "jacrev":
            return torch.func.jacrev(model)(x)
        if transform == "jvp":
            primal, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            primal.sum().backward()
            return tangent + model[0][0].bias.grad.sum()
        return torch.func.vmap(model)(x)

    assert torch.equal(run(ours), run(plain))


def test_lazy_layers_are_blocks_too() -> None:
    """They have no parameters to count before the first batch; it makes them, and from then on they are replayed."""
    torch.manual_seed(0)
    ours = nn.Sequential(*[nn.Sequential(nn.LazyLinear(8), nn.Tanh()) for _ in range(2)])
    plain = copy.deepcopy(ours)
    assert checkpoint_blocks(ours).blocks == ("0", "1")
    for model in (ours, plain):
        torch.manual_seed(1)
        model(torch.randn(4, 6)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
