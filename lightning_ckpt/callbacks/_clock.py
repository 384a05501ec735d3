"""Time as the device sees it, without waiting for the device."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

Spans = Sequence[tuple[Any, Any]]


class Clock(Protocol):
    """Takes marks now, and tells the time between them once it is known."""

    def mark(self) -> Any:
        """Return this instant."""

    def seconds(self, spans: Spans) -> float | None:
        """Return the time of the spans together, or None while the device has not come so far."""

    def wait(self, spans: Spans) -> None:
        """Wait until `seconds` knows; not for use in the training loop."""


class HostClock:
    """The host's clock: where the host computes, an instant is known at once."""

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, spans: Spans) -> float | None:
        if len(spans) == 1:  # as it nearly always is
            return float(spans[0][1] - spans[0][0])
        return float(sum(end - start for start, end in spans))

    def wait(self, spans: Spans) -> None:
        pass


class DeviceClock:
    """Events in the device's stream.

    The host runs ahead of an accelerator, so its own clock tells when work was queued. An event tells when it was
    done, and asking whether it has been reached (`query`) waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: Spans) -> float | None:
        if not all(mark.query() for span in spans for mark in span):
            return None
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1e3

    def wait(self, spans: Spans) -> None:
        for _, end in spans:
            end.synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of the device that computes, where it is an accelerator whose events tell the time."""
    current = torch.accelerator.current_accelerator()
    timed = current is not None and device.type == current.type and device.type != "mps"
    return DeviceClock(device) if timed else HostClock()
