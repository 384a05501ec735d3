"""Every byte of PyTorch's CPU allocator, counted exactly: alone, or on top of a process's resident size."""

from itertools import zip_longest
from types import TracebackType

import torch
from typing_extensions import Self

from lightning_ckpt import _compat
from lightning_ckpt.host_memory import HostReader

# Bytes that nothing else asks for and gives back at once.
_MARK = 12347


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
