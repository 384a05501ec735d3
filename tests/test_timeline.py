"""The peaks of a step apart, from both kinds of marks."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt.memory import AllocatorReader, Interval, ResetMarks
from lightning_ckpt.recompute import checkpoint_blocks
from lightning_ckpt.timeline import Peaks, Timeline
from zoo import GPT, mlp

ACTIVATION = 64 * 64 * 4


def one_step(model: nn.Module, batch: Tensor) -> tuple[Peaks, int]:
    """The peaks of one checkpointed step, and the peak of all of it."""
    with checkpoint_blocks(model) as handle, AllocatorReader() as reader:
        model(batch).sum().backward()
        model.zero_grad()
        timeline = Timeline(handle.blocks, reader)
        handle.observe(timeline)
        reader.reset_peak()
        model(batch).sum().backward()
        timeline.end_backward()
        return timeline.end(), reader.peak()


def test_stretches_follow_the_step() -> None:
    """Blocks run forward in order and backward in reverse, with what is live in each told by block."""
    peaks, _ = one_step(mlp(3), torch.randn(64, 64))
    told = [(stretch.what, stretch.block, stretch.live) for stretch in peaks.stretches]
    assert told == [
        ("start", -1, (0, 0, 0)),
        ("forward", 0, (1, 0, 0)),
        ("after", 0, (1, 0, 0)),
        ("forward", 1, (1, 1, 0)),
        ("after", 1, (1, 1, 0)),
        ("forward", 2, (1, 1, 1)),
        ("after", 2, (1, 1, 1)),
        ("backward", 2, (1, 1, 0)),
        ("backward", 1, (1, 0, 0)),
        ("backward", 0, (0, 0, 0)),
        ("optimizer", -1, (0, 0, 0)),
    ]


def test_the_highest_stretch_is_the_peak_of_the_step() -> None:
    """No byte of the peak falls between two stretches."""
    torch.manual_seed(0)
    peaks, whole = one_step(GPT(), torch.randint(0, 50, (4, 32)))
    assert peaks.peak == whole
    assert peaks.stretches[peaks.highest] == whole


def test_what_lies_within_a_backward_pass_is_counted() -> None:
    """Marks work where the allocator can't be read: within backward, each block's replay in its own stretch."""
    peaks, _ = one_step(mlp(3), torch.randn(64, 64))
    backward = [peak for stretch, peak in peaks.stretches.items() if stretch.what == "backward"]
    boundaries_fall = [one - other for one, other in pairwise(backward)]
    gradients = 2 * (64 * 64 + 64) * 4  # of the block whose backward came before
    assert boundaries_fall[1] == pytest.approx(ACTIVATION - gradients, abs=300)


def test_reading_within_a_backward_pass_is_refused() -> None:
    """A recording that is restarted there would miss the rest of it in silence."""
    x = torch.ones(3, requires_grad=True)
    with AllocatorReader() as reader:
        y = x * 2
        y.register_hook(lambda gradient: reader.reset_peak())
        with pytest.raises(RuntimeError, match="an AllocatorReader can't be read within a backward pass"):
            y.sum().backward()


class Counter:
    """An accelerator's counter, as a test moves it."""

    def __init__(self) -> None:
        self.now = self.highest = 100

    def use(self, size: int) -> None:
        self.now, self.highest = size, max(self.highest, size)

    def reset_peak(self) -> None:
        self.highest = self.now

    def peak(self) -> int:
        return self.highest

    def limit(self) -> int | None:
        return None


def test_marks_by_reset_tell_the_same() -> None:
    """Counters that can be read anywhere are read and reset at each mark; other intervals keep their peak."""
    counter = Counter()
    step = Interval(counter)
    step.reset_peak()
    timeline = Timeline(["a"], ResetMarks(Interval(counter)), gradients=lambda: counter.now)
    timeline.forward_begins("a")
    counter.use(300)
    counter.use(150)
    timeline.forward_ends("a", None, [], None)
    counter.use(200)
    timeline.backward_begins(0)
    counter.use(400)
    counter.use(120)
    timeline.end_backward()
    peaks = timeline.end()
    assert {(s.what, s.block): peak for s, peak in peaks.stretches.items()} == {
        ("start", -1): 100,
        ("forward", 0): 300,
        ("after", 0): 200,
        ("backward", 0): 400,
        ("optimizer", -1): 120,
    }
    assert (peaks.found, peaks.peak, peaks.gradients, step.peak()) == (100, 400, 200, 400)


def test_other_blocks_are_none_of_its_business() -> None:
    """A block that was not named makes no stretch."""
    counter = Counter()
    timeline = Timeline(["a"], ResetMarks(Interval(counter)))
    timeline.forward_begins("a.mlp")
    timeline.forward_ends("a.mlp", None, [], torch.ones(1, requires_grad=True))
    assert [stretch.what for stretch in timeline.end().stretches] == ["start"]


def test_micro_batches_share_their_stretches() -> None:
    """With gradients gathered over two batches each stretch has the higher of two peaks, and inputs are a batch's."""
    model = mlp(2)
    with checkpoint_blocks(model) as handle, AllocatorReader() as reader:
        timeline = Timeline(handle.blocks, reader)
        handle.observe(timeline)
        for rows in (64, 32):
            timeline.begin_batch()
            model(torch.randn(rows, 64)).sum().backward()
            timeline.end_backward()
        peaks = timeline.end()
    assert len([stretch for stretch in peaks.stretches if stretch.what == "forward"]) == 2
    assert peaks.inputs == {"0": ACTIVATION, "1": ACTIVATION}


def test_a_shared_block_is_live_as_often_as_it_ran() -> None:
    """Each call of a block that runs twice waits for its own backward."""
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = nn.ModuleList([block])
    with checkpoint_blocks(model, blocks="0") as handle, AllocatorReader() as reader:
        timeline = Timeline(handle.blocks, reader)
        handle.observe(timeline)
        block(block(torch.randn(4, 8))).sum().backward()
        timeline.end_backward()
        told = [(stretch.what, stretch.live) for stretch in timeline.end().stretches if stretch.what != "start"]
    assert ("after", (2,)) in told
    assert [live for what, live in told if what == "backward"] == [(1,), (0,)]
