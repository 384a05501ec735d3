"""Calls of blocks that one replay runs in turn.

While a block runs its forward, every tensor that autograd would keep is let go, and a place is held for it. The first
time backward asks for one, the blocks of the segment are called again in turn, and the places are filled in the order
in which they were made. This is the scheme of PyTorch's non-reentrant `torch.utils.checkpoint`, on the public
`torch.autograd.graph.saved_tensors_hooks`, and it goes further in two ways: a segment may span blocks that a model
calls in a loop of its own, and what differs in a replay is said with the block's name.

Hooks are in place only while a block runs. Whatever a model does between two blocks is recorded as usual, and all that
leaves a block is a real tensor with a real gradient: hidden states may be collected, skipped to, or supervised.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from lightning_ckpt._compat import SavedInput, early_stop_is_on, who_saves
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.value_check import Differs
from lightning_ckpt.versions import version_of

CALLED_AGAIN = "it is called a second time on the way, as a shared block is"


class Call(Protocol):
    """One call of one block, as a segment sees it."""

    name: str
    early_stop: bool

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Call the block again with `tensors` in the places of those it was given, and return those of its output."""

    def saves(self, tensor: Tensor) -> None:
        """Take note of a tensor that autograd saves, in the forward or in a replay."""

    def cause(self) -> str:
        """What may have made the latest replay differ from the forward, in words."""


class _Stop(BaseException):
    """Ends a replay that has all that backward needs. No `Exception`: a block's own handlers must not catch it."""


class _SavesOther(BaseException):
    """Ends a replay that does not save what the forward saved; becomes an error once it is out of the block."""


class _Held:
    """The place of a tensor that was let go, and the tensor once it is replayed."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


@dataclass(frozen=True)
class _Step:
    """A call, and where its tensors come from in a replay: saved ones, or results of the step before, by place."""

    call: Call
    inputs: list[SavedInput | int]


class Segment:
    """One or several calls of blocks, whose activations one replay brings back.

    Args:
        size: how many calls it takes at most.
        compare_kinds: whether shapes, dtypes and devices of what is replayed are compared with the forward's.
    """

    def __init__(self, size: int = 1, compare_kinds: bool = True) -> None:
        self.size = size
        self._compare_kinds = compare_kinds
        self._steps: list[_Step] = []
        self._held: list[weakref.ref[_Held]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._early_stop = early_stop_is_on()
        self._opened_under = who_saves()
        self._started_from: list[tuple[weakref.ref[Tensor], int]] = []
        self._results: list[tuple[weakref.ref[Tensor], int]] = []

    def refuses(self, name: str, tensors: Sequence[Tensor]) -> str | None:
        """Why a call with these tensors can't join, in words; `None` if it can."""
        if who_saves() is not self._opened_under:
            # The replay of an outer checkpoint runs the calls inside it alone: joined across, they would not be there.
            return "another checkpoint, or another saved-tensor hook, begins or ends between the two"
        if not any(self._place(tensor) is not None for tensor in tensors):
            return "it does not take the result of the block before as it is"
        if any(step.call.name == name for step in self._steps):
            return CALLED_AGAIN
        if any(tensor._backward_hooks for tensor in tensors):
            # FSDP gathers parameters by such a hook, those of one of the two alone.
            return "a hook waits for the gradient of what lies between the two"
        for tensor in tensors:
            # A result of this segment in another guise would make the graph hold the segment, and the segment the
            # graph: nothing would ever be freed.
            if tensor.grad_fn is not None and self._place(tensor) is None and not self._began_with(tensor):
                return (
                    "it takes another tensor with a gradient, which may come from inside the segment (of a key-value "
                    "cache, say: turn off use_cache)"
                )
        return None

    @property
    def full(self) -> bool:
        """Whether it takes no more calls."""
        return len(self._steps) >= self.size

    def run(self, call: Call, tensors: Sequence[Tensor], forward: Callable[[], Any]) -> Any:
        """Run a block's forward as the segment's next call, and let go of what autograd would keep of it."""
        places = [self._place(tensor) for tensor in tensors]
        inputs = [SavedInput(t) if place is None else place for t, place in zip(tensors, places, strict=True)]
        if not self._steps and self.size > 1:
            self._started_from = _watched(tensors)
        before = len(self._held)
        self._steps.append(_Step(call, inputs))
        self._early_stop = self._early_stop and call.early_stop
        try:
            with saved_tensors_hooks(self._let_go, self._bring_back):
                output = forward()
        except BaseException:
            # Whoever catches this goes on without the call that failed.
            del self._steps[-1], self._held[before:], self._kinds[before:]
            self.size = len(self._steps)
            raise
        if not self.full:
            self._results = _watched(Arguments((output,), {}).take_tensors())
        return output

    def bring_back(self) -> None:
        """Replay, and hand out every tensor that was let go, as a backward pass would."""
        for place in self._held:
            if held := place():
                self._bring_back(held)

    def _place(self, tensor: Tensor) -> int | None:
        return _find(tensor, self._results)

    def _began_with(self, tensor: Tensor) -> bool:
        return _find(tensor, self._started_from) is not None

    def _let_go(self, tensor: Tensor) -> _Held:
        held = _Held()
        self._held.append(weakref.ref(held))
        if self._compare_kinds:
            self._kinds.append(_kind(tensor))
        self._steps[-1].call.saves(tensor)
        return held

    def _bring_back(self, held: _Held) -> Tensor:
        # Given away once: a second backward over a retained graph replays again, and memory falls as backward goes.
        if held.tensor is None:
            self._replay()
        tensor, held.tensor = held.tensor, None
        if tensor is None:
            raise CheckpointError(
                "A tensor of a checkpointed block whose forward ended in an exception is needed in backward: what such "
                "a forward has made can't be replayed."
            )
        return tensor

    def _replay(self) -> None:
        filling = _Filling(self._held, self._kinds, self._early_stop)
        try:
            results: Sequence[Tensor] = ()
            for step in self._steps:
                filling.call = step.call
                tensors = _given(step, results)
                # A hook for each call, as in the forward: segments inside must be the same in both.
                with saved_tensors_hooks(filling.take, _as_it_is), torch.enable_grad():
                    results = step.call.replay(tensors)
            filling.check_complete()
        except _Stop:
            return
        except Differs as differs:
            raise CheckpointError(str(differs)) from None
        except _SavesOther as how:
            raise CheckpointError(
                f"The replay of block {filling.call.name!r} differs from its forward: {how}. Likely cause: "
                f"{filling.call.cause()}."
            ) from None


