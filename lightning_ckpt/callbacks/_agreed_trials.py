"""Trials that all ranks take at once, judged for the rank with the least room."""

from dataclasses import replace

from lightning_ckpt.callbacks._trials import Trials
from lightning_ckpt.processes import Ranks
from lightning_ckpt.search import Measurement


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
        try:
            measurement, seconds = self._trials.run(size)
        except Exception:
            if self._trials.alone:  # or else the others wait for this rank elsewhere
                self._ranks.gather(None)
            raise
        if measurement.out_of_memory and not self._trials.alone:
            raise RuntimeError(
                f"BatchSizeTuner: a trial with a batch size of {size} ran out of memory. The ranks share the model's "
                f"parts and wait for one another within a step, so there is no going back. Give max_val below {size}, "
                "or more headroom"
            )
        mine = replace(measurement, peak=measurement.peak - self._more), seconds, self._trials.floor - self._more
        told = self._ranks.gather(mine)
        failed = [rank for rank, theirs in enumerate(told) if theirs is None]
        if failed:
            raise RuntimeError(
                f"BatchSizeTuner: a trial with a batch size of {size} failed on rank {failed[0]}, whose error says why"
            )
        self.floor = max(0, min(floor for _, _, floor in told))
        peak = max(0, *(each.peak for each, _, _ in told))
        out_of_memory = any(each.out_of_memory for each, _, _ in told)
        return Measurement(size, peak, out_of_memory), max(taken for _, taken, _ in told)
