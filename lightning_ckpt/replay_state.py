"""The state around a block that a replay must see as the forward saw it: random numbers, autocast, defaults."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_ckpt._compat import DropoutBase

# Backward runs replays on a thread of its own for each device, so the flag belongs to the thread.
_replaying = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs in a replay, to keep what must happen once a step out of it.

    Guard the side effect, not the computation: what forward computed with gradients, the replay must compute again.

    Examples:
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
    """The random state, autocast state, default device and default dtype of one call.

    Args:
        tensors: those that the call is given, and one of the block's own: the devices whose random state counts.
        preserve_rng_state: whether random states are kept at all.
        latest: the environment of the call before, whose copy of the host's random state serves again if nothing was
            drawn since: 5 kB a call, which thin blocks would notice.
    """

    def __init__(self, tensors: Sequence[Tensor], preserve_rng_state: bool, latest: "Environment | None") -> None:
        self._accelerator = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self._autocasts = [_Autocast.now(kind) for kind in ("cpu", self._accelerator) if kind]
        self._default_device = torch.get_default_device()
        self._default_dtype = torch.get_default_dtype()
        self._host = torch.get_rng_state() if preserve_rng_state else None
        if latest and self._host is not None and latest._host is not None and torch.equal(latest._host, self._host):
            self._host = latest._host
        self._devices: list[int] = []
        self._states: list[Tensor] = []
        if preserve_rng_state and self._accelerator:
            self._devices, self._states = get_device_states(*tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a replay in the state of the call, then go on in the state of now."""
        with ExitStack() as state:
            if self._host is not None:
                kind = self._accelerator or "cpu"
                state.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
                torch.set_rng_state(self._host)
                if self._states:
                    set_device_states(self._devices, self._states, device_type=kind)
            for autocast in self._autocasts:
                state.enter_context(autocast.again())
            if self._default_device != torch.get_default_device():
                state.enter_context(self._default_device)
            if self._default_dtype != torch.get_default_dtype():
                state.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
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


def warn_of_chance(chosen: list[tuple[str, nn.Module]]) -> None:
    """Warn, of the first of some blocks by name that draws random numbers, that its replay will draw others."""
    for name, block in chosen:
        for below, module in block.named_modules():
            # Dropout layers call their probability `p`, recurrent and attention layers `dropout`.
            chance = getattr(module, "p", None) if isinstance(module, DropoutBase) else getattr(module, "dropout", None)
            if isinstance(module, nn.RReLU) or (isinstance(chance, float) and chance > 0):
                warnings.warn(
                    f"preserve_rng_state=False, and {f'{name}.{below}'.rstrip('.')!r} ({type(module).__name__}) draws "
                    "random numbers: its replay draws others, and the gradients are wrong. Leave preserve_rng_state on",
                    stacklevel=3,
                )
                return
