"""The search for the largest batch that fits, on curves whose answer is known."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ckpt.search import Measurement, NothingFits, Phase, Search
from lightning_ckpt.search import highest_of as highest_of_ranks

Curve = Callable[[int], float]
MANY = 60


def measure_all(search: Search, curve: Curve, *, limit: float, floor: int = 0) -> list[Measurement]:
    """Run the search to its end: above `limit` bytes memory runs out."""
    measured: list[Measurement] = []
    while (size := search.propose(measured, floor=floor)) is not None:
        assert size not in [m.size for m in measured], "a size was tried twice"
        measured.append(Measurement(size, math.ceil(min(curve(size), limit)), out_of_memory=curve(size) > limit))
    return measured


def largest(curve: Curve, target: float, *, step: int = 1) -> int:
    """The answer, by bisection over multiples of `step`."""
    low, high = 0, 2**22
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if curve(middle * step) <= target else (low, middle - 1)
    return low * step


def highest_of(*lines: tuple[float, float]) -> Curve:
    return lambda size: max(start + slope * size for start, slope in lines)


def test_a_straight_line_takes_two_small_sizes_and_one_jump() -> None:
    curve = highest_of((1000, 10))
    measured = measure_all(Search(target=1800), curve, limit=2000, floor=1000)
    assert [m.size for m in measured] == [2, 4, 80]
    assert Search(target=1800).settled(measured) == 80


def test_checkpointing_that_hides_the_growth_at_first_is_not_extrapolated() -> None:
    """Peaks of an 8-layer GPT, MB: the line through 2 and 4 promises 567 where 63 fit."""
    curve = highest_of((479, 2.5), (293, 25.5))
    search = Search(target=1900)
    measured = measure_all(search, curve, limit=1900 / 0.9, floor=293)
    assert not any(m.out_of_memory for m in measured)
    assert len(measured) <= 5
    assert search.settled(measured) == largest(curve, 1900) == 63


def test_a_flat_start_is_never_read_as_room_without_end() -> None:
    """The optimizer's step dominates up to 100 samples, then every sample counts."""
    curve = highest_of((1000, 0), (0, 10))
    search = Search(target=1800, max_trials=MANY)
    measured = measure_all(search, curve, limit=2000)
    assert all(later.size <= 2 * earlier.size for earlier, later in itertools.pairwise(measured))
    assert not any(m.out_of_memory for m in measured)
    assert search.settled(measured) >= 0.95 * 180


def test_the_first_size_is_init_val_and_the_second_about_twice_it() -> None:
    measured = measure_all(Search(target=10**9, init_val=10, max_trials=2), highest_of((0, 100)), limit=10**9)
    assert [m.size for m in measured] == [10, 20]


def test_without_init_val_the_first_size_is_two_multiples() -> None:
    assert Search(target=100, multiple_of=8).propose([]) == 16


def test_it_goes_down_when_the_first_size_does_not_fit() -> None:
    curve: Curve = lambda size: 100 if size <= 4 else 1e18  # noqa: E731
    search = Search(target=1000, init_val=8)
    assert search.settled(measure_all(search, curve, limit=1000)) == 4


def test_a_first_size_far_too_large_is_left_in_big_steps() -> None:
    search = Search(target=1030, init_val=4096)
    measured = measure_all(search, highest_of((1000, 10)), limit=1144)
    assert search.settled(measured) == 3
    assert len(measured) <= 6


def test_an_out_of_memory_error_bounds_the_search() -> None:
    search = Search(target=1500, init_val=60)
    measured = measure_all(search, lambda size: 1000 + 10 * size if size <= 50 else 1e18, limit=1e9)
    assert search.settled(measured) == 50
    assert sum(m.out_of_memory for m in measured) == 1


def test_the_chord_to_a_size_that_was_too_large_is_used() -> None:
    """600 bytes at 10 and 1200 at 40: whatever convex curve joins them, 20 samples need at most 800."""
    search = Search(target=800)
    assert search.propose([Measurement(10, 600), Measurement(40, 1200)]) == 20


def test_an_out_of_memory_peak_is_no_end_of_a_chord() -> None:
    """What a failed step had reached is less than it needed: a chord to it would promise too much."""
    search = Search(target=800)
    assert search.propose([Measurement(10, 600), Measurement(40, 900, out_of_memory=True)]) == 19


