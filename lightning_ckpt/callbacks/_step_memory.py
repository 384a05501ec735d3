"""The memory figures of an interval, from whichever reader measures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt.memory import GIB, AcceleratorReader, AllocatorReader, Counters, HostReader, Interval, reader_for

Phase = Literal["forward", "backward", "optimizer"]


class MemoryFigures:
    """Peaks and room since they were last asked for; the limit is read once, at the start.

    The peaks of a step's phases are told apart by reading and resetting at their ends. A process's resident size keeps
    what a phase has freed, and the profiler behind an `AllocatorReader` must not be read within an optimizer's step,
    where Lightning runs forward and backward: they tell the peak of the whole alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._reader = reader_for(device)
        self._interval: Interval | None = Interval(self._reader)
        self._has_phases = not isinstance(self._reader, HostReader | AllocatorReader)
        self._before: Counters | None = None  # the latest reset
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
        if self._interval is None or not self._has_phases:
            return
        counters = self._interval.counters()
        self._interval.reset_peak()
        self._before = counters.after(self._before)
        if phase:
            self._phases[phase] = max(self._phases.get(phase, 0), counters.peak)

    @property
    def limit(self) -> int | None:
        """What the process can hold, in bytes; None when unknown."""
        return self._limit if self._interval else None

    def peak(self) -> int | None:
        """The highest bytes since the last row; None when unknown."""
        return self._interval.counters().after(self._before).peak if self._interval else None

    def close(self) -> None:
        """Read no longer."""
        self._interval = None

    def since_last(self) -> Callable[[], dict[str, float]]:
        """Read, at the end of a phase, and return what makes figures of it: once they are written, and no sooner."""
        if self._interval is None:
            return dict
        counters, phases = self._before, self._phases
        if counters is None:  # no phase has read it
            counters = self._interval.counters()
            self._interval.reset_peak()
        self._before, self._phases = None, {}
        return partial(self._figures, counters, phases)

    def _figures(self, counters: Counters, phases: Mapping[Phase, int]) -> dict[str, float]:
        name = "memory/peak_rss_gib" if isinstance(self._reader, HostReader) else "memory/peak_allocated_gib"
        figures = {name: counters.peak / GIB}
        if isinstance(self._reader, AcceleratorReader):
            figures["memory/peak_reserved_gib"] = counters.reserved / GIB
            figures["memory/alloc_retries"] = counters.alloc_retries
            figures["memory/ooms"] = counters.ooms
        figures.update({f"memory/peak_{phase}_gib": size / GIB for phase, size in phases.items()})
        if self._limit:
            figures["memory/headroom_gib"] = (self._limit - counters.peak) / GIB
            figures["memory/peak_fraction"] = counters.peak / self._limit
        return figures
