"""The seam to Lightning: every access that Lightning does not document or type, each with its reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
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
from lightning.pytorch.utilities.data import _extract_batch_size
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_ckpt.callbacks._distributions import of
from lightning_ckpt.callbacks._loaders import drawn_from
from lightning_ckpt.processes import Ranks, ranks_of
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
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim:  # as it nearly always is, and each step asks
        return first.size(0)
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


def ranks_of_run(trainer: Trainer, who: str) -> Ranks:
    """The ranks of a run, for a callback to agree with: asked for by all of them in `setup`, in the same order.

    Strategies keep the timeout of their process group to themselves.
    """
    return ranks_of(trainer.world_size, who, getattr(trainer.strategy, "_timeout", None))


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
    return of(trainer, _request_dataloader)(trainer.fit_loop._data_source)


def loaded_checkpoint(trainer: Trainer) -> Any:
    """The checkpoint a run resumes from, which Lightning holds until it has put all of it back."""
    return trainer._checkpoint_connector._loaded_checkpoint


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
        trainer._logger_connector = of(trainer, _LoggerConnector)(trainer)
        trainer.loggers = [of(trainer, DummyLogger)() for _ in trainer.loggers]
        set_callbacks(trainer, [])
        trainer.profiler = of(trainer, PassThroughProfiler)()  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = min(trainer.accumulate_grad_batches, 2)
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        yield
    finally:
        vars(trainer).update(kept)
        trainer.strategy.lr_scheduler_configs = schedulers


@contextmanager
def by_itself(trainer: Trainer) -> Iterator[None]:
    """Let a rank take steps without the others, inside `unseen`, where it has all of the model.

    `DistributedDataParallel` is left out, so that neither gradients nor buffers are reduced; nor are logged values, and
    no word of a signal to end is passed on.
    """
    strategy, wrapped = trainer.strategy, trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel):
        yield
        return
    strategy.model = trainer.lightning_module
    strategy.reduce = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        strategy.model = wrapped
        del strategy.reduce


def wrap_anew(trainer: Trainer) -> None:
    """Let `static_graph=True` be learned from training: the wrapper has counted backward passes taken without it."""
    wrapped = trainer.strategy.model
    if isinstance(wrapped, DistributedDataParallel) and wrapped.static_graph:
        trainer.strategy.model = trainer.lightning_module
        trainer.strategy.configure_ddp()  # type: ignore[attr-defined]


def steps_alone(trainer: Trainer) -> bool:
    """Whether a rank can take steps `by_itself`."""
    return trainer.world_size == 1 or isinstance(trainer.strategy.model, DistributedDataParallel)


def data_ranks(trainer: Trainer) -> int:
    """How many ranks have batches of their own."""
    return round(batch_share(trainer) * trainer.world_size)


def shares_samples_out(trainer: Trainer, loader: Any) -> bool:
    """Whether Lightning will put a distributed sampler into this loader, which has none yet."""
    return (
        isinstance(loader, DataLoader)
        and data_ranks(trainer) > 1
        and trainer._accelerator_connector.use_distributed_sampler
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
    )


def _fresh_loop(trainer: Trainer) -> _FitLoop:
    old = trainer.fit_loop
    loop = of(trainer, _FitLoop)(trainer, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    loop.epoch_loop = of(trainer, _TrainingEpochLoop)(trainer, min_steps=old.min_steps, max_steps=old.max_steps)
    loop._data_source = old._data_source
    loop.epoch_loop.val_loop._data_source = old.epoch_loop.val_loop._data_source
    return loop


@contextmanager
def optimizer_steps(trainer: Trainer, loaders: CombinedLoader, *, most_batches: int) -> Iterator[Callable[[], None]]:
    """Yield a function that takes one optimizer step through Lightning's own loop, inside `unseen`.

    Precision, clipping, accumulation, the module's batch hooks, automatic or manual optimization: all as in training. A
    step is done when Lightning has counted one; a module that steps several optimizers by itself, perhaps on different
    batches, gets a batch for each. A step that the gradient scaler skipped for its first scales is taken again.
    """
    loop, module = trainer.fit_loop, trainer.lightning_module
    fetcher = of(trainer, _select_data_fetcher)(trainer, RunningStage.TRAINING)
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


def validation_loaders_handed(trainer: Trainer) -> Any:
    """The validation loaders given to `fit`; None where a module or datamodule makes them, or there are none."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return None if source.is_module() else source.instance


def hand_validation_loaders(trainer: Trainer, loaders: Any) -> None:
    """Let this `fit` validate on `loaders`, as if they had been given to it."""
    trainer.fit_loop.epoch_loop.val_loop._data_source.instance = loaders


def request_validation_loaders(trainer: Trainer) -> Any:
    """What the `val_dataloader` hook returns, asked for the way `fit` does."""
    return of(trainer, _request_dataloader)(trainer.fit_loop.epoch_loop.val_loop._data_source)


def validate_one_batch(trainer: Trainer, loaders: CombinedLoader) -> None:
    """Validate one batch of each loader through Lightning's own loop, inside `unseen`.

    Gradients are dropped before, as they are in training. The hooks are those of a sanity check, which a module can
    tell by `trainer.sanity_checking`, up to the batch: at the end of an epoch metrics would wait for other ranks.
    """
    loop, stage, steps = trainer.fit_loop.epoch_loop.val_loop, trainer.state.stage, trainer.num_sanity_val_steps
    loop._combined_loader, loop._max_batches = loaders, [1] * len(loaders.flattened)
    loop._last_val_dl_reload_epoch = trainer.current_epoch  # or it would ask for loaders of its own
    loop.on_run_end = list  # type: ignore[method-assign]
    loop._store_dataloader_outputs = _nothing  # type: ignore[method-assign]
    try:
        trainer.sanity_checking, trainer.num_sanity_val_steps = True, 1
        trainer.lightning_module.on_validation_model_zero_grad()
        loop.run()
        loop._on_evaluation_model_train()
    finally:
        loop.teardown()
        trainer.state.stage, trainer.num_sanity_val_steps = stage, steps


def _nothing() -> None:
    """Stand in for a step that is left out."""


def scaler_of(trainer: Trainer) -> Any:
    """The gradient scaler of 16-bit mixed precision, or None; only that plugin has the attribute."""
    return getattr(trainer.precision_plugin, "scaler", None)


def scale(trainer: Trainer) -> float | None:
    """The factor that losses are scaled by now; None where they are not."""
    scaler = scaler_of(trainer)
    return None if scaler is None else float(scaler.get_scale())