def test_nothing_fits_even_at_the_smallest() -> None:
    search = Search(target=1000)
    measured = measure_all(search, highest_of((2000, 1)), limit=5000)
    assert measured[-1].size == 1
    with pytest.raises(NothingFits, match=r"no batch size fits into 1000 bytes: tried \[2, 1\]"):
        search.settled(measured)


def test_the_last_trial_is_the_smallest_size_when_nothing_has_fitted() -> None:
    search = Search(target=1000, init_val=2**20, max_trials=3)
    assert [m.size for m in measure_all(search, lambda size: 999 + size, limit=999)][-1] == 1


def test_max_val_and_multiple_of_are_kept() -> None:
    search = Search(target=10**9, max_val=100, multiple_of=8, min_val=10)
    measured = measure_all(search, highest_of((0, 1)), limit=10**9)
    assert search.settled(measured) == 96
    assert all(m.size % 8 == 0 and 10 <= m.size <= 100 for m in measured)


def test_a_range_without_a_multiple_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no multiple of multiple_of=8 lies between min_val=9 and max_val=15"):
        Search(target=1, min_val=9, max_val=15, multiple_of=8)


def test_only_divisors_are_tried_and_the_largest_that_fits_is_found() -> None:
    """63 samples fit, and 48 is the largest divisor of 96 that does."""
    search = Search(target=1900, divides=96)
    measured = measure_all(search, highest_of((479, 2.5), (293, 25.5)), limit=1900 / 0.9, floor=293)
    assert [m.size for m in measured] == [2, 4, 32, 48]
    assert search.settled(measured) == 48


def test_the_search_is_over_when_no_divisor_lies_between() -> None:
    """7 fits and 14 is too large: of the divisors of 98 none lies between them."""
    search = Search(target=1000, divides=98)
    assert search.propose([Measurement(7, 600), Measurement(14, 1100)]) is None
    assert search.propose([Measurement(7, 600), Measurement(14, 900, out_of_memory=True)]) is None
    assert search.propose([Measurement(98, 900)]) is None


def test_a_prime_is_tried_whole_after_one() -> None:
    search = Search(target=1000, divides=509)
    assert [m.size for m in measure_all(search, lambda size: size, limit=2000)] == [1, 509]


def test_a_first_divisor_too_large_goes_down_by_divisors() -> None:
    search = Search(target=1030, init_val=4096, divides=3 * 4096)
    measured = measure_all(search, highest_of((1000, 10)), limit=1144)
    assert all(3 * 4096 % m.size == 0 for m in measured)
    assert search.settled(measured) == 3


def test_one_trial_settles_on_the_first_size() -> None:
    search = Search(target=1000, max_trials=1)
    assert search.settled(measure_all(search, highest_of((0, 1)), limit=1000)) == 2


def test_seven_hundred_of_a_meter_that_tells_nothing() -> None:
    """Memory runs out above 700 and the peak gives no warning: at least 85 % of it is found."""
    search = Search(target=10**9, max_trials=16)
    measured = measure_all(search, lambda size: 10**8 if size <= 700 else 1e18, limit=10**9)
    assert 595 <= search.settled(measured) <= 700


def test_a_noisy_meter_whose_larger_size_reads_less_does_not_confuse_it() -> None:
    search = Search(target=1000)
    assert search.propose([Measurement(2, 1010), Measurement(4, 900), Measurement(8, 890)]) == 16


def test_a_meter_that_lets_go_slowly_is_given_room() -> None:
    """A heap keeps most of what a step too large has taken: smaller and smaller steps down would use up the trials."""
    search, measured, held = Search(target=723), [Measurement(2, 453), Measurement(4, 453), Measurement(128, 478)], 0.0
    while (size := search.propose(measured, floor=453)) is not None:
        needs = 452 + 0.212 * size
        held = max(needs, needs + 0.9 * (held - needs))
        measured.append(Measurement(size, round(held)))
    assert [m.size for m in measured if m.peak > 723]
    assert search.settled(measured) >= 0.6 * (723 - 452) / 0.212


def test_a_meter_that_rises_without_a_batch_is_left_in_growing_steps() -> None:
    """Where a busy machine's figures stay above the target, each step down goes further, while there are trials."""
    search, measured = Search(target=710), [Measurement(2, 453), Measurement(4, 454), Measurement(128, 477)]
    measured += [Measurement(1419, 730), Measurement(1363, 725), Measurement(1282, 734), Measurement(1214, 733)]
    size = search.propose(measured)
    assert size is not None
    assert 700 <= size <= 0.8 * 1214


