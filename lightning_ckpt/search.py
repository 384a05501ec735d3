"""The largest batch that fits, from few measurements of peak memory: arithmetic only.

The peak of a training step is the highest of several phases (the optimizer step, the logits and the loss, a block's
replay, the kept activations), each a straight line in the batch size, so it is convex in it. Three facts follow, and
the search rests on them:

- the line through two measured sizes lies below the curve beyond them: where it meets the target is a bound from above;
- the chord between a size that fits and one that is too large lies above the curve: where it meets the target is safe;
- no phase starts below what is there without any batch (weights, optimizer state: the `floor`), so beyond a measured
  size the curve can't rise faster than if all of its peak above the floor grew with the batch, unless a phase that was
  hidden takes over. Where that line meets the target is how far one may reach on one measurement.

Where the peaks of a step's phases were measured apart, all three hold of each of them, and less is hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_ckpt.allowed_sizes import AllowedSizes
from lightning_ckpt.peak_curve import Point, bound, meets, reach_of_phases, reach_of_step

# A settled size this close to the bound from above isn't worth another trial.
_CLOSE_ENOUGH = 0.95
# How far below a size that was a little too large the next one is, where that is close enough to end the search.
_SAFELY_BELOW = 0.97
# With so many sizes that fitted, and the bound that near, one more shall end the search: below the bound, if that has
# moved, by as much as it is likely to move once more.
_MANY, _NEAR, _MOVED, _SHORT_OF_BOUND = 4, 0.85, 1.002, 0.98
# What a size may be rounded up by: bytes that no reader counts are a hair's breadth on a line.
_ROUNDED = 0.01
# The least that a trial should gain over the size that fits already.
_LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Phase:
    """One part of a step.

    Attributes:
        peak: its highest memory, in bytes.
        floor: bytes that are there whatever the batch size, as far as known; less is safe, more is not.
    """

    peak: int
    floor: int = 0


@dataclass(frozen=True)
class Measurement:
    """One training step at one batch size.

    Attributes:
        size: samples in the batch.
        peak: highest memory of the step, in bytes; where memory ran out, what it had reached.
        out_of_memory: whether memory ran out.
        phases: the parts of the step in their order, where they were told apart.
    """

    size: int
    peak: int
    out_of_memory: bool = False
    phases: tuple[Phase, ...] = ()

    def less(self, nbytes: int) -> "Measurement":
        """The same with so many bytes less in everything, as far as there are."""
        phases = tuple(Phase(max(p.peak - nbytes, 0), max(p.floor - nbytes, 0)) for p in self.phases)
        return replace(self, peak=max(self.peak - nbytes, 0), phases=phases)


def highest_of(measured: Sequence[Measurement]) -> Measurement:
    """Of measurements of one size, on several ranks, one that is safe for all: highest peaks, lowest floors."""
    together = zip(*(m.phases for m in measured), strict=True) if len({len(m.phases) for m in measured}) == 1 else ()
    phases = tuple(Phase(max(p.peak for p in each), min(p.floor for p in each)) for each in together)
    ran_out = any(m.out_of_memory for m in measured)
    return Measurement(measured[0].size, max(m.peak for m in measured), ran_out, phases)


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
        _ = self.allowed

    @cached_property
    def allowed(self) -> AllowedSizes:
        """The sizes that may be tried."""
        return AllowedSizes(self.min_val, self.max_val, self.multiple_of, self.divides)

    @property
    def smallest(self) -> int:
        """The smallest size that may be tried."""
        return self.allowed.smallest

    def nearest(self, size: float) -> int:
        """Return the largest allowed size at or below `size`, or else the smallest allowed."""
        return self.allowed.nearest(size)

    def fits(self, measurement: Measurement) -> bool:
        """Tell whether a step was within the target."""
        return not measurement.out_of_memory and measurement.peak <= self.target

    def propose(
        self, measured: Sequence[Measurement], *, floor: int = 0, hint: Measurement | None = None
    ) -> int | None:
        """Return the next size to measure, or None when the search is over.

        Args:
            measured: every measurement so far.
            floor: bytes that are there whatever the batch size, as far as known; less is safe, more is not.
            hint: what a size would probably measure, which is as good as a measurement but never settled on.
        """
        if len(measured) >= self.max_trials:
            return None
        if hint is None or not self.fits(hint) or hint.size in [m.size for m in measured]:
            return self._propose(measured, floor)
        if len(measured) == self.max_trials - 1 and not self._fitting(measured):
            return hint.size
        size = self._propose([*measured, hint], floor)
        return hint.size if size is None and self._fitting([*measured, hint])[-1] is hint else size

    def _propose(self, measured: Sequence[Measurement], floor: int) -> int | None:
        if not measured:
            return self.nearest(self.init_val or 2 * self.multiple_of)
        lower = self._fitting(measured)
        if not lower:
            return self._down(measured)
        upper = self._too_large(measured)
        last, least = lower[-1].size, self.allowed.next_above(lower[-1].size)
        most = min(self._bound(lower), self.allowed.largest, self._end(last, upper))
        if least is None or least > most or last >= _CLOSE_ENOUGH * most:
            return None
        reach = self._between(lower, upper, most, floor) if upper else self._beyond(lower, floor)
        if not upper and len(lower) >= _MANY and reach >= _NEAR * most:
            reach = most * (_SHORT_OF_BOUND if self._bound(lower[:-1]) > _MOVED * most else 1)
        elif not upper and reach >= _CLOSE_ENOUGH * most:  # the search would end there and leave the rest untried
            reach = most
        return self.nearest(min(max(reach + _ROUNDED, least), most))

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
        return (self.allowed.next_below(upper[0].size) or last) if upper else math.inf

    def _bound(self, lower: Sequence[Measurement]) -> float:
        """No size above this fits."""
        return min(bound(curve, self.target) for curve in _curves(lower))

    def _between(self, lower: Sequence[Measurement], upper: Sequence[Measurement], most: float, floor: int) -> float:
        """A size between one that fits and one that is too large."""
        below, above = lower[-1].size, upper[0]
        middle = math.sqrt(below * most)
        if not above.out_of_memory:
            chord = self._chord(lower[-1], above)
            if chord >= _CLOSE_ENOUGH * above.size or len(upper) > 2:
                # One step down from a noisy meter's too large is still too large; where several were, further down.
                chord = min(chord, _SAFELY_BELOW**2 ** (len(upper) - 1) * above.size)
            return chord if chord >= _LEAST_GAIN * below else middle
        # Its peak is unknown, so there is no chord. A line that promised more than there was is not to be trusted.
        return max(middle, self._beyond(lower, floor)) if most < self._end(below, (above,)) else middle

    def _chord(self, below: Measurement, above: Measurement) -> float:
        """Whatever convex curve joins a size that fits with one that is too large, sizes up to this fit."""
        pairs = _curves((below, above))
        return min(meets(one, other, self.target) for one, other in pairs if other.peak > self.target)

    def _beyond(self, lower: Sequence[Measurement], floor: int) -> float:
        """How far to go while nothing has been too large."""
        curves = _curves(lower, floor)
        return reach_of_phases(curves, self.target) if len(curves) > 1 else reach_of_step(curves[0], self.target)


def _curves(measured: Sequence[Measurement], floor: int = 0) -> list[list[Point]]:
    """The curve of each phase, where all measurements tell the same phases apart; or else that of the whole step."""
    counts = {len(m.phases) for m in measured}
    if len(counts) > 1 or not measured[-1].phases:
        return [[Point(m.size, m.peak, floor) for m in measured]]
    return [
        [Point(m.size, phase.peak, phase.floor) for m, phase in zip(measured, phases, strict=True)]
        for phases in zip(*(m.phases for m in measured), strict=True)
    ]
