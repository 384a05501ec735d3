"""Validation batches for trials, and the validation loaders that follow the batch size."""

import copy
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_ckpt.callbacks._batch_size import ForTrial
from lightning_ckpt.callbacks._distributions import is_a
from lightning_ckpt.callbacks._loaders import batch_size_of, changed, drawn_from, leaves, most_samples, resized
from lightning_ckpt.callbacks._trainer import (
    data_ranks,
    hand_validation_loaders,
    request_validation_loaders,
    shares_samples_out,
    validation_loaders_handed,
)
from lightning_ckpt.snapshot import Snapshot


class Evaluation:
    """The validation loaders of one `fit`, at the sizes that are tried and at the settled one.

    Those handed to `fit` get each size. Those of a hook are made by it for each size: one that uses the attribute
    follows it, another stays at its own size and is tried at that.

    Args:
        trainer: whose loaders they are.
        for_trial: makes of a loader one that gives batches of a size, over and over.
    """

    def __init__(self, trainer: Trainer, for_trial: ForTrial) -> None:
        self._trainer, self._for_trial = trainer, for_trial
        self._handed = validation_loaders_handed(trainer)
        self._drawn: list[Snapshot] = []

    def trial_loaders(self, size: int) -> CombinedLoader | None:
        """Loaders of which each gives batches as validation would see them; None where there are none.

        A batch is no larger than the validation data.
        """
        found = self._handed
        if found is None:
            found = request_validation_loaders(self._trainer)
        if not is_a(found, CombinedLoader):
            found = CombinedLoader([] if found is None else found, "sequential")
        self._drawn.append(Snapshot([], data=drawn_from(found)))
        loaders = copy.copy(found)
        loaders.flattened = [self._tried(leaf, size) for leaf in loaders.flattened]
        return loaders if loaders.flattened else None

    def put_back(self) -> None:
        """Give datasets, samplers and generators the state they had before they were read."""
        for snapshot in reversed(self._drawn):  # hooks may make loaders of the same data time and again
            snapshot.restore()

    def settle(self, size: int) -> None:
        """Give the size to the loaders handed to `fit`; a hook is asked again by Lightning."""
        if self._handed is not None and any(batch_size_of(leaf) not in (None, size) for leaf in leaves(self._handed)):
            hand_validation_loaders(self._trainer, changed(self._handed, lambda leaf: self._resized(leaf, size)))

    def _tried(self, leaf: Any, size: int) -> Any:
        own = batch_size_of(leaf)
        if own is None:
            return leaf
        return self._for_trial(leaf, self._there(leaf, own if self._handed is None else size))

    def _resized(self, leaf: Any, size: int) -> Any:
        return resized(leaf, self._there(leaf, size))

    def _there(self, leaf: Any, size: int) -> int:
        """The size, or all the samples there are for a rank."""
        ranks = data_ranks(self._trainer) if shares_samples_out(self._trainer, leaf) else 1
        return min(size, most_samples(leaf, lambda _: ranks) or size)
