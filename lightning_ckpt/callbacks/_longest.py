"""Trial batches of the largest samples there are, found by a bounded scan of the data."""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_ckpt.callbacks._loaders import batch_size_of, checked_batches, for_trial, serving, streaming
from lightning_ckpt.callbacks._sample_sizes import size_of

# A scan reads this many samples at most, and begins to read none after so many seconds.
MOST_SCANNED, MOST_SECONDS = 2**16, 10.0
# Of a stream, which can't be asked for a sample again, the largest are kept.
_KEPT = 64
_AT_ONCE = 16
# Of a sampler that may leave samples out, so many are drawn to know which it gives.
_MOST_DRAWN = 2**20
# These reach every sample of the dataset, in one epoch or another.
_REACH_ALL = (SequentialSampler, RandomSampler, DistributedSampler)


@dataclass(frozen=True)
class _Scan:
    """What was seen of one loader's data.

    Attributes:
        loader: which; held, so that the ids it is known by stay its own.
        largest: indices of the samples seen, the largest first; of a stream the samples themselves.
        total: samples there are, of which each one seen stands for its share.
    """

    loader: Any
    largest: Sequence[Any]
    total: int

    def batch(self, size: int) -> list[Any]:
        """As large a batch as the data have: each sample seen as often as there are such, the largest first."""
        return [self.largest[place % self.total * len(self.largest) // self.total] for place in range(size)]


class _Again(IterableDataset[Any]):
    """A stream that gives a few samples over and over."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return cycle(self._samples)


class Longest:
    """Makes loaders for trials whose every batch is of the largest samples; data are scanned once.

    Args:
        clock: seconds, to end a scan by.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or monotonic
        self._scans: dict[tuple[int, int], _Scan] = {}

    def scan(self, loader: Any) -> None:
        """Scan the data of a loader that has a batch size, unless it was done."""
        if batch_size_of(loader) is not None and _key(loader) not in self._scans:
            scan = self._stream if isinstance(loader.dataset, IterableDataset) else self._samples
            self._scans[_key(loader)] = scan(loader)

    def for_trial(self, loader: Any, size: int) -> Any:
        """A copy that gives a batch of the `size` largest samples over and over, as far as a scan can tell."""
        self.scan(loader)
        scan = self._scans.get(_key(loader)) if batch_size_of(loader) is not None else None
        if scan is None or not scan.largest:
            return for_trial(loader, size)
        if isinstance(loader.dataset, IterableDataset):
            return streaming(loader, batch_size=size, dataset=_Again(scan.batch(size)))
        if loader.batch_size is None:
            checked_batches(loader, size)
        return serving(loader, [scan.batch(size)])

    def _samples(self, loader: Any) -> _Scan:
        there = reached(loader, most=_MOST_DRAWN)
        indices = spread(there, MOST_SCANNED)
        sizes: list[int] = []
        begun = self._clock()
        for found in _read_sizes(loader, indices):
            sizes.extend(found)
            if self._clock() - begun > MOST_SECONDS:
                break
        places = sorted(range(len(sizes)), key=lambda place: sizes[place], reverse=True)
        return _Scan(loader, [indices[place] for place in places], len(there))

    def _stream(self, loader: Any) -> _Scan:
        kept: list[tuple[int, int, Any]] = []
        begun = self._clock()
        for place, sample in enumerate(islice(streaming(loader, batch_size=None), MOST_SCANNED)):
            heapq.heappush(kept, (size_of(sample), -place, sample))
            if len(kept) > _KEPT:
                heapq.heappop(kept)
            if self._clock() - begun > MOST_SECONDS:
                break
        largest = [sample for _, _, sample in sorted(kept, key=lambda entry: entry[:2], reverse=True)]
        return _Scan(loader, largest, len(largest))


def _key(loader: Any) -> tuple[int, int]:
    """Loaders of the same data share a scan, unless their samplers give different parts of it."""
    return id(loader.dataset), 0 if _reaches_all(loader) else id(loader.batch_sampler)


def _reaches_all(loader: Any) -> bool:
    return loader.batch_size is not None and type(loader.sampler) in _REACH_ALL


def reached(loader: Any, *, most: int) -> Sequence[Any]:
    """The indices that the loader gives in one epoch or another; of its own sampler or batch sampler the first ones."""
    if _reaches_all(loader):
        return range(len(loader.dataset))
    drawn = loader.sampler if loader.batch_size is not None else chain.from_iterable(loader.batch_sampler)
    return list(islice(drawn, most))


def spread(indices: Sequence[Any], most: int) -> list[Any]:
    """Evenly spaced ones, both ends among them; in an order of which every beginning is spread out too."""
    count = min(len(indices), most)
    places = [place * (len(indices) - 1) // max(count - 1, 1) for place in range(count)]
    inner = places[1:-1]
    random.Random(0).shuffle(inner)
    return [indices[place] for place in (*places[:1], *places[1:][-1:], *inner)]


def _read_sizes(loader: Any, indices: Sequence[Any]) -> Iterator[list[int]]:
    """Sizes in the order of the indices, read as training reads: in its workers, which send nothing but the sizes."""
    reading = DataLoader(
        loader.dataset,
        batch_sampler=[list(indices[at : at + _AT_ONCE]) for at in range(0, len(indices), _AT_ONCE)],
        collate_fn=_sizes,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        generator=loader.generator,
    )
    return iter(reading)


def _sizes(samples: Iterable[object]) -> list[int]:
    return [size_of(sample) for sample in samples]
