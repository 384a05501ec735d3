"""A block's parameters and buffers, as a forward found them, for its replay.

A replay runs a block's side effects again. Left alone, BatchNorm's running statistics move twice a step, and a
spectral-normalised layer is replayed from a later estimate than the one its forward used, which gives wrong gradients.
So a replay runs on copies of the buffers as they were before the forward, and the live ones come back afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError

from lightning_ckpt._compat import FakeTensor, NormBase, is_sharded, without_modes
from lightning_ckpt.versions import version_of

_Key = tuple[int, str]

# How many forwards compare all buffers by value. Several, since a counter may start something in the second one.
_LEARNING = 3


class Parameters:
    """The parameters with which one call ran.

    `torch.func.functional_call` puts others in their place for the time of a call, and its replay needs those. A
    parameter that was written to in between can't be had back: plain autograd raises then for most, and so does this.
    """

    def __init__(self, block: nn.Module) -> None:
        # Sharding gathers and frees parameters between forward and replay, by itself.
        self._then = [] if any(map(is_sharded, block.modules())) else list(_parameters(block))

    @contextmanager
    def as_then(self, block: str) -> Iterator[None]:
        """Run a replay of the named block with them."""
        written = [name for _, name, parameter, version in self._then if version_of(parameter) != version]
        if written:
            raise CheckpointError(
                f"Block {block!r} can't be replayed: parameters changed between forward and backward: "
                f"{', '.join(sorted(set(written)))}. Step the optimizer after backward."
            )
        swapped = [
            (module, name, parameter, module._parameters.get(name))
            for module, name, parameter, _ in self._then
            if module._parameters.get(name) is not parameter
        ]
        try:
            for module, name, parameter, _ in swapped:
                module._parameters[name] = parameter  # type: ignore[assignment]
            yield
        finally:
            for module, name, _, now in swapped:
                module._parameters[name] = now


def _parameters(block: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                yield module, name, parameter, version_of(parameter)


@dataclass(frozen=True)
class _Values:
    """A buffer as it was: the live tensor, its version, and a copy."""

    live: Tensor
    version: int
    copy: Tensor


@dataclass(frozen=True)
class _Buffer:
    """One buffer as a forward found it; no values where it was `None`, or not there at all."""

    module: nn.Module
    name: str
    found: _Values | None
    known: bool = False
    there: bool = True

    @property
    def key(self) -> _Key:
        return id(self.module), self.name

    def touched(self) -> bool:
        """Whether the buffer was replaced, or written to by an operator that says so, since."""
        now = self.module._buffers.get(self.name)
        if now is None or self.found is None:
            return now is not None or self.found is not None
        return now is not self.found.live or version_of(now) != self.found.version


class Buffers:
    """Which of a block's buffers its forward changes, learned as it runs, and their values before each forward.

    The first forwards copy every buffer and compare afterwards, and so do those after a training mode or another flag
    of a module with buffers has changed. Later ones copy only the buffers that changed. The copy of a constant one (a
    mask, a rotary table) is made once and stays good until somebody writes to it, so that a buffer that starts to
    change later is still replayed as it was, unless it is written to through `.data`, which leaves no trace.
    """

    def __init__(self) -> None:
        self.learning = _LEARNING
        self._flags: list[Any] = []
        self._changing: set[_Key] = set()
        self._constant: dict[_Key, _Values] = {}

    def before_forward(self, block: nn.Module) -> list[_Buffer]:
        """The block's buffers as they are now."""
        owners = [module for module in block.modules() if module._buffers]
        flags = [[value for value in vars(owner).values() if isinstance(value, bool)] for owner in owners]
        if flags != self._flags:
            self._flags, self.learning = flags, _LEARNING
        copies: dict[int, _Values] = {}  # a buffer that has two names is one buffer
        return [
            self._look(owner, name, buffer, copies)
            for owner in owners
            if owner.training or not _is_norm(owner)  # outside of training a norm only reads its statistics
            for name, buffer in owner._buffers.items()
        ]

    def _look(self, owner: nn.Module, name: str, buffer: Tensor | None, copies: dict[int, _Values]) -> _Buffer:
        if buffer is None:
            return _Buffer(owner, name, None)
        known = self._constant.get((id(owner), name))
        if known and known.live is buffer and known.version == version_of(buffer):
            return _Buffer(owner, name, known, known=True)
        if id(buffer) not in copies:
            copies[id(buffer)] = _Values(buffer, version_of(buffer), buffer.detach().clone())
        return _Buffer(owner, name, copies[id(buffer)])

    def after_forward(self, block: nn.Module, before: list[_Buffer]) -> None:
        """Learn which buffers the forward changed, from how it found them."""
        if self.learning:
            listed = {buffer.key for buffer in before}
            made = ((m, name) for m in block.modules() for name in m._buffers if (id(m), name) not in listed)
            before += [_Buffer(m, name, None, there=False) for m, name in made if m.training or not _is_norm(m)]
        for buffer in before:
            if buffer.key in self._changing:
                continue
            if self._has_changed(buffer):
                self._changing.add(buffer.key)
                self._constant.pop(buffer.key, None)
            elif buffer.found is not None:
                self._constant[buffer.key] = buffer.found
        self.learning = max(0, self.learning - 1)

    def _has_changed(self, buffer: _Buffer) -> bool:
        # A norm's native kernel writes without raising the version, and may leave the first values as they are.
        if _is_norm(buffer.module) or buffer.touched():
            return True
        if buffer.found is None or (buffer.known and not self.learning):
            return False
        # Code that goes through `.data` raises no version either: it is found by value.
        return not _same_values(buffer.found.live, buffer.found.copy)

    @contextmanager
    def as_before(self, before: list[_Buffer]) -> Iterator[None]:
        """Run a replay on the buffers as the forward found them, then put the live ones back."""
        swapped = [buffer for buffer in before if buffer.key in self._changing or buffer.touched()]
        live = [(buffer, buffer.name in buffer.module._buffers, _now(buffer)) for buffer in swapped]
        found = {id(buffer.found): buffer.found.copy for buffer in swapped if buffer.found}
        with without_modes():
            scratch = {key: copy.clone() for key, copy in found.items()}
        try:
            for buffer in swapped:
                _put(buffer, scratch.get(id(buffer.found)), buffer.there)
            yield
        finally:
            for buffer, was_there, now in live:
                _put(buffer, now, was_there)


def _put(buffer: _Buffer, value: Tensor | None, there: bool) -> None:
    if there:
        buffer.module._buffers[buffer.name] = value
    else:
        buffer.module._buffers.pop(buffer.name, None)


def _now(buffer: _Buffer) -> Tensor | None:
    return buffer.module._buffers.get(buffer.name)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NormBase)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN for NaN; kinds that can't be compared count as different.

    Fake tensors have no values that could differ: who writes to them with an operator has raised their version.
    """
    if isinstance(one, FakeTensor):
        return True
    try:
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False  # sparse, jagged and meta tensors among them
