"""One call of a block replayed for measurement: counted to its end, and timed as backward would have it."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt._compat import storage_id
from lightning_ckpt.checkpointed_forward import Call
from lightning_ckpt.held import has_memory, with_memory

# PyTorch's own tables in a module.
_TABLES = frozenset(vars(nn.Module()))
_COLLECTIONS = (list, dict, set)
# Replays that are timed; one before them has warmed up caches, allocator and kernels.
_REPLAYS = 7
# More bytes than caches of hosts hold for one core; not PyTorch's memory, so that it counts where that is measured.
_CACHED = 32 * 2**20

_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """What autograd saves in a call.

    Attributes:
        count: how many tensors, parameters among them.
        nbytes: bytes of unique memory, less what is there anyway.
        outputs: for each tensor of the call's result, the bytes among them that are its memory.
    """

    count: int
    nbytes: int
    outputs: tuple[int, ...]


def count_saved(call: Call, tensors: Sequence[Tensor], *, there: set[int]) -> Saved:
    """Replay a call to its end, and count what autograd saves.

    Args:
        call: the call.
        tensors: its inputs.
        there: identities of memory that is there anyway: parameters and buffers. The inputs' is added.
    """
    left_out = there | set(map(storage_id, with_memory(tensors)))
    sizes: dict[int, int] = {}
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if has_memory(tensor) and storage_id(tensor) not in left_out:
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a result that its own graph node holds as it is would never be freed

    with saved_tensors_hooks(pack, _as_it_is), torch.enable_grad():
        results = call.again(tensors)
    nbytes = sum(sizes.values())
    outputs = tuple(
        sizes.pop(storage_id(result), 0) for result in with_memory(results)
    )  # memory of two results counts once
    return Saved(count, nbytes, outputs)


class _Enough(BaseException):
    """Ends a replay that has all that backward needs. No `Exception`: a block's own handlers must not catch it."""


def replay_alone(
    call: Call, tensors: Sequence[Tensor], wanted: int, mode: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    """Replay a call as backward has it replayed, up to the last of `wanted` saved tensors, and return those."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        if call.early_stop and len(saved) == wanted:
            raise _Enough
        return saved[-1]

    with saved_tensors_hooks(pack, _as_it_is), torch.enable_grad(), suppress(_Enough):
        call.again(tensors, [mode] if mode else [])
    return saved


def median_seconds(run: Callable[[], Any], tensors: Sequence[Tensor]) -> float:
    """The median time of several runs, the work of the tensors' devices included, each with caches of the host cold."""

    def cold() -> float:
        _forget_caches()
        return seconds_of(run, tensors)

    return statistics.median(cold() for _ in range(_REPLAYS))


def seconds_of(run: Callable[[], Any], tensors: Iterable[Tensor]) -> float:
    """The time of one run, the work of the tensors' devices included."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    # On one thread of the host its own time: what loaders and other processes do meanwhile is none of it.
    clock = time.perf_counter if devices or torch.get_num_threads() > 1 else time.thread_time
    _wait(devices)
    start = clock()
    run()
    _wait(devices)
    return clock() - start


@cache
def _other_memory() -> np.ndarray[Any, Any]:
    return np.zeros(_CACHED, dtype=np.uint8)


def _forget_caches() -> None:
    """Fill the host's caches with other memory: by the time a block is replayed the step has done so too."""
    _other_memory().fill(0)


def _wait(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def attributes_kept(block: nn.Module) -> Iterator[None]:
    """Put back what replays change in a block's own attributes: a step counts its calls once, not once a replay."""
    found = [(vars(module), _own_attributes(module)) for module in block.modules()]
    try:
        yield
    finally:
        for attributes, before in found:
            attributes.update(before)


def unrecorded(run: Callable[[], _T]) -> _T:
    """Run where context variables hold copies of their collections.

    The model's forward has not ended, and what gathers its parts' outputs, as Hugging Face's hooks do in such a
    variable, is to gather those of the forward alone.
    """
    context = copy_context()

    def inside() -> _T:
        for variable, value in list(context.items()):
            if type(value) in _COLLECTIONS:
                variable.set(_copied(value))
        return run()

    return context.run(inside)


def _copied(value: Any) -> Any:
    """A builtin collection and those in it, copied."""
    if type(value) is dict:
        return {key: copy(one) if type(one) in _COLLECTIONS else one for key, one in value.items()}
    return copy(value)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, builtin containers among them copied; PyTorch's own tables are left out."""
    own = {name: value for name, value in vars(module).items() if name not in _TABLES and name != "forward"}
    return {name: copy(value) if type(value) in _COLLECTIONS else value for name, value in own.items()}
