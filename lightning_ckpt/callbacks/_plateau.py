"""Where a larger batch is no faster any more: by the samples per second of the sizes that were tried."""

from collections.abc import Sequence

from lightning_ckpt.callbacks._trials import Trial

# A single step's time is noisy, mostly upwards: where times decide, the fastest of so many steps counts.
TIMED_STEPS = 3
# A jump past this many times the largest size that fitted would pass over the plateau too.
_LONGEST_JUMP = 4


def has_levelled_off(trials: Sequence[Trial], least_growth: float) -> bool:
    """Tell whether the largest size that fits gives too few samples per second more than the next smaller one.

    Args:
        trials: those of one search.
        least_growth: the share by which they must grow.
    """
    fitting = _fitting(trials)
    if len(fitting) < 2:
        return False
    before, last = fitting[-2:]
    return last.samples_per_second < (1 + least_growth) * before.samples_per_second


def fastest(trials: Sequence[Trial]) -> int:
    """Return the fitting size that gives the most samples per second."""
    return max(_fitting(trials), key=lambda trial: trial.samples_per_second).size


def reach(trials: Sequence[Trial]) -> float:
    """Return how large the next size may be, so that a plateau is seen."""
    fitting = _fitting(trials)
    return _LONGEST_JUMP * fitting[-1].size if fitting else float("inf")


def _fitting(trials: Sequence[Trial]) -> list[Trial]:
    return sorted((trial for trial in trials if trial.outcome == "fits"), key=lambda trial: trial.size)