def _given(step: _Step, results: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call, in a replay."""
    try:
        return [results[source] if isinstance(source, int) else source.unpack() for source in step.inputs]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise CheckpointError(
            f"An input of block {step.call.name!r} was changed in place after the block ran, so the block can't be "
            "replayed from it. Write `x = x + 1` for `x += 1`, or leave the block out of `blocks`."
        ) from error


class _Filling:
    """Puts what a replay saves into the places that the forward held."""

    call: Call  # that is replayed now

    def __init__(self, held: list[weakref.ref[_Held]], kinds: list[Any], early_stop: bool) -> None:
        self._held = held
        self._kinds = kinds
        self._early_stop = early_stop
        self._wanted = len(held)
        self._taken = 0

    def take(self, tensor: Tensor) -> Tensor:
        index, self._taken = self._taken, self._taken + 1
        self.call.saves(tensor)
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if index < self._wanted:
            self._compare(index, tensor)
            if held := self._held[index]():
                held.tensor = tensor
        if self._early_stop and self._taken == self._wanted:
            raise _Stop
        return tensor

    def _compare(self, index: int, tensor: Tensor) -> None:
        if self._kinds and self._kinds[index] != _kind(tensor):
            then, now = self._kinds[index], _kind(tensor)
            raise _SavesOther(f"saved tensor {index} was {_words(then)}, and is {_words(now)} now")

    def check_complete(self) -> None:
        if self._taken < self._wanted:
            raise _SavesOther(f"it saved {self._taken} tensors for backward instead of {self._wanted}")


def _watched(tensors: Sequence[Tensor]) -> list[tuple[weakref.ref[Tensor], int]]:
    return [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]


def _find(tensor: Tensor, watched: Sequence[tuple[weakref.ref[Tensor], int]]) -> int | None:
    """The place of a tensor among those watched, if it was not changed in place since."""
    for place, (known, version) in enumerate(watched):
        if known() is tensor and version_of(tensor) == version:
            return place
    return None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What must not differ between forward and replay, and costs nothing to compare."""
    return tensor.shape, tensor.dtype, tensor.device


def _words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{kind[1]} of shape {tuple(kind[0])} on {kind[2]}"
