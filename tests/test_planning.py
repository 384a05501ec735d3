"""A plan keeps its budget and adds the least time: against every choice there is, at the size of real models, at fault.

Random steps come in two kinds: chains, whose blocks are held from their forward pass to their backward pass as in
training, last in first out; and phases that hold any blocks, any number of times.
"""

import dataclasses
import itertools
import math
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from lightning_ckpt.planning import Option, Phase, Plan, frontier, solve

KIB, MIB, GIB = 2**10, 2**20, 2**30
INSTANCES, CHUNKS = 10_000, 20
REPLAY = Option("replay", 0, 0, 1.0)

Options = list[list[Option]]
Instance = tuple[Options, list[Phase], int]


def chain(options: Options, boundaries: Sequence[int], replays: Sequence[int], base: int) -> list[Phase]:
    """The phases of a step: forward passes, the loss, backward passes in reverse, the optimizer step."""
    blocks = range(len(options))
    held = [base + total for total in itertools.accumulate(boundaries, initial=0)]
    upto = [tuple(int(block < stop) for block in blocks) for stop in range(len(options) + 1)]
    forward = [Phase(f"forward {block}", held[block + 1], upto[block + 1]) for block in blocks]
    backward = [Phase(f"backward {block}", held[block + 1] + replays[block], upto[block], block) for block in blocks]
    ends = Phase("loss", held[-1] + base // 8, upto[-1]), Phase("optimizer", base + base // 4, upto[0])
    return [*forward, ends[0], *reversed(backward), ends[1]]


def random_option(rng: random.Random, size: int, seconds: float, index: int) -> Option:
    """The first replays all; now and then one keeps less than that."""
    if index == 0:
        return Option("replay", 0, 0, seconds)
    kept = rng.randint(-size // 4 if rng.random() < 0.02 else 0, size)
    own = rng.randint(-size // 2, size // 4) if rng.random() < 0.8 else 0
    return Option(f"option {index}", kept, own, seconds * rng.choice((0.0, rng.random(), rng.random(), 1.1)))


def random_options(rng: random.Random) -> Options:
    """One to twelve blocks of two to six options, at most 5000 plans; some blocks are equal."""
    options: Options = []
    most = rng.choice((2, 2, 3, 6))
    for _ in range(rng.randint(1, 12)):
        size, seconds = rng.choice((1, 50, 3 * MIB, GIB)), rng.choice((1.0, rng.random(), 1e-4 * rng.random()))
        drawn = [random_option(rng, size, seconds, index) for index in range(rng.randint(2, most))]
        options.append(rng.choice(options) if options and rng.random() < 0.3 else drawn)
    while math.prod(map(len, options)) > 5000:
        options.pop()
    return options


def random_phases(rng: random.Random, options: Options) -> list[Phase]:
    size = max(max(abs(option.kept), 4) for group in options for option in group)
    if rng.random() < 0.7:
        boundaries, replays = ([rng.randint(0, size // scale) for _ in options] for scale in (4, 1))
        return chain(options, boundaries, replays, base=rng.randint(1, 4 * size))
    return [
        Phase(
            f"phase {index}",
            rng.randint(1, 4 * size),
            tuple(rng.choice((0, 0, 1, 1, 1, 3)) for _ in options),
            rng.choice((None, rng.randrange(len(options)))),
        )
        for index in range(rng.randint(1, 12))
    ]


def random_instance(rng: random.Random) -> Instance:
    """A budget from less than anything needs to more than everything does; often just what some plan needs."""
    options = random_options(rng)
    phases = random_phases(rng, options)
    ends = [max(phase.peak for phase in phases)]
    ends += [max(peaks(options, phases, [rng.randrange(len(group)) for group in options])) for _ in range(2)]
    budget = rng.choice((rng.choice(ends), rng.randint(min(ends) * 9 // 10, max(ends) * 11 // 10)))
    return options, phases, max(budget, 1)


def peaks(options: Options, phases: Sequence[Phase], choices: Sequence[int]) -> tuple[int, ...]:
    """The formula of a phase's peak, written out."""
    chosen = [group[choice] for group, choice in zip(options, choices, strict=True)]
    return tuple(
        phase.peak
        + sum(count * option.kept for count, option in zip(phase.live, chosen, strict=True))
        + (0 if phase.own is None else chosen[phase.own].own)
        for phase in phases
    )


def every_plan(options: Options, phases: Sequence[Phase]) -> tuple[Any, Any]:
    """Peaks (N, P) and seconds (N,) of all N plans there are; bytes are exact in a double here."""
    choices = np.indices([len(group) for group in options]).reshape(len(options), -1)
    kept, own, seconds = (
        np.stack([np.array(column)[picks] for column, picks in zip(columns, choices, strict=True)], axis=1)
        for name in ("kept", "own", "seconds")
        for columns in [[[getattr(option, name) for option in group] for group in options]]
    )
    mine = np.array([[phase.own == block for block in range(len(options))] for phase in phases])
    totals = kept.astype(float) @ np.array([phase.live for phase in phases], dtype=float).T + own @ mine.T.astype(float)
    return totals + np.array([phase.peak for phase in phases]), seconds.sum(axis=1)


def better_moves(plan: Plan, options: Options, phases: Sequence[Phase]) -> list[tuple[int, int]]:
    """Blocks that could move to an option of less time and still fit."""
    return [
        (block, index)
        for block, group in enumerate(options)
        for index, option in enumerate(group)
        if option.seconds < group[plan.choices[block]].seconds
        and max(peaks(options, phases, [*plan.choices[:block], index, *plan.choices[block + 1 :]])) <= plan.budget
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_against_every_plan_there_is(chunk: int) -> None:
    """Within 1 % of the least time, without waste; where nothing fits, the lowest excess there is."""
    rng, greedy = random.Random(chunk), 0
    for _ in range(INSTANCES // CHUNKS):
        options, phases, budget = random_instance(rng)
        highest, seconds = every_plan(options, phases)
        fitting = (highest <= budget).all(axis=1)
        plan = solve(options, phases, budget, time_limit=60)
        greedy += plan.solver == "greedy"
        assert plan.peaks == peaks(options, phases, plan.choices)
        assert plan.fits == fitting.any()
        if plan.fits:
            assert plan.seconds <= 1.01 * seconds[fitting].min() + 1e-12
            assert not better_moves(plan, options, phases)
        else:
            assert plan.peak == budget + plan.shortfall == highest.max(axis=1).min()
    assert greedy <= 2  # HiGHS as of scipy 1.11 takes a few of 10,000 that fit to the byte for infeasible


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_greedy_plan_fits_without_waste(chunk: int) -> None:
    """Without the solver every step that fits replayed gets a plan that fits and that no single move betters."""
    rng = random.Random(chunk)
    for _ in range(INSTANCES // CHUNKS):
        options, phases, budget = random_instance(rng)
        plan = solve(options, phases, budget, time_limit=0)
        replayed = max(peaks(options, phases, [0] * len(options)))
        assert plan.fits == (replayed <= budget)
        assert plan.peaks == peaks(options, phases, plan.choices)
        assert not plan.fits or plan.solver == "greedy"
        assert not plan.fits or not better_moves(plan, options, phases)


def large(blocks: int, *, equal: bool) -> tuple[Options, list[Phase]]:
    """A chain of blocks of eight options, all equal or no two, which keep up to a gibibyte each."""
    rng = random.Random(1)
    drawn = [ladder(rng) for _ in range(blocks)]
    options = [drawn[0]] * blocks if equal else drawn
    boundaries = [32 * MIB if equal else rng.randint(1, 100) * MIB for _ in range(blocks)]
    replays = [options[block][-1].kept if equal else rng.randint(256, 2048) * MIB for block in range(blocks)]
    return options, chain(options, boundaries, replays, base=20 * GIB)


def ladder(rng: random.Random) -> list[Option]:
    kept = [0, *sorted(rng.randint(1, 4096) * 256 * KIB for _ in range(7))]
    seconds = [*sorted((rng.uniform(1e-3, 1e-2) for _ in range(7)), reverse=True), 0.0]
    return [Option(f"{size}", size, -size // 2, time) for size, time in zip(kept, seconds, strict=True)]


def between(options: Options, phases: Sequence[Phase], share: float) -> int:
    """A budget at this share of the way from everything replayed to everything kept."""
    low, high = (max(peaks(options, phases, [choice] * len(options))) for choice in (0, -1))
    return round(low + share * (high - low))


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_large_model_is_planned_in_less_than_a_second(equal: bool, share: float) -> None:
    """200 blocks of 8 options and 402 phases take less than a second of the processor's time, and leave no waste."""
    options, phases = large(200, equal=equal)
    budget = between(options, phases, share)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = solve(options, phases, budget, time_limit=60)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1
    assert plan.fits
    assert plan.solver == "milp"


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_the_same_numbers_give_the_same_plan(equal: bool) -> None:
    """Twice the same step, twice the same plan to the last choice, by the solver and without it."""
    options, phases = large(24, equal=equal)
    budget = between(options, phases, 0.5)
    for time_limit in (60.0, 0.0):
        assert solve(options, phases, budget, time_limit=time_limit) == solve(
            [list(group) for group in options], tuple(phases), budget, time_limit=time_limit
        )


def step(blocks: int) -> tuple[Options, list[Phase]]:
    """A small chain: a boundary of 10 bytes a block, 20 to replay one, 30 to keep the costly part, 40 for all."""
    options = [[REPLAY, Option("costly", 30, -20, 0.75), Option("keep", 40, -20, 0.0)] for _ in range(blocks)]
    return options, chain(options, [10] * blocks, [20] * blocks, base=80)


class TestSolve:
    def test_a_budget_for_everything(self) -> None:
        """Where everything kept just fits, nothing is replayed, and every phase has its predicted peak."""
        plan = solve(*step(3), 240)
        assert plan == Plan((2, 2, 2), 0.0, (130, 180, 230, 240, 190, 140, 90, 100), 240, "milp")
        assert (plan.peak, plan.shortfall, plan.fits) == (240, 0, True)

    def test_one_byte_less(self) -> None:
        """A byte too little for everything kept costs a part of one block's replay, and no more."""
        plan = solve(*step(3), 239)
        assert sorted(plan.choices) == [1, 2, 2]
        assert plan.seconds == 0.75
        assert plan.peak <= 239

    def test_late_blocks_are_kept_first(self) -> None:
        """Of equal blocks the last is kept: its memory is held while no other block is replayed."""
        assert solve(*step(3), 160).choices == (0, 0, 2)

    def test_a_block_called_twice(self) -> None:
        """What two calls of a block keep is counted for both."""
        options = [[REPLAY, Option("keep", 40, 0, 0.0)]]
        phases = [Phase("forward", 100, (2,)), Phase("backward", 120, (1,), own=0)]
        assert solve(options, phases, 179).choices == (0,)
        assert solve(options, phases, 180).peaks == (180, 160)

    def test_nothing_fits(self) -> None:
        """A budget below the replayed step leaves everything replayed and says how much is missing."""
        plan = solve(*step(3), 100)
        assert (plan.choices, plan.peak, plan.shortfall, plan.fits) == ((0, 0, 0), 130, 30, False)

    def test_a_phase_that_no_choice_changes(self) -> None:
        """An optimizer step above the budget leaves everything replayed, though blocks alone could be kept."""
        options, phases = step(3)
        plan = solve(options, [*phases, Phase("optimizer", 300, (0, 0, 0))], 250)
        assert (plan.choices, plan.shortfall) == ((0, 0, 0), 50)

    def test_only_an_option_that_needs_less_fits(self) -> None:
        """Where replaying everything is too much, an option that keeps less than that is found."""
        options = [[REPLAY, Option("less", -10, 5, 1.5), Option("least", -20, 15, 2.0)] for _ in range(3)]
        phases = chain(options, [10] * 3, [20] * 3, base=80)
        assert not solve(options, phases, 121, time_limit=0).fits
        plan = solve(options, phases, 121)
        assert plan.fits
        assert plan.seconds == min(every_plan(options, phases)[1][(every_plan(options, phases)[0] <= 121).all(axis=1)])

    def test_a_model_without_blocks(self) -> None:
        """Without blocks there is nothing to choose; the step fits or it doesn't."""
        phases = [Phase("step", 100, ())]
        assert solve([], phases, 100) == Plan((), 0.0, (100,), 100, "milp")
        assert solve([], phases, 99).shortfall == 1

    def test_a_search_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When time runs out the solver's last word is not taken, and the plan says so."""
        result = scipy.optimize.OptimizeResult(status=1, x=np.zeros(100), mip_node_count=0)
        monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: result)
        options, phases = step(3)
        plan = solve(options, phases, 200)
        assert plan == solve(options, phases, 200, time_limit=0)
        assert (plan.solver, plan.fits, plan.seconds) == ("greedy", True, 1.0)

    def test_a_proposal_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A solver that keeps proposing more than fits is not believed."""
        proposals = []

        def milp(c: Any, **model: Any) -> Any:
            proposals.append(model["constraints"].A.shape[0])
            keep_all = np.where(c == 0, 1.0, 0.0)
            return scipy.optimize.OptimizeResult(status=0, x=keep_all, mip_node_count=1)

        monkeypatch.setattr(scipy.optimize, "milp", milp)
        plan = solve(*step(3), 200)
        assert (plan.solver, plan.fits) == ("greedy", True)
        assert proposals == list(range(proposals[0], proposals[0] + len(proposals)))  # each refused one is ruled out

    def test_bytes_beside_gibibytes(self) -> None:
        """A plan that is one byte too large among gibibytes is told from one that just fits."""
        options = [[REPLAY, Option("keep", GIB, 0, 0.0)], [REPLAY, Option("two", 2, 0, 0.1), Option("one", 1, 0, 0.2)]]
        phases = [Phase("forward", 60 * GIB, (1, 1))]
        assert solve(options, phases, 61 * GIB + 2).choices == (1, 1)
        assert solve(options, phases, 61 * GIB + 1).choices == (1, 2)
        assert solve(options, phases, 61 * GIB).choices == (1, 0)


def bad(message: str, **changed: Any) -> Any:
    return pytest.param(changed, message, id=message.split(" ")[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        bad("budget=0 leaves no memory: give a number of bytes, more than 0", budget=0),
        bad("time_limit=-1 is out of range: give a finite number, at least 0", time_limit=-1),
        bad("gap=nan is out of range: give a finite number, at least 0", gap=math.nan),
        bad("options[1]=[] leaves no choice: give each block at least one option", options=[[REPLAY], []]),
        bad(
            "options[1][1].seconds=inf is no time: give a finite number, at least 0",
            options=[[REPLAY], [REPLAY, Option("keep", 1, 0, math.inf)]],
        ),
        bad(
            "options[0][0].seconds=-0.5 is no time: give a finite number, at least 0",
            options=[[dataclasses.replace(REPLAY, seconds=-0.5)], [REPLAY]],
        ),
        bad("phases=[] is no training step: give at least one phase", phases=[]),
        bad(
            "phases[0].live has 1 entries for 2 blocks: give one for each item of options",
            phases=[Phase("forward", 1, (1,))],
        ),
        bad(
            "phases[0].live=(0, -1) counts less than no calls: give whole numbers, at least 0",
            phases=[Phase("forward", 1, (0, -1))],
        ),
        bad(
            "phases[0].own=2 is no block: give an index into options, 0 to 1, or None",
            phases=[Phase("backward", 1, (0, 0), own=2)],
        ),
        bad(
            "phases[0].beyond=(0, 5) does not fit own=1: give one size an option of that block",
            phases=[Phase("backward", 1, (0, 0), 1, (0, 5))],
        ),
        bad(
            "phases[0].beyond=(0,) does not fit own=None: give one size an option of that block",
            phases=[Phase("loss", 1, (0, 0), None, (0,))],
        ),
    ],
)
def test_bad_input(changed: dict[str, Any], message: str) -> None:
    """An argument that makes no sense is named, with its value and what is accepted."""
    arguments = {"options": [[REPLAY], [REPLAY]], "phases": [Phase("forward", 1, (1, 1))], "budget": 100, **changed}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        solve(**arguments)


class TestFrontier:
    def test_best_seconds_per_byte_first(self) -> None:
        """Sets grow in the order of seconds per byte, the first call among equals first."""
        assert frontier([(4, 1.0), (1, 1.0), (2, 1.0), (2, 1.0)], points=4) == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 0)]

    def test_even_shares_of_the_time_saved(self) -> None:
        """Two of 100 equal calls' sets end at a half and at the whole."""
        assert [len(kept) for kept in frontier([(8, 0.125)] * 100, points=2)] == [50, 100]

    def test_a_call_that_outweighs_the_rest(self) -> None:
        """Shares that one call reaches alone make one set, not several."""
        assert frontier([(1, 9.0), (1, 1.0)]) == [(0,), (0, 1)]

    def test_free_results_are_always_kept(self) -> None:
        """Results that take no memory, such as views, are in the smallest set too."""
        assert frontier([(8, 1.0), (0, 0.5), (0, 0.25)], points=5) == [(1, 2), (1, 2, 0)]

    def test_calls_that_save_nothing_are_not(self) -> None:
        """A call that takes no time is not kept, even where keeping it is free."""
        assert frontier([(0, 0.0), (8, 0.0)]) == []
        assert frontier([]) == []

    def test_nested_and_complete(self) -> None:
        """Of any calls: each set begins the next, the last has all that save time, and there are few."""
        rng = random.Random(0)
        for _ in range(200):
            calls = [(rng.choice((0, 1, 5, MIB)), rng.choice((0.0, rng.random()))) for _ in range(rng.randint(0, 30))]
            sets = frontier(calls, points=rng.randint(1, 8))
            assert all(after[: len(before)] == before for before, after in itertools.pairwise(sets))
            assert not sets or set(sets[-1]) == {index for index, (_, seconds) in enumerate(calls) if seconds}
            assert len(sets) <= 8

    @pytest.mark.parametrize(
        ("calls", "points", "message"),
        [
            ([(1, 1.0)], 0, "points=0 is no number of sets: give a whole number, at least 1"),
            (
                [(1, math.nan)],
                5,
                "calls[0]=(1, nan) is no size and time: give bytes and seconds, finite and at least 0",
            ),
            (
                [(1, 1.0), (-1, 1.0)],
                5,
                "calls[1]=(-1, 1.0) is no size and time: give bytes and seconds, finite and at least 0",
            ),
        ],
    )
    def test_bad_input(self, calls: Any, points: int, message: str) -> None:
        """A call or a number that makes no sense is named, with what is accepted."""
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            frontier(calls, points)
