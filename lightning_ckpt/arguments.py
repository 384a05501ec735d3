"""A call's arguments with the tensors taken out, to be called again later.

PyTorch saves, watches and offloads only the tensors that a checkpointed function takes by position: a tensor found
inside a container or a keyword that is changed in place gives zero gradients without an error, and the random state
of a device found only there is not saved. So every tensor goes in by position, and the rest is rebuilt around it.
"""

import copy
from collections import UserDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor, by its index."""

    index: int


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, _Slot)


class Arguments:
    """The positional and keyword arguments of one call, as they were when it was made.

    Containers are copied, since callers fill and change them between one block and the next: tuples, named tuples,
    lists, deques, dicts, dataclasses, key-value caches as Hugging Face has them, and objects with tensors for
    attributes. Any other object is passed on as it is. PyTorch's own pytree would stop at most of these.

    Attributes:
        tensors: every tensor among the arguments once, in the order of their first appearance.
        opaque: the class of an object that could not be looked into, by its name; `None` if there was none.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.opaque: str | None = None
        take = partial(_take, self, {})
        self._args = tuple(map(take, args))
        self._kwargs = {name: take(value) for name, value in kwargs.items()}

    def take_tensors(self) -> list[Tensor]:
        """Hand the tensors over, so that whoever saves them is the only one to keep them alive."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` in the places of the originals."""
        put = partial(_put, tensors)
        return tuple(map(put, self._args)), {name: put(value) for name, value in self._kwargs.items()}


# Functions that visit themselves are no closures: a closure that holds itself keeps its tensors until a collection.


def _take(arguments: Arguments, slots: dict[int, _Slot], value: Any) -> Any:
    """`value` with slots for tensors, which join those of `arguments`."""
    if not isinstance(value, Tensor):
        rebuilt = _rebuilt(value, partial(_take, arguments, slots))
        if rebuilt is value and not isinstance(value, _PLAIN) and type(value) is not tuple:
            arguments.opaque = type(value).__name__
        return rebuilt
    # A tensor passed twice stays one tensor in the replay: attention takes another path if `query is key`.
    if id(value) not in slots:
        slots[id(value)] = _Slot(len(arguments.tensors))
        arguments.tensors.append(value)
    return slots[id(value)]


def _put(tensors: Sequence[Tensor], value: Any) -> Any:
    """`value` with tensors for slots."""
    return tensors[value.index] if isinstance(value, _Slot) else _rebuilt(value, partial(_put, tensors))


def _rebuilt(value: Any, visit: Callable[[Any], Any]) -> Any:
    """A copy of a container with every part visited; anything that is no container, itself."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        parts = map(visit, value)
        # Not the constructor: that of a PackedSequence, for one, computes its fields anew.
        return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts) if type(value) is tuple else value
    if isinstance(value, dict):
        copied: Any = copy.copy(value)
        for key, part in value.items():
            copied[key] = visit(part)
        return copied
    if isinstance(value, list | deque):
        copied = copy.copy(value)
        for index, part in enumerate(value):
            copied[index] = visit(part)
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        return _copied(value, {f.name: visit(getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)})
    if isinstance(value, SimpleNamespace | UserDict) or _is_cache(value) or _holds_tensors(value):
        return _copied(value, {name: visit(part) for name, part in vars(value).items()})
    return value


def _is_cache(value: Any) -> bool:
    """Whether a value is a key-value cache, which every layer of a Hugging Face model writes to."""
    return hasattr(type(value), "get_seq_length") and hasattr(type(value), "update")


def _holds_tensors(value: Any) -> bool:
    """Whether a value is an object with tensors for attributes: a graph, a distribution, a user's own batch."""
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(part, Tensor | _Slot) for part in vars(value).values())


def _copied(value: Any, parts: dict[str, Any]) -> Any:
    copied = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(copied, name, part)  # also where a dataclass is frozen
    return copied
