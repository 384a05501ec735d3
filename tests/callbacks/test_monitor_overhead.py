"""What `StepMonitor` adds to a step, beside what Lightning's own monitors add, by the benchmark of it."""

import pytest
from monitor_overhead import TARGETS, measure, ratios

TRIES = 5  # a machine that does something else meanwhile spoils one
NOISE = 1.6  # a few short fits tell of a regression; how far the targets are reached, the benchmark does


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adds_a_part_of_what_lightnings_own_add() -> None:
    """On the shortest of steps, with a row at each: paired in one run, fit by fit."""
    found = {}
    for _ in range(TRIES):
        found = ratios(measure(5, 400, arms=["nothing", "StepMonitor", *TARGETS]))
        if all(found[arm] <= NOISE * most for arm, most in TARGETS.items()):
            return
    pytest.fail(f"what StepMonitor adds, as a share of theirs: {found}; at most {TARGETS}, and {NOISE} for noise")
