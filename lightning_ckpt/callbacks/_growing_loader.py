"""A train loader whose batch size may change between any two batches, with no sample lost and none given twice."""

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_ckpt import _compat
from lightning_ckpt.callbacks._distributions import MisconfigurationException
from lightning_ckpt.callbacks._loaders import as_it_is, copy_with


def growing(loader: Any, size: int) -> Any:
    """The loader with batches of `size`, to be changed later; itself where it has no batch size to change.

    Raises:
        MisconfigurationException: for a batch sampler of another class, which may make its batches by any rule.
    """
    if not isinstance(loader, DataLoader) or (loader.batch_size is None and loader.batch_sampler is None):
        return loader
    stream = isinstance(loader.dataset, IterableDataset)
    if not stream and type(loader.batch_sampler) is not BatchSampler:
        raise MisconfigurationException(
            f'BatchSizeTuner(mode="grow") can\'t cut the batches of a {type(loader.batch_sampler).__name__} anew while '
            'it is read: use mode="search", or give the DataLoader a sampler and a batch_size'
        )
    return GrowingLoader(loader, size)


class GrowingLoader:
    """The user's loader, as a `DataLoader` to whoever asks, with a batch size that follows.

    It counts what it has given in the first pass of an epoch (a `CombinedLoader` may read a short loader again and
    again): how many batches the epoch will have depends on it.

    Args:
        loader: the loader as Lightning has prepared it.
        size: samples in the first batch.

    Attributes:
        loader: the same.
        total: samples in a pass; None where that is unknown.
    """

    def __init__(self, loader: "DataLoader[Any]", size: int) -> None:
        self.loader = loader
        self._source = _Stream(loader, size) if isinstance(loader.dataset, IterableDataset) else _Indexed(loader, size)
        self.total = self._source.total
        self._drops_last = self._source.drops_last
        self._size = size
        self._passes = self._batches = self._samples = 0
        self._start = (0, 0)
        self._ahead: deque[int] = deque()  # samples in batches that were given and not trained on yet
        self._random: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["loader"], name)

    @property
    def batch_size(self) -> int:
        """Samples in the next batch."""
        return self._source.size

    @property
    def worker_init_fn(self) -> Any:
        """Lightning sets it, to seed workers."""
        return self._source.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._source.loader.worker_init_fn = function

    @property
    def _iterator(self) -> Any:
        """Where Lightning finds the workers to shut down, as in a `DataLoader`."""
        return self._source.iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        self._source.iterator = self._source.loader._iterator = iterator

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self.loader.dataset).__name__} has no length")
        return self.batches()

    def batches(self, share: float = 1.0) -> int:
        """How many batches the epoch has, those given and those to come at the present size.

        Args:
            share: of the samples, what the epoch takes.
        """
        assert self.total is not None
        if self._passes > 1:
            return self._batches
        left, size = self.total - self._samples, self._source.size
        whole = left // size if self._drops_last else -(-left // size)
        within = -(-(int(self.total * share) - self._samples) // size)
        return self._batches + max(min(whole, within), 0)

    def resize(self, size: int) -> None:
        """Give batches of `size` from the next one on.

        A loader that drops its last batch keeps its size until the next pass where no whole batch would be left: the
        batch before was not announced as the last one.
        """
        self._size = size
        left = None if self.total is None or self._passes > 1 else self.total - self._samples
        if left is None or not self._drops_last or not self._source.size <= left < size:
            self._source.resize(size)

    def trained(self, held: int) -> int:
        """Note that training is done with all but the last `held` batches; return the samples in the last of these."""
        samples = 0
        while len(self._ahead) > held:
            samples = self._ahead.popleft()
        return samples

    def end_epoch(self) -> None:
        """Let the next pass be the first of an epoch."""
        self._passes = self._batches = self._samples = 0
        self._start = (0, 0)
        self._ahead.clear()

    def state(self) -> dict[str, Any]:
        """How far training has come in this epoch, and the random numbers its order was drawn with."""
        ahead = self._ahead if self._passes == 1 else ()
        samples = self._samples - sum(ahead)
        return {"batches": self._batches - len(ahead), "samples": samples, "random": self._random} if samples else {}

    @property
    def is_resumed(self) -> bool:
        """Whether the first pass goes on where a saved one had come to."""
        return self._start != (0, 0)

    def resume(self, state: dict[str, Any]) -> None:
        """Let the first pass go on where the saved one had come to; a pass that was over is begun anew."""
        # Lightning warns that an epoch begins anew unless its loaders have these. They are gone before a checkpoint is
        # made, lest a run without this callback find states in it that its loaders don't take.
        vars(self).update(state_dict=self.state, load_state_dict=self.resume)
        if state and (self.total is None or state["samples"] < self.total):
            self._start = self._batches, self._samples = state["batches"], state["samples"]
            self._random = state["random"]

    def __iter__(self) -> Iterator[Any]:
        self._source.resize(self._size)
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        # Counted here and not in `__iter__`: Lightning begins a pass and throws it away where it loads loaders anew.
        self._passes += 1
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
        first = self._passes == 1
        skipped = self._start[1] if first else 0
        drawn_with = _Random(self._source.generators)
        if skipped:
            drawn_with.set(self._random)
        self._source.begin(skipped)
        if skipped:
            drawn_with.restore()
        elif first:
            self._random = drawn_with.state
        for batch, samples in self._source.batches():
            self._ahead.append(samples)
            if first:
                self._batches, self._samples = self._batches + 1, self._samples + samples
            yield batch


class _Indexed:
    """Batches of samples that have indices: the batch sampler of a copy of the loader.

    Workers read ahead. When the size changes, what they have read and nobody was given is read again in batches of the
    new size, so that the very next batch has it.
    """

    def __init__(self, loader: "DataLoader[Any]", size: int) -> None:
        assert isinstance(loader.batch_sampler, BatchSampler)
        self.sampler, self.drops_last = loader.batch_sampler.sampler, loader.batch_sampler.drop_last
        self.loader = copy_with(loader, batch_sampler=self, in_order=True)
        self.size, self.total = size, _length(self.sampler)
        self.generators = [loader.generator, getattr(self.sampler, "generator", None)]
        self.iterator: Any = None
        self._rest: Iterator[Any] = iter(())
        self._ahead: deque[list[Any]] = deque()  # lists of indices the loader has taken and nobody was given
        self._stale = False

    def resize(self, size: int) -> None:
        self._stale = self._stale or (size != self.size and bool(self._ahead))
        self.size = size

    def begin(self, skipped: int) -> None:
        self._ahead.clear()
        self._stale = False
        order = iter(self.sampler)
        first = list(islice(order, skipped + 1))[skipped:]  # the order is drawn with the first index
        self._rest = chain(first, order)

    def __iter__(self) -> Iterator[list[Any]]:
        self._rest = chain([index for indices in self._ahead for index in indices], self._rest)
        self._ahead.clear()
        while indices := list(islice(self._rest, self.size)):
            if len(indices) < self.size and self.drops_last:
                return
            self._ahead.append(indices)
            yield indices

    def batches(self) -> Iterator[tuple[Any, int]]:
        while True:
            self.iterator = iter(self.loader)
            for batch in self.iterator:
                yield batch, len(self._ahead.popleft())
                if self._stale:
                    break
            else:
                return
            self._stale, self.iterator = False, None  # ends the workers, unless they are persistent


class _Stream:
    """Batches of a stream: a copy of the loader gives single samples, which are collated here, in the main process."""

    generators = ()

    def __init__(self, loader: "DataLoader[Any]", size: int) -> None:
        single = {"batch_size": None, "batch_sampler": None, "drop_last": False, "pin_memory": False}
        self.loader = copy_with(loader, collate_fn=as_it_is, in_order=True, **single)
        self.size, self.total, self.drops_last = size, _length(loader.dataset), loader.drop_last
        self._collate, self._pins = loader.collate_fn, loader.pin_memory
        self.iterator: Any = None
        self._skipped = 0

    def resize(self, size: int) -> None:
        self.size = size

    def begin(self, skipped: int) -> None:
        self._skipped = skipped

    def batches(self) -> Iterator[tuple[Any, int]]:
        self.iterator = iter(self.loader)
        samples = islice(self.iterator, self._skipped, None)
        while rows := list(islice(samples, self.size)):
            if len(rows) < self.size and self.drops_last:
                return
            batch = self._collate(rows)
            yield _compat.pinned(batch) if self._pins else batch, len(rows)


class _Random:
    """The random numbers an order is drawn with: PyTorch's global ones and those of the loader's own generators."""

    def __init__(self, generators: Any) -> None:
        self._generators = [generator for generator in generators if generator is not None]
        self.state = [torch.get_rng_state(), *(generator.get_state() for generator in self._generators)]

    def set(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for generator, own in zip(self._generators, state[1:], strict=True):
            generator.set_state(own)

    def restore(self) -> None:
        """Only the global ones are others' too."""
        torch.set_rng_state(self.state[0])


def samples_to_grow_into(loaders: list[Any]) -> int | None:
    """The largest batch there are samples for; None where that is unknown.

    As in a search: of several loaders the longest counts, unless one that drops its last batch would be left with none.
    """
    known = [(loader.total, loader._drops_last) for loader in loaders if loader.total is not None]
    dropping = [total for total, drops in known if drops]
    return min(dropping) if dropping else max((total for total, _ in known), default=None)


def _length(samples: Any) -> int | None:
    try:
        return len(samples)
    except (TypeError, NotImplementedError):  # no length, or one that its class leaves open
        return None
