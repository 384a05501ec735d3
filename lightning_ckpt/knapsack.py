"""A multiple-choice knapsack with several limits: one option of each group, every limit kept, least seconds.

Kellerer, Pferschy and Pisinger, "Knapsack Problems", Springer 2004, chapters 9 and 11. HiGHS solves it, through
`scipy.optimize.milp`; needs are whole numbers here, and what the solver proposes is added up again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Choices: TypeAlias = tuple[int, ...]
Ints: TypeAlias = npt.NDArray[np.int64]
Marks: TypeAlias = npt.NDArray[np.bool_]

# Keeps a division by a plan of no seconds finite.
_TINY = 1e-300
# The largest number the solver sees, for its absolute tolerances (1e-6) to be small beside what is decided.
_UNITS = 2.0**16
# To the solver 0.9999999 of an option is one, which can hide a few bytes in gigabytes. So many of its proposals are
# added up as whole numbers, each refused one ruled out for the next, before the search is given up.
_PROPOSALS = 32
# How much the solver may look at, in nodes times options: a count, so that every machine comes to the same choices.
_EFFORT = 5_000
# Up to this many options are searched to a share of the plan's own seconds. In a larger problem that share can be a
# small fraction of one group's, and proving it takes longer than anything it could save.
_SMALL = 100
# A limit is compared with this many of the tightest ones: enough to find nearly all that never decide.
_TIGHTEST = 16


@dataclass(frozen=True, eq=False)
class Knapsack:
    """Groups of options, each option with its seconds and with what it needs of every limit.

    Attributes:
        seconds: for each group, the seconds of its options, at least 0.
        needs: for each group, what its options need: whole numbers, options x limits. May be less than 0.
        limits: the most that the needs of all groups together may be.
    """

    seconds: Sequence[Sequence[float]]
    needs: Sequence[Ints]
    limits: Ints

    def total_seconds(self, choices: Sequence[int]) -> float:
        """Return the seconds of one option a group."""
        return math.fsum(options[choice] for options, choice in zip(self.seconds, choices, strict=True))

    def room(self, choices: Sequence[int]) -> Ints:
        """Return what each limit has left: less than 0 where it is exceeded."""
        return self.limits - sum((need[pick] for need, pick in zip(self.needs, choices, strict=True)), 0 * self.limits)

    def fits(self, choices: Sequence[int]) -> bool:
        """Return whether every limit is kept."""
        return bool((self.room(choices) >= 0).all())

    @cached_property
    def least(self) -> Ints:
        """What each limit is asked for at least, whatever is chosen."""
        return sum((needs.min(axis=0) for needs in self.needs), 0 * self.limits)

    @cached_property
    def most(self) -> Ints:
        """What each limit is asked for at most, whatever is chosen."""
        return sum((needs.max(axis=0) for needs in self.needs), 0 * self.limits)

    def only(self, limits: Marks | list[int]) -> "Knapsack":
        """Return the problem with some of the limits: a mask, or indices."""
        return replace(self, needs=[needs[:, limits] for needs in self.needs], limits=self.limits[limits])


def fill(problem: Knapsack, choices: Choices) -> Choices:
    """Move groups to options of less seconds while any such move keeps the limits, and return the choices.

    One group at a time: the move that saves most seconds for what it takes, as a share of the room that a limit had at
    first, where that share is largest. `choices` must fit.
    """
    filled, room = list(choices), problem.room(choices)
    weights = 1 / np.maximum(room, 1)
    moved = True
    while moved:  # again where a move made room for one that did not fit before
        moved = False
        queue = [move for group in range(len(filled)) for move in _moves(problem, weights, group, filled[group])]
        heapify(queue)
        while queue:
            *_, group, new, old = heappop(queue)
            need = problem.needs[group][new] - problem.needs[group][old]
            if filled[group] == old and (need <= room).all():
                filled[group], moved = new, True
                room -= need
                for move in _moves(problem, weights, group, new):
                    heappush(queue, move)
    return tuple(filled)


_Move: TypeAlias = tuple[float, float, int, int, int]


def _moves(problem: Knapsack, weights: npt.NDArray[np.float64], group: int, old: int) -> Iterator[_Move]:
    """Yield a group's moves to less seconds as (-saved per share, -saved, group, new option, old option)."""
    seconds, needs = problem.seconds[group], problem.needs[group]
    shares = ((needs - needs[old]) * weights).max(axis=1, initial=-math.inf)
    for new, (after, share) in enumerate(zip(seconds, shares.tolist(), strict=True)):
        saved = seconds[old] - after
        if saved > 0:
            yield (-saved / share if share > 0 else -math.inf, -saved, group, new, old)


