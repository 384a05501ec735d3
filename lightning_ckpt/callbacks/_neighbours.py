"""Other callbacks beside the batch size tuner: those it refuses, and those it stands behind."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_ckpt.callbacks._distributions import Callback, MisconfigurationException, is_a
from lightning_ckpt.callbacks._trainer import callbacks_of, set_callbacks
from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing


def refuse_other_finders(trainer: Trainer) -> None:
    """Refuse callbacks that look for a batch size too, or for a rate that depends on it.

    Raises:
        MisconfigurationException: there is one.
    """
    for other in callbacks_of(trainer):
        if is_a(other, LearningRateFinder):
            raise MisconfigurationException(
                "LearningRateFinder would run before BatchSizeTuner, since Lightning moves it to the front, and "
                "find a rate for a batch size that then changes: find the size first, in a `fit` without it, set "
                "it by hand, and find the learning rate after"
            )
        if is_a(other, BatchSizeFinder):
            raise MisconfigurationException(
                "BatchSizeFinder and BatchSizeTuner both set the batch size: leave one of them out"
            )


def stand_behind_checkpointing(trainer: Trainer, tuner: Callback) -> None:
    """Blocks made in `configure_model` are checkpointed in `on_fit_start`, and the trials must see them so."""
    callbacks = callbacks_of(trainer)
    places = [place for place, other in enumerate(callbacks) if isinstance(other, ActivationCheckpointing)]
    mine = callbacks.index(tuner)
    if places and places[-1] > mine:
        rest = callbacks[:mine] + callbacks[mine + 1 :]
        set_callbacks(trainer, [*rest[: places[-1]], tuner, *rest[places[-1] :]])
