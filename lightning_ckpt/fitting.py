"""The largest batch size whose peak fits, to the sample, where a peak can be had for any size: arithmetic only.

An estimate has no noise and no out-of-memory error, so this search, unlike that of `search`, may try what does not fit.
"""

from collections.abc import Callable

# No larger batch is tried: one that fits in this size is not bounded by memory.
MOST = 2**24


def largest_size(peak: Callable[[int], int], limit: int, *, start: int = 1, most: int = MOST) -> int:
    """The largest batch size whose peak is at or under a limit; 0 where that of 1 is not.

    The peak is convex in the batch size and piecewise linear, so the line through two sizes that fit lies below it
    beyond them, and the chord from one that fits to one that does not lies above it in between.

    Args:
        peak: bytes of a step with a batch of some size, at least 1.
        limit: bytes.
        start: the size to try first.
        most: no larger size is tried.
    """
    fits: dict[int, int] = {}
    above: tuple[int, int] | None = None
    size: int | None = min(start, most)
    while size is not None:
        found = peak(size)
        if found <= limit:
            fits[size] = found
        else:
            above = size, found
        size = _next_size(sorted(fits.items()), above, limit, most)
    return max(fits, default=0)


def _next_size(fits: list[tuple[int, int]], above: tuple[int, int] | None, limit: int, most: int) -> int | None:
    """The size to try next; `None` where the largest that fits is known."""
    last = fits[-1][0] if fits else 0
    end = above[0] - 1 if above else most
    bound = _meets(fits[-2], fits[-1], limit) if len(fits) > 1 else None
    if last >= (end if bound is None else min(bound, end)):
        return None
    if bound is not None and (bound < end or not above):
        return min(bound, end)
    if not fits or not above:
        return min(2 * last, end) if fits else -(-end // 2)
    chord, middle = _meets(fits[-1], above, limit), -(-(last + end) // 2)
    return middle if chord is None else min(max(chord, middle), end)


def _meets(one: tuple[int, int], other: tuple[int, int], limit: int) -> int | None:
    """The last size at which the line through two is at or under the limit; `None` where the line does not rise."""
    rise, run = other[1] - one[1], other[0] - one[0]
    return one[0] + (limit - one[1]) * run // rise if rise > 0 else None
