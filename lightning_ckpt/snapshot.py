"""Everything a training step changes, copied before it and put back after it, bit by bit.

The copies lie in host memory that is not PyTorch's: they don't count where the peak of a step on an accelerator, or of
PyTorch's CPU allocator, is measured.
"""

import argparse
import collections
import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ckpt.held import local

Undo = Callable[[], None]

_ENTERED = (nn.Module, Optimizer, LRScheduler, GradScaler)
# Of the standard library, and yet nothing but the user's values under names.
_HOLDERS = (SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
# Entered for its counters and generators only: its samples may be all of the host's memory.
_DATA = (Dataset, Sampler)
_NEVER = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, weakref.ReferenceType, DataLoader)
# Objects of these packages are not the user's state: trainers, loggers, handles, dtypes, worker pools.
_FOREIGN = sys.stdlib_module_names | {
    *("torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "wandb"),
    "lightning_ckpt",
}
# A longer container of a dataset is its content, not its state.
_LONGEST_OF_DATA = 100


class RandomState:
    """The global random numbers of Python, NumPy and PyTorch, on the host and on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state().numpy().copy()
        # Of the device's own module, since `torch` has none for accelerators; Metal's knows a single device.
        self._which = () if self._device.type == "mps" else (self._device,)
        self._accelerator: Any = None
        if self._device.type != "cpu":
            self._accelerator = self._module().get_rng_state(*self._which)

    def restore(self) -> None:
        """Make the next random numbers those that were next when this was made."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(torch.from_numpy(self._torch))
        if self._accelerator is not None:
            self._module().set_rng_state(self._accelerator, *self._which)

    def same_as(self, other: "RandomState") -> bool:
        """Tell whether both would give the same random numbers."""
        return (
            self._python == other._python
            and all(np.array_equal(mine, yours) for mine, yours in zip(self._numpy, other._numpy, strict=True))
            and np.array_equal(self._torch, other._torch)
            and (self._accelerator is None or torch.equal(self._accelerator, other._accelerator))
        )

    def _module(self) -> Any:
        return torch.get_device_module(self._device)


class Snapshot:
    """The state of live objects and of the random numbers, to be put back into the same objects.

    Modules, optimizers, learning-rate schedulers, gradient scalers, and a user's own objects are entered through
    their attributes, containers through their items. Each keeps its identity: whoever refers to a parameter, a list or
    a metric finds it as it was. Tensors get their values, gradients and `requires_grad` back; attributes and items that
    were added go, those that went come back.

    Args:
        training: what the step changes.
        data: datasets, samplers and the like, of which numbers and random generators are kept but no samples.
        device: whose random numbers to keep beside the host's.
    """

    def __init__(
        self, training: Iterable[object], *, data: Iterable[object] = (), device: torch.device | str = "cpu"
    ) -> None:
        self.nbytes = 0
        self._undo: list[Undo] = []
        self._capture(training, light=False)
        self._capture(data, light=True)
        self._random = RandomState(device)

    def restore(self) -> None:
        """Put everything back. May be called again after further steps."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self._random.restore()

    def _capture(self, roots: Iterable[object], *, light: bool) -> None:
        waiting = collections.deque(roots)
        seen: dict[int, object] = {}  # holds the objects, so that an id stays theirs
        while waiting:
            value = waiting.popleft()
            if id(value) in seen or value is None or isinstance(value, bool | int | float | complex | str | bytes):
                continue
            seen[id(value)] = value
            waiting.extend(self._enter(value, light))

    def _enter(self, value: Any, light: bool) -> Iterable[object]:
        """Remember one object and return what it refers to."""
        if isinstance(value, Tensor | np.ndarray):
            if not light:
                self._remember_array(value)
            return [] if light or not isinstance(value, Tensor) or not value.is_leaf else [value.grad]
        if undo := _generator(value):
            self._undo.append(undo)
            return ()
        if isinstance(value, dict | list | set | collections.deque):
            return () if light and len(value) > _LONGEST_OF_DATA else self._container(value)
        if isinstance(value, tuple | frozenset):
            return () if light and len(value) > _LONGEST_OF_DATA else value
        return self._attributes(value) if _is_entered(value, light) else ()

    def _attributes(self, value: Any) -> Iterable[object]:
        inside = list(self._container(vars(value))) if hasattr(value, "__dict__") else []
        for slot in _slots(type(value)):
            undo, held = _slot(value, slot)
            self._undo.append(undo)
            inside.append(held)
        return inside

    def _container(self, value: Any) -> Iterable[object]:
        self._undo.append(_items(value))
        return list(value.values()) if isinstance(value, dict) else list(value)

    def _remember_array(self, value: Tensor | np.ndarray[Any, Any]) -> None:
        undo, nbytes = _tensor(value) if isinstance(value, Tensor) else _array(value)
        self._undo.append(undo)
        self.nbytes += nbytes


def _is_entered(value: Any, light: bool) -> bool:
    if isinstance(value, _NEVER):
        return False
    if isinstance(value, _DATA):
        return light
    return isinstance(value, _ENTERED + _HOLDERS) or type(value).__module__.partition(".")[0] not in _FOREIGN


def _slots(of: type) -> list[MemberDescriptorType]:
    """What a class and its bases declare in `__slots__`."""
    members = (member for each in of.__mro__ if "__slots__" in vars(each) for member in vars(each).values())
    return [member for member in members if isinstance(member, MemberDescriptorType)]


def _slot(owner: Any, slot: MemberDescriptorType) -> tuple[Undo, object]:
    """How to put one slot back, and what it holds; None where it is empty."""
    empty = object()

    def held() -> Any:
        try:
            return slot.__get__(owner)
        except AttributeError:
            return empty

    before = held()

    def put() -> None:
        if held() is before:
            return
        if before is empty:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, before)

    return put, None if before is empty else before


def _items(value: Any) -> Undo:
    """Put the same items back, in the same order; a container that did not change is not touched."""
    if isinstance(value, dict):
        pairs = list(value.items())

        def put_pairs() -> None:
            now = list(value.items())
            if len(now) != len(pairs) or any(
                a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, pairs, strict=True)
            ):
                value.clear()
                for key, item in pairs:  # not `update`, which in a Counter adds
                    value[key] = item

        return put_pairs
    items = list(value)

    def put_items() -> None:
        if (
            isinstance(value, set)
            or len(value) != len(items)
            or any(a is not b for a, b in zip(value, items, strict=True))
        ):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items)

    return put_items


def _generator(value: Any) -> Undo | None:
    """For a random generator: how to give it its state back."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _void(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits = copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        words = value.get_state(legacy=True)
        return lambda: value.set_state(words)
    if isinstance(value, random.Random):
        before = value.getstate()
        return lambda: value.setstate(before)
    return None


def _array(value: np.ndarray[Any, Any]) -> tuple[Undo, int]:
    kept = value.copy()
    return lambda: np.copyto(value, kept) if value.flags.writeable else None, kept.nbytes


def _tensor(value: Tensor) -> tuple[Undo, int]:
    grad, requires_grad = (value.grad if value.is_leaf else None), value.requires_grad
    kept = _copied(value)

    def put() -> None:
        if kept is not None:
            kept(value)
        if value.is_leaf:
            value.grad = grad
            value.requires_grad_(requires_grad)

    return put, 0 if kept is None else local(value).nbytes


def _copied(value: Tensor) -> Callable[[Tensor], None] | None:
    """Copy the values and return what writes them back; None for a tensor that holds none or can't be written to."""
    if (shard := local(value)) is not value:
        put = _copied(shard)
        return put and (lambda target: put(local(target)))
    if is_lazy(value) or value.is_meta or value.is_sparse or value.is_inference() or _overlaps(value):
        return None
    if type(value) not in (Tensor, nn.Parameter) or value.is_quantized or not value.numel():
        kept = value.detach().clone()
        return lambda target: _void(target.data.copy_(kept))
    shape, dtype, device = value.shape, value.dtype, value.device
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()

    def write(target: Tensor) -> None:
        values = torch.from_numpy(raw).view(dtype).reshape(shape)
        if target.shape == shape and target.dtype == dtype and target.device == device:
            target.detach().copy_(values)
        else:  # the step has put other storage under the tensor
            target.data = values.to(device, copy=True)

    return write


def _overlaps(value: Tensor) -> bool:
    """An expanded tensor can't be written to in place, by a step no more than by us."""
    return value.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)
    )


def _void(_: object) -> None:
    """Drop a result, where a function that returns nothing is wanted."""
