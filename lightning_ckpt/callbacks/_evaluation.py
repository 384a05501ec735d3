"""Validation batches for trials, and the validation loaders that follow the batch size."""

import copy
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_ckpt.callbacks._batch_size import ForTrial
from lightning_ckpt.callbacks._loaders import batch_size_of, changed, drawn_from, leaves, most_samples, resized
from lightning_ckpt.callbacks._trainer import (
    hand_validation_loaders,
    request_validation_loaders,
    validation_loaders_handed,
)


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

    def drawn_from(self) -> Iterable[object]:
        """The objects whose state reading a batch may change, as far as they are there before a hook is asked."""
        return () if self._handed is None else drawn_from(self._handed)

    def trial_loaders(self, size: int) -> CombinedLoader | None:
        """Loaders of which each gives batches as validation would see them; None where there are none.

        A batch is no larger than the validation data.
        """
        found = self._handed
        if found is None:
            found = request_validation_loaders(self._trainer)
        if not isinstance(found, CombinedLoader):
            found = CombinedLoader([] if found is None else found, "sequential")
        loaders = copy.copy(found)
        loaders.flattened = [self._tried(leaf, size) for leaf in loaders.flattened]
        return loaders if loaders.flattened else None

    def settle(self, size: int) -> None:
        """Give the size to the loaders handed to `fit`; a hook is asked again by Lightning."""
        if self._handed is not None and any(batch_size_of(leaf) not in (None, size) for leaf in leaves(self._handed)):
            hand_validation_loaders(
                self._trainer, changed(self._handed, lambda leaf: resized(leaf, _there(leaf, size)))
            )

    def _tried(self, leaf: Any, size: int) -> Any:
        own = batch_size_of(leaf)
        if own is None:
            return leaf
        return self._for_trial(leaf, _there(leaf, own if self._handed is None else size))


def _there(leaf: Any, size: int) -> int:
    """The size, or all the samples there are."""
    return min(size, most_samples(leaf) or size)
