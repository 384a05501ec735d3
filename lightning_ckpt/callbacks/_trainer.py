"""The seam to Lightning: every access that Lightning does not document or type, each with its reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _select_data_fetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.data import _extract_batch_size

from lightning_ckpt.callbacks._loaders import drawn_from
from lightning_ckpt.snapshot import RandomState, Snapshot


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
    try:
        return next((size for size in _extract_batch_size(batch) if size is not None), None)
    except RecursionError:  # an object that gives itself as its element
        return None


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


def has_training_to_do(trainer: Trainer) -> bool:
    """Whether this `fit` is a real one; `fast_dev_run` is documented, but set where type checkers can't see it."""
    return not trainer.fast_dev_run and trainer.limit_train_batches != 0  # type: ignore[attr-defined]


def around_train_loaders(trainer: Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let every train loader be changed once Lightning has prepared it; return what undoes it.

    The strategy's hook is the last thing a loader passes before its batches are counted and drawn.
    """
    strategy, process = trainer.strategy, trainer.strategy.process_dataloader

    def processing(dataloader: object) -> object:
        dataloader = process(dataloader)
        return change(dataloader) if trainer.training else dataloader

    strategy.process_dataloader = processing  # type: ignore[method-assign]
    return lambda: _void(vars(strategy).pop("process_dataloader", None))


def batches_held(trainer: Trainer) -> int:
    """How many batches were drawn and not trained on yet: one where the number of batches is not known."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def recount_batches(
    trainer: Trainer, count: Callable[[Any, float], int | None], *, begins: bool = False
) -> int | float | None:
    """Let Lightning know how many batches the epoch has, which it finds out once, when it loads the loaders.

    The progress bar, the interval between validations and what is the last batch depend on it.

    Args:
        trainer: whose epoch it is.
        count: from a loader and the share of it that is used, its number of batches; None where that stays as it was.
        begins: whether an epoch begins, rather than goes on.

    Returns:
        The number; None where it is unknown or nothing is left to change.
    """
    loop, fetcher, loaders = trainer.fit_loop, trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    if fetcher is None or loaders is None or fetcher.length is None or (fetcher.done and not begins):
        return None
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        loaders.limits = [limit] * len(loaders.flattened)
    else:
        counts = [count(leaf, limit) for leaf in loaders.flattened]
        before = loaders.limits or [float("inf")] * len(counts)
        loaders.limits = [b if c is None else c for b, c in zip(before, counts, strict=True)]
    if loaders._iterator is not None:
        loaders._iterator.limits = loaders.limits  # as they were when the pass began
    loop.max_batches = fetcher.length = len(loaders)
    _space_validations(trainer)
    _show_batches(trainer)
    return loop.max_batches


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
    batches, interval = trainer.fit_loop.max_batches, trainer.val_check_interval
    if getattr(trainer, "_val_check_time_interval", None) is not None or trainer.check_val_every_n_epoch is None:
        return
    at = min(interval, batches) if isinstance(interval, int) else max(1, int(batches * interval))
    trainer.val_check_batch = at


def _show_batches(trainer: Trainer) -> None:
    bar, batches = trainer.progress_bar_callback, trainer.fit_loop.max_batches
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = batches
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=batches)


