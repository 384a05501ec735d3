"""The seam to Lightning: every access that Lightning does not document or type, each with its reason."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.data import _extract_batch_size


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks; `Trainer.callbacks` is documented, but set where type checkers can't see it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Give the trainer another list of callbacks. A new list, since Lightning may be going through the old one."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def step_axis(trainer: Trainer) -> int:
    """The number under which Lightning itself logs this batch's loss.

    It counts batches that stepped, not optimizer steps: with several optimizers `global_step` runs faster. Read it no
    later than `on_train_batch_end`, since it moves right after.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def gradients_are_complete(trainer: Trainer) -> bool:
    """Whether the current batch is the last micro-batch of its step, by the rule Lightning steps by."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def samples_in(batch: Any) -> int | None:
    """The batch size as Lightning's logging takes it: the first dimension of the first tensor found.

    The public `extract_batch_size` looks on at every other tensor only to warn where sizes differ, in each step, and
    remembers that it has warned, so that the user's own `self.log` is never told.
    """
    if isinstance(batch, Iterator):  # looking into it would use it up
        return None
    return next((size for size in _extract_batch_size(batch) if size is not None), None)


def is_compiled_whole(pl_module: LightningModule) -> bool:
    """Whether the module was given to the trainer as `torch.compile(module)`, which Lightning unwraps and remembers."""
    return pl_module._compiler_ctx is not None


def batch_share(trainer: Trainer) -> float:
    """What part of the ranks has a batch of its own: less than 1 under tensor parallelism.

    Lightning has this as the arguments it gives to a distributed sampler, which not every strategy has.
    """
    arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return (arguments.get("num_replicas") or trainer.world_size) / trainer.world_size


def around_saving(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` and `after` around each checkpoint the trainer saves; return what undoes it.

    There is a hook where saving begins and none where it ends, so the method is replaced on the instance.
    """
    save, found = trainer.save_checkpoint, vars(trainer).get("save_checkpoint")

    @wraps(save)
    def saving(*args: Any, **kwargs: Any) -> None:
        before()
        try:
            save(*args, **kwargs)
        finally:
            after()

    def undo() -> None:
        if vars(trainer).get("save_checkpoint") is not saving:
            return  # somebody replaced it after us, and theirs calls ours
        del trainer.save_checkpoint
        if found is not None:
            trainer.save_checkpoint = found  # type: ignore[method-assign]

    trainer.save_checkpoint = saving  # type: ignore[method-assign]
    return undo


def wandb_names(logger: WandbLogger) -> tuple[str, str]:
    """The run's step axis, and what the logger writes before every key.

    The axis has a fixed name in Lightning's source, another one where a run mirrors TensorBoard; the logger's prefix
    has no public property.
    """
    axis = "global_step" if logger._wandb_init.get("sync_tensorboard") else "trainer/global_step"
    return axis, f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
