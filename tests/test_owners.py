"""Models that checkpoint themselves: their checkpointing is left alone with one line, or replaced and given back."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from equality import Replays, trace, twins
from lightning_ckpt import checkpoint_blocks, find_blocks
from lightning_ckpt.owners import owner_of

WIDTH = 8


class Block(nn.Module):
    """A block as Hugging Face and timm write them, with a flag of its own."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.two(self.dropout(self.one(x).tanh()))


PARTS = 3  # layers of a block


class Model(nn.Module):
    """Checkpoints its blocks by itself while its flag is up, as timm's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.grad_checkpointing = self.by_hand = False
        self.how: Callable[..., Any] = partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x) if self.grad_checkpointing or self.by_hand else block(x)
        return x


def _flag_on_blocks(model: Model) -> None:
    for block in model.blocks:
        block.gradient_checkpointing = True


def _flag_on_the_model(model: Model) -> None:
    model.grad_checkpointing = True


def _wrappers(model: Model, **how: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, **how)


def _composable(model: Model) -> None:
    for block in model.blocks:
        composable(block)


OWNERS: dict[str, tuple[Callable[[Model], None], str]] = {
    "a flag on blocks": (_flag_on_blocks, "gradient_checkpointing=True"),
    "a flag on the model": (_flag_on_the_model, "grad_checkpointing=True on the model itself"),
    "wrappers": (_wrappers, "a CheckpointWrapper"),
    "reentrant wrappers": (partial(_wrappers, checkpoint_impl=CheckpointImpl.REENTRANT), "a CheckpointWrapper"),
    "composable": (_composable, "torch.distributed._composable.checkpoint"),
}
each_owner = pytest.mark.parametrize("kind", OWNERS)


def rows(seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(4, WIDTH, requires_grad=True) for _ in range(3)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_same_training(ours: nn.Module, plain: nn.Module) -> None:
    """Loss, random numbers and gradients of three steps, whose names a wrapper changes."""
    for mine, expected in zip(*(trace(model, rows(), mean_square) for model in (ours, plain)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.values(), expected.values(), strict=True))


def runs_in_a_step(model: Model) -> tuple[int, int]:
    """How often a step runs the layers of the second block, and how many of these runs are replays of ours."""
    block = find_blocks(model)[1][1]
    counted = Replays(getattr(block, "_checkpoint_wrapped_module", block))
    mean_square(model, rows()[0]).backward()
    layers = (counted.calls / PARTS, counted.replays / PARTS)
    model.zero_grad()
    return layers  # type: ignore[return-value]


@each_owner
def test_blocks_that_their_owner_checkpoints_are_left_to_it(kind: str) -> None:
    """One warning, one level."""
    turn_on, words = OWNERS[kind]
    model = Model()
    turn_on(model)
    with pytest.warns(UserWarning, match="Left alone") as warned:
        assert checkpoint_blocks(model).blocks == ()
    assert [str(warning.message) for warning in warned] == [
        f'Left alone: blocks.0, blocks.1, blocks.2: checkpointed by its owner: {words}; existing="replace" takes over'
    ]


@each_owner
def test_their_owners_checkpointing_is_replaced_on_request(kind: str) -> None:
    """Ours is the one level, training is the plain one, and afterwards the owner's is what it was."""
    turn_on, words = OWNERS[kind]
    ours, plain = twins(Model)
    turn_on(ours)
    with checkpoint_blocks(ours, existing="replace") as handle:
        assert len(handle.blocks) == 3
        assert owner_of(ours, handle.blocks[0]) is None
        assert_same_training(ours, plain)
        assert runs_in_a_step(ours) == (2, 1)
    assert owner_of(ours, find_blocks(ours)[0][0]) == words
    assert runs_in_a_step(ours) == (2, 0)


def test_an_error_gives_the_owners_checkpointing_back() -> None:
    """As the forwards."""
    model = Model()
    _wrappers(model)
    how = [block.checkpoint_fn for block in model.blocks]
    with pytest.raises(RuntimeError), checkpoint_blocks(model, existing="replace"):
        raise RuntimeError
    assert [block.checkpoint_fn for block in model.blocks] == how


def test_a_copy_made_meanwhile_has_one_level_too() -> None:
    """A copy of a model whose owner's checkpointing is replaced computes with its own weights, checkpointed by ours."""
    model = Model()
    _wrappers(model)
    with checkpoint_blocks(model, existing="replace"):
        copied = copy.deepcopy(model)
    assert runs_in_a_step(copied) == (2, 1)
    plain = Model()
    plain.load_state_dict(copied.state_dict())  # whose names a wrapper keeps
    assert_same_training(copied, plain)


def test_a_wrapper_without_a_known_switch_is_left_alone_either_way() -> None:
    """FairScale has a class of that name; the line says that there is nothing to turn off."""

    class CheckpointWrapper(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    model = Model()
    model.blocks[1] = CheckpointWrapper(model.blocks[1])
    with pytest.warns(UserWarning, match="Left alone") as warned:
        handle = checkpoint_blocks(model, blocks="blocks.*", existing="replace")
    assert handle.blocks == ("blocks.0", "blocks.2")
    assert [str(warning.message) for warning in warned] == [
        f"Left alone: blocks.1: checkpointed by its owner: a CheckpointWrapper of {__name__}; it has no switch that is "
        "known here"
    ]


def test_a_wrapped_block_counts_as_what_it_wraps() -> None:
    """One of three is wrapped: the three still repeat."""
    model = Model()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    assert [name for name, _ in find_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.warns(UserWarning, match=r"Left alone: blocks\.1: checkpointed by its owner: a CheckpointWrapper;"):
        assert checkpoint_blocks(model).blocks == ("blocks.0", "blocks.2")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_block_is_told_of_once(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A forward of the model's own that calls `torch.utils.checkpoint` has no flag: seen at the first call."""
    ours, plain = twins(Model)
    ours.how, ours.by_hand = partial(checkpoint, use_reentrant=reentrant), True
    checkpoint_blocks(ours)
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        assert_same_training(ours, plain)
    assert [record.getMessage() for record in caplog.records] == [
        f"Block 'blocks.{2 if reentrant else 0}' is called inside torch.utils.checkpoint by the model itself, which "
        "replays it too, so each step computes it three times: turn that one off, or leave the block out of blocks, "
        "unless it is meant"
    ]
