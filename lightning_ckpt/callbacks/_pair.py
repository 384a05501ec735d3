"""A batch size and a memory plan chosen together: of what fits, the pair with the most samples per second.

A larger batch leaves less memory to keep activations in, so more of it is replayed; a smaller one makes less use of the
device. Which is faster is measured: sizes from the largest that fits with everything checkpointed downwards, each under
the plan that the planner makes for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.callbacks._budget_run import BudgetRun
from lightning_ckpt.callbacks._distributions import Callback
from lightning_ckpt.callbacks._trainer import set_callbacks
from lightning_ckpt.callbacks._trials import Trial, Trials
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.processes import Alone
from lightning_ckpt.recompute import CheckpointedBlocks
from lightning_ckpt.search import Search

# From one size to the next smaller one.
_SMALLER = 2**-0.5
# Sizes in a row that were no faster before the search ends.
_PATIENCE = 2
# A plan stands after a handful of steps; where it does not, there is nothing to plan.
_MOST_PLANNING_STEPS = 12
# The shortest of these is the time of a step: whatever else runs only makes it longer.
_TIMED_STEPS = 3


@dataclass(frozen=True)
class Paired:
    """A batch size with its plan.

    Attributes:
        trial: as it was measured.
        plan: what its blocks keep.
    """

    trial: Trial
    plan: BudgetPlan

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.trial.size / self.trial.seconds


class Pair:
    """Tries batch sizes, each under its own plan.

    Args:
        trainer: whose steps are taken.
        pl_module: the module it trains.
        trials: takes steps of which nothing remains.
        handle: the checkpointed blocks.
        budget: bytes that a step may need.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, trials: Trials, handle: CheckpointedBlocks, budget: int
    ) -> None:
        self._trainer, self._module, self._trials, self._handle = trainer, pl_module, trials, handle
        self._policy = MemoryBudget(budget + trials.copies)

    def try_sizes(self, search: Search, largest: int) -> list[Paired]:
        """Measure sizes from `largest` downwards, until smaller ones are no faster or nothing is left to replay.

        A size that no plan keeps to the budget is passed over, and so is one that runs out of memory.
        """
        tried: list[Paired] = []
        for size in _sizes(search, largest):
            taken = self._trials.unless_out_of_memory(partial(self._tries, size))
            if taken is None:
                continue
            (paired,) = taken
            if paired is None:
                break
            if paired.plan.peak > paired.plan.budget:
                continue
            tried.append(paired)
            best = max(range(len(tried)), key=lambda place: tried[place].rate)
            if len(tried) - 1 - best >= _PATIENCE or not paired.plan.seconds:
                break
        return tried

    def _tries(self, size: int) -> tuple[Paired | None]:
        return (self._try(size),)

    def _try(self, size: int) -> Paired | None:
        """One size under its plan; None where no plan was made."""
        self._handle.treat({})
        with self._trials.steps(size) as step:
            run = BudgetRun(self._trainer, self._module, self._handle, self._policy, None, Alone(), silent=True)
            set_callbacks(self._trainer, [_Hooks(run)])
            try:
                for _ in range(_MOST_PLANNING_STEPS):
                    step()
                    if run.plan is not None:
                        break
                seconds = min(self._trials.timed(step) for _ in range(_TIMED_STEPS))
                plan = run.plan
            finally:
                run.close()
                self._handle.treat({})
        if plan is None:
            return None
        copies = self._trials.copies
        plan = replace(plan, peak=plan.peak - copies, budget=plan.budget - copies)
        return Paired(Trial(size, plan.peak, seconds, "planned"), plan)


class _Hooks(Callback):
    """Tells the planner of steps that no other callback hears of."""

    def __init__(self, run: BudgetRun) -> None:
        self._run = run

    def on_train_batch_start(self, *_: Any) -> None:
        self._run.begin_batch()

    def on_after_backward(self, *_: Any) -> None:
        self._run.end_backward()

    def on_train_batch_end(self, *_: Any) -> None:
        self._run.end_batch()


def _sizes(search: Search, largest: int) -> Iterator[int]:
    size: int | None = largest
    while size is not None:
        yield size
        smaller = search.nearest(_SMALLER * size)
        size = smaller if smaller < size else search.allowed.next_below(size)
