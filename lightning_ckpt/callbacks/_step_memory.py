"""The memory figures of an interval, from whichever reader measures."""

from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt.memory import GIB, AcceleratorReader, AllocatorReader, HostReader, Interval, reader_for

Phase = Literal["forward", "backward", "optimizer"]


class MemoryFigures:
    """Peaks and room since they were last asked for; the limit is read once, at the start.

    The peaks of a step's phases are told apart by reading and resetting at their ends. A process's resident size keeps
    what a phase has freed, and the profiler behind an `AllocatorReader` must not be read within an optimizer's step,
    where Lightning runs forward and backward: they tell the peak of the whole alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._interval: Interval | None = Interval(reader_for(device))
        self._peak = self._reserved = 0  # before the latest phase
        self._phases: dict[Phase, int] = {}
        try:
            self._limit = self._interval.limit()
            self._interval.peak()
            self._interval.reset_peak()
        except OSError as error:
            rank_zero_info(f"StepMonitor: memory is left out: {error}")
            self._interval = None

    def end_phase(self, phase: Phase | None) -> None:
        """A phase of the step ends here; None for what is none: validation, the saving of a checkpoint."""
        if self._interval is None or isinstance(self._interval.reader, HostReader | AllocatorReader):
            return
        peak = self._interval.peak()
        self._peak = max(self._peak, peak)
        self._reserved = max(self._reserved, self._interval.peak_reserved())
        self._interval.reset_peak()
        if phase:
            self._phases[phase] = max(self._phases.get(phase, 0), peak)

    @property
    def limit(self) -> int | None:
        """What the process can hold, in bytes; None when unknown."""
        return self._limit if self._interval else None

    def peak(self) -> int | None:
        """The highest bytes since the last row; None when unknown."""
        return max(self._peak, self._interval.peak()) if self._interval else None

    def close(self) -> None:
        """Read no longer."""
        self._interval = None

    def since_last(self) -> dict[str, float]:
        if self._interval is None:
            return {}
        peak = max(self._peak, self._interval.peak())
        reserved = max(self._reserved, self._interval.peak_reserved())
        figures = self._peaks(peak, reserved)
        if self._limit:
            figures["memory/headroom_gib"] = (self._limit - peak) / GIB
            figures["memory/peak_fraction"] = peak / self._limit
        self._interval.reset_peak()
        self._peak, self._reserved, self._phases = 0, 0, {}
        return figures

    def _peaks(self, peak: int, reserved: int) -> dict[str, float]:
        assert self._interval is not None
        reader = self._interval.reader
        if isinstance(reader, HostReader):
            return {"memory/peak_rss_gib": peak / GIB}
        figures = {"memory/peak_allocated_gib": peak / GIB}
        if isinstance(reader, AcceleratorReader):
            figures["memory/peak_reserved_gib"] = reserved / GIB
            figures["memory/alloc_retries"] = reader.alloc_retries()
            figures["memory/ooms"] = reader.ooms()
        figures.update({f"memory/peak_{phase}_gib": size / GIB for phase, size in self._phases.items()})
        return figures