lines = st.lists(st.tuples(st.floats(0, 900_000), st.floats(10, 50_000)), min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(lines=lines, multiple_of=st.integers(1, 9), init_val=st.none() | st.integers(1, 10_000), known=st.floats(0, 1))
def test_on_any_convex_curve_it_settles_within_five_percent(
    lines: Sequence[tuple[float, float]], multiple_of: int, init_val: int | None, known: float
) -> None:
    """Given trials enough: the size is measured, fits, and is 95 % of the largest or its next multiple fails."""
    curve, target = highest_of(*lines), 1_000_000
    floor = int(known * min(start for start, _ in lines))
    search = Search(target=target, multiple_of=multiple_of, init_val=init_val, max_trials=MANY)
    measured = measure_all(search, curve, limit=target / 0.9, floor=floor)
    best = largest(curve, target, step=multiple_of)
    assert len(measured) < MANY
    assert all(m.size % multiple_of == 0 for m in measured)
    if best == 0:
        with pytest.raises(NothingFits):
            search.settled(measured)
        return
    settled = search.settled(measured)
    assert settled in [m.size for m in measured]
    assert settled <= best
    assert settled >= 0.95 * best or settled + multiple_of > best


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    lines=lines,
    multiple_of=st.integers(1, 4),
    factor=st.integers(1, 5000),
    min_val=st.integers(1, 20),
    init_val=st.none() | st.integers(1, 10_000),
    known=st.floats(0, 1),
)
def test_among_divisors_it_settles_on_the_largest_that_fits_or_within_five_percent_of_it(
    lines: Sequence[tuple[float, float]],
    multiple_of: int,
    factor: int,
    min_val: int,
    init_val: int | None,
    known: float,
) -> None:
    """On any convex curve, given trials enough: only allowed sizes are tried, none twice, and the answer is right."""
    curve, target = highest_of(*lines), 1_000_000
    divides = multiple_of * factor
    allowed = [n for n in range(min_val, divides + 1) if n % multiple_of == 0 and divides % n == 0]
    if not allowed:
        return
    floor = int(known * min(start for start, _ in lines))
    search = Search(target, min_val, None, multiple_of, init_val, MANY, divides)
    measured = measure_all(search, curve, limit=target / 0.9, floor=floor)
    assert len(measured) < MANY
    assert {m.size for m in measured} <= set(allowed)
    fitting = [n for n in allowed if curve(n) <= target]
    if not fitting:
        with pytest.raises(NothingFits):
            search.settled(measured)
        return
    assert 0.95 * fitting[-1] <= search.settled(measured) <= fitting[-1]


def training_step(rng: random.Random) -> tuple[Curve, int]:
    """A step of a model whose weights take up to a tenth of the target: optimizer step, kept activations, two more."""
    target = 1_000_000
    weights = rng.uniform(0.01, 0.1) * target
    floor, most = weights * rng.choice([1, 2, 3]), 2 ** rng.uniform(3, 10)
    phases = [(floor + weights * rng.choice([1, 1.5, 2]), 0.0)]
    for share in (1.0, rng.uniform(0.1, 1), rng.uniform(0.1, 1)):
        start = floor + rng.choice([0, 1]) * weights
        phases.append((start, share * (target - start) / most))
    return highest_of(*phases), int(floor)


def test_few_trials_and_no_out_of_memory_on_curves_as_models_have_them() -> None:
    """400 random steps, fixed seed: median at most 4 trials, no error in 95 %, at least 95 % of the largest in 95 %."""
    rng = random.Random(0)
    trials, failures, shares = [], 0, []
    for _ in range(400):
        curve, floor = training_step(rng)
        search = Search(target=1_000_000)
        measured = measure_all(search, curve, limit=1_000_000 / 0.9, floor=floor)
        trials.append(len(measured))
        failures += any(m.out_of_memory for m in measured)
        shares.append(search.settled(measured) / largest(curve, 1_000_000))
    assert statistics.median(trials) <= 4
    assert sorted(trials)[int(0.8 * len(trials))] <= 5
    assert failures <= 20
    assert sum(share < 0.95 for share in shares) <= 20


def parts(size: int, *phases: tuple[Curve, int]) -> Measurement:
    """A step whose phases each have a curve and a floor."""
    told = tuple(Phase(math.ceil(curve(size)), floor) for curve, floor in phases)
    return Measurement(size, max(phase.peak for phase in told), phases=told)