def least_seconds(problem: Knapsack, *, time_limit: float, gap: float) -> Choices | None:
    """Search the choices of least seconds that keep the limits.

    Args:
        problem: one that some choices fit.
        time_limit: seconds after which the search is given up.
        gap: ends the search when other choices could save no more than this share of the seconds; in a problem of more
            than 100 options, of these and those of the first options together.

    Returns:
        Choices that keep the limits; None where the search came to none, mostly because the time ran out.
    """
    firsts = (0,) * len(problem.needs)
    offset = problem.total_seconds(firsts) if sum(map(len, problem.seconds)) > _SMALL else 0.0
    return _search(problem.only(problem.most > problem.limits), offset, time_limit=time_limit, gap=gap)


def least_excess(problem: Knapsack, *, time_limit: float) -> Choices | None:
    """Search the choices whose greatest excess over a limit is least; None where the time ran out."""
    timeless = replace(problem, seconds=[[0.0] * len(seconds) for seconds in problem.seconds])
    return _search(timeless, None, time_limit=time_limit, gap=0.0)


def _search(problem: Knapsack, offset: float | None, *, time_limit: float, gap: float) -> Choices | None:
    """Run the solver: for the least seconds, which start at `offset`, or where that is None for the least excess."""
    small, options = _reduce(problem)
    if not len(small.limits):  # anything fits
        return tuple(kept[int(np.argmin(seconds))] for kept, seconds in zip(options, small.seconds, strict=True))
    cuts: list[Marks] = []
    deadline = monotonic() + time_limit
    while len(cuts) < _PROPOSALS:
        found = _run(_model(small, offset, cuts), time_limit=max(deadline - monotonic(), 0.0), gap=gap)
        if found is None:
            return None
        parts = np.split(found, np.cumsum([len(kept) for kept in options]))
        choices = tuple(int(part.argmax()) for part, _ in zip(parts, options, strict=False))
        if offset is None or small.fits(choices):
            return tuple(kept[choice] for kept, choice in zip(options, choices, strict=True))
        cuts.append(_cover(small, choices))
    return None


