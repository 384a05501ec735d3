"""The largest size that fits: against trying every size, on curves such as peaks have."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt.fitting import largest_size

LINES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60)), min_size=1, max_size=4)


@given(lines=LINES, limit=st.integers(0, 4000), start=st.integers(1, 300))
def test_it_is_the_one_that_trying_every_size_finds(lines: list[tuple[int, int]], limit: int, start: int) -> None:
    """Whatever phases the peak is the highest of, and wherever the search starts."""

    def peak(size: int) -> int:
        return max(floor + slope * size for floor, slope in lines)

    expected = max((size for size in range(1, 257) if peak(size) <= limit), default=0)
    assert largest_size(peak, limit, start=start, most=256) == expected


@given(lines=LINES, limit=st.integers(2000, 10**9))
def test_it_needs_few_sizes(lines: list[tuple[int, int]], limit: int) -> None:
    """A step is seconds for a large model: a straight curve needs a handful, a bent one not many more."""
    tried = []

    def peak(size: int) -> int:
        tried.append(size)
        return max(floor + (slope + 1) * size for floor, slope in lines)

    largest_size(peak, limit, start=1)
    assert len(tried) <= 16
    assert len(tried) == len(set(tried))


def test_a_peak_that_does_not_grow_fits_in_every_size() -> None:
    """There is no larger size to be had than the largest that may be tried."""
    assert largest_size(lambda size: 5, 5, start=3, most=1000) == 1000


def test_nothing_fits() -> None:
    """Zero says so: there is no batch of no samples."""
    assert largest_size(lambda size: 10 + size, 10) == 0
