"""The largest batch size that fits, found before the first step, as a Lightning callback."""

from dataclasses import asdict
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy

from lightning_ckpt.callbacks._distributions import Callback, MisconfigurationException
from lightning_ckpt.callbacks._global_batch import GlobalBatch
from lightning_ckpt.callbacks._growing import Growing
from lightning_ckpt.callbacks._neighbours import refuse_other_finders, stand_behind_checkpointing
from lightning_ckpt.callbacks._room import room_of
from lightning_ckpt.callbacks._searching import Searching
from lightning_ckpt.callbacks._trainer import OptimizerSetup, has_training_to_do, ranks_of_run
from lightning_ckpt.callbacks._trial_report import TrialReport, log_size
from lightning_ckpt.callbacks._trials import Trial
from lightning_ckpt.callbacks._tuner_options import TunerOptions
from lightning_ckpt.processes import Alone, Ranks


class BatchSizeTuner(Callback):
    """Find the largest batch size that leaves the headroom, before training starts, and train with it.

    A few real training steps are taken at growing sizes, their peak memory is measured, and the size is settled on
    that fits and was measured to: a first small one, in which gradients and optimizer state come up, a jump as far as
    is safe by what its forward pass, backward pass and optimizer step took each, and what is needed after it, mostly
    one or two more. An out-of-memory error in a trial is caught and used as a bound. Then everything is put back:
    training is bit for bit what it would have been with that size set by hand, and nothing of the trials is logged,
    counted or left on disk.

    The size must live where it can be changed: as an attribute or hyperparameter `batch_size` of the module or
    datamodule that `train_dataloader` uses, or in a `DataLoader` handed to `fit`, which is replaced by one of the new
    size with the same dataset, sampler, workers and collate function. When the size changes, `configure_optimizers` is
    called once more, so that rates and schedules planned from the size or the number of batches see the new one.

    How far to go after a small first step is estimated, where the step runs on fake tensors: `training_step` sees a few
    batches of them, on a copy of the module.

    The trials run in `on_fit_start`, before the module's own `on_fit_start` and `on_train_start`; of the module's hooks
    only those of a batch are called. `ActivationCheckpointing` is put before this callback. The trials are printed as
    a table, and logged as a table of W&B; `batch_size/per_device` and `batch_size/global` are logged once, unless a
    `StepMonitor` logs them with each step.

    Of several processes all take one size, the largest that fits on each of them. Under DDP a trial waits for no other
    rank, so one that runs out of memory is a bound like any other; with `gradient_as_bucket_view=True` gradients count
    twice in it, so that the size is on the safe side. Where ranks share the parts of a model (FSDP2) they wait for one
    another within a step, and an out-of-memory error ends the run, with what to do; sizes grow so that there is none.

    Beside `ActivationCheckpointing("auto")`, in a single process, size and memory plan are chosen together: of the
    sizes that fit, each tried under its own plan, the one with the most samples per second. Training starts with that
    plan and keeps to the room both were chosen for.

    A settled size is saved in checkpoints. A resumed run, and another `fit` with the same callback, use it after one
    trial has shown that it still fits, and search only if it doesn't; a new callback searches anew. With
    `fast_dev_run` nothing is done.

    With `mode="grow"` training itself is the search: no step is repeated or thrown away. The first steps have small
    batches; each size is measured in two real steps (on the host in as many as its resident size needs to settle, six
    at most) and grows until only the headroom is left. No sample of an epoch is lost or seen twice: what workers have
    read ahead is cut into batches anew, and a mid-epoch checkpoint knows which samples are to come. (Of a stream whose
    length is unknown Lightning holds one batch, so that a new size comes one batch later.) Once settled, a later peak
    into the headroom shrinks the batches from the next step on. Sizes are written everywhere they live, and logged
    when they settle or shrink. Without `global_batch_size` optimizer steps grow with the batches, and a schedule
    planned from the number of batches is planned for the first size. An out-of-memory error in a real step can't be
    undone: the run ends with it, and says below which size to resume; but sizes grow no further than what was measured
    allows. After the run the loaders and `accumulate_grad_batches` are as they were, but for the size.

    Args:
        mode: `"search"`: settle the size before the first step; `"grow"`: while training. `"grow"` works in several
            processes and whatever size the loaders have; it refuses custom batch samplers, `probe`, `stop_at_plateau`,
            `evaluation`, and `ActivationCheckpointing("auto")` beside it.
        headroom: share of the memory limit to leave free, 0 to 1. On the host 4 % of the rest are left too: its heap
            fragments, and a resident size is not exact.
        batch_arg_name: name of the attribute or hyperparameter that holds the batch size.
        init_val: first size to try; `None` for a small one. The size found in the module is not tried first: it may be
            the one that does not fit.
        min_val: smallest size allowed.
        max_val: largest size allowed; `None` for no bound but the number of samples.
        multiple_of: settle on a multiple of this.
        memory_limit: memory to fill, in bytes or as `"40GiB"`; `None` for what the device, or on a machine without one
            the process, can hold.
        max_trials: most sizes to try, not counting those tried under a plan; in `"grow"` most sizes to measure.
        global_batch_size: samples of an optimizer step, over all processes and micro-batches, to be kept whatever the
            batch size: sizes tried divide it, and `accumulate_grad_batches` follows. `None` lets the step grow with the
            batch, which one line in the log says.
        probe: `"first"`: trials take the samples that come first, and a warning says so where samples differ in size.
            `"longest"`: they take the largest there are, so that a later batch of long ones fits too. The train data
            are read for it once: all of up to 65536 samples, as many evenly spaced ones of more, for 10 seconds at
            most; of a stream as many from its front.
        stop_at_plateau: share by which samples per second must grow from one size that fits to the next larger one for
            the search to go on, such as 0.05; below that, the size with the most is settled. A size is then at most
            four times the one before, and the fastest of three steps counts. `None` for the largest size that fits.
        evaluation: let each trial run a validation batch of its size too, with the higher peak counting, and give the
            settled size to validation loaders handed to `fit`. A `val_dataloader` hook is called for each trial, and
            follows the size if it uses it. `False` leaves validation as it is, and untried.

    Attributes:
        options: the arguments, by their names.
        batch_size: the settled size; `None` before. While growing, the size of the next step.
        trials: every trial, in order: size, peak in bytes, seconds of the step, outcome, samples per second.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: when `fit` starts: no batch size was found that can be changed; a
            `LearningRateFinder` or `BatchSizeFinder` beside it.
        RuntimeError: in a trial: another rank has failed; or memory ran out where ranks wait for one another in a step.
        NothingFits: when `fit` starts: not even the smallest size allowed fits.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[BatchSizeTuner(multiple_of=8)], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        mode: Literal["search", "grow"] = "search",
        *,
        headroom: float = 0.1,
        batch_arg_name: str = "batch_size",
        init_val: int | None = None,
        min_val: int = 1,
        max_val: int | None = None,
        multiple_of: int = 1,
        memory_limit: int | str | None = None,
        max_trials: int = 8,
        global_batch_size: int | None = None,
        probe: Literal["first", "longest"] = "first",
        stop_at_plateau: float | None = None,
        evaluation: bool = False,
    ) -> None:
        self.options = TunerOptions(
            mode,
            headroom,
            batch_arg_name,
            init_val,
            min_val,
            max_val,
            multiple_of,
            memory_limit,
            max_trials,
            global_batch_size,
            probe,
            stop_at_plateau,
            evaluation,
        )
        self.batch_size: int | None = None
        self.trials: list[Trial] = []
        self._found: TrialReport | None = None
        self._global_batch: GlobalBatch | None = None
        self._optimizer_setup: OptimizerSetup | None = None
        self._growing: Growing | None = None
        self._ranks: Ranks = Alone()
        self._grown: dict[str, Any] = {}

    @property
    def _divides(self) -> int | None:
        return self._global_batch.per_rank if self._global_batch else None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(batch_arg_name=self.options.batch_arg_name)

    def state_dict(self) -> dict[str, Any]:
        if self.batch_size is None:
            return {}
        state = {"batch_size": self.batch_size, "trials": [asdict(trial) for trial in self.trials]}
        if self.options.mode == "search":
            return state
        grown = self._growing.state() if self._growing else self._grown
        return state | {"batch_size": grown["size"], "grown": grown} if grown else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.options.mode == "search" and self._optimizer_setup is None and self.batch_size is not None:
            return  # a strategy that loads late: this fit has settled its size already
        self.batch_size = state_dict["batch_size"]
        self.trials[:] = [Trial(**trial) for trial in state_dict["trials"]]
        settled: dict[str, Any] = {"size": self.batch_size, "settled": True, "loaders": [], "since": 0}
        self._grown = state_dict.get("grown") or settled
        if self._growing:
            self._growing.resume(self._grown)
        elif self.options.mode == "search" and not self._grown["settled"]:
            self.batch_size = None  # it was to grow further

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        refuse_other_finders(trainer)
        stand_behind_checkpointing(trainer, self)
        self._forget_setup()
        self._ranks = ranks_of_run(trainer, "BatchSizeTuner")
        if self.options.global_batch_size is not None:
            self._global_batch = GlobalBatch(trainer, pl_module, self.options.global_batch_size)
        if self.options.mode == "search":
            self._optimizer_setup = OptimizerSetup(trainer)
        elif has_training_to_do(trainer):
            first, settled = self.options.first(self.batch_size, self._divides), self._grown.get("settled", False)
            self._growing = Growing(
                trainer,
                pl_module,
                self._ranks,
                name=self.options.batch_arg_name,
                first=first,
                settled=settled,
                global_batch=self._global_batch,
                trials=self.trials,
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        setup = self._optimizer_setup
        if setup is None or not has_training_to_do(trainer):
            return
        if any(map(is_lazy, pl_module.parameters())):
            raise MisconfigurationException(
                "BatchSizeTuner can't put back parameters that are made on the first batch: run one batch through the "
                "module before `fit`, so that its lazy layers know their shapes"
            )
        searching = Searching(
            trainer,
            pl_module,
            self.options,
            self._ranks,
            known=self.batch_size,
            global_batch=self._global_batch,
        )
        try:
            self.batch_size, self._found = searching.run(setup)
        finally:
            self.trials += searching.trials
        self._forget_setup()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growing:
            self._growing.start(
                room_of(trainer, self.options, usable=self._growing.usable, copies=0),
                lambda target, samples: self.options.search(target, samples, self._divides),
            )
            self.batch_size = self._growing.size
            if not self._growing.settled:
                return
        # Not earlier: Lightning logs the hyperparameters' initial values right after `on_fit_start`.
        if self.batch_size is not None:
            log_size(trainer, self.options.batch_arg_name, self.batch_size)
            if self._found is not None:
                self._found.log(trainer, self.batch_size)
        self._found = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growing:
            self._growing.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._growing:
            self._growing.begin_batch()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._growing:
            self._growing.end_batch()
            self.batch_size = self._growing.size

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growing:
            self._growing.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growing:
            self._growing.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ranks.failed(exception)
        if self._growing:
            self._growing.fail(exception)
        self._end()  # Lightning calls no teardown after an exception

    def _end(self) -> None:
        self._forget_setup()
        if self._global_batch is not None:
            self._global_batch.put_back()
            self._global_batch = None

    def _forget_setup(self) -> None:
        if self._optimizer_setup is not None:
            self._optimizer_setup.remove()
            self._optimizer_setup = None
        if self._growing is not None:
            self._grown = self._growing.state()
            self._growing.close()
            self._growing = None
