"""Peak memory, read where it is: the accelerator's allocator, the host's kernel, or the CPU allocator's own events.

Three readers behind one protocol. Everything here is in bytes; GiB appear only where a person reads them.
"""

import contextlib
import ctypes
import gc
import logging
import os
import re
import sys
import weakref
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import Self

from lightning_ckpt import _compat

log = logging.getLogger(__name__)

GIB = 2**30

# Bytes that nothing else asks for and gives back at once.
_MARK = 12347


@runtime_checkable
class MemoryReader(Protocol):
    """Where a peak is read: any object with these three methods."""

    def reset_peak(self) -> None:
        """Start a new interval: the next `peak()` looks back no further than this call."""

    def peak(self) -> int:
        """Return the highest use since `reset_peak()`, in bytes."""

    def limit(self) -> int | None:
        """Return the most this process can hold now, in bytes, or None when nobody knows."""


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
        return torch.accelerator.max_memory_allocated(self.device)

    def peak_reserved(self) -> int:
        """Return the highest bytes the allocator held from the device since the last reset, its cache included."""
        return torch.accelerator.max_memory_reserved(self.device)

    def alloc_retries(self) -> int:
        """Return how often, since the start, an allocation succeeded only after the cache was flushed."""
        return self._count("num_alloc_retries")

    def ooms(self) -> int:
        """Return how many out-of-memory errors the allocator has raised since the start."""
        return self._count("num_ooms")

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
        share = getattr(backend, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)
        return min(room, int(total * share))

    def _count(self, name: str) -> int:
        return int(torch.accelerator.memory_stats(self.device).get(name, 0))


class HostReader:
    """The resident size of this process, as the kernel keeps it.

    The peak is `VmHWM`, which Linux resets when "5" is written to `/proc/self/clear_refs`. Where that is not allowed
    the peak is the one since the process started, which is said once in the log. Pages the process gave back to
    its C library but not to the kernel still count: call `release_unused` before a measurement that has to be tight.

    Args:
        proc: where the kernel tells about this process.
        cgroup: where control groups are mounted.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._status = _KernelFile(proc / "self/status", os.O_RDONLY)
        self._clear_refs = _KernelFile(proc / "self/clear_refs", os.O_WRONLY | os.O_CREAT)
        self._can_reset = True

    def reset_peak(self) -> None:
        """Start a new interval at the current resident size, where the kernel lets us."""
        if not self._can_reset:
            return
        try:
            # 5 resets the peak resident size and nothing else: proc(5), /proc/pid/clear_refs.
            self._clear_refs.write(b"5")
        except OSError as error:
            self._can_reset = False
            log.warning(
                "The host's peak memory can't be reset (%s): memory figures are the highest since this process "
                "started, not since the last logged step.",
                error,
            )

    def peak(self) -> int:
        """Return the highest resident bytes since the last reset.

        Raises:
            OSError: where the system tells neither in /proc nor through `getrusage`.
        """
        return self._status.kib(b"VmHWM") or _peak_since_start()

    def current(self) -> int:
        """Return the resident bytes now; where the kernel doesn't tell, the highest since the start."""
        return self._status.kib(b"VmRSS") or _peak_since_start()

    def limit(self) -> int | None:
        """Return what this process can hold now: its own resident bytes and those still to be had.

        To be had is what the kernel says is available without swapping, and no more than what the tightest control
        group above the process has left.
        """
        rooms = list(_group_rooms(self._proc, self._cgroup))
        available = _kib(self._proc / "meminfo", "MemAvailable")
        if available is not None:
            rooms.append(available)
        return self.current() + max(min(rooms), 0) if rooms else None


class _KernelFile:
    """A file about this process, kept open: to open it takes many times as long as to read it.

    Args:
        path: which file.
        flags: how it is opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._path, self._flags = path, flags
        self._file: int | None = None
        self._process = 0

    def write(self, content: bytes) -> None:
        os.pwrite(self._opened(), content, 0)

    def kib(self, name: bytes) -> int | None:
        """Return the number behind `name:`, in kB, as bytes; None where there is no such file or number."""
        try:
            _, found, after = os.pread(self._opened(), 4096, 0).partition(name + b":")
        except OSError:
            return None
        return int(after.split(None, 1)[0]) * 1024 if found else None

    def _opened(self) -> int:
        if self._file is None or self._process != os.getpid():  # a forked process has files of its own
            self._file, self._process = os.open(self._path, self._flags), os.getpid()
        return self._file

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class AllocatorReader:
    """Every byte of PyTorch's CPU allocator, exactly, while entered: for tests and benchmarks.

    The running sum of the profiler's memory events, which starts at zero on entering: tensors of before do not count,
    nor does their end. It profiles the thread that entered it and the backward passes started there.

    Args:
        limit: the bytes to report as this machine's limit; None when there is none.

    Raises:
        RuntimeError: on entering, while it is entered already or another profiler runs.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._now = self._peak = 0
        self._stretch = 0
        self._marked: list[int] = []
        self._recording: _compat.AllocationRecording | None = None

    def __enter__(self) -> Self:
        if self._recording is not None:
            raise RuntimeError("this AllocatorReader is already entered; make a second one to measure inside it")
        self._now = self._peak = self._stretch = 0
        self._marked = []
        self._recording = _compat.AllocationRecording()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording is not None:
            self._count(self._recording.stop())
        self._recording = None

    def reset_peak(self) -> None:
        """Start a new interval at what is allocated now."""
        self._read()
        self._peak = self._now

    def peak(self) -> int:
        """Return the highest running sum since the last reset; after the exit, up to the exit."""
        self._read()
        return self._peak

    def current(self) -> int:
        """Return the bytes allocated since entering that are still held."""
        self._read()
        return self._now

    def limit(self) -> int | None:
        """Return the limit this reader was given."""
        return self._limit

    def mark(self) -> None:
        """End a stretch here; also within a backward pass, where nothing can be read."""
        with _compat.without_modes():
            torch.empty(_MARK, dtype=torch.uint8, device="cpu")  # seen among the events, in its place

    def marked(self) -> list[int]:
        """Return the peak of each stretch that ended since this was last asked for."""
        self._read()
        marked, self._marked = self._marked, []
        return marked

    def _read(self) -> None:
        if _compat.backward_under_way() != -1:
            raise RuntimeError(
                "an AllocatorReader can't be read within a backward pass: the recording would end with it"
            )
        if self._recording is not None:
            self._count(self._recording.restart())

    def _count(self, deltas: list[int]) -> None:
        for delta, following in zip_longest(deltas, deltas[1:], fillvalue=0):
            if delta == _MARK == -following:
                self._marked.append(self._stretch)
                self._stretch = self._now
            self._now += delta
            if delta != _MARK:
                self._peak, self._stretch = max(self._peak, self._now), max(self._stretch, self._now)


