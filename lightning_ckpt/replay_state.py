"""What a replay must see as the forward saw it: random numbers, autocast, and the buffers that a block changes.

A replay runs a block's side effects again. Left alone, BatchNorm's running statistics move twice a step, and a
spectral-normalised layer is replayed from a later estimate than the one its forward used, which gives wrong gradients.
So a replay runs on copies of the buffers as they were before the forward, and the live ones come back afterwards.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_ckpt._compat import NormBase


@dataclass(frozen=True)
class _Before:
    """One buffer as a forward found it: the live tensor, its version then, and a copy of its values."""

    module: nn.Module
    name: str
    live: Tensor
    version: int
    copy: Tensor

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.name

    def touched(self) -> bool:
        """Whether the buffer was replaced, or written to by an operator that says so, since."""
        return self.module._buffers.get(self.name) is not self.live or tensor_version(self.live) != self.version


# Backward runs replays on a thread of its own for each device, so the flag belongs to the thread.
_replaying = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs in a replay, to keep what must happen once a step out of it.

    Guard the side effect, not the computation: what forward computed with gradients, the replay must compute again.

    Example:
        >>> balance = []
        >>> class Router(torch.nn.Linear):
        ...     def forward(self, x):
        ...         y = super().forward(x)
        ...         loss = y.square().mean()
        ...         if not is_recomputing():
        ...             balance.append(loss)
        ...         return y
    """
    return not torch.compiler.is_compiling() and getattr(_replaying, "depth", 0) > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """What `is_recomputing` tells of."""
    _replaying.depth = getattr(_replaying, "depth", 0) + 1
    try:
        yield
    finally:
        _replaying.depth -= 1


class Environment:
    """The random state, autocast state and default device of one call.

    Args:
        tensors: those that the call is given, and one of the block's own: the devices whose random state counts.
        preserve_rng_state: whether random states are kept at all.
    """

    def __init__(self, tensors: Sequence[Tensor], preserve_rng_state: bool) -> None:
        self._accelerator = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self._autocasts = [_Autocast.now(kind) for kind in ("cpu", self._accelerator) if kind]
        self._default_device = torch.get_default_device()
        self._host: Tensor | None = torch.get_rng_state() if preserve_rng_state else None
        self._devices: list[int] = []
        self._states: list[Tensor] = []
        if preserve_rng_state and self._accelerator:
            self._devices, self._states = get_device_states(*tensors)

    def after_forward(self) -> None:
        """Let go of the host's random state, 5 kB, where the forward drew no random number from it."""
        if self._host is not None and torch.equal(self._host, torch.get_rng_state()):
            self._host = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a replay in the state of the call, then go on in the state of now."""
        with ExitStack() as state:
            kind = self._accelerator or "cpu"
            if self._host is not None or self._states:
                state.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
            if self._host is not None:
                torch.set_rng_state(self._host)
            if self._states:
                set_device_states(self._devices, self._states, device_type=kind)
            for autocast in self._autocasts:
                state.enter_context(autocast.again())
            if self._default_device != torch.get_default_device():
                state.enter_context(self._default_device)
            yield


@dataclass(frozen=True)
class _Autocast:
    kind: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @staticmethod
    def now(kind: str) -> "_Autocast":
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return _Autocast(kind, enabled, dtype, torch.is_autocast_cache_enabled())

    def again(self) -> torch.autocast:
        return torch.autocast(self.kind, self.dtype, self.enabled, self.cache)


class ReplayState:
    """The buffers of one block, and which of them its forward changes, learned as it runs.

    The first forward copies every buffer and compares afterwards. Later ones copy only those that changed; the copy of
    a constant one (a mask, a rotary table) is made once and stays good until somebody writes to the buffer, so that a
    buffer that starts to change later is still replayed as it was.
    """

    def __init__(self) -> None:
        self._changing: set[tuple[int, str]] = set()
        self._constant: dict[tuple[int, str], _Before] = {}

    def before_forward(self, block: nn.Module) -> list[_Before]:
        """The block's buffers as they are now."""
        return [
            self._look(module, name, buffer)
            for module in block.modules()
            if module._buffers and (module.training or not _is_norm(module))
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _look(self, module: nn.Module, name: str, buffer: Tensor) -> _Before:
        known = self._constant.get((id(module), name))
        if known and known.live is buffer and not known.touched():
            return known
        return _Before(module, name, buffer, tensor_version(buffer), buffer.detach().clone())

    def after_forward(self, before: list[_Before]) -> None:
        """Learn which buffers the forward changed, from how it found them."""
        for found in before:
            if found.key in self._changing:
                continue
            known = found is self._constant.get(found.key)
            # Code that goes through `.data` writes without raising the version: new buffers are compared by value.
            if _is_norm(found.module) or found.touched() or not (known or torch.equal(found.live, found.copy)):
                self._changing.add(found.key)
                self._constant.pop(found.key, None)
            else:
                self._constant[found.key] = found

    @contextmanager
    def as_before(self, before: list[_Before]) -> Iterator[None]:
        """Run a replay on the buffers as the forward found them, then put the live ones back."""
        swapped = [found for found in before if found.key in self._changing or found.touched()]
        live = [found.module._buffers.get(found.name) for found in swapped]
        try:
            for found in swapped:
                found.module._buffers[found.name] = found.copy.clone()
            yield
        finally:
            for found, buffer in zip(swapped, live, strict=True):
                found.module._buffers[found.name] = buffer


def tensor_version(tensor: Tensor) -> int:
    """How often the tensor was written to. Inference tensors do not count, and can't be written to in training."""
    return -1 if tensor.is_inference() else tensor._version


def _is_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics that a native kernel moves, in training only and without a version."""
    return isinstance(module, NormBase)