def measure_parts(search: Search, *phases: tuple[Curve, int], limit: float, first: int = 2) -> list[Measurement]:
    """Run the search to its end, with a hint at the first size."""
    measured: list[Measurement] = []
    while (size := search.propose(measured, hint=parts(first, *phases))) is not None:
        there = parts(size, *phases)
        measured.append(Measurement(size, int(limit), out_of_memory=True) if there.peak > limit else there)
    return measured


FLAT = (highest_of((1300, 0)), 1000)


def test_a_phase_that_is_hidden_in_the_step_is_seen_apart() -> None:
    """The optimizer's step is the highest up to 12 samples, and the forward pass beneath it tells what comes."""
    forward = (highest_of((1180, 10)), 1150)
    search = Search(target=1800)
    assert [m.size for m in measure_parts(search, forward, FLAT, limit=2000)] == [5, 26, 62]
    whole = measure_all(search, highest_of((1300, 0), (1180, 10)), limit=2000, floor=1000)
    assert len(whole) > 3


def test_a_hint_is_never_settled_on_but_measured_when_nothing_larger_fits() -> None:
    hint = parts(2, (highest_of((0, 490)), 0), (highest_of((0, 100)), 0))
    search = Search(target=1000, multiple_of=2, max_val=3)
    assert search.propose([], hint=hint) == 2
    assert search.propose([Measurement(2, 980)], hint=hint) is None
    with pytest.raises(NothingFits):
        search.settled([])


def test_a_hint_that_does_not_fit_or_was_measured_counts_for_nothing() -> None:
    assert Search(target=100, init_val=3).propose([], hint=Measurement(2, 101)) == 3
    assert Search(target=1000).propose([Measurement(2, 100)], hint=Measurement(2, 900)) == 4


def test_the_only_trial_goes_to_the_size_of_the_hint() -> None:
    """A larger one might not fit, and there would be nothing to settle on."""
    hint = parts(2, (highest_of((0, 10)), 0), (highest_of((0, 5)), 0))
    assert Search(target=1000, max_trials=1).propose([], hint=hint) == 2


def test_a_flat_phase_at_its_floor_is_not_read_as_room_without_end() -> None:
    """Nothing grows that a meter could tell: the next size is twice the last, and no more."""
    flat = (highest_of((1000, 0)), 1000)
    assert Search(target=1800).propose([], hint=parts(2, flat, flat)) == 4


def test_steps_that_tell_different_phases_count_as_wholes() -> None:
    hint = parts(2, (highest_of((0, 100)), 0), (highest_of((0, 50)), 0))
    assert Search(target=1000).propose([Measurement(4, 400)], hint=hint) == 10


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    forward=lines,
    backward=lines,
    update=st.floats(0, 900_000),
    known=st.floats(0, 1),
    multiple_of=st.integers(1, 9),
    first=st.integers(1, 50),
)
def test_by_phases_too_it_settles_within_five_percent_on_any_convex_curves(
    forward: Sequence[tuple[float, float]],
    backward: Sequence[tuple[float, float]],
    update: float,
    known: float,
    multiple_of: int,
    first: int,
) -> None:
    """Given trials enough; whatever phases hide in each other, the size is measured, fits, and is as it should be."""
    target = 1_000_000
    phases = tuple(
        (highest_of(*of), int(known * min(start for start, _ in of))) for of in (forward, backward, [(update, 0.0)])
    )
    search = Search(target=target, multiple_of=multiple_of, max_trials=MANY)
    measured = measure_parts(search, *phases, limit=target / 0.9, first=first * multiple_of)
    best = largest(lambda size: max(curve(size) for curve, _ in phases), target, step=multiple_of)
    assert len(measured) < MANY
    assert len({m.size for m in measured}) == len(measured)
    if best == 0:
        with pytest.raises(NothingFits):
            search.settled(measured)
        return
    settled = search.settled(measured)
    assert settled <= best
    assert settled >= 0.95 * best or settled + multiple_of > best


def test_of_several_ranks_the_highest_peaks_and_the_lowest_floors_count() -> None:
    first, second = parts(2, (lambda _: 10, 3), (lambda _: 20, 4)), parts(2, (lambda _: 30, 2), (lambda _: 5, 9))
    assert highest_of_ranks([first, second]) == Measurement(2, 30, phases=(Phase(30, 2), Phase(20, 4)))
    assert highest_of_ranks([first, Measurement(2, 40, out_of_memory=True)]) == Measurement(2, 40, out_of_memory=True)
    assert first.less(3) == Measurement(2, 17, phases=(Phase(7, 0), Phase(17, 1)))
