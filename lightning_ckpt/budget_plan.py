"""A plan that stands: what is done with each block under a memory budget."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.table import Table

from lightning_ckpt.causes import MemoryByCause
from lightning_ckpt.printed import whole
from lightning_ckpt.profiles import Profile, names_of
from lightning_ckpt.sizes import format_size
from lightning_ckpt.treatments import Treatment


@dataclass(frozen=True)
class BudgetPlan:
    """What is done with each block, and what it was chosen by; prints as a rich table.

    Attributes:
        treatments: by the block's qualified name; blocks left out are replayed whole.
        profile: the blocks as they were measured.
        unmeasured: blocks that had nothing to save while others were measured; they are replayed whole.
        budget: bytes.
        peak: the peak of a step, in bytes: measured, or predicted where no step has run under the plan yet.
        seconds: time that replaying adds to a batch, as predicted.
        solver: how the plan was found; see `planning.Plan`.
        causes: what the measured peak is made of.
    """

    treatments: Mapping[str, Treatment]
    profile: Profile
    unmeasured: tuple[str, ...]
    budget: int
    peak: int
    seconds: float
    solver: str
    causes: MemoryByCause | None = None

    def to_json(self) -> dict[str, Any]:
        """What a later run needs to start with this plan, as plain values."""
        return {
            "peak": self.peak,
            "treatments": {name: treatment.to_json() for name, treatment in self.treatments.items()},
            "profile": self.profile.to_json(),
        }

    def summary(self) -> dict[str, Any]:
        """What belongs into a run's config."""
        return {
            "budget_bytes": self.budget,
            "peak_bytes": self.peak,
            "replay_ms": self.seconds * 1e3,
            "replay_ms_of_full": self.profile.replay_seconds * 1e3,
            "solver": self.solver,
            "blocks": {name: str(treatment) for name, treatment in self.treatments.items()},
        }

    def __rich__(self) -> Table:
        caption = (
            f"Replay takes {self.seconds * 1e3:.3g} ms a batch, of {self.profile.replay_seconds * 1e3:.3g} ms with "
            "everything checkpointed"
        )
        if self.solver == "greedy":
            caption += "; chosen by the greedy rule, since the solver ran out of time"
        title = f"Memory plan: {format_size(self.peak)} of {format_size(self.budget)}"
        table = Table(whole("Blocks"), "Treatment", title=title, caption=caption)
        rows = [(block.name, str(self.treatments.get(block.name, Treatment()))) for block in self.profile.blocks]
        rows += [(name, "replayed: not measured, since it had nothing to save") for name in self.unmeasured]
        for treatment, group in groupby(rows, itemgetter(1)):
            table.add_row(names_of([name for name, _ in group]), treatment)
        return table
