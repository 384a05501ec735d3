"""What stretches need, learned from measured steps."""

from lightning_ckpt.peak_model import PeakModel, Stretch
from lightning_ckpt.planning import Option, solve

WAYS = [Option("replayed", 0, 0, 3.0), Option("part", 40, -5, 1.0), Option("kept", 100, 0, 0.0)]
START = Stretch("start", -1, (0, 0))
LOSS = Stretch("after", 1, (1, 1))
BACKWARD = Stretch("backward", 1, (1, 0))
OPTIMIZER = Stretch("optimizer", -1, (0, 0))
MEASURED = {START: 500, LOSS: 700, BACKWARD: 800, OPTIMIZER: 600}


def model() -> PeakModel:
    """Two blocks, measured with everything replayed."""
    peaks = PeakModel([WAYS, WAYS])
    peaks.observe(MEASURED, (0, 0))
    return peaks


def test_what_was_measured_is_predicted() -> None:
    """Under the options it was measured with, every stretch has its measured peak."""
    assert model().peaks((0, 0)) == MEASURED


def test_kept_bytes_count_where_their_block_is_live() -> None:
    """They add to the stretches between a block's forward and its backward, and to no other."""
    assert model().peaks((2, 1)) == {START: 500, LOSS: 840, BACKWARD: 895, OPTIMIZER: 600}


def test_a_step_corrects_the_prediction() -> None:
    """After a step under a plan its peaks are those measured; stretches in which no block runs are right for all."""
    peaks = model()
    peaks.observe({**peaks.peaks((2, 1)), LOSS: 850, BACKWARD: 880}, (2, 1))
    assert peaks.peaks((2, 1))[LOSS] == 850
    assert peaks.peaks((2, 1))[BACKWARD] == 880
    assert peaks.peaks((0, 0))[LOSS] == 710
    assert peaks.peaks((0, 0))[BACKWARD] == 800  # as measured with block 1 replayed


def test_a_live_count_multiplies() -> None:
    """A block that ran twice keeps its bytes twice."""
    peaks = PeakModel([WAYS])
    peaks.observe({Stretch("after", 0, (2,)): 100}, (0,))
    assert peaks.peaks((2,)) == {Stretch("after", 0, (2,)): 300}


def test_a_larger_batch_lets_options_grow() -> None:
    """What blocks keep grows with the factor; what was measured stays."""
    peaks = model()
    peaks.scale(1.5)
    assert peaks.peaks((0, 0)) == MEASURED
    assert peaks.peaks((2, 0))[LOSS] == 850


def test_a_lift_reaches_every_stretch() -> None:
    """After a step that needed more than predicted, everything does."""
    peaks = model()
    peaks.lift(50)
    assert peaks.peaks((0, 0)) == {stretch: peak + 50 for stretch, peak in MEASURED.items()}


def test_plans_are_made_for_what_it_predicts() -> None:
    """The phases it hands to the solver peak as it says, for any choice."""
    peaks = model()
    peaks.observe({**peaks.peaks((2, 1)), BACKWARD: 870}, (2, 1))
    for choices in [(0, 0), (2, 1), (1, 2), (2, 2)]:
        added = [
            sum(phase.needs(block, peaks.options[block])[choice] for block, choice in enumerate(choices))
            for phase in peaks.phases()
        ]
        planned = [phase.peak + more for phase, more in zip(peaks.phases(), added, strict=True)]
        assert planned == list(peaks.peaks(choices).values())


def test_blocks_of_one_kind_learn_from_one_another() -> None:
    """What keeping a block has cost its own stretch is expected of an equal block, unless that was measured itself."""
    peaks = PeakModel([WAYS, WAYS])
    first, second = Stretch("forward", 0, (1, 0)), Stretch("forward", 1, (1, 1))
    peaks.observe({first: 500, second: 520}, (0, 0))
    assert peaks.peaks((2, 2)) == {first: 600, second: 720}
    peaks.observe({first: 560, second: 620}, (2, 0))  # keeping block 0 needed 40 less than foreseen
    assert peaks.peaks((2, 2)) == {first: 560, second: 680}


def test_a_plan_within_the_budget_is_predicted_within_it() -> None:
    """What the solver chooses for the phases keeps to the budget by the model's own word."""
    peaks = model()
    plan = solve(peaks.options, peaks.phases(), 860)
    assert max(peaks.peaks(plan.choices).values()) == plan.peak <= 860
