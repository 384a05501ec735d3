"""The memory of one training step over its time, from the allocator's own events."""

import time
from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ckpt._compat import AllocationRecording, CudaAllocationRecording, storage_id
from lightning_ckpt.cli._measurement import CAUSES, StepMemory

# How many stretches of a step the curve is drawn with: two points each, its highest and its last.
_STRETCHES = 160


class StepRecording:
    """Records the CPU allocator's events, or those of CUDA's caching allocator, over one step.

    It is to be made a step before the one that counts: the CPU allocator tells the size of what is freed only of memory
    that it gave while it was watched, and a step begins by freeing the gradients of the one before. Recording slows
    steps down, so they are none to time. On other accelerators there is a peak and no curve. The CUDA path has not run
    on a device yet.

    Args:
        module: what is trained.
        device: where the module is.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._recording = _recording(device)
        self._ends: dict[str, int] = {}
        self._without: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self.started = False

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """Begin the step that counts, trained by these optimizers."""
        self.started = True
        self._static = {
            "parameters": _bytes([*self._module.parameters(), *self._module.buffers()]),
            "optimizer state": _bytes(tensor for optimizer in optimizers for tensor in _state(optimizer)),
        }
        self._gradients = [(0, self._held_gradients())]  # (time in nanoseconds, bytes held from then on)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in self._module.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]
        self._base = sum(self._static.values()) + self._gradients[0][1]
        if self._device.type != "cpu":
            self._base = torch.accelerator.memory_allocated(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
        if isinstance(self._recording, AllocationRecording):
            self._recording.restart()
        self._start = time.time_ns()

    def before_backward(self) -> None:
        """Take note that the forward is over; of several, the first counts."""
        self._ends.setdefault("forward", time.time_ns())
        self._without = {id(p) for p in self._module.parameters() if p.grad is None}
        self._gradients.append((time.time_ns(), self._held_gradients()))

    def after_backward(self) -> None:
        """Take note that backward is over; of several, the last counts."""
        self._ends["backward"] = time.time_ns()

    def stop(self) -> StepMemory:
        """End the step."""
        end = time.time_ns()
        events = self._recording.stop_timed() if self._recording else []
        events = [event for event in events if event[0] >= self._start]
        for hook in self._hooks:
            hook.remove()
        held = _running_sum(events, self._base, self._start)
        moment, peak = max(held, key=lambda point: point[1])
        if self._device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(self._device)
        length = end - self._start
        ends = [self._ends.get("forward", end), self._ends.get("backward", end), end]
        return StepMemory(
            peak=peak,
            causes=self._causes(moment, peak),
            curve=[(round((at - self._start) / length, 5), size) for at, size in _thinned(held, end)] if events else [],
            phases=[(at - self._start) / length for at in ends],
        )

    def _causes(self, moment: int, peak: int) -> dict[str, int]:
        gradients = self._gradients[bisect_right(self._gradients, (moment, peak)) - 1][1]
        known = self._static | {"gradients": gradients}
        known["activations"] = max(0, peak - sum(known.values()))
        return {cause: known[cause] for cause in CAUSES}

    def _held_gradients(self) -> int:
        return _bytes(p.grad for p in self._module.parameters() if p.grad is not None)

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) in self._without and parameter.grad is not None:
            self._without.discard(id(parameter))
            self._gradients.append((time.time_ns(), self._gradients[-1][1] + _bytes([parameter.grad])))


def _recording(device: torch.device) -> AllocationRecording | CudaAllocationRecording | None:
    if device.type == "cpu":
        return AllocationRecording()
    return CudaAllocationRecording(device) if device.type == "cuda" else None


def _running_sum(events: list[tuple[int, int]], base: int, start: int) -> list[tuple[int, int]]:
    held = [(start, base)]
    for at, delta in events:
        held.append((at, held[-1][1] + delta))
    return held


def _thinned(held: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The highest and the last point of each stretch of time."""
    start = held[0][0]
    stretches: dict[int, list[tuple[int, int]]] = {}
    for at, size in held:
        stretches.setdefault((at - start) * _STRETCHES // max(1, end - start), []).append((at, size))
    kept = [point for points in stretches.values() for point in (max(points, key=lambda p: p[1]), points[-1])]
    return sorted(dict.fromkeys(kept), key=lambda point: point[0])


def _state(optimizer: Optimizer) -> Iterable[Tensor]:
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, shared memory once."""
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