class ExactHostReader:
    """The resident size on entering, plus every byte of PyTorch's CPU allocator since.

    A resident size keeps what a step has freed, so the peaks of a step's parts can't be told apart by it.

    Args:
        host: where the resident size is read.
    """

    def __init__(self, host: HostReader) -> None:
        self._host = host
        self._allocated = AllocatorReader()
        self._before = 0

    def __enter__(self) -> Self:
        self._before = self._host.current()
        self._allocated.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._allocated.__exit__(kind, error, trace)

    def reset_peak(self) -> None:
        """Start a new interval at what is allocated now."""
        self._allocated.reset_peak()

    def peak(self) -> int:
        """Return the highest bytes since the last reset."""
        return self._before + self._allocated.peak()

    def limit(self) -> int | None:
        """Return what this process can hold now, as the host tells."""
        return self._host.limit()

    def mark(self) -> None:
        """End a stretch here."""
        self._allocated.mark()

    def marked(self) -> list[int]:
        """Return the peak of each stretch that ended since this was last asked for."""
        return [self._before + peak for peak in self._allocated.marked()]


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
        self._peak = self._reserved = 0  # before the latest reset of another
        _intervals.add(self)

    def reset_peak(self) -> None:
        """Start a new interval."""
        for other in _intervals:
            if other is not self and _same_memory(other.reader, self.reader):
                other._peak = other.peak()
                other._reserved = other.peak_reserved()
        self.reader.reset_peak()
        self._peak = self._reserved = 0

    def peak(self) -> int:
        """Return the highest use since this interval began, in bytes."""
        return max(self._peak, self.reader.peak())

    def peak_reserved(self) -> int:
        """Return the highest bytes an accelerator's allocator held since this interval began; 0 for other readers."""
        now = self.reader.peak_reserved() if isinstance(self.reader, AcceleratorReader) else 0
        return max(self._reserved, now)

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
        return one.device == other.device
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


def _peak_since_start() -> int:
    """`getrusage`'s peak, where /proc does not tell: kilobytes on Linux, bytes on macOS."""
    try:
        import resource  # Windows has no such module
    except ImportError as error:
        raise OSError(
            "this system does not tell the peak memory of a process; measure with a reader of your own: "
            "`with lightning_ckpt.memory.use_reader(reader):`"
        ) from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _entry(path: Path, name: str) -> int | None:
    """Return the number behind `name` in a kernel file of `name: number` or `name number` lines."""
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _kib(path: Path, name: str) -> int | None:
    number = _entry(path, name)
    return None if number is None else number * 1024


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _group_rooms(proc: Path, mount: Path) -> Iterator[int]:
    """Yield the bytes left in each control group above the process that has a limit (cgroup v2, then v1)."""
    paths = _group_paths(proc)
    for base, limit, usage, cache in (
        (mount, "memory.max", "memory.current", "inactive_file"),
        (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group in _with_parents(paths.get("memory" if base != mount else "", "/")):
            folder = base / group
            most, used = _number(folder / limit), _number(folder / usage)
            if most is None or used is None:
                continue
            # The kernel drops file pages nobody has touched lately before it refuses memory.
            yield most - used + (_entry(folder / "memory.stat", cache) or 0)


def _group_paths(proc: Path) -> dict[str, str]:
    """Return the process's group by controller, "" for cgroup v2, from `id:controllers:path` lines."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split(":", 2) for line in lines)
    return {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(",")}


def _with_parents(path: str) -> Iterator[str]:
    """Yield the group and every group above it, down to the mount's root ("")."""
    group = PurePosixPath(path.lstrip("/"))
    yield from dict.fromkeys([str(group), *(str(parent) for parent in group.parents), "."])
