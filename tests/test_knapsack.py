"""One option of each group within every limit; what plans are made of it is tested in `test_planning.py`."""

import itertools
import random

import numpy as np

from lightning_ckpt.knapsack import Knapsack, fill, least_excess, least_seconds


def random_problem(rng: random.Random, *, groups: int, options: int, limits: int) -> Knapsack:
    """Needs of -20 to 100 for the first options' 0."""
    needs = [
        np.array([[0] * limits] + [[rng.randint(-20, 100) for _ in range(limits)] for _ in range(options - 1)])
        for _ in range(groups)
    ]
    seconds = [[1.0] + [rng.random() for _ in range(options - 1)] for _ in range(groups)]
    return Knapsack(seconds, needs, np.array([rng.randint(-30, 60 * groups) for _ in range(limits)]))


def excess(problem: Knapsack, choices: tuple[int, ...]) -> int:
    return int((-problem.room(choices)).max())


def test_a_move_that_makes_room_is_made_use_of() -> None:
    """What did not fit at first is moved after all when another group has given room back."""
    problem = Knapsack([[1.0, 0.0], [1.0, 0.9]], [np.array([[0], [50]]), np.array([[0], [-20]])], np.array([30]))
    assert fill(problem, (0, 0)) == (1, 1)


def test_the_least_excess_is_the_least_there_is() -> None:
    """Over random problems no choices exceed the limits by less, also where some stay below them."""
    rng = random.Random(0)
    for _ in range(50):
        problem = random_problem(rng, groups=3, options=4, limits=5)
        found = least_excess(problem, time_limit=60)
        assert found is not None
        assert excess(problem, found) == min(excess(problem, each) for each in itertools.product(range(4), repeat=3))


def test_a_limit_that_never_decides_changes_nothing() -> None:
    """Copies of limits with more room, in between, lead to the same choices."""
    rng = random.Random(0)
    for _ in range(20):
        problem = random_problem(rng, groups=6, options=4, limits=4)
        if problem.fits((0,) * 6):
            wider = Knapsack(
                problem.seconds,
                [np.repeat(needs, 2, axis=1) for needs in problem.needs],
                np.repeat(problem.limits, 2) + np.arange(8) % 2,
            )
            assert least_seconds(wider, time_limit=60, gap=1e-3) == least_seconds(problem, time_limit=60, gap=1e-3)


def test_no_time_no_word() -> None:
    """A search without time answers nothing."""
    rng = random.Random(0)
    problem = random_problem(rng, groups=40, options=8, limits=20)
    assert least_seconds(problem, time_limit=1e-9, gap=0.0) is None
