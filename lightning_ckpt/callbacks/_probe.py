"""What a trial's batches are made of: the samples that come first, or the largest there are."""

from collections.abc import Iterable
from itertools import islice
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_ckpt.callbacks._batch_size import BatchSize, ForTrial
from lightning_ckpt.callbacks._distributions import MisconfigurationException
from lightning_ckpt.callbacks._loaders import batch_size_of, for_trial, serving, streaming
from lightning_ckpt.callbacks._longest import Longest, reached, spread
from lightning_ckpt.callbacks._sample_sizes import elements_of

Probe = Literal["first", "longest"]

# Whether samples vary is asked of so few, and a tenth more elements is no variation.
_FEW, _DRAWN, _ALIKE = 8, 2**12, 1.1


class Probing:
    """Looks at the data before the trials.

    Attributes:
        for_trial: makes of a loader one that gives batches of a size, over and over.
    """

    def __init__(self, probe: Probe) -> None:
        self._longest = Longest() if probe == "longest" else None
        self.for_trial: ForTrial = self._longest.for_trial if self._longest else for_trial

    def look(self, place: BatchSize) -> None:
        """Scan the data for the largest samples, or warn where the first that come may not be them.

        Raises:
            MisconfigurationException: when the largest are asked for, of loaders that can't be asked for samples.
        """
        if self._longest is None:
            _warn_if_ragged(place.loaders())
            return
        sized = [loader for loader in place.loaders() if batch_size_of(loader) is not None]
        if not sized:
            made = ", ".join(type(loader).__name__ for loader in place.loaders())
            raise MisconfigurationException(
                f'BatchSizeTuner(probe="longest") reads the samples of a DataLoader, and the train loader is a {made}: '
                'use a DataLoader, or probe="first"'
            )
        for loader in sized:
            self._longest.scan(loader)


def _warn_if_ragged(loaders: list[Any]) -> None:
    for loader in loaders:
        if (found := _spread_of(loader)) is not None:
            rank_zero_warn(
                f"BatchSizeTuner: samples of the train data differ in size: the tensors of one have {found[0]} "
                f"elements, those of another {found[1]}. The trials take the samples that come first, so a later "
                'batch of larger ones may not fit: probe="longest" tries the largest'
            )
            return


def _spread_of(loader: Any) -> tuple[int, int] | None:
    """The elements of the smallest and the largest of a few batches of one sample each, where they differ.

    They are read from all over the data, or from the front of a stream, and by the loader's own collate function: text
    that it pads to one length is all alike. None where they are alike, or where single samples can't be batched.
    """
    if batch_size_of(loader) is None:
        return None
    try:
        found = [elements_of(batch) for batch in _singles(loader)]
    except Exception:  # a collate function that needs more than one sample
        return None
    smallest, largest = min(found, default=0), max(found, default=0)
    return (smallest, largest) if largest > _ALIKE * smallest else None


def _singles(loader: Any) -> Iterable[Any]:
    if isinstance(loader.dataset, IterableDataset):
        return islice(streaming(loader, batch_size=1), _FEW)
    indices = spread(reached(loader, most=_DRAWN), _FEW)
    return islice(serving(loader, [[index] for index in indices]), len(indices))
