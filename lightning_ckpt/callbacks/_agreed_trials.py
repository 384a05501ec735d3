"""Trials that all ranks take at once, judged for the rank with the least room."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_ckpt.callbacks._trials import Trials
from lightning_ckpt.processes import Ranks
from lightning_ckpt.search import Measurement, highest_of

_T = TypeVar("_T")
# The share of the target from which on a size may be the one to settle on.
_DECISIVE = 0.75


class AgreedTrials:
    """The trials of every rank as one: peaks are those of the rank with the least room, and memory runs out for all.

    Args:
        trials: this rank's.
        ranks: the processes that train together.
        target: most memory a step may need on this rank, in bytes.

    Attributes:
        target: most memory a step may need, in bytes, on the rank that has the smallest target.
        floor: bytes that are there whatever the batch size, as far as known.
    """

    def __init__(self, trials: Trials, ranks: Ranks, target: int) -> None:
        self._trials, self._ranks = trials, ranks
        self.target = min(ranks.gather(target))
        self._more = target - self.target  # what this rank may need beyond it
        trials.decisive = range(int(_DECISIVE * target), target + 1)
        self.floor = 0

    @property
    def highest_in(self) -> str:
        """What of the latest trial took the most memory on this rank, in words."""
        return self._trials.highest_in

    def run(self, size: int) -> tuple[Measurement, float]:
        """Take one step on every rank, and return what was measured and the seconds it took.

        Raises:
            Exception: whatever the step raises here, except running out of memory.
            RuntimeError: the step failed on another rank; or memory ran out in a step in which ranks wait for one
                another, which can't be gone back from.
        """
        told = self._told(size, lambda: self._trials.run(size), lambda taken: taken[0].out_of_memory)
        self.floor = max(0, min(self._ranks.gather(self._trials.floor - self._more)))
        return self._agreed([measurement for measurement, _ in told]), max(seconds for _, seconds in told)

    def warm_up(self, size: int) -> tuple[Measurement | None, Any]:
        """Take the first step on every rank, and tell what a second would measure, where every rank can tell.

        Returns:
            What a second would measure, and this rank's batch; None for what is not known.

        Raises:
            Exception: as `run`.
        """
        batch: Any = None

        def take() -> Measurement | None:
            nonlocal batch
            hint, batch = self._trials.warm_up(size)
            return hint

        told = self._told(size, take, lambda hint: hint is not None and hint.out_of_memory)
        self.floor = max(0, min(self._ranks.gather(self._trials.floor - self._more)))
        hints = [hint for hint in told if hint is not None]
        return (self._agreed(hints) if len(hints) == len(told) else None), batch

    def _agreed(self, measured: Sequence[Measurement]) -> Measurement:
        mores = self._ranks.gather(self._more)
        return highest_of([m.less(more) for m, more in zip(measured, mores, strict=True)])

    def _told(self, size: int, take: Callable[[], _T], ran_out: Callable[[_T], bool]) -> list[_T]:
        """What taking steps told each rank."""
        try:
            mine = take()
        except Exception:
            if self._trials.alone:  # or else the others wait for this rank elsewhere
                self._ranks.gather(None)
            raise
        if ran_out(mine) and not self._trials.alone:
            raise RuntimeError(
                f"BatchSizeTuner: a trial with a batch size of {size} ran out of memory. The ranks share the model's "
                f"parts and wait for one another within a step, so there is no going back. Give max_val below {size}, "
                "or more headroom"
            )
        told: list[tuple[_T] | None] = self._ranks.gather((mine,))
        failed = [rank for rank, theirs in enumerate(told) if theirs is None]
        if failed:
            raise RuntimeError(
                f"BatchSizeTuner: a trial with a batch size of {size} failed on rank {failed[0]}, whose error says why"
            )
        return [theirs[0] for theirs in told if theirs is not None]