def put_train_loaders(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    """Give the trainer other loaders for those it has loaded, and end their workers."""
    loaders = trainer.fit_loop._combined_loader
    if loaders is not None:
        for leaf in loaders.flattened:
            _shutdown_workers_and_reset_iterator(leaf)
        loaders.flattened = [change(leaf) for leaf in loaders.flattened]


class Accumulation:
    """How many micro-batches make an optimizer step, which may change between any two steps.

    Lightning steps where the number of the batch in its epoch is divisible, so that after a change the next step would
    have a number of micro-batches of its own. So the rule is replaced on the instance by one that counts from the
    change.

    Attributes:
        since: batches of this epoch before the change.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self._found = trainer.accumulate_grad_batches
        self.since = 0
        self._loop._accumulated_batches_reached = self._reached  # type: ignore[method-assign]

    def change(self, count: int) -> None:
        """Let the steps from here on have `count` micro-batches; between two steps."""
        self.since = batches_trained(self._trainer)
        self._trainer.accumulate_grad_batches = count

    def remove(self) -> None:
        """Give the trainer its rule and number back."""
        del self._loop._accumulated_batches_reached
        self._trainer.accumulate_grad_batches = self._found

    def _reached(self) -> bool:
        return (batches_trained(self._trainer) - self.since) % self._trainer.accumulate_grad_batches == 0


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    """The trainer's datamodule; documented, but set where type checkers can't see it."""
    datamodule: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule


def train_loaders_handed(trainer: Trainer) -> Any:
    """The loaders given to `fit`, of which there is no public record; None where a module or datamodule makes them."""
    source = trainer.fit_loop._data_source
    return None if source.is_module() else source.instance


def hand_train_loaders(trainer: Trainer, loaders: Any) -> None:
    """Let this `fit` use `loaders`, as if they had been given to it."""
    trainer.fit_loop._data_source.instance = loaders


def request_train_loaders(trainer: Trainer) -> Any:
    """What the `train_dataloader` hook of the module or datamodule returns, asked for the way `fit` does."""
    return _request_dataloader(trainer.fit_loop._data_source)


def loaded_train_loaders(trainer: Trainer) -> CombinedLoader | None:
    """The loaders already loaded, which happens early where the number of batches is asked for; None before."""
    return trainer.fit_loop._combined_loader


def forget_train_loaders(trainer: Trainer) -> None:
    """Let the trainer ask for its train loaders again. It has no public way to, short of another epoch."""
    if trainer.fit_loop._data_fetcher is not None:
        trainer.fit_loop._data_fetcher.teardown()
        trainer.fit_loop._data_fetcher = None
    trainer.fit_loop._combined_loader = None


class OptimizerSetup:
    """The strategy's call of `configure_optimizers`, noticed so that it can be made once more.

    No callback hook comes before it, and what it draws from the random numbers, the global ones and those of loaders
    handed to `fit` (it may begin to read them, to ask how many batches there are), must be drawn from the same ones the
    second time. So the method is replaced on the instance until it has been called once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._strategy = trainer.strategy
        self._setup = trainer.strategy.setup_optimizers
        self._before: Snapshot | None = None
        self._after: RandomState | None = None
        self._strategy.setup_optimizers = self._notice  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the strategy its method back."""
        vars(self._strategy).pop("setup_optimizers", None)

    def again(self, trainer: Trainer) -> None:
        """Set up optimizers and schedulers as `strategy.setup` does, from the random numbers of the first time."""
        now, device = RandomState(self._strategy.root_device), self._strategy.root_device
        forget_train_loaders(trainer)
        if self._before is not None:
            self._before.restore()
        self._setup(trainer)
        self._strategy.setup_precision_plugin()
        _optimizers_to_device(self._strategy.optimizers, device)
        if self._after is None or not now.same_as(self._after):
            now.restore()  # others have drawn since, and what they drew is not known

    def _notice(self, trainer: Trainer) -> None:
        self.remove()
        handed = train_loaders_handed(trainer)
        drawn = () if handed is None else drawn_from(handed)
        self._before = Snapshot([], data=drawn, device=self._strategy.root_device)
        self._setup(trainer)
        self._after = RandomState(self._strategy.root_device)


def optimizer_wrappers(trainer: Trainer) -> list[dict[str, Any]]:
    """The attributes of Lightning's own wrappers, into which a manual step that fails leaves its hooks."""
    return [vars(wrapper) for wrapper in trainer.strategy._lightning_optimizers]


@contextmanager
def unseen(trainer: Trainer) -> Iterator[None]:
    """Let steps be taken that nothing of the trainer remembers.

    Loops, results and logged values are fresh ones; callbacks, loggers and profiler are silent; schedulers are not
    stepped unless the module does it by itself. Of accumulated micro-batches the first two are run: with two there is
    what there ever is, new activations beside old gradients. All the trainer had is put back in the end.
    """
    names = (
        "fit_loop",
        "_logger_connector",
        "_loggers",
        "callbacks",
        "profiler",
        "accumulate_grad_batches",
        "should_stop",
    )
    kept = {name: vars(trainer)[name] for name in names}
    schedulers = trainer.strategy.lr_scheduler_configs
    try:
        trainer.fit_loop = _fresh_loop(trainer)
        trainer._logger_connector = _LoggerConnector(trainer)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        set_callbacks(trainer, [])
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = min(trainer.accumulate_grad_batches, 2)
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        yield
    finally:
        vars(trainer).update(kept)
        trainer.strategy.lr_scheduler_configs = schedulers


def _fresh_loop(trainer: Trainer) -> _FitLoop:
    old = trainer.fit_loop
    loop = _FitLoop(trainer, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    loop.epoch_loop = _TrainingEpochLoop(trainer, min_steps=old.min_steps, max_steps=old.max_steps)
    loop._data_source = old._data_source
    return loop


@contextmanager
def optimizer_steps(trainer: Trainer, loaders: CombinedLoader, *, most_batches: int) -> Iterator[Callable[[], None]]:
    """Yield a function that takes one optimizer step through Lightning's own loop, inside `unseen`.

    Precision, clipping, accumulation, the module's batch hooks, automatic or manual optimization: all as in training. A
    step is done when Lightning has counted one; a module that steps several optimizers by itself, perhaps on different
    batches, gets a batch for each. A step that the gradient scaler skipped for its first scales is taken again.
    """
    loop, module = trainer.fit_loop, trainer.lightning_module
    fetcher = _select_data_fetcher(trainer, RunningStage.TRAINING)
    fetcher.setup(loaders)
    iter(fetcher)
    loop._combined_loader, loop._data_fetcher = loaders, fetcher
    loop.max_batches = fetcher.length if fetcher.length is not None else float("inf")
    at_least = 1 if module.automatic_optimization else len(trainer.optimizers)

    def take() -> None:
        before = loop.epoch_loop.global_step
        for taken in range(1, most_batches + 1):
            try:
                loop.epoch_loop.advance(fetcher)
            except StopIteration:  # the data ended, or `on_train_batch_start` skipped the rest of the epoch
                iter(fetcher)
            if taken >= at_least and loop.epoch_loop.global_step > before:
                return

    def step() -> None:
        for _ in range(most_batches):
            before = scale(trainer)
            take()
            if before is None or (scale(trainer) or 0) >= before:
                return

    try:
        yield step
    finally:
        fetcher.teardown()


def scaler_of(trainer: Trainer) -> Any:
    """The gradient scaler of 16-bit mixed precision, or None; only that plugin has the attribute."""
    return getattr(trainer.precision_plugin, "scaler", None)


def scale(trainer: Trainer) -> float | None:
    """The factor that losses are scaled by now; None where they are not."""
    scaler = scaler_of(trainer)
    return None if scaler is None else float(scaler.get_scale())


def _void(_: object) -> None:
    """Drop a result, where a function that returns nothing is wanted."""
