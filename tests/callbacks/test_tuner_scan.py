"""The search against a scan of every size: four architectures, plain and checkpointed, by the allocator's own bytes."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner
from lightning_ckpt.memory import AllocatorReader, use_reader
from lightning_ckpt.search import Measurement, Phase, Search
from modules import is_estimated
from zoo import GPT, ZOO, UNet, ViT

pytestmark = pytest.mark.slow

LARGEST, FIRST = 64, 2
HEADROOMS = (0.05, 0.1, 0.2)


class LSTM(torch.nn.Module):
    """Three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.LSTM(width, width, batch_first=True) for _ in range(3)])
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], Tensor]]] = {
    # Four tokens, so that the optimizer's step is the highest phase up to many samples, as in large models.
    "gpt": (lambda: GPT(depth=6), lambda count: torch.randint(0, 50, (count, 5))),
    "vit": (ViT, lambda count: torch.randn(count, 1, 8, 8)),
    "unet": (UNet, lambda count: torch.randn(count, 1, 8, 8)),
    # Wide enough that what its kernel rounds up does not show.
    "lstm": (lambda: LSTM(48), lambda count: torch.randn(count, 12, 48)),
}
CASES = list(itertools.product(MODELS, (False, True)))


class Model(LightningModule):
    """One of the models, which tells the size of each batch it sees."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, MODELS[kind][0]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not is_estimated(batch):
            SEEN.append(len(batch))
        return ZOO[self.kind].loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


SEEN: list[int] = []


class EachSize:
    """Batches of one sample, of two, and so on; the first makes the optimizer's state."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(size)) for size in (FIRST, *range(1, LARGEST + 1))])

    def __len__(self) -> int:
        return LARGEST + 1


class Recorder(Callback):
    """The peaks of forward, backward and optimizer step of each batch of a real training."""

    def __init__(self, reader: AllocatorReader) -> None:
        self.reader = reader
        self.peaks: list[list[int]] = []
        self.floor = self.gradients = 0

    def on_before_backward(self, *_: Any) -> None:
        self.reader.mark()

    on_before_optimizer_step = on_before_backward

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.reader.mark()
        self.peaks.append(self.reader.marked())
        if not self.floor:
            self.gradients = sum(p.nbytes for p in pl_module.parameters())
            # AdamW keeps two averages of each parameter, and counts its steps in four bytes.
            self.floor = 3 * self.gradients + 4 * len(list(pl_module.parameters()))


@dataclass(frozen=True)
class Scan:
    """What a step of every size needs."""

    measured: dict[int, Measurement]

    def largest(self, target: int) -> int:
        return max(size for size, m in self.measured.items() if m.peak <= target)


def fit(model: Model, data: DataLoader[Any], callbacks: list[Callback], checkpointed: bool, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        callbacks=[*([ActivationCheckpointing(monitor=False)] if checkpointed else []), *callbacks],
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, data)
    return trainer


@cache
def scan(kind: str, checkpointed: bool) -> Scan:
    """Train on batches of every size."""
    with AllocatorReader() as reader:
        recorder, model = Recorder(reader), Model(kind)
        fit(
            model,
            DataLoader(MODELS[kind][1](LARGEST), batch_sampler=EachSize()),
            [recorder],
            checkpointed,
            max_epochs=1,
        )  # type: ignore[arg-type]
    floors = (recorder.floor + recorder.gradients, recorder.floor, recorder.floor)
    return Scan(
        {
            size: Measurement(size, max(peaks), phases=tuple(map(Phase, peaks, floors)))
            for size, peaks in enumerate(recorder.peaks[1:], start=1)
        }
    )


@dataclass(frozen=True)
class Found:
    """How a search went: training steps taken for it, whether memory ran out, what was settled, of what was best."""

    steps: int
    ran_out: bool
    settled: int
    best: int


def searched(of: Scan, best: int, headroom: float) -> Found:
    """The search on the curve, with a first step that makes the optimizer's state."""
    target = of.measured[best].peak
    limit, search = math.ceil(target / (1 - headroom)), Search(target, max_val=LARGEST)
    measured: list[Measurement] = []
    while (size := search.propose(measured, floor=0, hint=of.measured[FIRST])) is not None:
        there = of.measured[size]
        measured.append(Measurement(size, limit, out_of_memory=True) if there.peak > limit else there)
    ran_out = any(m.out_of_memory for m in measured)
    return Found(1 + len(measured), ran_out, search.settled(measured), of.largest(target))


def test_on_the_curve_of_every_model_few_steps_find_the_largest_size() -> None:
    """Answers from 24 to 60: at most 5 steps, 4 in the median, no error in 95 %, at least 95 % of the largest."""
    runs = [
        searched(scan(*case), best, headroom)
        for case, best, headroom in itertools.product(CASES, range(24, 61, 4), HEADROOMS)
    ]
    assert max(run.steps for run in runs) <= 5
    assert statistics.median(run.steps for run in runs) <= 4
    assert sum(run.ran_out for run in runs) <= 0.05 * len(runs)
    assert all(run.settled <= run.best for run in runs)
    assert all(run.settled >= 0.95 * run.best for run in runs)


@pytest.mark.parametrize(("kind", "checkpointed"), CASES, ids=lambda value: str(value))
def test_the_callback_finds_it_in_real_training_steps(kind: str, checkpointed: bool) -> None:
    """At each headroom: at most 5 steps before training, within 95 % of the scan's answer, peaks as in the scan."""
    of = scan(kind, checkpointed)
    for headroom, best in zip(HEADROOMS, (30, 45, 60), strict=True):
        target = of.measured[best].peak
        tuner = BatchSizeTuner(headroom=headroom, memory_limit=math.ceil(target / (1 - headroom)), max_val=LARGEST)
        SEEN.clear()
        with AllocatorReader() as reader, use_reader(reader):
            data = DataLoader(MODELS[kind][1](LARGEST), batch_size=3)
            fit(Model(kind), data, [tuner], checkpointed, max_steps=1)
        assert tuner.batch_size is not None
        assert 0.95 * of.largest(target) <= tuner.batch_size <= of.largest(target)
        assert not any(trial.outcome == "out of memory" for trial in tuner.trials)
        *tried, trained = SEEN
        assert tried == [FIRST, *(trial.size for trial in tuner.trials)]
        assert trained == tuner.batch_size
        assert len(tried) <= 5
        for trial in tuner.trials:
            assert trial.peak == pytest.approx(of.measured[trial.size].peak, rel=0.01)
