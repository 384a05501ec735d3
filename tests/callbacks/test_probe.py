"""Trials of the largest samples there are: which they are found to be, and that a later long batch then fits."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

from lightning_ckpt import BatchSizeTuner
from lightning_ckpt.callbacks import _longest, _probe
from lightning_ckpt.callbacks._longest import Longest
from lightning_ckpt.callbacks._sample_sizes import elements_of, size_of
from lightning_ckpt.memory import use_reader
from modules import trainer
from recording import Clock, Meter

MIB = 2**20
pytestmark = pytest.mark.usefixtures("quick_collection")


class Texts(Dataset[Tensor]):
    """Samples of these lengths, each filled with its index; reading one draws a random number of the dataset's own."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.read, self.rng = lengths, 0, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        self.rng.random()
        return torch.full((self.lengths[index],), float(index))


class Stream(IterableDataset[Tensor]):
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((length,), float(index)) for index, length in enumerate(self.lengths))


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def to_ten(samples: list[Tensor]) -> Tensor:
    return torch.stack([nn.functional.pad(sample, (0, 10 - len(sample))) for sample in samples])


class Model(LightningModule):
    """A step takes a MiB an element of its batch."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.layer, self.meter, self.shapes = nn.Linear(1, 1), meter, []  # type: ignore[var-annotated]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.meter.use(batch.numel() * MIB)
        self.shapes.append(tuple(batch.shape))
        return self.layer(batch.unsqueeze(-1)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loader: Any, probe: Any, *, limit: int = 1000) -> tuple[Model, BatchSizeTuner]:
    """Train an epoch with a tuner that may use nine tenths of `limit` MiB."""
    meter, tuner = Meter(limit=limit * MIB), BatchSizeTuner(probe=probe)
    seed_everything(1, verbose=False)
    model = Model(meter)
    with use_reader(meter):
        trainer([tuner]).fit(model, loader)
    return model, tuner


ONE_LONG = [1] * 1999 + [10]
"""Two thousand samples of which the last is ten times as long, as data are that crash in the last step of an epoch."""


@pytest.mark.parametrize(("probe", "settled"), [("longest", 90), ("first", 900)])
def test_a_later_long_batch_fits_if_the_longest_was_tried(probe: str, settled: int) -> None:
    """A batch of 90 has its ten columns within 900 MiB; the samples that come first promise room for 900."""
    loader = DataLoader(Texts(ONE_LONG), batch_size=4, collate_fn=padded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tuner = fit(loader, probe)
    assert tuner.batch_size == settled
    trained = [rows * columns for rows, columns in model.shapes]
    assert (max(trained) <= 900) == (probe == "longest")


def first_batch(loader: Any, size: int) -> list[int]:
    """Which samples a trial's batch is made of."""
    batch = next(iter(Longest().for_trial(loader, size)))
    return [int(row.max()) for row in batch]


LENGTHS = [3, 9, 1, 7, 5, 8, 2, 6]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda **how: DataLoader(Texts(LENGTHS), batch_size=2, **how), [1, 5, 3]),
        (lambda **how: DataLoader(Texts(LENGTHS), batch_size=2, shuffle=True, **how), [1, 5, 3]),
        (lambda **how: DataLoader(Texts(LENGTHS), batch_size=2, shuffle=True, num_workers=2, **how), [1, 5, 3]),
        (
            lambda **how: DataLoader(Texts(LENGTHS), batch_size=2, sampler=SubsetRandomSampler([0, 2, 4, 6]), **how),
            [4, 0, 6],
        ),
        (
            lambda **how: DataLoader(
                Texts(LENGTHS), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, drop_last=False), **how
            ),
            [1, 3, 4],
        ),
        (lambda **how: DataLoader(Stream(LENGTHS), batch_size=2, **how), [1, 5, 3]),
        (lambda **how: DataLoader(Stream(LENGTHS), batch_size=2, num_workers=1, **how), [1, 5, 3]),
    ],
    ids=["plain", "shuffled", "workers", "part of the data", "batch sampler", "stream", "stream with a worker"],
)
def test_a_batch_is_of_the_largest_that_the_loader_gives(make: Callable[..., Any], expected: list[int]) -> None:
    """The largest first; of what a sampler leaves out, none."""
    assert first_batch(make(collate_fn=padded), 3) == expected


