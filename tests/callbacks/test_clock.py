"""An accelerator's time is read from events that have been reached, and never waited for in the loop."""

from typing import Any

import pytest
import torch

from lightning_ckpt.callbacks._clock import DeviceClock, HostClock, clock_for


class Event:
    """Events of a device that comes to them one by one, half a second apart."""

    reached = 0
    made = 0

    def __init__(self, device: Any, *, enable_timing: bool) -> None:
        assert enable_timing
        self.number = 0

    def record(self) -> None:
        Event.made += 1
        self.number = Event.made

    def query(self) -> bool:
        return self.number <= Event.reached

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query()
        return 500.0 * (end.number - self.number)

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.number)


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "reached", 0)
    monkeypatch.setattr(Event, "made", 0)
    return DeviceClock(torch.device("cuda"))


def test_unknown_until_the_device_is_there(device_clock: DeviceClock) -> None:
    """Two spans with a pause between have a time once the last event is reached: the pause is no part of it."""
    first, pause, resume, last = (device_clock.mark() for _ in range(4))
    spans = [(first, pause), (resume, last)]
    assert device_clock.seconds(spans) is None
    Event.reached = 3
    assert device_clock.seconds(spans) is None
    Event.reached = 4
    assert device_clock.seconds(spans) == 1.0


def test_waiting_is_a_choice(device_clock: DeviceClock) -> None:
    """After training, the clock can be told to wait, for no more than its own events."""
    spans = [(device_clock.mark(), device_clock.mark())]
    device_clock.mark()
    device_clock.wait(spans)
    assert device_clock.seconds(spans) == 0.5
    assert Event.reached == 2


def test_the_host_knows_at_once() -> None:
    """Where the host computes, its own clock is right."""
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    start, end = clock.mark(), clock.mark()
    assert clock.seconds([(start, end), (start, end)]) == 2 * (end - start)


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_devices_without_timed_events(kind: str) -> None:
    """A device that is no accelerator of this PyTorch, or has no timed events, is timed by the host."""
    assert isinstance(clock_for(torch.device(kind)), HostClock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device() -> None:
    """The device's own time of a known amount of work is above zero and below the host's."""
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, DeviceClock)
    host = HostClock()
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    begin, start = host.mark(), clock.mark()
    for _ in range(20):
        x = x @ x
    spans = [(start, clock.mark())]
    clock.wait(spans)
    seconds = clock.seconds(spans)
    assert seconds is not None
    assert 0 < seconds <= host.mark() - begin
