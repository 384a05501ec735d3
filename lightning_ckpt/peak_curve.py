"""What few points of a convex curve tell of the rest of it: how far it stays below a target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Slopes this much alike belong to one straight line; more, and another phase has taken over between the two sizes.
_SAME_SLOPE = 1.1
# However straight the line, no size is tried that is larger than this many times the largest that fitted.
LONGEST_JUMP = 32
# Of a phase of a step, how far to trust the line through two sizes against what is sure, in factors; and how far at
# most, in multiples of what is sure. Scanned on models of the tests: more meets out-of-memory errors, less takes steps.
_TRUST_IN_LINE, _MOST_BEYOND_SURE = 0.4, 2


@dataclass(frozen=True)
class Point:
    """The peak at one batch size.

    Attributes:
        size: samples in the batch.
        peak: in bytes.
        floor: bytes that are there whatever the batch size, as far as known.
    """

    size: int
    peak: int
    floor: int = 0

    def reach(self, target: int, floor: int) -> float:
        """The size that would meet the target if every byte above the floor grew with the batch."""
        return self.size * (target - floor) / max(self.peak - floor, 1)

    def tells(self) -> bool:
        """Whether there is anything above the floor that could grow."""
        return 0 < self.floor < self.peak


def meets(one: Point, other: Point, target: int) -> float:
    """Where the line through two points meets a target; infinite where it does not rise."""
    rise = other.peak - one.peak
    return one.size + (target - one.peak) * (other.size - one.size) / rise if rise > 0 else math.inf


def bound(curve: Sequence[Point], target: int) -> float:
    """The size above which none meets the target: the line through the last two points lies below the rest."""
    return meets(curve[-2], curve[-1], target) if len(curve) > 1 else math.inf


def reach_of_step(curve: Sequence[Point], target: int) -> float:
    """How far to go on the peaks of whole steps: a phase that is hidden so far may take over at once."""
    last = curve[-1]
    if len(curve) == 1:
        return min(2 * last.size, last.reach(target, last.floor) if last.floor else last.reach(target, 0))
    reach, slope, before = _sure(last, target), _slope(curve[-2:]), _slope(curve[-3:-1])
    if 0 < slope <= _SAME_SLOPE * before:  # three sizes on one line: no other phase is near
        reach *= 2
    return min(reach, LONGEST_JUMP * last.size)


def reach_of_phases(curves: Sequence[Sequence[Point]], target: int) -> float:
    """How far to go where the phases of a step were measured apart: in each there is little that could be hidden.

    A phase at its floor says nothing, and is left out unless it is the highest.
    """
    highest = max(curve[-1].peak for curve in curves)
    telling = [curve for curve in curves if curve[-1].tells() or curve[-1].peak == highest]
    return min(_reach_of_phase(curve, target) for curve in telling)


def _reach_of_phase(curve: Sequence[Point], target: int) -> float:
    last, most = curve[-1], LONGEST_JUMP * curve[-1].size
    sure = _sure(last, target)
    if len(curve) == 1 or not last.tells():
        return min(sure, most)
    line = min(bound(curve, target), most)
    between: float = sure ** (1 - _TRUST_IN_LINE) * line**_TRUST_IN_LINE
    return min(between, _MOST_BEYOND_SURE * sure, line)


def _sure(last: Point, target: int) -> float:
    """How far no phase that began at the floor or above could carry the peak past the target."""
    # A meter that reads its floor at every size says nothing about what grows.
    return last.reach(target, last.floor) if last.tells() else max(last.reach(target, 0), 2 * last.size)


def _slope(pair: Sequence[Point]) -> float:
    """Bytes a sample adds between two sizes; 0 for less than two."""
    if len(pair) < 2:
        return 0.0
    return (pair[1].peak - pair[0].peak) / (pair[1].size - pair[0].size)
