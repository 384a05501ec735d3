"""Batch size and memory plan chosen together: the fastest pair, and training as with both set by hand."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, MemoryBudget
from lightning_ckpt.callbacks._trials import Trials
from lightning_ckpt.memory import AllocatorReader, use_reader
from modules import Language, differences, fit, is_estimated
from recording import Peaks

LIMIT = 700_000


class Many(Language):
    """A longer epoch, whose batches may be larger."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = [{"input_ids": torch.randint(0, 50, (9,), generator=generator)} for _ in range(96)]
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]


class Replays(Callback):
    """Counts how often a part of the first block runs in each training step: once, and once more where replayed."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.now = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        module.gpt.blocks[0].mlp.register_forward_hook(self.count)  # type: ignore[union-attr, index]

    def count(self, *_: Any) -> None:
        self.now += 1

    def on_train_batch_start(self, *_: Any) -> None:
        self.now = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.now)


def timed_as(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[int]:
    """Let steps take as long as `seconds` says, by the size of their batch; return the sizes that were timed."""
    sizes: list[int] = []
    steps = Trials.steps

    def noting(self: Trials, size: int) -> Any:
        sizes.append(size)
        return steps(self, size)

    def timed(self: Trials, step: Any) -> float:
        step()
        return float(seconds(sizes[-1]))

    monkeypatch.setattr(Trials, "steps", noting)
    monkeypatch.setattr(Trials, "timed", timed)
    return sizes


def tune(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> tuple[BatchSizeTuner, ActivationCheckpointing, Many, Any]:
    timed_as(monkeypatch, seconds)
    torch.manual_seed(0)
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        module = Many()
        planner, tuner = ActivationCheckpointing(MemoryBudget(0.9), monitor=False), BatchSizeTuner()
        left = fit(module, [planner, tuner], max_epochs=2)
    return tuner, planner, module, left


def sizes_planned(tuner: BatchSizeTuner) -> list[int]:
    return [trial.size for trial in tuner.trials if trial.outcome == "planned"]


def test_the_largest_size_is_taken_where_samples_get_cheaper_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes equally long at every size: two smaller sizes are tried, and no more."""
    tuner, _, module, _ = tune(monkeypatch, lambda size: 1.0)
    fitting = max(trial.size for trial in tuner.trials if trial.outcome == "fits")
    assert sizes_planned(tuner)[0] == fitting == tuner.batch_size == module.batch_size
    assert len(sizes_planned(tuner)) == 3


def test_a_smaller_size_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that grows with the square of the size: down to where nothing is left to replay, since less can't help."""
    tuner, planner, _, _ = tune(monkeypatch, lambda size: size**2)
    planned = sizes_planned(tuner)
    assert tuner.batch_size == planned[-1] < planned[0]
    assert planner.plan is not None
    assert planner.plan.seconds == 0
    assert all(trial.peak <= 0.9 * LIMIT for trial in tuner.trials if trial.outcome != "too large")


def test_training_is_that_with_the_size_set_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, optimizer state, metrics and random numbers, bit for bit, as plain training leaves them."""
    torch.manual_seed(0)
    plain = Many()
    tuner, _, _, left = tune(monkeypatch, lambda size: abs(size - 20) + size)
    by_hand = copy.deepcopy(plain)
    assert tuner.batch_size is not None
    by_hand.batch_size = tuner.batch_size
    torch.manual_seed(0)
    Many()  # draws what the other run's module drew
    assert not differences(left, fit(by_hand, max_epochs=2))


class RunsOut(Many):
    """Runs out of memory when a size is taken for the second time, which is when its plan is made."""

    def training_step(self, batch: Any, *args: Any) -> Any:
        size = len(batch["input_ids"])
        if not is_estimated(batch["input_ids"]):
            SEEN.append(size)
        if size > 8 and SEEN.count(size) == 2 and not FAILED:
            FAILED.append(size)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, *args)


SEEN: list[int] = []
FAILED: list[int] = []


def test_a_plan_that_runs_out_of_memory_is_passed_over() -> None:
    """The size is not settled; a smaller one is, under its plan, and training goes through."""
    SEEN.clear()
    FAILED.clear()
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        planner, tuner, module = ActivationCheckpointing(MemoryBudget(0.9), monitor=False), BatchSizeTuner(), RunsOut()
        fit(module, [planner, tuner], max_epochs=1)
    fitting = max(trial.size for trial in tuner.trials if trial.outcome == "fits")
    assert [fitting] == FAILED
    assert tuner.batch_size == module.batch_size in sizes_planned(tuner)
    assert fitting not in sizes_planned(tuner)
    assert planner.plan is not None


class OnlyTheHead(Many):
    """Blocks that keep nothing: neither they nor what comes before them is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt.requires_grad_(False)
        self.gpt.head.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.gpt.head.parameters(), lr=1e-3)


