"""Time that tests of the callbacks hold in their hands."""

import gc
from collections.abc import Iterator

import pytest

from lightning_ckpt.callbacks import _clock
from recording import Clock
from sample_meter import SampleMeter, metered


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the monitor reads; it moves when a test's parts say how long they take."""
    clock = Clock()
    monkeypatch.setattr(_clock, "perf_counter", clock)
    return clock


@pytest.fixture
def meter() -> Iterator[SampleMeter]:
    """Memory that 40 samples fill but for a tenth."""
    with metered(SampleMeter()) as reader:
        yield reader


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Trials collect garbage, and going through all of Lightning each time would take most of a file's time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