def test_every_batch_of_a_trial_is_the_same() -> None:
    """Also of a stream, whose few largest are given again."""
    for data in (Texts(LENGTHS), Stream(LENGTHS)):
        batches = iter(Longest().for_trial(DataLoader(data, batch_size=2, collate_fn=padded), 3))
        assert torch.equal(next(batches), next(batches))


def test_of_many_samples_evenly_spaced_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stands for its share of the data: with 5 of 9 read, a batch of 4 has the two largest twice."""
    monkeypatch.setattr(_longest, "MOST_SCANNED", 5)
    data = Texts([1, 99, 2, 99, 3, 99, 4, 99, 5])
    loader = Longest()
    trial = loader.for_trial(DataLoader(data, batch_size=2, collate_fn=padded), 4)
    assert data.read == 5
    assert [int(row.max()) for row in next(iter(trial))] == [8, 8, 6, 6]


def test_the_scan_of_a_stream_ends_by_the_clock() -> None:
    """Each sample takes four seconds: of the three that come first, the largest first, over and over."""
    clock = Clock()

    class Slow(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            for sample in super().__iter__():
                clock.sleep(4)
                yield sample

    trial = Longest(clock).for_trial(DataLoader(Slow([2, 9, 5, 99]), batch_size=2, collate_fn=padded), 4)
    assert [int(row.max()) for row in next(iter(trial))] == [1, 2, 0, 1]


def test_what_has_no_largest_samples_is_tried_as_it_is() -> None:
    """Batches that are ready made, beside a loader that has some; data without a sample."""
    batches = [torch.ones(2, 1)]
    assert Longest().for_trial(batches, 3) is batches
    assert list(Longest().for_trial(DataLoader(Texts([]), batch_size=2, collate_fn=padded), 3)) == []


def test_a_scan_ends_by_the_clock_with_both_ends_read() -> None:
    """A fetch takes four seconds here: the third one ends it. The last sample, where data are sorted, is among them."""
    clock = Clock()

    class Slow(Texts):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            clock.sleep(4)
            return [self[index] for index in indices]

    data = Slow(range(1, 1001))
    trial = Longest(clock).for_trial(DataLoader(data, batch_size=2, collate_fn=padded), 1)
    assert data.read == 3 * _longest._AT_ONCE
    assert next(iter(trial)).shape == (1, 1000)


def test_a_stream_without_end_is_scanned_from_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_longest, "MOST_SCANNED", 100)

    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            length = 0
            while True:
                length += 1
                yield torch.ones(length)

    trial = Longest().for_trial(DataLoader(Endless(), batch_size=2, collate_fn=padded), 70)
    assert next(iter(trial)).count_nonzero(1).tolist() == [*range(100, 36, -1), *range(100, 94, -1)]


def test_workers_read_so_that_the_dataset_here_is_untouched() -> None:
    """A file that a dataset opens on its first read is opened where training opens it."""
    data = Texts(LENGTHS)
    assert len(first_batch(DataLoader(data, batch_size=2, collate_fn=padded, num_workers=2), 2)) == 2
    assert data.read == 0


def test_data_are_scanned_once() -> None:
    """Whatever sizes are tried, and by whichever loader of the same dataset."""
    data, longest = Texts(LENGTHS), Longest()
    for size in (2, 4, 8):
        longest.for_trial(DataLoader(data, batch_size=2, collate_fn=padded), size)
    assert data.read == len(LENGTHS)


def test_a_scan_leaves_random_numbers_as_they_were() -> None:
    """Global ones and the dataset's own: the epoch after it has the batches of one without a scan, in their order."""
    states, shapes = [], []
    for loader in (
        DataLoader(Texts([1, 2, 3] * 30), batch_size=4, shuffle=True, collate_fn=padded),
        DataLoader(Texts([1, 2, 3] * 30), batch_size=30, shuffle=True, collate_fn=padded),
    ):
        meter = Meter(limit=100 * MIB)
        seed_everything(1, verbose=False)
        model = Model(meter)
        tuners: list[Any] = [BatchSizeTuner(probe="longest")] if loader.batch_size == 4 else []
        with use_reader(meter):
            trainer(tuners).fit(model, loader)
        dataset: Any = loader.dataset
        own = (dataset.read, repr(dataset.rng.bit_generator.state))
        states.append((own, torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())))
        shapes.append([shape for shape in model.shapes if shape[0] == 30][-3:])
        assert len(shapes[-1]) == 3
    assert states[0] == states[1]
    assert shapes[0] == shapes[1]


