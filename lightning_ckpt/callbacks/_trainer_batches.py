"""The seam to Lightning's batches: loaders exchanged under it, and what it counts once, counted again."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator

from lightning_ckpt.callbacks._distributions import is_a


def around_train_loaders(trainer: Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let every train loader be changed once Lightning has prepared it; return what undoes it.

    The strategy's hook is the last thing a loader passes before its batches are counted and drawn.
    """
    strategy, process = trainer.strategy, trainer.strategy.process_dataloader

    def processing(dataloader: object) -> object:
        dataloader = process(dataloader)
        return change(dataloader) if trainer.training else dataloader

    strategy.process_dataloader = processing  # type: ignore[method-assign]

    def undo() -> None:
        vars(strategy).pop("process_dataloader", None)

    return undo


def batches_held(trainer: Trainer) -> int:
    """How many batches were drawn and not trained on yet: one where the number of batches is not known."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def recount_batches(trainer: Trainer, count: Callable[[Any, float], int | None], *, begins: bool = False) -> None:
    """Let Lightning know how many batches the epoch has, which it finds out once, when it loads the loaders.

    The progress bar, the interval between validations and what is the last batch depend on it.

    Args:
        trainer: whose epoch it is.
        count: from a loader and the share of it that is used, its number of batches; None where that stays as it was.
        begins: whether an epoch begins, rather than goes on.
    """
    loop, fetcher, loaders = trainer.fit_loop, trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    if fetcher is None or loaders is None or loaders._iterator is None or fetcher.length is None:
        return
    if fetcher.done and not begins:
        return
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        loaders.limits = [limit] * len(loaders.flattened)
    else:
        counts = [count(leaf, limit) for leaf in loaders.flattened]
        before = loaders.limits or [float("inf")] * len(counts)
        loaders.limits = [b if c is None else c for b, c in zip(before, counts, strict=True)]
    loaders._iterator.limits = loaders.limits  # as they were when the pass began
    loop.max_batches = fetcher.length = len(loaders)
    _space_validations(trainer)
    _show_batches(trainer)


def take_epoch_for_over(trainer: Trainer) -> None:
    """Let Lightning see that the epoch it resumes had come to its end, at however many batches that was."""
    trainer.fit_loop.max_batches = batches_trained(trainer)
    if getattr(trainer, "_val_check_time_interval", None) is None and trainer.check_val_every_n_epoch is not None:
        trainer.val_check_batch = trainer.fit_loop.max_batches


def batches_trained(trainer: Trainer) -> int:
    """How many batches of this epoch were begun, those before a resume too."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _space_validations(trainer: Trainer) -> None:
    """As `setup_data` does; an interval that became longer than the epoch ends with it."""
    if getattr(trainer, "_val_check_time_interval", None) is not None or trainer.check_val_every_n_epoch is None:
        return
    batches, interval = trainer.fit_loop.max_batches, trainer.val_check_interval  # no attribute where it is a time
    at = min(interval, batches) if isinstance(interval, int) else max(1, int(batches * interval))
    trainer.val_check_batch = at


def _show_batches(trainer: Trainer) -> None:
    bar, batches = trainer.progress_bar_callback, trainer.fit_loop.max_batches
    if is_a(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = batches
    elif is_a(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=batches)


def put_train_loaders(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    """Give the trainer other loaders for those it has loaded, and end their workers."""
    loaders = trainer.fit_loop._combined_loader
    if loaders is not None:
        for leaf in loaders.flattened:
            _shutdown_workers_and_reset_iterator(leaf)
        loaders.flattened = [change(leaf) for leaf in loaders.flattened]


class StepsCountedFrom:
    """Optimizer steps of a number of micro-batches that may change between any two steps.

    Lightning steps where the number of the batch in its epoch is divisible, so that after a change the next step would
    have a number of micro-batches of its own. So the rule is replaced on the instance by one that counts from the
    change.

    Attributes:
        since: batches of this epoch before the change.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self.since = 0
        self._loop._accumulated_batches_reached = self._reached  # type: ignore[method-assign]

    def here(self) -> None:
        """Count from here, between two steps."""
        self.since = batches_trained(self._trainer)

    def remove(self) -> None:
        """Give the trainer its rule back."""
        del self._loop._accumulated_batches_reached

    def _reached(self) -> bool:
        return (batches_trained(self._trainer) - self.since) % self._trainer.accumulate_grad_batches == 0
