"""The memory figures of an interval, from whichever reader measures."""

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt.memory import GIB, AcceleratorReader, HostReader, Interval, reader_for


class MemoryFigures:
    """Peak and room since they were last asked for; the limit is read once, at the start."""

    def __init__(self, device: torch.device) -> None:
        self._interval: Interval | None = Interval(reader_for(device))
        try:
            self._limit = self._interval.limit()
            self._interval.peak()
            self._interval.reset_peak()
        except OSError as error:
            rank_zero_info(f"StepMonitor: memory is left out: {error}")
            self._interval = None

    def since_last(self) -> dict[str, float]:
        if self._interval is None:
            return {}
        peak = self._interval.peak()
        figures = {**_peaks(self._interval, peak), **_room(peak, self._limit)}
        self._interval.reset_peak()
        return {f"memory/{name}": figure for name, figure in figures.items()}


def _peaks(interval: Interval, peak: int) -> dict[str, float]:
    reader = interval.reader
    if isinstance(reader, HostReader):
        return {"peak_rss_gib": peak / GIB}
    if not isinstance(reader, AcceleratorReader):
        return {"peak_allocated_gib": peak / GIB}
    return {
        "peak_allocated_gib": peak / GIB,
        "peak_reserved_gib": interval.peak_reserved() / GIB,
        "alloc_retries": reader.alloc_retries(),
        "ooms": reader.ooms(),
    }


def _room(peak: int, limit: int | None) -> dict[str, float]:
    return {"headroom_gib": (limit - peak) / GIB, "peak_fraction": peak / limit} if limit else {}
