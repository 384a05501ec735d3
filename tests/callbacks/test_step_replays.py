"""The figures of checkpointing in a run's rows: absent without it, exact with it, those of the plan that stands."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, MemoryBudget, StepMonitor, checkpoint_blocks
from lightning_ckpt.callbacks import _step_work
from lightning_ckpt.callbacks._clock import HostClock
from lightning_ckpt.callbacks._step_replays import StepReplays
from lightning_ckpt.memory import GIB
from lightning_ckpt.recompute import checkpointed_forwards
from recording import Clock, Module, Rowed, fit

OWN = {"checkpointing/saved_gib", "checkpointing/recompute_ms", "checkpointing/overhead_fraction"}
BLOCK = 0.125
"""Seconds a block's forward takes on the injected clock."""


class Slow(nn.Module):
    def __init__(self, clock: Clock | None) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(4, 4), clock

    def forward(self, x: Tensor) -> Tensor:
        if self.clock:
            self.clock.sleep(BLOCK)
        return self.layer(x).tanh().exp()


class Deep(Module):
    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.blocks = nn.ModuleList(Slow(clock) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)


def run(policy: Any = "full", *, clock: Clock | None = None, samples: int = 8, **options: Any) -> Rowed:
    checkpointing = ActivationCheckpointing(policy, blocks="blocks.*")
    return fit(module=Deep(clock), clock=clock, samples=samples, callbacks=(checkpointing,), **options)


def test_a_plain_run_has_no_such_keys(clock: Clock) -> None:
    """Nobody checkpoints, nobody reads that it saves nothing."""
    assert not OWN & fit(module=Deep(clock), clock=clock).rows()[0][1].keys()


def test_savings_and_cost_of_each_step(clock: Clock) -> None:
    """Three blocks of an eighth of a second: each step replays as long, and lets go what `tanh` and `exp` would keep.

    The first keeps its result twice as input of the next: what is let go of four numbers a sample is `tanh`'s result.
    """
    logger = run(clock=clock, samples=5)
    replays = 3 * BLOCK
    step = 0.25 + 0.5 + 3 * BLOCK + replays
    assert logger.column("throughput/step_time_ms") == [step * 1e3] * 3
    assert logger.column("checkpointing/recompute_ms") == [replays * 1e3] * 3
    assert logger.column("checkpointing/overhead_fraction") == pytest.approx([replays / step] * 3)
    row = 4 * torch.float32.itemsize
    assert logger.column("checkpointing/saved_gib") == [samples * 3 * row / GIB for samples in (2, 2, 1)]


def test_micro_batches_add_time_and_not_memory(clock: Clock) -> None:
    """Four micro-batches replay four times as long, and let go what the largest of them does."""
    one, four = run(clock=clock), run(clock=clock, accumulate_grad_batches=4)
    assert four.column("checkpointing/recompute_ms") == [4 * one.column("checkpointing/recompute_ms")[0]]
    assert four.column("checkpointing/saved_gib") == one.column("checkpointing/saved_gib")[:1]


def test_an_interval_has_the_median_cost_and_the_highest_savings(clock: Clock) -> None:
    """Of three steps in a row, the last one of a smaller batch."""
    monitor = StepMonitor(3)
    logger = fit(monitor, Deep(clock), samples=5, clock=clock, callbacks=(ActivationCheckpointing(blocks="blocks.*"),))
    assert logger.column("checkpointing/recompute_ms") == [3 * BLOCK * 1e3]
    assert logger.column("checkpointing/saved_gib") == [2 * 3 * 16 / GIB]


def test_a_plan_that_keeps_all_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a roomy budget the plan keeps every block: no savings, no replay, and hardware does the model's work alone.

    Until the plan stands there is no utilization: the first step replays all, and measures besides.
    """
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"fp32": 1e15})
    logger = run(MemoryBudget("4GiB"), samples=24)
    rows = [row for _, row in logger.rows()]
    assert "throughput/hfu" not in rows[0]
    assert rows[0]["checkpointing/saved_gib"] > 0
    assert rows[-1]["checkpointing/saved_gib"] == rows[-1]["checkpointing/recompute_ms"] == 0
    assert rows[-1]["throughput/hfu"] == rows[-1]["throughput/mfu"]


def test_a_plan_that_changes_is_counted_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Utilization follows what is replayed, without a row in which it is that of another plan."""
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"fp32": 1e6})

    class Replanned(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                (how,) = {forward.how for forward in checkpointed_forwards(self)}
                how.treated += 1
                for forward in checkpointed_forwards(self):
                    forward.contexts = None

    checkpointing = ActivationCheckpointing(blocks="blocks.*")
    logger = fit(module=Replanned(clock), clock=clock, callbacks=(checkpointing,))
    replayed = [row["throughput/hfu"] - row["throughput/mfu"] for _, row in logger.rows()]
    assert replayed[0] == replayed[1] > replayed[2] == replayed[3] == 0


def test_compiled_blocks_are_not_known(clock: Clock) -> None:
    """What the compiler checkpoints nobody sees: no key rather than a zero."""

    class Compiled(Deep):
        def __init__(self, clock: Clock | None = None) -> None:
            super().__init__(None)
            self.whole = [torch.compile(self.blocks_in_turn, backend="eager")]

        def blocks_in_turn(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.whole[0](x))

    checkpointing = ActivationCheckpointing(blocks="blocks.*")
    logger = fit(module=Compiled(), callbacks=(checkpointing,))
    assert not OWN & logger.rows()[-1][1].keys()


def test_the_blocks_are_left_without_a_meter() -> None:
    """After a fit, and after one that failed, nobody is left looking on."""

    class Breaks(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.meters = [forward.how.meter for forward in checkpointed_forwards(self)]
            self.hows = [forward.how for forward in checkpointed_forwards(self)]
            if batch_idx == 1:
                raise RuntimeError("enough")

    module = Breaks()
    with pytest.raises(RuntimeError, match="enough"):
        fit(module=module, callbacks=(ActivationCheckpointing(blocks="blocks.*"),))
    assert all(module.meters)
    assert [how.meter for how in module.hows] == [None] * 3


def test_of_two_monitors_the_one_that_ends_first_leaves_the_other_its_meter() -> None:
    """Each takes the meter when it begins; the later one goes on measuring."""
    module = Deep()
    with checkpoint_blocks(module, blocks="blocks.*"):
        first, second = (StepReplays(module, HostClock()) for _ in range(2))
        first.close()
        module(torch.ones(2, 4)).sum().backward()
        assert second.take()[0]
        second.close()
        assert not any(forward.how.meter for forward in checkpointed_forwards(module))
