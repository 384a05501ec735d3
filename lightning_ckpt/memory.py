"""Peak memory, read where it is: the accelerator's allocator, the host's kernel, or the CPU allocator's own events.

Readers behind one protocol, and what several who read the same memory need. Everything here is in bytes; GiB appear
only where a person reads them.
"""

import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from lightning_ckpt.exact_memory import AllocatorReader, ExactHostReader
from lightning_ckpt.host_memory import HostReader

__all__ = [
    "GIB",
    "AcceleratorReader",
    "AllocatorReader",
    "Counters",
    "ExactHostReader",
    "HostReader",
    "Interval",
    "Marks",
    "MemoryReader",
    "ResetMarks",
    "marks_of",
    "reader_for",
    "release_unused",
    "use_reader",
]

GIB = 2**30


@runtime_checkable
class MemoryReader(Protocol):
    """Where a peak is read: any object with these three methods."""

    def reset_peak(self) -> None:
        """Start a new interval: the next `peak()` looks back no further than this call."""

    def peak(self) -> int:
        """Return the highest use since `reset_peak()`, in bytes."""

    def limit(self) -> int | None:
        """Return the most this process can hold now, in bytes, or None when nobody knows."""


class Counters(NamedTuple):
    """What is told of an interval, all of it read at once.

    Args:
        peak: the highest bytes in use.
        reserved: the highest bytes that an accelerator's allocator held from the device, its cache included.
        alloc_retries: how often, since the start, an allocation succeeded only after the cache was flushed.
        ooms: how many out-of-memory errors the allocator has raised since the start.
    """

    peak: int
    reserved: int = 0
    alloc_retries: int = 0
    ooms: int = 0

    def after(self, before: "Counters | None") -> "Counters":
        """Return those of the interval before and this one together."""
        if before is None:
            return self
        peak, reserved = max(self.peak, before.peak), max(self.reserved, before.reserved)
        return self._replace(peak=peak, reserved=reserved)


class AcceleratorReader:
    """Counters of an accelerator's caching allocator; reading them does not wait for the device.

    Args:
        device: the accelerator, with its index or as the current one of its type.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def reset_peak(self) -> None:
        """Start a new interval at what is allocated now."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the highest bytes held by tensors since the last reset."""
        return self.counters().peak

    def counters(self) -> Counters:
        """Return all that is counted since the last reset: PyTorch collects every statistic for each that is asked."""
        known = torch.accelerator.memory_stats(self.device)  # empty before the allocator's first use
        names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
        return Counters(*(int(known.get(name, 0)) for name in names))

    def limit(self) -> int | None:
        """Return what this process can hold: the device's free memory and what its allocator has already reserved.

        On a card of its own that is the whole device, less the driver's context; on a shared card, less what others
        hold; no more than the share that `torch.cuda.set_per_process_memory_fraction` allows. None for a backend that
        does not tell its free memory.
        """
        backend = torch.get_device_module(self.device)
        if not hasattr(backend, "mem_get_info"):
            return None
        free, total = backend.mem_get_info(self.device)
        room = int(free) + torch.accelerator.memory_reserved(self.device)
        share = getattr(backend, "get_per_process_memory_fraction", lambda index: 1.0)(self._index)
        return min(room, int(total * share))

    @property
    def _index(self) -> int:
        """The device's number: of a device named by its type alone, the one that is current."""
        index = self.device.index
        return torch.accelerator.current_device_index() if index is None else index


_overrides: list[MemoryReader] = []


@contextlib.contextmanager
def use_reader(reader: MemoryReader) -> Iterator[MemoryReader]:
    """Let monitor, planner and tuner read memory from `reader` while the context is open, whatever the device.

    Raises:
        TypeError: when `reader` lacks one of the protocol's methods.
    """
    if not isinstance(reader, MemoryReader):
        raise TypeError(
            f"use_reader: {reader!r} is no MemoryReader; give an object with reset_peak(), peak() -> int (bytes) and "
            "limit() -> int | None (bytes)"
        )
    _overrides.append(reader)
    try:
        yield reader
    finally:
        _overrides.remove(reader)


def reader_for(device: torch.device | str) -> MemoryReader:
    """Return the innermost `use_reader` reader, or else the one that reads the memory of `device`."""
    if _overrides:
        return _overrides[-1]
    device = torch.device(device)
    current = torch.accelerator.current_accelerator()
    if current is not None and device.type == current.type and device.type != "mps":
        return AcceleratorReader(device)
    return HostReader()  # unified memory (mps) and devices without an allocator of their own are host memory


class Interval:
    """One reader's own peak, where several read the same memory: the reset of one leaves the peaks of the others alone.

    Args:
        reader: what is read.
    """

    def __init__(self, reader: MemoryReader) -> None:
        self.reader = reader
        self._before: Counters | None = None  # the latest reset of another
        _intervals.add(self)

    def reset_peak(self) -> None:
        """Start a new interval."""
        for other in _intervals if len(_intervals) > 1 else ():
            if other is not self and _same_memory(other.reader, self.reader):
                other._before = other.counters()
        self.reader.reset_peak()
        self._before = None

    def peak(self) -> int:
        """Return the highest use since this interval began, in bytes."""
        return self.counters().peak

    def counters(self) -> Counters:
        """Return what is counted since this interval began; of readers other than an accelerator's, the peak alone."""
        reader = self.reader
        now = reader.counters() if isinstance(reader, AcceleratorReader) else Counters(reader.peak())
        return now.after(self._before)

    def limit(self) -> int | None:
        """Return the most this process can hold now, in bytes, or None when nobody knows."""
        return self.reader.limit()


_intervals: "weakref.WeakSet[Interval]" = weakref.WeakSet()


class Marks(Protocol):
    """Tells the peaks of one stretch after the other."""

    def mark(self) -> None:
        """End a stretch here, and begin the next."""

    def marked(self) -> list[int]:
        """Return the peak of each stretch that ended since this was last asked for, in bytes."""


class ResetMarks:
    """Marks by reading and resetting the peak: what accelerators' counters allow anywhere.

    Args:
        interval: what is read.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._peaks: list[int] = []

    def mark(self) -> None:
        """End a stretch here, and begin the next."""
        self._peaks.append(self._interval.peak())
        self._interval.reset_peak()

    def marked(self) -> list[int]:
        """Return the peak of each stretch that ended since this was last asked for, in bytes."""
        peaks, self._peaks = self._peaks, []
        return peaks


def marks_of(reader: MemoryReader) -> Marks:
    """Return what tells the stretches of a step apart by this reader."""
    return reader if isinstance(reader, AllocatorReader | ExactHostReader) else ResetMarks(Interval(reader))


def _same_memory(one: MemoryReader, other: MemoryReader) -> bool:
    if isinstance(one, AcceleratorReader) and isinstance(other, AcceleratorReader):
        return one.device.type == other.device.type and one._index == other._index
    return one is other or (isinstance(one, HostReader) and isinstance(other, HostReader))


def release_unused(device: torch.device | str) -> None:
    """Give back memory that nothing uses, so that the next measurement starts from what is really held.

    Collects garbage, empties the accelerator's cache, and asks the C library to return its free pages to the kernel.
    """
    gc.collect()
    if torch.device(device).type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
