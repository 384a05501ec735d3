"""Hooks on blocks and parametrized weights: as many calls as without checkpointing, and the plain results."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from equality import each_policy, trains_as_plain

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.two((self.one(x) * scale).tanh())


class Model(nn.Module):
    """The last block has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[2].one.weight = self.blocks[0].one.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def rows() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, WIDTH) for _ in range(3)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# --- hooks ---


def hooks_on(module: nn.Module) -> Counter[str]:
    """Every kind of hook on a module, each of which changes what goes by; returns how often each was called."""
    calls: Counter[str] = Counter()

    def called(kind: str) -> None:
        calls[kind] += 1

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        called("pre-hook with keywords")
        return args, {**kwargs, "scale": kwargs["scale"] * 1.5}

    def before_by_position(module: nn.Module, args: Any) -> Any:
        called("pre-hook")
        return (args[0] + 0.25, *args[1:])

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        called("hook")
        return output * 1.25

    def after_with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        called("hook with keywords")
        return output + kwargs["scale"]

    def backward(module: nn.Module, inward: Any, outward: Any) -> Any:
        called("backward")
        return tuple(None if grad is None else grad * 0.5 for grad in inward)

    def before_backward(module: nn.Module, outward: Any) -> Any:
        called("backward pre-hook")
        return tuple(grad * 2 for grad in outward)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_pre_hook(before_by_position)
    module.register_forward_hook(after)
    module.register_forward_hook(after_with_keywords, with_kwargs=True)
    module.register_full_backward_hook(backward)
    module.register_full_backward_pre_hook(before_backward)
    return calls


@each_policy
def test_hooks_on_a_block_are_called_as_without_us(policy: Any) -> None:
    """Before and after, forward and backward, with keywords and without: once a step, and all they change counts."""
    calls: list[Counter[str]] = []
    trains_as_plain(Model, rows(), mean_square, policy, prepare=lambda model: calls.append(hooks_on(model.blocks[1])))
    ours, plain = calls
    assert ours == plain
    assert set(ours.values()) == {3}
    assert len(ours) == 6


@each_policy
def test_backward_hooks_inside_a_block_are_called_as_without_us(policy: Any) -> None:
    """On a layer of a block, whose forward runs twice: they see the one backward pass there is."""
    calls: list[Counter[str]] = []

    def hook(model: nn.Module) -> None:
        counted: Counter[str] = Counter()

        def halve(kind: str, grads: Any) -> Any:
            counted[kind] += 1
            return tuple(grad * 0.5 for grad in grads)

        model.blocks[1].two.register_full_backward_hook(lambda module, inward, outward: halve("backward", inward))
        model.blocks[1].two.register_full_backward_pre_hook(lambda module, outward: halve("before", outward))
        calls.append(counted)

    trains_as_plain(Model, rows(), mean_square, policy, prepare=hook)
    assert calls == [{"backward": 3, "before": 3}] * 2


# --- parametrized and tied weights ---


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@each_policy
@pytest.mark.parametrize("first", [True, False], ids=["before us", "after us"])
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_parametrized_weights_train_as_plain(kind: str, first: bool, policy: Any) -> None:
    """In a layer of each block; a spectral norm's vectors move once a step."""

    def parametrize(model: nn.Module) -> None:
        for block in model.blocks:
            torch.manual_seed(5)
            PARAMETRIZED[kind](block.two)

    def build() -> nn.Module:
        model = Model()
        if first:
            parametrize(model)
        return model

    prepare = (lambda model: None) if first else parametrize
    trains_as_plain(build, rows(), mean_square, policy, prepare=prepare)


@each_policy
def test_tied_weights_get_the_gradients_of_all_their_uses(policy: Any) -> None:
    """The first and the last block share a matrix, replayed by each."""
    ours, plain = trains_as_plain(Model, rows(), mean_square, policy)
    assert ours.blocks[2].one.weight is ours.blocks[0].one.weight
    assert torch.equal(ours.blocks[0].one.weight.grad, plain.blocks[0].one.weight.grad)
