"""Time that tests of the callbacks hold in their hands."""

import pytest

from lightning_ckpt.callbacks import _clock
from recording import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the monitor reads; it moves when a test's parts say how long they take."""
    clock = Clock()
    monkeypatch.setattr(_clock, "perf_counter", clock)
    return clock
