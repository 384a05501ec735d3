"""The first jump of a search: by an estimate where one can be made, and by trials alone where not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner
from lightning_ckpt.callbacks import _first_jump, _searching
from lightning_ckpt.callbacks._trials import Trial
from lightning_ckpt.memory import AllocatorReader, use_reader
from modules import is_estimated, trainer
from zoo import GPT, ZOO, ViT

pytestmark = pytest.mark.usefixtures("quick_collection")

FIRST, SAMPLES = 2, 1024
# Counted by the allocator's events, a GPT of so many layers fills this with some two hundred samples.
LIMIT = 24 * 2**20


class Text(LightningModule):
    """A GPT; `extra` runs in each step, and counts are kept of what ran for real."""

    def __init__(self, extra: Callable[[Any], None] = lambda module: None) -> None:
        super().__init__()
        self.net, self.extra, self.seen = GPT(depth=4), extra, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        self.extra(self)
        return ZOO["gpt"].loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Pictures(Text):
    def __init__(self) -> None:
        super().__init__()
        self.net = ViT()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ZOO["vit"].loss(self.net, batch)


def chosen_by_value(module: Text) -> None:
    """What a fake tensor can't tell."""
    if next(module.parameters()).sum().item() > 1e6:
        raise AssertionError


SIDE: list[Tensor] = []


def keeps_on_the_side(module: Text) -> None:
    """Memory that no estimate sees, a fifth of the limit from the first real step on."""
    if not SIDE and not is_estimated(next(module.parameters()).data):
        SIDE.append(torch.empty(LIMIT // 5, dtype=torch.uint8))


def search(
    make: Callable[[], Text], callbacks: Sequence[Callback] = (), limit: int = LIMIT
) -> tuple[BatchSizeTuner, Text]:
    """The tuner and the model after a search; what the model itself takes is counted too."""
    seed_everything(1, verbose=False)
    SIDE.clear()
    with AllocatorReader() as reader, use_reader(reader):
        model, tuner = make(), BatchSizeTuner(headroom=0.1, memory_limit=limit)
        data = torch.randn(SAMPLES, 1, 8, 8) if isinstance(model, Pictures) else torch.randint(0, 50, (SAMPLES, 9))
        trainer([*callbacks, tuner], max_steps=1, max_epochs=None).fit(model, DataLoader(data, batch_size=4))
    return tuner, model


def searched(tuner: BatchSizeTuner) -> list[Trial]:
    return [trial for trial in tuner.trials if trial.outcome != "planned"]


def without_a_jump(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Text], *callbacks: Callback) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(_searching, "first_jump", lambda *_: None)
        return search(make, callbacks)


@pytest.mark.parametrize("policy", [None, "full", "auto"])
def test_one_trial_is_enough_where_the_step_can_be_estimated(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lands within a fiftieth below the target, where the search without it takes more trials to get as far."""
    callbacks: list[Callback] = [ActivationCheckpointing(policy, monitor=False)] if policy else []
    ours, theirs = search(Text, callbacks)[0], without_a_jump(monkeypatch, Text, *callbacks)[0]
    (trial,) = searched(ours)
    assert len(searched(theirs)) > 1
    assert 0.98 * 0.9 * LIMIT <= trial.peak <= 0.9 * LIMIT
    assert max(t.size for t in searched(theirs) if t.outcome == "fits") <= trial.size * 1.02


@pytest.mark.parametrize(
    "make",
    [lambda: Text(chosen_by_value), lambda: Text(keeps_on_the_side), Pictures],
    ids=["a value decides", "memory on the side", "a kernel with memory of its own"],
)
def test_where_it_can_not_trials_alone_settle(make: Callable[[], Text], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trials as if nobody had tried to estimate."""
    ours, theirs = search(make)[0], without_a_jump(monkeypatch, make)[0]
    assert len(ours.trials) > 1
    assert [t.size for t in ours.trials] == [t.size for t in theirs.trials]


def test_an_estimate_that_takes_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials alone settle then, and the log says why."""
    theirs = without_a_jump(monkeypatch, Text)[0]
    monkeypatch.setattr(_first_jump, "_MOST_SECONDS", 0)
    with caplog.at_level("DEBUG", logger=_first_jump.__name__):
        ours = search(Text)[0]
    assert [t.size for t in ours.trials] == [t.size for t in theirs.trials]
    assert "The first jump is not estimated: it took more than 0 s" in caplog.text


def test_data_that_end_before_memory_does_are_enough() -> None:
    """The jump goes no further than there are samples."""
    assert [trial.size for trial in search(Text, limit=2**40)[0].trials] == [SAMPLES]


def test_an_estimate_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step counts, and the random numbers, are as after trials alone."""
    found = []
    for tuner, model in (search(Text), without_a_jump(monkeypatch, Text)):
        assert model.seen == 1, tuner.trials
        found.append(torch.get_rng_state())
    assert torch.equal(*found)
