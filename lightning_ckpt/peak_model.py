"""What each stretch of a training step needs, learned from measured steps, and what it would need under other plans.

What blocks keep is there from their forward to their backward, so a measured peak, less what the blocks alive in it
keep, is what the stretch needs by itself. The rest of the model is that sum again, with what another plan keeps. A
stretch in which a block itself runs may need more or less when the block is treated otherwise: what was measured under
a treatment holds for that treatment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_ckpt.planning import Option, Phase


@dataclass(frozen=True)
class Stretch:
    """A part of a step.

    Attributes:
        what: `"start"`, `"forward"`, `"after"` a block's forward, `"backward"`, from the beginning of a block's
            backward to that of the next, or `"optimizer"`, from the end of backward to the end of the step.
        block: the index of the block; -1 where there is none.
        live: for each block, how many of its calls have run forward and wait for their backward.
    """

    what: str
    block: int
    live: tuple[int, ...]

    @property
    def own(self) -> int | None:
        """The block that runs; `None` where none does."""
        return self.block if self.what in ("forward", "backward") else None


@dataclass
class _Needs:
    """What a stretch needs by itself, in bytes, by the option of the block that runs; `latest` was measured last."""

    latest: int = 0
    by_option: dict[int, int] = field(default_factory=dict)


class PeakModel:
    """Predicts the peak of every stretch under any choice of options.

    Args:
        options: the ways to treat each block, the first of which replays all of it.
    """

    def __init__(self, options: Sequence[Sequence[Option]]) -> None:
        self.options = [list(ways) for ways in options]
        # Blocks with equal options are of one kind, and learn from one another.
        self._kinds = [tuple((way.name, way.seconds) for way in ways) for ways in options]
        self._needs: dict[Stretch, _Needs] = {}
        self._beyond: dict[tuple[str, Any, int], int] = {}  # by what, kind and option: bytes beyond replaying all

    def observe(self, peaks: Mapping[Stretch, int], choices: Sequence[int]) -> None:
        """Learn from one step.

        Args:
            peaks: the highest memory of each stretch, in bytes.
            choices: the option of each block that it ran under.
        """
        for stretch, peak in peaks.items():
            needs = self._needs.setdefault(stretch, _Needs())
            needs.latest = 0 if stretch.own is None else choices[stretch.own]
            needs.by_option[needs.latest] = peak - self._kept(stretch, choices)
        self._beyond = {}
        for stretch, needs in self._needs.items():
            if stretch.own is not None and 0 in needs.by_option:
                for option, need in needs.by_option.items():
                    key = stretch.what, self._kinds[stretch.own], option
                    beyond = need - needs.by_option[0]
                    self._beyond[key] = max(beyond, self._beyond.get(key, beyond))

    def scale(self, factor: float) -> None:
        """Let what blocks keep grow, for a larger batch than the one they were profiled on."""
        self.options = [
            [replace(way, kept=round(way.kept * factor), own=round(way.own * factor)) for way in ways]
            for ways in self.options
        ]

    def lift(self, nbytes: int) -> None:
        """Let every stretch need more, after a step that needed more than was predicted."""
        for needs in self._needs.values():
            needs.by_option = {option: need + nbytes for option, need in needs.by_option.items()}

    def phases(self) -> list[Phase]:
        """The stretches as a plan needs them."""
        return [self._phase(stretch) for stretch in self._needs]

    def peaks(self, choices: Sequence[int]) -> dict[Stretch, int]:
        """The peak of each stretch under these options."""
        return {
            stretch: self._kept(stretch, choices)
            + self._need(stretch, 0 if stretch.own is None else choices[stretch.own])
            for stretch in self._needs
        }

    def _phase(self, stretch: Stretch) -> Phase:
        base = self._need(stretch, 0)
        if stretch.own is None:
            return Phase(stretch.what, base, stretch.live)
        beyond = tuple(self._need(stretch, option) - base for option in range(len(self.options[stretch.own])))
        return Phase(stretch.what, base, stretch.live, stretch.own, beyond)

    def _need(self, stretch: Stretch, option: int) -> int:
        """What a stretch needs by itself: as measured, or as a block of the same kind has shown, or as profiled."""
        needs = self._needs[stretch]
        if option in needs.by_option:
            return needs.by_option[option]
        known = self._beyond_replaying(stretch, needs.latest)
        return needs.by_option[needs.latest] + self._beyond_replaying(stretch, option) - known

    def _beyond_replaying(self, stretch: Stretch, option: int) -> int:
        """What an option of the block that runs needs more there than replaying all of it."""
        profiled = self.options[stretch.block][option].own
        return self._beyond.get((stretch.what, self._kinds[stretch.block], option), profiled)

    def _kept(self, stretch: Stretch, choices: Sequence[int]) -> int:
        return sum(live * self.options[block][choices[block]].kept for block, live in enumerate(stretch.live) if live)
