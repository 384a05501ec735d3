"""The largest batch that fits, from few measurements of peak memory: arithmetic only.

The peak of a training step is the highest of several phases (the optimizer step, the logits and the loss, a block's
replay, the kept activations), each a straight line in the batch size, so it is convex in it. Three facts follow, and
the search rests on them:

- the line through two measured sizes lies below the curve beyond them: where it meets the target is a bound from above;
- the chord between a size that fits and one that is too large lies above the curve: where it meets the target is safe;
- no phase starts below what is there without any batch (weights, optimizer state: the `floor`), so beyond a measured
  size the curve can't rise faster than if all of its peak above the floor grew with the batch, unless a phase that was
  hidden takes over. Where that line meets the target is how far one may reach on one measurement.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# A settled size this close to the bound from above isn't worth another trial.
_CLOSE_ENOUGH = 0.95
# Slopes this much alike belong to one straight line; more, and another phase has taken over between the two sizes.
_SAME_SLOPE = 1.1
# However straight the line, no trial is larger than this many times the largest size that fitted.
_LONGEST_JUMP = 32
# How far below a size that was a little too large the next one is, where that is close enough to end the search.
_SAFELY_BELOW = 0.97
# The least that a trial should gain over the size that fits already.
_LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Measurement:
    """One training step at one batch size.

    Attributes:
        size: samples in the batch.
        peak: highest memory of the step, in bytes; where memory ran out, what it had reached.
        out_of_memory: whether memory ran out.
    """

    size: int
    peak: int
    out_of_memory: bool = False


class NothingFits(RuntimeError):
    """No batch size that may be used fits into memory."""


@dataclass(frozen=True)
class Search:
    """What is looked for: the largest batch size whose step stays at or below `target`.

    Attributes:
        target: most memory a step may need, in bytes.
        min_val: smallest size allowed.
        max_val: largest size allowed; None for no bound.
        multiple_of: every size tried is a multiple of this.
        init_val: first size to try; None for a small one.
        max_trials: most sizes to measure.
        divides: every size tried divides this; None for any size.

    Raises:
        ValueError: when no size that is allowed lies between `min_val` and `max_val`.
    """

    target: int
    min_val: int = 1
    max_val: int | None = None
    multiple_of: int = 1
    init_val: int | None = None
    max_trials: int = 8
    divides: int | None = None

    def __post_init__(self) -> None:
        if self.divides is not None and self.divides < 1:
            raise ValueError(f"divides={self.divides}: give a whole number of at least 1")
        if self.next_above(0) is None:
            dividing = "" if self.divides is None else f" that divides {self.divides}"
            raise ValueError(
                f"no multiple of multiple_of={self.multiple_of}{dividing} lies between min_val={self.min_val} and "
                f"max_val={self.max_val}"
            )

    @property
    def smallest(self) -> int:
        """The smallest size that may be tried."""
        smallest = self.next_above(0)
        assert smallest is not None
        return smallest

    @property
    def largest(self) -> float:
        """The largest size that may be tried; infinite where nothing bounds it."""
        most = self.max_val or self.divides
        return math.inf if most is None else self.nearest(most)

    def nearest(self, size: float) -> int:
        """Return the largest allowed size at or below `size`, or else the smallest allowed."""
        return self.next_below(math.floor(size) + 1) or self.smallest

    def next_above(self, size: int) -> int | None:
        """Return the smallest allowed size above `size`; None where there is none."""
        least = max(size + 1, self.min_val)
        if self.divides is None:
            above = -(-least // self.multiple_of) * self.multiple_of
        else:
            allowed = _divisors(self.divides, self.multiple_of)
            above = next(iter(allowed[bisect_left(allowed, least) :]), 0)
        return above if least <= above and (self.max_val is None or above <= self.max_val) else None

    def next_below(self, size: int) -> int | None:
        """Return the largest allowed size below `size`; None where there is none."""
        most = size - 1 if self.max_val is None else min(size - 1, self.max_val)
        if self.divides is None:
            below = most // self.multiple_of * self.multiple_of
        else:
            allowed = _divisors(self.divides, self.multiple_of)
            below = max(allowed[: bisect_right(allowed, most)], default=0)
        return below if below >= self.min_val else None

    def fits(self, measurement: Measurement) -> bool:
        """Tell whether a step was within the target."""
        return not measurement.out_of_memory and measurement.peak <= self.target

    def propose(self, measured: Sequence[Measurement], *, floor: int = 0) -> int | None:
        """Return the next size to measure, or None when the search is over.

        Args:
            measured: every measurement so far.
            floor: bytes that are there whatever the batch size, as far as known; less is safe, more is not.
        """
        if len(measured) >= self.max_trials:
            return None
        if not measured:
            return self.nearest(self.init_val or 2 * self.multiple_of)
        lower = self._fitting(measured)
        if not lower:
            return self._down(measured)
        upper = self._too_large(measured)
        last = lower[-1].size
        bound = min(self._bound(lower), self.largest, self._end(last, upper))
        least = self.next_above(last)
        if least is None or least > bound or last >= _CLOSE_ENOUGH * bound:
            return None
        reach = self._between(lower, upper[0], bound, floor) if upper else self._beyond(lower, floor)
        if not upper and reach >= _CLOSE_ENOUGH * bound:  # the search would end there and leave the rest untried
            reach = bound
        return self.nearest(min(max(reach, least), bound))

    def settled(self, measured: Sequence[Measurement]) -> int:
        """Return the largest measured size that fits.

        Raises:
            NothingFits: when none does.
        """
        fitting = self._fitting(measured)
        if fitting:
            return fitting[-1].size
        raise NothingFits(f"no batch size fits into {self.target} bytes: tried {[m.size for m in measured]}")

    def _fitting(self, measured: Sequence[Measurement]) -> list[Measurement]:
        return sorted((m for m in measured if self.fits(m)), key=lambda m: m.size)

    def _too_large(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """What is too large above the largest size that fits: meters are noisy, and below it nothing is of interest."""
        last = self._fitting(measured)[-1].size
        return sorted((m for m in measured if not self.fits(m) and m.size > last), key=lambda m: m.size)

    def _down(self, measured: Sequence[Measurement]) -> int | None:
        """Where nothing has fitted yet: towards the smallest size in equal factors, and to it on the last trial."""
        lowest = min(m.size for m in measured)
        if lowest <= self.smallest:
            return None
        if len(measured) == self.max_trials - 1:
            return self.smallest
        return self.nearest(min(math.sqrt(self.smallest * lowest), lowest - 1))

    def _end(self, last: int, upper: Sequence[Measurement]) -> float:
        """The largest allowed size below the smallest that is too large."""
        return (self.next_below(upper[0].size) or last) if upper else math.inf

    def _bound(self, lower: Sequence[Measurement]) -> float:
        """No size above this fits: where the line through the two largest fitting sizes meets the target."""
        slope = _slope(lower[-2:])
        return lower[-1].size + (self.target - lower[-1].peak) / slope if slope > 0 else math.inf

    def _between(self, lower: Sequence[Measurement], above: Measurement, bound: float, floor: int) -> float:
        """A size between one that fits and one that is too large."""
        below = lower[-1]
        middle = math.sqrt(below.size * bound)
        if not above.out_of_memory:
            chord = below.size + (self.target - below.peak) / _slope((below, above))
            if chord >= _CLOSE_ENOUGH * above.size:  # one step down from a noisy meter's too large is still too large
                chord = min(chord, _SAFELY_BELOW * above.size)
            return chord if chord >= _LEAST_GAIN * below.size else middle
        # Its peak is unknown, so there is no chord. A line that promised more than there was is not to be trusted.
        return max(middle, self._beyond(lower, floor)) if bound < self._end(below.size, (above,)) else middle

    def _beyond(self, lower: Sequence[Measurement], floor: int) -> float:
        """How far to go while nothing has been too large."""
        last = lower[-1]
        sure = self._reach(last, 0)
        # A meter that reads its floor at every size says nothing about what grows.
        reach = self._reach(last, floor) if 0 < floor < last.peak else max(sure, 2 * last.size)
        if len(lower) == 1:
            return min(2 * last.size, reach if floor else sure)
        slope, before = _slope(lower[-2:]), _slope(lower[-3:-1])
        if 0 < slope <= _SAME_SLOPE * before:  # three sizes on one line: no other phase is near
            reach *= 2
        return min(reach, _LONGEST_JUMP * last.size)

    def _reach(self, last: Measurement, floor: int) -> float:
        """The size that would meet the target if every byte above the floor grew with the batch."""
        return last.size * (self.target - floor) / max(last.peak - floor, 1)


def _slope(pair: Sequence[Measurement]) -> float:
    """Bytes a sample adds between two sizes; 0 for less than two."""
    if len(pair) < 2:
        return 0.0
    return (pair[1].peak - pair[0].peak) / (pair[1].size - pair[0].size)


@lru_cache(maxsize=8)
def _divisors(of: int, multiple_of: int) -> tuple[int, ...]:
    """The divisors of a number that are multiples of another, in order."""
    if of % multiple_of:
        return ()
    rest = of // multiple_of
    small = [divisor for divisor in range(1, math.isqrt(rest) + 1) if rest % divisor == 0]
    return tuple(multiple_of * divisor for divisor in sorted({*small, *(rest // divisor for divisor in small)}))
