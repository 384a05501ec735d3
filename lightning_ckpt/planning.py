"""What to replay and what to keep: the least added time whose peak memory stays within a budget.

Every checkpointed block may be treated in one of several ways, its options. A training step is a row of phases, and an
option adds to the memory of each phase in which its block's kept results are held, or in which the block's own backward
pass runs. One option a block, one limit a phase: a multiple-choice knapsack. Bytes are added up as whole numbers, also
those of what the solver proposes, so no plan exceeds its budget by rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np

from lightning_ckpt.knapsack import Choices, Knapsack, fill, least_excess, least_seconds

Solver: TypeAlias = Literal["milp", "greedy"]


@dataclass(frozen=True)
class Option:
    """One way to treat a block. The first option of a block is to replay all of it.

    Attributes:
        name: as people read it.
        kept: bytes it keeps from each forward pass of the block until its backward pass, beyond what replaying all of
            it keeps: 0 for the first option.
        own: bytes it needs while the block's own backward pass runs, beyond what replaying all of it needs. Less than 0
            where there is less to replay.
        seconds: time it adds to a step, at least 0.
    """

    name: str
    kept: int
    own: int
    seconds: float


@dataclass(frozen=True)
class Phase:
    """A stretch of a training step: a block's forward or backward pass, what lies between, the optimizer step.

    Attributes:
        name: as people read it.
        peak: its highest memory when everything is replayed, in bytes.
        live: for each block, how many of its calls' kept bytes are held then: 0 or 1, more for a block that is called
            several times.
        own: the block that runs in it; None where none does.
        beyond: for each option of that block, bytes beyond what replaying all of it needs in this phase; left out, it
            is the options' `own`.
    """

    name: str
    peak: int
    live: tuple[int, ...]
    own: int | None = None
    beyond: tuple[int, ...] | None = None

    def needs(self, block: int, options: Sequence[Option]) -> list[int]:
        """Return what each option of a block adds to this phase, in bytes."""
        kept = [option.kept * self.live[block] for option in options]
        if block != self.own:
            return kept
        beyond = [option.own for option in options] if self.beyond is None else self.beyond
        return [held + more for held, more in zip(kept, beyond, strict=True)]


@dataclass(frozen=True)
class Plan:
    """One option for each block, and what a step is predicted to need with them.

    Attributes:
        choices: for each block, the index of its option.
        seconds: time the options add to a step.
        peaks: the highest memory of each phase, in bytes.
        budget: what the plan was made for, in bytes.
        solver: "milp" where the search for it came to its end or there was nothing to search; "greedy" where it did
            not, and the plan is made by the rule in `solve` alone: it may miss a better one, or one that fits.
    """

    choices: Choices
    seconds: float
    peaks: tuple[int, ...]
    budget: int
    solver: Solver

    @property
    def peak(self) -> int:
        """Highest memory of the step, in bytes."""
        return max(self.peaks)

    @property
    def shortfall(self) -> int:
        """Bytes by which the budget is too small; 0 where the plan fits."""
        return max(0, self.peak - self.budget)

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the budget."""
        return self.shortfall == 0


