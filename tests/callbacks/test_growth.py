"""The sizes that steps grow and shrink to, from their peaks alone."""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt.callbacks._growth import Growth
from lightning_ckpt.search import Search

TARGET = 10_000


def grown(growth: Growth, curve: Callable[[int], int], steps: int = 60) -> list[int]:
    """The sizes of that many steps."""
    sizes = []
    for _ in range(steps):
        sizes.append(growth.size)
        growth.step(curve(growth.size), full=True)
    return sizes


@given(
    floor=st.integers(0, 5000),
    slopes=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), min_size=1, max_size=3),
    multiple=st.sampled_from([1, 8]),
)
def test_every_curve_ends_settled_within_the_target_or_at_the_smallest(
    floor: int, slopes: list[tuple[int, int]], multiple: int
) -> None:
    """The peak is the highest of phases, each a straight line from the floor or above; each size costs two steps."""

    def curve(size: int) -> int:
        return max(floor + start + slope * size for start, slope in slopes)

    growth = Growth(Search(TARGET, multiple_of=multiple), size=2 * multiple)
    growth.floor = floor
    sizes = grown(growth, curve)
    assert growth.settled
    assert len(growth.measured) <= 8
    assert all(size % multiple == 0 for size in sizes)
    assert curve(sizes[-1]) <= TARGET or sizes[-1] == multiple
    counted = [m.size for m in growth.measured]
    twice = [size for m in growth.measured for size in [m.size] * (2 if m.peak <= TARGET else 1)]
    assert sizes[: len(twice)] == twice
    assert len(set(counted)) == len(counted)


def test_a_step_that_is_not_full_counts_only_where_it_is_too_large() -> None:
    growth = Growth(Search(TARGET), size=4)
    assert [growth.step(5000, full=False) for _ in range(5)] == [None] * 5
    assert growth.size == 4
    assert growth.step(TARGET + 1, full=False) == "measured"
    assert growth.size < 4


def test_a_creeping_size_counts_when_it_has_stopped_growing_or_after_six_steps() -> None:
    growth = Growth(Search(TARGET), size=4, creeping=True)
    assert [growth.step(peak, full=True) for peak in (1000, 1100, 1200, 1205)] == [None, None, None, "measured"]
    assert growth.measured[0].peak == 1205
    growth = Growth(Search(TARGET), size=4, creeping=True)
    assert [growth.step(1000 + 100 * at, full=True) for at in range(6)] == [None] * 5 + ["measured"]


def test_after_settling_only_a_peak_above_the_target_changes_the_size() -> None:
    """To what the chord from the floor allows, and to the next size below at least."""
    growth = Growth(Search(TARGET), size=100, settled=True)
    growth.floor = 2000
    assert [growth.step(peak, full=True) for peak in (100, TARGET)] == [None, None]
    assert growth.step(TARGET + 1, full=False) == "shrunk"
    assert growth.size == 99
    assert growth.step(18_000, full=True) == "shrunk"
    assert growth.size == math.floor(99 * 8000 / 16_000)


def test_what_creeps_may_use_what_was_kept_back_for_it() -> None:
    """Up to the ceiling; above it the size goes back to what the target allows."""
    growth = Growth(Search(TARGET), size=100, settled=True, ceiling=TARGET + 400)
    assert growth.step(TARGET + 400, full=True) is None
    assert growth.step(2 * TARGET, full=True) == "shrunk"
    assert growth.size == 50


def test_a_size_shrinks_among_those_allowed_and_says_once_that_it_can_not() -> None:
    growth = Growth(Search(TARGET, divides=60), size=30, settled=True)
    assert [growth.step(TARGET + 1, full=True) for _ in range(11)] == ["shrunk"] * 10 + ["can't shrink"]
    assert growth.size == 1
    assert growth.step(TARGET + 1, full=True) is None


def test_a_size_shrinks_by_no_more_than_half_at_once() -> None:
    """A peak far above the target may be made of something else, which a smaller batch does not change."""
    growth = Growth(Search(TARGET), size=64, settled=True)
    assert growth.step(100 * TARGET, full=True) == "shrunk"
    assert growth.size == 32


def test_where_not_even_the_smallest_size_fits_training_goes_on_with_it() -> None:
    growth = Growth(Search(TARGET), size=8)
    assert [growth.step(TARGET + 1, full=True) for _ in range(3)] == ["measured", "measured", "nothing fits"]
    assert (growth.size, growth.settled, growth.proven) == (1, True, None)
