"""A memory reader that knows only how many samples a batch had."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_ckpt.memory import use_reader

MIB = 2**20


class SampleMeter:
    """A memory reader whose peak, in MiB, is a function of the largest batch since the last reset.

    With its 2000 MiB, a tenth of headroom, and 1000 MiB and 20 a sample, 40 samples fit.
    """

    def __init__(self, curve: Callable[[int], float] | None = None, *, limit: int | None = 2000) -> None:
        self.curve = curve or (lambda size: 1000 + 20 * size)
        self._limit, self._largest = limit, 0
        self.sizes: list[int] = []

    def see(self, size: int) -> None:
        self.sizes.append(size)
        self._largest = max(self._largest, size)

    def reset_peak(self) -> None:
        self._largest = 0

    def peak(self) -> int:
        return int(self.curve(self._largest) * MIB)

    def limit(self) -> int | None:
        return None if self._limit is None else self._limit * MIB


_open: list[SampleMeter] = []


@contextmanager
def metered(meter: SampleMeter) -> Iterator[SampleMeter]:
    """Let memory be read from a meter that hears of each batch whose size is `seen`."""
    _open.append(meter)
    try:
        with use_reader(meter):
            yield meter
    finally:
        _open.remove(meter)


def seen(size: int) -> None:
    """A step has a batch of this size."""
    for meter in _open:
        meter.see(size)