def _run(model: dict[str, Any], *, time_limit: float, gap: float) -> npt.NDArray[np.float64] | None:
    """Return the solver's values, found at its end or at the count that bounds it; None where it got to neither."""
    from scipy.optimize import milp  # a third of a second, which those who never search should not wait

    nodes = max(_EFFORT // int(model["integrality"].sum()), 1)
    found = milp(**model, options={"time_limit": time_limit, "node_limit": nodes, "mip_rel_gap": gap})
    ended = found.status == 0 or (found.mip_node_count or 0) >= nodes
    return found.x if ended else None


def _cover(problem: Knapsack, choices: Choices) -> Marks:
    """Mark options of which not every group may choose one, for then a limit is exceeded as it is by these choices.

    A minimal cover inequality: what a group asks for counts only where the limit would be kept without it.
    """
    limit = int(problem.room(choices).argmin())
    asked = [needs[:, limit] for needs in problem.needs]
    floors = [int(needs[choice]) for needs, choice in zip(asked, choices, strict=True)]
    excess = sum(floors) - int(problem.limits[limit])
    for group in sorted(range(len(asked)), key=lambda group: floors[group] - int(asked[group].min())):
        spare = floors[group] - int(asked[group].min())
        if spare < excess:
            floors[group], excess = floors[group] - spare, excess - spare
    return np.concatenate([needs >= floor for needs, floor in zip(asked, floors, strict=True)])


def _model(problem: Knapsack, offset: float | None, cuts: Sequence[Marks]) -> dict[str, Any]:
    """Return the arguments of `scipy.optimize.milp`.

    The columns are the options, the excess over each limit, and the excess that is allowed. Limits that follow each
    other ask for nearly the same, so an excess is given by the one before and the difference: many times faster than
    rows that list every option for every limit.
    """
    from scipy import optimize, sparse

    groups, options, limits = len(problem.needs), sum(map(len, problem.needs)), len(problem.limits)
    group = np.repeat(np.arange(groups), [len(needs) for needs in problem.needs])
    needs = np.concatenate(problem.needs)
    unit = max(abs(needs).max(), abs(problem.limits).max(), 1) / _UNITS
    steps = -np.diff(problem.limits, prepend=0) / unit
    eye, before = np.eye(limits), np.eye(limits, k=-1)
    rows: list[tuple[list[Any], Any, Any, int]] = [  # blocks of columns, least, most, how many
        ([sparse.csr_array(group == np.arange(groups)[:, None], dtype=float), None, None], 1, 1, groups),
        ([sparse.csr_array(np.reshape(cuts, (-1, options)), dtype=float), None, None], 0, groups - 1, len(cuts)),
        (
            [sparse.csr_array(-np.diff(needs, axis=1, prepend=0).T / unit), sparse.csr_array(eye - before), None],
            steps,
            steps,
            limits,
        ),
        ([None, sparse.csr_array(eye), -np.ones((limits, 1))], -np.inf, 0, limits),
    ]
    low, high = (np.concatenate([np.broadcast_to(row[end], row[3]) for row in rows]) for end in (1, 2))
    seconds = np.concatenate([np.asarray(group, dtype=float) for group in problem.seconds])
    cost = (seconds + (group == 0) * (offset or 0)) * 1e3 / max(seconds.max(), _TINY)  # the offset: one of these is in
    allowed = np.inf if offset is None else 0
    reach = np.repeat([1, np.inf, allowed], [options, limits, 1])
    return {
        "c": np.concatenate([cost, np.zeros(limits), [offset is None]]),
        "integrality": np.repeat([1, 0], [options, limits + 1]),
        "bounds": optimize.Bounds(np.repeat([0, -np.inf, -allowed], [options, limits, 1]), reach),
        "constraints": optimize.LinearConstraint(sparse.bmat([row[0] for row in rows]), low, high),
    }


def _reduce(problem: Knapsack) -> tuple[Knapsack, list[list[int]]]:
    """Return the problem with what may decide of it, and for each group which options those are."""
    problem = problem.only(_deciding(problem))
    options = [_undominated(*pair) for pair in zip(problem.seconds, problem.needs, strict=True)]
    seconds = [[group[option] for option in kept] for group, kept in zip(problem.seconds, options, strict=True)]
    needs = [group[kept] for group, kept in zip(problem.needs, options, strict=True)]
    return Knapsack(seconds, needs, problem.limits), options


def _deciding(problem: Knapsack) -> list[int]:
    """Return the limits that no tighter one implies, whatever is chosen; in order, for neighbours to be alike."""
    deciding: list[int] = []
    needs = np.concatenate([np.empty((0, len(problem.limits)), dtype=np.int64), *problem.needs])
    starts = np.cumsum([0, *map(len, problem.needs)])[:-1]
    for limit in np.argsort(problem.limits - problem.most, kind="stable").tolist():
        rivals = deciding[:_TIGHTEST]
        lead = np.maximum.reduceat(needs[:, [limit]] - needs[:, rivals], starts).sum(axis=0)
        if not (lead <= problem.limits[limit] - problem.limits[rivals]).any():
            deciding.append(limit)
    return sorted(deciding)


def _undominated(seconds: Sequence[float], needs: Ints) -> list[int]:
    """Return the options to which no other is preferable or, where it comes first, equal in everything."""
    figures = np.column_stack([seconds, needs])
    no_worse = (figures[:, None] <= figures).all(axis=2)
    beaten = no_worse & (~no_worse.T | np.tri(len(figures), k=-1, dtype=bool).T)
    return [option for option, out in enumerate(beaten.any(axis=0).tolist()) if not out]
