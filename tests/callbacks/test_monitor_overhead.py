"""What `StepMonitor` adds to a step, beside what Lightning's own monitors add, by the benchmark of it."""

import pytest
from monitor_overhead import TARGETS, measure, ratios

ROUNDS = 5  # until the medians of all rounds are within the targets, since a machine does something else meanwhile
TRIES = 8
NOISE = 1.6  # of cores shared with other tests; how far the targets are reached on a quiet machine, the benchmark tells


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adds_a_part_of_what_lightnings_own_add() -> None:
    """On the shortest of steps, with a row at each: paired in one run, fit by fit."""
    arms = ["nothing", "StepMonitor", *TARGETS]
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(TRIES):
        for arm, seconds in measure(ROUNDS, 400, arms=arms).items():
            found[arm] += seconds
        shares = ratios(found)
        if all(shares[arm] <= NOISE * most for arm, most in TARGETS.items()):
            return
    pytest.fail(f"what StepMonitor adds, as a share of theirs: {shares}; at most {TARGETS}, and {NOISE} for noise")