def solve(
    options: Sequence[Sequence[Option]],
    phases: Sequence[Phase],
    budget: int,
    *,
    time_limit: float = 1.0,
    gap: float = 1e-3,
) -> Plan:
    """Choose one option for each block, so that every phase stays within the budget and the added time is least.

    The predicted peak of a phase is its `peak`, plus `kept` of every block's option times the block's `live`, plus
    what the option of the block that runs needs beyond replaying it all.

    No block of a plan that fits could move to an option of less time and still fit. The same numbers give the same
    plan, unless the solver runs out of time on one machine and not on another. When nothing fits, also because of a
    phase that no option changes, such as the optimizer step, the plan is the one whose other phases exceed the budget
    least: with options that only ever add memory, everything replayed.

    The greedy plan, made first, starts with everything replayed and moves one block at a time, to the option that gives
    back most time for the memory it takes, as a share of the headroom where that share is largest.

    Args:
        options: for each block its options, everything replayed first.
        phases: the phases of a step, at least one.
        budget: most memory a phase may need, in bytes.
        time_limit: seconds after which the search is given up and the greedy plan stands; 0 for no search. A safety
            net: a count bounds the search before. Where everything replayed does not fit, but other options might, a
            search for those comes first, with a limit of its own.
        gap: the search ends when a better plan could save no more than this share of the time the plan adds; in
            problems of more than 100 options, of that time plus what replaying everything adds.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(options, phases, budget, time_limit, gap)
    problem = _problem(options, phases, budget)
    choices, solver = _start(problem, time_limit)
    if problem.fits(choices):
        choices = fill(problem, choices)
        found = least_seconds(problem, time_limit=time_limit, gap=gap) if time_limit else None
        solver = "greedy" if found is None else "milp"
        if found is not None:
            choices = min(fill(problem, found), choices, key=lambda plan: _merit(problem, plan))
    peaks = tuple(budget - int(room) for room in problem.room(choices))
    return Plan(choices, problem.total_seconds(choices), peaks, budget, solver)


def frontier(calls: Sequence[tuple[int, float]], points: int = 5) -> list[tuple[int, ...]]:
    """Return sets of operator calls whose results are worth keeping, from few to all, each within the next.

    Calls are taken in the order of seconds saved per byte, most first. In that order each set is the best for the
    memory it takes, were the last call divisible (Dantzig, "Discrete-Variable Extremum Problems", Operations Research
    5(2), 1957). The sets end where the time they save first reaches an even share of what all would save. Calls that
    take no memory are in every set; calls that save no time in none.

    >>> frontier([(8, 1.0), (2, 1.0), (0, 0.5), (4, 0.0), (1, 2.0)], points=3)
    [(2, 4), (2, 4, 1), (2, 4, 1, 0)]

    Args:
        calls: for each call the bytes of its result and the seconds to run it again.
        points: how many sets at most.

    Returns:
        Indices into `calls`, best first; no set where no call is worth keeping.

    Raises:
        ValueError: bytes or seconds less than 0 or not finite, or less than one point.
    """
    _check_calls(calls, points)
    useful = (index for index, (_, seconds) in enumerate(calls) if seconds > 0)
    order = sorted(useful, key=lambda index: (-_ratio(calls[index][1], calls[index][0]), index))
    free = sum(calls[index][0] == 0 for index in order)
    saved = list(accumulate(calls[index][1] for index in order))
    ends = (_reach(saved, point / points) for point in range(1, points + 1) if saved)
    return [tuple(order[:end]) for end in sorted({max(end, free) for end in ends})]


def _reach(saved: Sequence[float], share: float) -> int:
    return next((end for end, seconds in enumerate(saved, 1) if seconds >= share * saved[-1]), len(saved))


def _ratio(seconds: float, cost: float) -> float:
    return seconds / cost if cost > 0 else math.inf


def _problem(options: Sequence[Sequence[Option]], phases: Sequence[Phase], budget: int) -> Knapsack:
    """One group a block, one limit a phase: what it has left below the budget with everything replayed."""
    needs = [
        np.array([phase.needs(block, group) for phase in phases], dtype=np.int64).T
        for block, group in enumerate(options)
    ]
    seconds = [[option.seconds for option in group] for group in options]
    return Knapsack(seconds, needs, np.array([budget - phase.peak for phase in phases], dtype=np.int64))


def _start(problem: Knapsack, time_limit: float) -> tuple[Choices, Solver]:
    """Return choices that fit, if there are any, else those whose peak is lowest, and who says so."""
    replay = (0,) * len(problem.needs)
    changeable = problem.only(problem.most > problem.least)
    if problem.fits(replay) or _excess(changeable, replay) == (changeable.least - changeable.limits).max(initial=0):
        return replay, "milp"
    found = least_excess(changeable, time_limit=time_limit) if time_limit else None
    if found is None:
        return replay, "greedy"
    return min(replay, found, key=lambda choices: _excess(changeable, choices)), "milp"


def _merit(problem: Knapsack, choices: Choices) -> tuple[float, int]:
    """Less is better: seconds, and of equal seconds the peak nearest to the budget, or above it."""
    return problem.total_seconds(choices), -int(problem.room(choices).min())


def _excess(problem: Knapsack, choices: Choices) -> int:
    return int((-problem.room(choices)).max(initial=0))


def _check(
    options: Sequence[Sequence[Option]], phases: Sequence[Phase], budget: int, time_limit: float, gap: float
) -> None:
    if budget <= 0:
        raise ValueError(f"budget={budget} leaves no memory: give a number of bytes, more than 0")
    for name, value in (("time_limit", time_limit), ("gap", gap)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} is out of range: give a finite number, at least 0")
    for block, group in enumerate(options):
        if not group:
            raise ValueError(f"options[{block}]={group!r} leaves no choice: give each block at least one option")
        for index, option in enumerate(group):
            if not 0 <= option.seconds < math.inf:
                raise ValueError(
                    f"options[{block}][{index}].seconds={option.seconds!r} is no time: give a finite number, at least 0"
                )
    if not phases:
        raise ValueError(f"phases={phases!r} is no training step: give at least one phase")
    for index, phase in enumerate(phases):
        _check_phase(f"phases[{index}]", phase, options)


def _check_phase(name: str, phase: Phase, options: Sequence[Sequence[Option]]) -> None:
    blocks = len(options)
    if len(phase.live) != blocks:
        raise ValueError(
            f"{name}.live has {len(phase.live)} entries for {blocks} blocks: give one for each item of options"
        )
    if min(phase.live, default=0) < 0:
        raise ValueError(f"{name}.live={phase.live!r} counts less than no calls: give whole numbers, at least 0")
    if phase.own is not None and not 0 <= phase.own < blocks:
        raise ValueError(
            f"{name}.own={phase.own!r} is no block: give an index into options, 0 to {blocks - 1}, or None"
        )
    if phase.beyond is not None and (phase.own is None or len(phase.beyond) != len(options[phase.own])):
        raise ValueError(
            f"{name}.beyond={phase.beyond!r} does not fit own={phase.own!r}: give one size an option of that block"
        )


def _check_calls(calls: Sequence[tuple[int, float]], points: int) -> None:
    if points < 1:
        raise ValueError(f"points={points!r} is no number of sets: give a whole number, at least 1")
    for index, call in enumerate(calls):
        if not all(0 <= figure < math.inf for figure in call):
            raise ValueError(
                f"calls[{index}]={call!r} is no size and time: give bytes and seconds, finite and at least 0"
            )
