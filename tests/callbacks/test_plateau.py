"""Where a larger batch brings no more samples per second, on a clock that tests hold in their hands."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import BatchSizeTuner
from lightning_ckpt.callbacks import _trials
from lightning_ckpt.callbacks._plateau import TIMED_STEPS
from lightning_ckpt.memory import use_reader
from modules import trainer
from recording import Clock, Meter

MIB = 2**20
pytestmark = pytest.mark.usefixtures("quick_collection")


class Timed(LightningModule):
    """A step takes a MiB a sample, and the time of 16 samples or of as many as there are, if more."""

    def __init__(self, clock: Clock, meter: Meter, samples_at_once: int = 16) -> None:
        super().__init__()
        self.layer, self.clock, self.meter, self.at_once = nn.Linear(2, 1), clock, meter, samples_at_once

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size = len(batch[0])
        self.meter.use(size * MIB)
        self.clock.sleep(max(size, self.at_once) / 64)
        return self.layer(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_trials, "perf_counter", clock)
    return clock


def search(module: Timed, **arguments: Any) -> BatchSizeTuner:
    """With a thousand MiB and a tenth of headroom, 900 samples fit."""
    tuner = BatchSizeTuner(memory_limit="1000MiB", **arguments)
    train(module, tuner)
    return tuner


def train(module: Timed, tuner: BatchSizeTuner) -> None:
    with use_reader(module.meter):
        trainer([tuner], max_steps=1).fit(module, DataLoader(TensorDataset(torch.ones(5000, 2)), batch_size=4))


def test_the_search_ends_where_samples_per_second_stop_growing(time: Clock) -> None:
    """From 16 samples on each takes its own time: 128 are no faster than 32, and the smaller is settled."""
    tuner = search(Timed(time, Meter()), stop_at_plateau=0.05)
    assert [(trial.size, trial.samples_per_second) for trial in tuner.trials] == [(2, 8), (8, 32), (32, 64), (128, 64)]
    assert tuner.batch_size == 32


def test_without_it_the_largest_size_that_fits_is_settled(time: Clock) -> None:
    assert search(Timed(time, Meter())).batch_size == 900


def test_growth_to_the_end_settles_the_largest(time: Clock) -> None:
    """A model that is faster with every sample fills its memory, as without the argument."""
    tuner = search(Timed(time, Meter(), samples_at_once=5000), stop_at_plateau=0.05)
    assert tuner.batch_size is not None
    assert 0.95 * 900 <= tuner.batch_size <= 900
    assert all(later.size <= 4 * trial.size for trial, later in zip(tuner.trials, tuner.trials[1:], strict=False))


def test_a_share_of_growth_is_asked_for(time: Clock) -> None:
    """From 8 to 32 samples the rate grows by half: enough for 0.4, too little for 0.6."""

    class Slowing(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            size = len(batch[0])
            self.clock.sleep({2: 2 / 64, 8: 8 / 128, 32: 32 / 192}.get(size, size / 64) - max(size, 16) / 64)
            return super().training_step(batch, batch_idx)

    assert [t.size for t in search(Slowing(time, Meter()), stop_at_plateau=0.4).trials] == [2, 8, 32, 128]
    short = search(Slowing(time, Meter()), stop_at_plateau=0.6)
    assert [t.size for t in short.trials] == [2, 8, 32]
    assert short.batch_size == 32


def test_one_slow_step_does_not_end_it(time: Clock) -> None:
    """Of each size the fastest of three steps counts: at 8 samples the first two take a hundred times as long."""
    seen: list[int] = []

    class Hindered(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(len(batch[0]))
            if seen[-1] == 8 and seen.count(8) < TIMED_STEPS:
                self.clock.sleep(1e4)
            return super().training_step(batch, batch_idx)

    tuner = search(Hindered(time, Meter(), samples_at_once=5000), stop_at_plateau=0.05)
    assert seen.count(8) == TIMED_STEPS
    assert tuner.batch_size is not None
    assert tuner.batch_size >= 0.95 * 900


def test_the_printed_title_says_why(time: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A size far from the limit is not called the largest."""
    search(Timed(time, Meter()), stop_at_plateau=0.05)
    assert "Batch size: 32, the most samples per second of those measured within" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_size_settled_before_is_used_after_one_trial(time: Clock) -> None:
    """A second fit asks for memory only."""
    module = Timed(time, Meter())
    tuner = search(module, stop_at_plateau=0.05)
    tried = len(tuner.trials)
    train(module, tuner)
    assert [trial.size for trial in tuner.trials[tried:]] == [32]
    assert tuner.batch_size == 32