class OwnLoader:
    """No DataLoader, and so nothing whose samples could be read one by one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(self.size, 1)] * 4)


class ByHook(Model):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return OwnLoader(self.batch_size)


def test_a_loader_that_can_not_be_asked_for_samples_is_refused() -> None:
    meter = Meter(limit=1000 * MIB)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[BatchSizeTuner(probe="longest")], logger=False)
    with use_reader(meter), pytest.raises(MisconfigurationException, match="the train loader is a OwnLoader: use a"):
        trainer.fit(ByHook(meter))


def test_a_batch_sampler_that_does_not_follow_is_told() -> None:
    """As with the first samples: a size that it would not give must not be settled."""

    class Fixed:
        batch_size = 2

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    loader: Any = DataLoader(Texts(LENGTHS), batch_sampler=Fixed(), collate_fn=padded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Fixed gives batches of 2 samples after its `batch_size` was set to 3"):
        Longest().for_trial(loader, 3)


@pytest.mark.parametrize("data", [Texts(ONE_LONG), Stream([1, 1, 5, 1, 1, 1, 1, 1, 1, 1])], ids=["dataset", "stream"])
def test_ragged_data_are_told_once(data: Any) -> None:
    """With what differs, and the argument that helps."""
    with pytest.warns(
        UserWarning, match=r"tensors of one have 1 elements, those of another \d+\. .*probe=\"longest\""
    ) as told:
        fit(DataLoader(data, batch_size=4, collate_fn=padded), "first")
    assert len([warning for warning in told if "differ in size" in str(warning.message)]) == 1


@pytest.mark.parametrize(
    ("lengths", "collate", "probe"),
    [
        ([4] * 50, padded, "first"),
        (ONE_LONG, to_ten, "first"),
        (ONE_LONG, padded, "longest"),
        ([40, 41] * 9, padded, "first"),
    ],
    ids=["even", "padded to one length", "longest", "nearly even"],
)
def test_nothing_is_told_without_need(lengths: list[int], collate: Any, probe: str) -> None:
    """Warnings are errors here."""
    fit(DataLoader(Texts(lengths), batch_size=4, collate_fn=collate), probe)


def test_batches_that_a_stream_makes_by_itself_are_not_compared() -> None:
    """Beside a loader whose size is looked for: their size is nobody's to choose. Warnings are errors here."""
    loaders = [DataLoader(data, batch_size=size) for data, size in ((Texts([4] * 50), 4), (Stream([1, 5, 1]), None))]
    _probe._warn_if_ragged(loaders)


def test_a_collate_function_that_wants_a_pair_is_let_alone() -> None:
    """Whether data are ragged is not asked at the price of an error."""

    def pairs(samples: list[Tensor]) -> Tensor:
        assert len(samples) > 1
        return padded(samples)

    fit(DataLoader(Texts(ONE_LONG), batch_size=4, collate_fn=pairs), "first")


@dataclass
class Example:
    words: list[str]
    label: int
    itself: Any = None


def test_the_size_of_a_sample_counts_all_that_is_in_it() -> None:
    """Tensors and arrays by elements, texts and lists by length, whatever they lie in; an object that holds itself."""
    round_about = Example(["ab", "c"], 1)
    round_about.itself = round_about
    assert size_of(torch.ones(2, 3)) == 6
    assert size_of((np.ones(4), "abc", [1, 2, 3], 5)) == 4 + 3 + 3 + 1
    assert size_of({"a": [torch.ones(2), torch.ones(5)], "b": None}) == 2 + 5 + 1
    assert size_of(["ab", 7, 7]) == 2 + 1 + 1
    assert size_of(round_about) == 3 + 1
    assert size_of([]) == 0


def test_of_a_batch_the_tensors_count() -> None:
    """Names of files differ in length everywhere; where there is no tensor, what there is counts."""
    assert elements_of({"pixels": torch.ones(3), "file": "a/long/name.png"}) == 3
    assert elements_of(["some", "words"]) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probe": "largest"}, 'probe=\'largest\': accepted are "first" and "longest"'),
        ({"stop_at_plateau": 1}, "stop_at_plateau=1: give the share by which samples per second must grow"),
        ({"stop_at_plateau": "5%"}, "stop_at_plateau='5%'"),
        ({"stop_at_plateau": True}, "stop_at_plateau=True"),
        ({"evaluation": "yes"}, "evaluation='yes': accepted are True and False"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_said(arguments: dict[str, Any], message: str) -> None:
    """Before anything is tried."""
    with pytest.raises(ValueError, match=message):
        BatchSizeTuner(**arguments)
