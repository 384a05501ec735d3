"""Which batch size the next real step takes, from the peaks of the steps before: counting and arithmetic only."""

from typing import Literal

from lightning_ckpt.search import Measurement, NothingFits, Search

# A size counts once this many of its steps were measured: the first of all makes the optimizer's state.
_STEPS = 2
# On the host a size counts only when its peak has stopped growing by a hundredth a step, or after this many steps more.
_STILL_GROWING, _MOST_SETTLING_STEPS = 1.01, 4

News = Literal["measured", "settled", "nothing fits", "shrunk", "can't shrink"]


class Growth:
    """A size that grows by what a `Search` proposes, settles, and shrinks when a later step needs more than it may.

    Args:
        search: what is looked for.
        size: the size of the first step.
        settled: whether that size is one that an earlier run has settled.
        creeping: whether the same step may need more each time, as where a process's resident size is read.
        ceiling: what a step may need once the size is settled, in bytes; None for the search's target.

    Attributes:
        size: samples in the next step's batches.
        settled: whether growing is over.
        measured: the sizes measured, in order.
        floor: bytes that are there whatever the size, as far as known.
        target: most memory a step may need, in bytes.
    """

    def __init__(
        self,
        search: Search,
        *,
        size: int,
        settled: bool = False,
        creeping: bool = False,
        ceiling: int | None = None,
    ) -> None:
        self._search = search
        self._ceiling = search.target if ceiling is None else ceiling
        self.size, self.settled = size, settled
        self.measured: list[Measurement] = []
        self.floor = 0
        self.target = search.target
        self._creeping = creeping
        self._peaks: list[int] = []
        self._told = False

    @property
    def proven(self) -> int | None:
        """The largest size that was measured to fit; None before one was."""
        return max((m.size for m in self.measured if self._search.fits(m)), default=None)

    def step(self, peak: int, *, full: bool) -> News | None:
        """Take in a step of the present size, and choose the next step's.

        Args:
            peak: its highest memory, in bytes.
            full: whether it shows what the size needs: not the short end of an epoch.

        Returns:
            What has come of it.
        """
        if self.settled:
            return self._watch(peak)
        if full or peak > self.target:
            self._peaks.append(peak)
        if not self._counts():
            return None
        self.measured.append(Measurement(self.size, max(self._peaks)))
        self._peaks = []
        following = self._search.propose(self.measured, floor=self.floor)
        if following is None:
            return self._settle()
        self.size = following
        return "measured"

    def _counts(self) -> bool:
        if not self._peaks or self._peaks[-1] > self.target:
            return bool(self._peaks)
        if len(self._peaks) < _STEPS:
            return False
        still = self._creeping and self._peaks[-1] >= _STILL_GROWING * self._peaks[-2]
        return not still or len(self._peaks) >= _STEPS + _MOST_SETTLING_STEPS

    def _settle(self) -> News:
        self.settled = True
        try:
            self.size = self._search.settled(self.measured)
            return "settled"
        except NothingFits:  # training goes on: it is the headroom that is used, and memory has not run out
            self.size = self._search.smallest
            return "nothing fits"

    def _watch(self, peak: int) -> News | None:
        if peak <= self._ceiling:
            return None
        below = self._search.allowed.next_below(self.size)
        if below is None:
            told, self._told = self._told, True
            return None if told else "can't shrink"
        # The peak is convex in the size, so it lies below the chord from the floor to this step.
        share = (self.target - self.floor) / (peak - self.floor) if self.floor < self.target else 0
        # By no more than half at once: what else the peak is made of, a smaller batch does not change.
        self.size = min(below, self._search.nearest(self.size * max(share, 0.5)))
        return "shrunk"
