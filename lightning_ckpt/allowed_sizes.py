"""Which batch sizes may be tried: multiples of a number, in a range, and where asked only those that divide another."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class AllowedSizes:
    """The batch sizes that may be tried.

    Attributes:
        min_val: smallest size allowed.
        max_val: largest size allowed; None for no bound.
        multiple_of: every size is a multiple of this.
        divides: every size divides this; None for any size.

    Raises:
        ValueError: when there is none.
    """

    min_val: int = 1
    max_val: int | None = None
    multiple_of: int = 1
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
        """The smallest size."""
        return self.next_above(0) or self.min_val

    @property
    def largest(self) -> float:
        """The largest size; infinite where nothing bounds it."""
        most = self.divides if self.max_val is None else self.max_val
        return math.inf if most is None else self.nearest(most)

    def nearest(self, size: float) -> int:
        """Return the largest size at or below `size`, or else the smallest."""
        return self.next_below(math.floor(size) + 1) or self.smallest

    def next_above(self, size: int) -> int | None:
        """Return the smallest size above `size`; None where there is none."""
        least = max(size + 1, self.min_val)
        if self.divides is None:
            above = -(-least // self.multiple_of) * self.multiple_of
        else:
            allowed = _divisors(self.divides, self.multiple_of)
            above = next(iter(allowed[bisect_left(allowed, least) :]), 0)
        return above if least <= above and (self.max_val is None or above <= self.max_val) else None

    def next_below(self, size: int) -> int | None:
        """Return the largest size below `size`; None where there is none."""
        most = size - 1 if self.max_val is None else min(size - 1, self.max_val)
        if self.divides is None:
            below = most // self.multiple_of * self.multiple_of
        else:
            allowed = _divisors(self.divides, self.multiple_of)
            below = max(allowed[: bisect_right(allowed, most)], default=0)
        return below if below >= self.min_val else None


@lru_cache(maxsize=8)
def _divisors(of: int, multiple_of: int) -> tuple[int, ...]:
    """The divisors of a number that are multiples of another, in order."""
    if of % multiple_of:
        return ()
    rest = of // multiple_of
    small = [divisor for divisor in range(1, math.isqrt(rest) + 1) if rest % divisor == 0]
    return tuple(multiple_of * divisor for divisor in sorted({*small, *(rest // divisor for divisor in small)}))
