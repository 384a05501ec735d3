"""The memory of a training step that runs on fake tensors: every byte its tensors would hold, and no others.

A fake tensor has a shape, a dtype and a device, and no memory; operators on it compute shapes. What real tensors would
allocate is known all the same: each storage's size when it appears, and the moment it goes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt._compat import FakeTensorMode, called_by_the_engine, storage_id


class Kind(Enum):
    """What memory is held for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    BACKWARD = "temporaries of backward"
    OPTIMIZER = "temporaries of the optimizer"


# Sharded training holds a share of these on each rank; what an optimizer computes on the way is as large as its shard.
SHARDED = frozenset({Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE, Kind.OPTIMIZER})

# What autograd does in place on real tensors whose memory nobody else holds, and out of place on subclasses of tensor
# (`InputBuffer::accumulate`, and the formulas of derivatives.yaml that ask `areAnyTensorSubclassLike`).
_IN_PLACE_IF_REAL = frozenset(
    {torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.scatter_add.default}
)

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """What a tensor's memory is like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Allocation:
    """What an operator takes from the allocator when it runs for real.

    Attributes:
        peak: the highest bytes that it holds at once, its results included.
        results: the layout of each tensor it returns, `None` where fake tensors have it right.
    """

    peak: int
    results: tuple[Layout | None, ...]


# What an operator takes from the allocator, if that is known; by operator, arguments and result, all fake.
Measure = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Allocation | None]


@dataclass
class _Held:
    storage: "weakref.ref[torch.UntypedStorage]"
    nbytes: int
    kind: Kind


class FakeMemory(FakeTensorMode):
    """Makes tensors fake while entered, and counts what they would hold.

    Not a mode beside `FakeTensorMode` but one itself, so that it also sees operators that run while all other modes
    are put aside.

    Args:
        born_as: what memory that appears now is held for.
        ranks: how many ranks share what sharded training shares.
        multiple_of: the allocator rounds every size up to a multiple of this.
        measure: tells what operators take beyond what their fake results say.

    Attributes:
        operators: what ran so far, and the dtype of its first result.
    """

    def __init__(
        self, *, born_as: Callable[[], Kind], ranks: int = 1, multiple_of: int = 1, measure: Measure | None = None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._born_as, self._ranks, self._multiple_of, self._measure = born_as, ranks, multiple_of, measure
        self._inside = False
        self._held: dict[int, _Held] = {}
        self._bytes = dict.fromkeys(Kind, 0)
        self._peak, self._at_peak = 0, dict(self._bytes)
        # An addition whose result may turn out to take its operand's place: the operand, and what was held with both.
        self._open: tuple[int, dict[Kind, int]] | None = None
        self.operators: set[tuple[Any, torch.dtype | None]] = set()

    @property
    def at_peak(self) -> dict[Kind, int]:
        """Bytes held on this rank at the highest moment since `reset_peak`, by what for."""
        self._settle()
        return {kind: self._share(kind, held) for kind, held in self._at_peak.items()}

    @property
    def transient(self) -> int:
        """Bytes held now that come with a step and go with it."""
        return sum(self._bytes[kind] for kind in (Kind.ACTIVATIONS, Kind.BACKWARD, Kind.OPTIMIZER))

    def reset_peak(self) -> None:
        """Start a new interval at what is held now."""
        self._open = None
        self._peak, self._at_peak = self._total(self._bytes), dict(self._bytes)

    def count_as(self, kind: Kind, tensors: Iterable[Tensor | None]) -> None:
        """Say what the memory of some tensors is held for."""
        for tensor in tensors:
            if tensor is not None and self._see(tensor, kind) is None:
                held = self._held[storage_id(tensor)]
                self._bytes[held.kind] -= held.nbytes
                self._bytes[kind] += held.nbytes
                held.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and count the memory that appears."""
        if self._inside or func is torch.ops.prim.device.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        self._settle()
        kwargs = _on_the_host(kwargs or {})
        result = self._inner(func, types, args, kwargs)
        self.operators.add((func, next((tensor.dtype for tensor in tensors_of(result)), None)))
        measured = self._measure(func, args, kwargs, result) if self._measure else None
        if measured and any(measured.results):
            result = self._with_layouts(result, iter(measured.results))
        seen = [self._see(tensor, None) or 0 for tensor in tensors_of(result)]
        held = self._with_more(measured.peak - sum(seen)) if measured else self._bytes
        if any(seen) and func in _IN_PLACE_IF_REAL and called_by_the_engine():
            self._open = storage_id(args[0]), dict(held)
        else:
            self._note(held)
        return result

    def _inner(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and count nothing of what it is made of inside: a kernel does it in one."""
        self._inside = True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False

    def _with_layouts(self, result: Any, layouts: Iterator[Layout | None]) -> Any:
        """A result whose tensors have the layouts that real ones have."""
        if isinstance(result, Tensor):
            layout = next(layouts, None)
            if layout is None:
                return result
            how = {"dtype": layout.dtype, "device": _HOST}
            return self._inner(torch.ops.aten.empty_strided.default, (), (layout.shape, layout.stride), how)
        if isinstance(result, list | tuple):
            parts = [self._with_layouts(part, layouts) for part in result]
            return parts if isinstance(result, list) else tuple(parts)
        return result

    def _with_more(self, nbytes: int) -> dict[Kind, int]:
        """What is held now, with what a kernel takes beside its results."""
        if nbytes <= 0:
            return self._bytes
        kind = self._born_as()
        return {**self._bytes, kind: self._bytes[kind] + nbytes}

    def _see(self, tensor: Tensor, kind: Kind | None) -> int | None:
        """Start to count the memory of a tensor; None where it is counted already."""
        if tensor.layout is not torch.strided:
            return 0
        key = storage_id(tensor)
        if key in self._held:
            return None
        storage = tensor.untyped_storage()
        nbytes = -(-storage.nbytes() // self._multiple_of) * self._multiple_of
        kind = kind or self._born_as()
        self._held[key] = _Held(weakref.ref(storage, lambda _: self._gone(key)), nbytes, kind)
        self._bytes[kind] += nbytes
        return nbytes

    def _gone(self, key: int) -> None:
        held = self._held.pop(key)
        self._bytes[held.kind] -= held.nbytes
        if self._open and self._open[0] == key:
            (_, then), self._open = self._open, None
            self._note({**then, held.kind: then[held.kind] - held.nbytes})

    def _settle(self) -> None:
        """The next operator runs: an operand that is still there was not replaced."""
        if self._open:
            (_, then), self._open = self._open, None
            self._note(then)

    def _note(self, held: dict[Kind, int]) -> None:
        total = self._total(held)
        if total > self._peak:
            self._peak, self._at_peak = total, dict(held)

    def _total(self, held: dict[Kind, int]) -> int:
        return sum(self._share(kind, nbytes) for kind, nbytes in held.items())

    def _share(self, kind: Kind, nbytes: int) -> int:
        return -(-nbytes // self._ranks) if kind in SHARDED else nbytes


def _on_the_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the host, where code asks for an accelerator: fake ones need a PyTorch that is built for it."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type in ("cpu", "meta"):
        return kwargs
    return {**kwargs, "device": _HOST}


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that an operator returned, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors_of(part)] if isinstance(result, list | tuple) else []
