"""Buffers that a block changes in forward: replayed as they were, changed once a step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from equality import assert_equal, trace, twins
from lightning_ckpt import checkpoint_blocks


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
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()), (4, 8)),
}
CHANGE_NOTHING = ("weight norm",)


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

    for build, shape in (BLOCKS["batch norm"], BLOCKS["instance norm"]):
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
