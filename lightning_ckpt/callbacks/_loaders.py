"""Train loaders at another batch size: the user's own loader, copied, with a batch sampler of that size."""

import copy
import math
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_ckpt.callbacks._distributions import is_a

# A trial takes few batches; a module that steps its optimizers every so many batches by itself takes this many at most.
MOST_BATCHES = 64


def leaves(loaders: Any) -> list[Any]:
    """Every loader in what `fit` accepts: one, a list or dict of them, nested, or a `CombinedLoader`."""
    return combined(loaders).flattened


def combined(loaders: Any) -> CombinedLoader:
    """The loaders as `fit` combines them."""
    return loaders if is_a(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


def changed(loaders: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every loader changed."""
    outer = copy.copy(combined(loaders))
    outer.flattened = [change(leaf) for leaf in outer.flattened]
    return outer if is_a(loaders, CombinedLoader) else outer.iterables


def batch_size_of(loader: Any) -> int | None:
    """The batch size a loader was made with; None where it has none that could be changed."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def resized(loader: Any, size: int) -> Any:
    """A copy of the loader that gives batches of `size`; a loader without a batch size of its own, itself.

    Copied rather than made anew, so that whatever its class keeps beside PyTorch's arguments is kept. Dataset, sampler,
    generator and collate function are the very same objects.
    """
    if batch_size_of(loader) is None:
        return loader
    if loader.batch_size is not None:
        return copy_with(loader, batch_size=size, batch_sampler=BatchSampler(loader.sampler, size, loader.drop_last))
    sampler = copy.copy(loader.batch_sampler)
    sampler.batch_size = size
    return copy_with(loader, batch_sampler=sampler)


def for_trial(loader: Any, size: int) -> Any:
    """A copy that gives batches of `size` over and over, however few samples there are.

    With workers it uses one: a trial draws two batches, and starting more would take longer than the step.
    """
    if batch_size_of(loader) is None:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return streaming(loader, batch_size=size)
    return serving(loader, checked_batches(loader, size))


def serving(loader: Any, batches: Iterable[list[Any]]) -> Any:
    """A copy that gives the batches of these indices, over and over."""
    return copy_with(loader, batch_sampler=list(islice(cycle(batches), MOST_BATCHES)), **_few_workers(loader))


def streaming(loader: Any, *, batch_size: int | None, dataset: Any = None) -> Any:
    """A copy for a stream from its front, or for another one: in batches, or for None its samples one by one."""
    changed_too = _few_workers(loader) if dataset is None else {"dataset": dataset, "num_workers": 0, "timeout": 0}
    if batch_size is not None:
        return copy_with(resized(loader, batch_size), **changed_too)
    return copy_with(loader, batch_size=None, batch_sampler=None, collate_fn=as_it_is, **changed_too)


def most_samples(loaders: Any, sharing: Callable[[Any], int]) -> int | None:
    """The largest batch size worth trying: no larger than the dataset; None where its length is unknown.

    Of several loaders the longest counts, unless a loader that drops its last batch would be left with none.

    Args:
        loaders: one or several.
        sharing: how many ranks share a loader's samples out among them.
    """
    sized = [leaf for leaf in leaves(loaders) if batch_size_of(leaf) is not None]
    known = [
        (math.ceil(count / sharing(leaf)), _drops_last(leaf)) for leaf in sized if (count := _samples(leaf)) is not None
    ]
    if not known:
        return None
    dropping = [count for count, drops in known if drops]
    return min(dropping) if dropping else max(count for count, _ in known)


def samples_up_to(loaders: Any, size: int, sharing: Callable[[Any], int]) -> int:
    """How many samples there are, counted in streams of unknown length, and no further than `size`."""
    counts = [most_samples(loaders, sharing)]
    streams = [leaf for leaf in leaves(loaders) if batch_size_of(leaf) is not None and _samples(leaf) is None]
    counts += [sum(1 for _ in islice(leaf.dataset, size)) for leaf in streams]
    return max((min(count, size) for count in counts if count is not None), default=size)


def drawn_from(loaders: Any) -> Iterable[object]:
    """The objects whose state reading a batch may change."""
    for leaf in leaves(loaders):
        sampler = getattr(leaf, "batch_sampler", None)
        yield from (getattr(leaf, name, None) for name in ("dataset", "sampler", "generator", "collate_fn"))
        yield from (sampler, getattr(sampler, "sampler", None))


def checked_batches(loader: Any, size: int) -> list[list[Any]]:
    """Two lists of indices as the loader's own sampler gives them.

    Raises:
        ValueError: when the batch sampler does not follow its own size.
    """
    if loader.batch_size is None:
        drawn = list(islice(resized(loader, size).batch_sampler, 2))
        if drawn and len(drawn[0]) != size:
            raise ValueError(
                f"{type(loader.batch_sampler).__name__} gives batches of {len(drawn[0])} samples after its `batch_size`"
                f" was set to {size}"
            )
    else:
        samples = list(islice(loader.sampler, 2 * size))
        drawn = [list(islice(cycle(samples), start, start + size)) for start in (0, size)] if samples else []
    return drawn


def _few_workers(loader: Any) -> dict[str, Any]:
    return {"num_workers": min(loader.num_workers, 1), "persistent_workers": False}


def as_it_is(sample: Any) -> Any:
    """Collate nothing."""
    return sample


def _samples(loader: Any) -> int | None:
    whole = loader.batch_size is None or isinstance(loader.dataset, IterableDataset)
    try:
        return len(loader.dataset if whole else loader.sampler)
    except (TypeError, NotImplementedError):  # no length, or one that its class leaves open
        return None


def _drops_last(loader: Any) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def copy_with(loader: Any, **attributes: Any) -> Any:
    """A copy of the loader with other attributes."""
    copied = copy.copy(loader)
    # `DataLoader.__setattr__` refuses these names once a loader is made, lest an iterator of it disagree.
    vars(copied).update(attributes, _iterator=None)
    return copied
