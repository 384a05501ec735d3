"""What operators take from the allocator: each runs once for real, alone, on zeros of its shapes.

Fake tensors know an operator's results and nothing of its kernel: oneDNN's reordered copies, the packed inputs of
16-bit products, casts of mixed operands, the workspace that a recurrent layer keeps for backward.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt._compat import allocations_during, storage_id, without_modes
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.fake_memory import Allocation, Layout, tensors_of
from lightning_ckpt.memory import AcceleratorReader, HostReader, Interval
from lightning_ckpt.sizes import format_size

log = logging.getLogger(__name__)

# Operators whose kernels take much for themselves: on any device, and those whose results have 16 bits on a CPU.
_GREEDY = ("aten.convolution", "aten.mkldnn_rnn_layer")
_GREEDY_IN_HALF = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_HALF = (torch.float16, torch.bfloat16)


def greedy(ran: Iterable[tuple[Any, torch.dtype | None]], device: str) -> tuple[str, ...]:
    """The names of operators whose kernels take much memory for themselves, among those that ran, with their dtypes."""
    names = {(str(operator.overloadpacket), dtype in _HALF) for operator, dtype in ran}
    in_half = _GREEDY_IN_HALF if device == "cpu" else ()
    found = {name for name, half in names if name in _GREEDY or (half and name in in_half)}
    return tuple(name for name in (*_GREEDY, *_GREEDY_IN_HALF) if name in found)


class KernelMemory:
    """Measures operators that run on fake tensors, once for each combination of shapes, strides and dtypes.

    It needs the memory of one operator at a time, and leaves out operators that are not PyTorch's own, those whose
    memory is not free, and those that fail on zeros; the log says which, and why.

    Args:
        device: where operators run: `"cpu"`, or an accelerator that is there.

    Attributes:
        left_out: the names of operators that were not measured.

    Raises:
        RuntimeError: a profiler is running already, which would be ended.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._peak(lambda: None)  # what keeps it from recording is said here, not of each operator
        self._known: dict[Hashable, Allocation | None] = {}
        self.left_out: set[str] = set()

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Allocation | None:
        """What an operator takes, if it can be measured.

        Args:
            operator: an overload.
            args: as it was called, with fake tensors.
            kwargs: as it was called, with fake tensors.
            result: what it gave on fake tensors.
        """
        key = (operator, _signature(args), _signature(kwargs))
        if key not in self._known:
            arguments, found = Arguments(args, kwargs), tensors_of(result)
            takes_memory = not operator.is_view and (arguments.tensors or found)
            self._known[key] = self._measured(operator, arguments, found) if takes_memory else None
        return self._known[key]

    def _measured(self, operator: Any, arguments: Arguments, found: list[Tensor]) -> Allocation | None:
        name = str(operator.overloadpacket)
        why = self._why_not(operator, [*arguments.tensors, *found])
        try:
            if why is None:
                return self._run(operator, arguments, found)
        except Exception as error:  # kernels raise what they like: zeros are not for all of them
            why = str(error).partition("\n")[0]
        if name not in self.left_out:
            log.warning("what the kernel of %s takes for itself is not counted: %s", name, why)
        self.left_out.add(name)
        return None

    def _why_not(self, operator: Any, tensors: Sequence[Tensor]) -> str | None:
        if operator.namespace != "aten":
            return "it is none of PyTorch's own, and may do more than compute"
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return "its tensors are sparse"
        # As much again as its tensors is what a kernel may take.
        needed, free = 2 * sum(tensor.untyped_storage().nbytes() for tensor in tensors), self._free()
        if free is None or needed <= free:
            return None
        return f"it may need {format_size(needed)} to run, and {format_size(free)} are free"

    def _free(self) -> int | None:
        if self._device.type == "cpu":
            host = HostReader()
            limit, used = host.limit(), host.current()
        else:
            limit, used = AcceleratorReader(self._device).limit(), torch.accelerator.memory_allocated(self._device)
        return None if limit is None else limit - used

    def _run(self, operator: Any, arguments: Arguments, found: list[Tensor]) -> Allocation:
        with without_modes():
            given = [_zeros(tensor, self._device) for tensor in arguments.tensors]
            args, kwargs = arguments.rebuild(given)
            if "device" in kwargs:
                kwargs["device"] = self._device
            peak, result = self._peak(partial(operator, *args, **kwargs))
        return Allocation(peak, _layouts(found, tensors_of(result), given))

    def _peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """The highest bytes that a call allocates, and what it returns."""
        if self._device.type == "cpu":
            result, deltas = allocations_during(call)
            return max(accumulate(deltas), default=0), result
        call()  # libraries take a workspace with their first call, and keep it
        before = torch.accelerator.memory_allocated(self._device)
        interval = Interval(AcceleratorReader(self._device))
        interval.reset_peak()
        result = call()
        return interval.peak() - before, result


def _signature(value: Any) -> Hashable:
    """What an operator's memory may depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(part)) for name, part in value.items())
    if isinstance(value, float):  # learning rates change with each step, a dropout's zero is another kernel
        return float, value in (0.0, 1.0) and value
    return type(value), value


def _zeros(tensor: Tensor, device: torch.device) -> Tensor:
    """A real tensor like a fake one: any index that it may hold is in range."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()


def _layouts(found: list[Tensor], real: list[Tensor], given: list[Tensor]) -> tuple[Layout | None, ...]:
    """The layouts of real results that have memory of their own, where the fake ones are not like them."""
    if len(found) != len(real):
        return ()
    taken, fakes = {storage_id(tensor) for tensor in given}, set[int]()
    layouts = []
    for fake, result in zip(found, real, strict=True):
        new = storage_id(result) not in taken
        alike = storage_id(fake) not in fakes and _layout(fake) == _layout(result)
        layouts.append(_layout(result) if new and not alike else None)
        taken.add(storage_id(result))
        fakes.add(storage_id(fake))
    return tuple(layouts)


def _layout(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)