def test_where_there_is_nothing_to_plan_the_largest_size_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is tried for a plan, since none would come; training keeps to the room all the same."""
    sizes = timed_as(monkeypatch, lambda size: 1.0)
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        planner, tuner = ActivationCheckpointing(MemoryBudget(0.9), monitor=False), BatchSizeTuner()
        fit(OnlyTheHead(), [planner, tuner], max_epochs=1)
    assert tuner.batch_size == sizes[-1] == max(trial.size for trial in tuner.trials if trial.outcome == "fits")
    assert sizes_planned(tuner) == []
    assert planner.state_dict()["budget"] == int(0.9 * LIMIT)


@pytest.mark.parametrize(("budget", "most"), [(300_000, 12), (1024, 2)], ids=["one is kept to", "none is"])
def test_sizes_that_no_plan_keeps_to_the_budget_are_passed_over(
    budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's budget is smaller than the room: a smaller size is taken, or the largest where none has a plan."""
    sizes = timed_as(monkeypatch, lambda size: 1.0)
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        planner, tuner = ActivationCheckpointing(MemoryBudget(budget), monitor=False), BatchSizeTuner(max_val=most)
        fit(Many(), [planner, tuner], max_epochs=1)
    assert most in [trial.size for trial in tuner.trials if trial.outcome == "fits"]
    assert most not in sizes_planned(tuner)
    assert all(trial.peak <= budget for trial in tuner.trials if trial.outcome == "planned")
    if sizes_planned(tuner):
        assert tuner.batch_size in sizes_planned(tuner)
    else:
        assert sizes[-2:] == [2, 1]
        assert tuner.batch_size == most == 2
    assert planner.state_dict()["budget"] == budget


def test_training_starts_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is spent on a profile: the first one runs the plan, under its budget."""
    timed_as(monkeypatch, lambda size: size**2)
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        planner, tuner, replays = (
            ActivationCheckpointing(MemoryBudget(0.9), monitor=False),
            BatchSizeTuner(),
            Replays(),
        )
        fit(Many(), [planner, tuner, replays], max_epochs=1)
    assert set(replays.seen) == {1}


def test_a_second_fit_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is checked by one trial, the plan stays the callback's."""
    tuner, planner, module, _ = tune(monkeypatch, lambda size: size**2)
    size, before = tuner.batch_size, len(tuner.trials)
    with AllocatorReader(limit=LIMIT) as reader, use_reader(reader):
        fit(module, [planner, tuner], max_epochs=1)
    assert tuner.batch_size == size
    assert len(tuner.trials) == before + 1


def test_the_tuners_limit_binds_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner, by itself, would fill ten times as much; what it was given stays for a later fit too."""
    timed_as(monkeypatch, lambda size: 1.0)
    with AllocatorReader(limit=10 * LIMIT) as reader, use_reader(reader):
        planner, tuner = ActivationCheckpointing(MemoryBudget(0.9), monitor=False), BatchSizeTuner(memory_limit=LIMIT)
        peaks, module = Peaks(reader), Many()
        fit(module, [planner, tuner, peaks], max_epochs=2)
        state = planner.state_dict()
        assert state["budget"] == int(0.9 * LIMIT)
        assert max(peaks.seen) <= state["budget"]
        fit(module, [planner, tuner, peaks], max_epochs=2)
        assert max(peaks.seen) <= state["budget"]
        resumed = ActivationCheckpointing(MemoryBudget(0.9), monitor=False)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
