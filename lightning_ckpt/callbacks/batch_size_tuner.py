"""The largest batch size that fits, found before the first step, as a Lightning callback."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from torch.nn.parameter import is_lazy

from lightning_ckpt.callbacks._agreed_trials import AgreedTrials
from lightning_ckpt.callbacks._batch_size import BatchSize
from lightning_ckpt.callbacks._evaluation import Evaluation
from lightning_ckpt.callbacks._global_batch import GlobalBatch
from lightning_ckpt.callbacks._growing import Growing
from lightning_ckpt.callbacks._pair import Pair
from lightning_ckpt.callbacks._plateau import TIMED_STEPS, fastest, has_levelled_off, reach
from lightning_ckpt.callbacks._probe import Probing
from lightning_ckpt.callbacks._trainer import (
    OptimizerSetup,
    callbacks_of,
    data_ranks,
    has_training_to_do,
    set_callbacks,
    wrap_anew,
)
from lightning_ckpt.callbacks._trial_report import SearchLine, TrialReport
from lightning_ckpt.callbacks._trials import Outcome, Trial, Trials
from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_ckpt.memory import reader_for
from lightning_ckpt.processes import Ranks, ranks_of
from lightning_ckpt.search import Measurement, NothingFits, Search
from lightning_ckpt.sizes import format_size, parse_size


@dataclass(frozen=True)
class _Room:
    """How much memory a step may need.

    Attributes:
        limit: what the device or the process can hold, in bytes.
        target: what a step may need of it, in bytes.
        noise: what else was taken off, in words.
    """

    limit: int
    target: int
    noise: str

    def __str__(self) -> str:
        return f"{format_size(self.target)}, of {format_size(self.limit)} less the headroom{self.noise}"


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

    The trials run in `on_fit_start`, before the module's own `on_fit_start` and `on_train_start`; of the module's hooks
    only those of a batch are called. `ActivationCheckpointing` is put before this callback. The trials are printed as
    a table, and logged as a table of W&B; `batch_size/per_device` and `batch_size/global` are logged once, unless a
    `StepMonitor` logs them with each step.

    Of several processes all take one size, the largest that fits on each of them. Under DDP a trial waits for no other
    rank, so one that runs out of memory is a bound like any other; with `gradient_as_bucket_view=True` gradients count
    twice in it, so that the size is on the safe side. Where ranks share the parts of a model (FSDP2) they wait for one
    another within a step, and an out-of-memory error ends the run, with what to do; sizes grow so that there is none.

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
        max_trials: most sizes to try.
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
        batch_size: the settled size; `None` before. While growing, the size of the next step.
        trials: every trial, in order: size, peak in bytes, seconds of the step, outcome, samples per second.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: when `fit` starts: no batch size was found that can be changed; a
            `LearningRateFinder` or `BatchSizeFinder` beside it.
        RuntimeError: in a trial: another rank has failed; or memory ran out where ranks wait for one another in a step.
        NothingFits: when `fit` starts: not even the smallest size allowed fits.

    Example:
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
        if mode not in ("search", "grow"):
            raise ValueError(f'mode={mode!r}: accepted are "search" and "grow"')
        if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
            raise ValueError(f"headroom={headroom!r}: give the share of memory to leave free, at least 0 and below 1")
        if not isinstance(batch_arg_name, str) or not batch_arg_name.isidentifier():
            raise ValueError(f'batch_arg_name={batch_arg_name!r}: give the name of an attribute, like "batch_size"')
        for name, value in (("min_val", min_val), ("multiple_of", multiple_of), ("max_trials", max_trials)):
            _check_count(name, value)
        for name, bound in (("max_val", max_val), ("init_val", init_val), ("global_batch_size", global_batch_size)):
            if bound is not None:
                _check_count(name, bound)
        _check_range(min_val, max_val, init_val, multiple_of)
        self.mode = mode
        self.headroom = headroom
        self.batch_arg_name = batch_arg_name
        self.init_val, self.min_val, self.max_val = init_val, min_val, max_val
        self.multiple_of = multiple_of
        self.memory_limit = None if memory_limit is None else parse_size(memory_limit, name="memory_limit")
        self.max_trials = max_trials
        self.global_batch_size = global_batch_size
        self._global_batch: GlobalBatch | None = None
        _check_probe(probe)
        _check_growth(stop_at_plateau)
        _check_switch("evaluation", evaluation)
        if mode == "grow" and (probe != "first" or stop_at_plateau is not None or evaluation):
            raise ValueError(
                'mode="grow" takes the steps of training as they come: leave probe, stop_at_plateau and evaluation '
                'out, or use mode="search"'
            )
        self.probe, self.stop_at_plateau, self.evaluation = probe, stop_at_plateau, evaluation
        self._paired = False
        self.batch_size: int | None = None
        self.trials: list[Trial] = []
        self._found: TrialReport | None = None
        self._optimizer_setup: OptimizerSetup | None = None
        self._growing: Growing | None = None
        self._grown: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return self._generate_state_key(batch_arg_name=self.batch_arg_name)

    def state_dict(self) -> dict[str, Any]:
        if self.batch_size is None:
            return {}
        state = {"batch_size": self.batch_size, "trials": [asdict(trial) for trial in self.trials]}
        if self.mode == "search":
            return state
        grown = self._growing.state() if self._growing else self._grown
        return state | {"batch_size": grown["size"], "grown": grown} if grown else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.mode == "search" and self._optimizer_setup is None and self.batch_size is not None:
            return  # a strategy that loads late: this fit has settled its size already
        self.batch_size = state_dict["batch_size"]
        self.trials[:] = [Trial(**trial) for trial in state_dict["trials"]]
        settled: dict[str, Any] = {"size": self.batch_size, "settled": True, "loaders": [], "since": 0}
        self._grown = state_dict.get("grown") or settled
        if self._growing:
            self._growing.resume(self._grown)
        elif self.mode == "search" and not self._grown["settled"]:
            self.batch_size = None  # it was to grow further

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._refuse(trainer)
        self._stand_behind_checkpointing(trainer)
        self._forget_setup()
        if self.global_batch_size is not None:
            self._global_batch = GlobalBatch(trainer, pl_module, self.global_batch_size)
        if self.mode == "search":
            self._optimizer_setup = OptimizerSetup(trainer)
        elif has_training_to_do(trainer):
            first, settled = self._first(self._search(0, None)), self._grown.get("settled", False)
            self._growing = Growing(
                trainer,
                pl_module,
                name=self.batch_arg_name,
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
        probing, before = Probing(self.probe), len(self.trials)
        place = BatchSize(trainer, pl_module, self.batch_arg_name, probing.for_trial)
        evaluation = Evaluation(trainer, probing.for_trial) if self.evaluation and trainer.enable_validation else None
        timed_steps = 1 if self.stop_at_plateau is None else TIMED_STEPS
        ranks = ranks_of(trainer.world_size)
        if self._global_batch:
            self._global_batch.accumulate_for_trials()
        with SearchLine(trainer) as line, Trials(trainer, place, evaluation, timed_steps) as trials:
            line.say("Looking at the data")
            trials.prepare(self._first(self._search(0, None)))
            probing.look(place)
            room = min(ranks.gather(self._room(trainer, trials)), key=lambda room: room.target)
            agreed = AgreedTrials(trials, ranks, self._room(trainer, trials).target)
            size = self._settle(room, place, agreed, ranks, line)
            self._paired = False
            if size != self.batch_size:
                size = self._with_a_plan(trainer, pl_module, place, trials, room, size)
        wrap_anew(trainer)
        if self._global_batch:
            self._global_batch.accumulate(size)
        if place.settle(size) or self._global_batch:
            setup.again(trainer)
        if evaluation is not None:
            evaluation.settle(size)
        self.batch_size = size
        self._forget_setup()
        self._report(trainer, room, place.size, self.trials[before:])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._growing:
            self._growing.start(self._room(trainer, self._growing), self._search)
            self.batch_size = self._growing.size
            if not self._growing.settled:
                return
        # Not earlier: Lightning logs the hyperparameters' initial values right after `on_fit_start`.
        if self.batch_size is not None:
            for logger in trainer.loggers:
                logger.log_hyperparams({self.batch_arg_name: self.batch_size})
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
        if self._growing:
            self._growing.fail(exception)
        self._end()  # Lightning calls no teardown after an exception

    def _end(self) -> None:
        self._forget_setup()
        if self._global_batch is not None:
            self._global_batch.put_back()
            self._global_batch = None

    def _refuse(self, trainer: Trainer) -> None:
        for other in callbacks_of(trainer):
            if isinstance(other, LearningRateFinder):
                raise MisconfigurationException(
                    "LearningRateFinder would run before BatchSizeTuner, since Lightning moves it to the front, and "
                    "find a rate for a batch size that then changes: find the size first, in a `fit` without it, set "
                    "it by hand, and find the learning rate after"
                )
            if isinstance(other, BatchSizeFinder):
                raise MisconfigurationException(
                    "BatchSizeFinder and BatchSizeTuner both set the batch size: leave one of them out"
                )

    def _stand_behind_checkpointing(self, trainer: Trainer) -> None:
        """Blocks made in `configure_model` are checkpointed in `on_fit_start`, and the trials must see them so."""
        callbacks = callbacks_of(trainer)
        places = [place for place, other in enumerate(callbacks) if isinstance(other, ActivationCheckpointing)]
        mine = callbacks.index(self)
        if places and places[-1] > mine:
            rest = callbacks[:mine] + callbacks[mine + 1 :]
            set_callbacks(trainer, [*rest[: places[-1]], self, *rest[places[-1] :]])

    def _forget_setup(self) -> None:
        if self._optimizer_setup is not None:
            self._optimizer_setup.remove()
            self._optimizer_setup = None
        if self._growing is not None:
            self._grown = self._growing.state()
            self._growing.close()
            self._growing = None

    def _room(self, trainer: Trainer, trials: Trials | Growing) -> _Room:
        limit = self.memory_limit or reader_for(trainer.strategy.root_device).limit()
        if limit is None:
            raise MisconfigurationException(
                "BatchSizeTuner can't tell how much memory there is on this machine: give memory_limit, in bytes or as "
                '"40GiB"'
            )
        # The copies of the state lie in the same memory while the trials run, and must not push a trial over the edge.
        target = min(int(limit * (1 - self.headroom) * trials.usable), limit - trials.copies)
        noise = f" and {1 - trials.usable:.0%} for what a resident size can't tell" if trials.usable < 1 else ""
        return _Room(limit, max(0, target), noise)

    def _search(self, target: int, samples: int | None) -> Search:
        most = min((bound for bound in (self.max_val, samples) if bound is not None), default=None)
        try:
            divides = self._global_batch.per_rank if self._global_batch else None
            return Search(target, self.min_val, most, self.multiple_of, self.init_val, self.max_trials, divides)
        except ValueError as error:
            data = "" if samples is None else f"; the train data has {samples} samples"
            raise MisconfigurationException(f"BatchSizeTuner: {error}{data}") from None

    def _first(self, search: Search) -> int:
        """The size a fit before or a checkpoint has settled, or else the search's first."""
        return search.nearest(self.batch_size or search.init_val or 2 * search.multiple_of)

    def _settle(self, room: _Room, place: BatchSize, trials: AgreedTrials, ranks: Ranks, line: SearchLine) -> int:
        """Try sizes until the search is over, or until the size that was settled before has shown to fit."""
        measured: list[Measurement] = []
        hint: Measurement | None = None
        known = [samples for samples in ranks.gather(place.most_samples) if samples is not None]
        search = self._search(room.target, min(known, default=None))
        size: int | None = self._first(search)
        while size is not None:
            there = min(ranks.gather(place.samples_up_to(size)))
            if there < size:  # a stream that turned out short
                search = self._search(room.target, there)
                size = search.nearest(size)
                if size in [m.size for m in measured]:
                    break
            if hint is None and not measured and self._takes_hints(size):
                line.trying(size, [], search.max_trials)
                hint = trials.warm_up(size)
                if hint is not None:
                    size = search.propose([], floor=trials.floor, hint=hint)
                    continue
            line.trying(size, self._latest(measured), search.max_trials)
            measured.append(self._try(search, trials, size))
            if size == self.batch_size and search.fits(measured[0]):
                return size
            if self._is_at_plateau(self._latest(measured)):
                return fastest(self._latest(measured))
            proposed = search.propose(measured, floor=trials.floor, hint=hint)
            size = self._within_reach(proposed, search, measured)
        try:
            return search.settled(measured)
        except NothingFits:
            least = min(measured, key=lambda m: m.size)
            raise NothingFits(_why(least, search, room, trials.highest_in)) from None

    def _takes_hints(self, size: int) -> bool:
        """Whether what the first step tells of a second may stand for a trial: only training counts, and its memory."""
        return size != self.batch_size and self.stop_at_plateau is None and not self.evaluation

    def _latest(self, measured: Sequence[Measurement]) -> list[Trial]:
        """The trials of the search that goes on."""
        return self.trials[len(self.trials) - len(measured) :]

    def _is_at_plateau(self, tried: Sequence[Trial]) -> bool:
        return self.stop_at_plateau is not None and has_levelled_off(tried, self.stop_at_plateau)

    def _within_reach(self, size: int | None, search: Search, measured: Sequence[Measurement]) -> int | None:
        """The proposed size, or a smaller one that does not pass over a plateau."""
        if size is None or self.stop_at_plateau is None:
            return size
        smaller = search.nearest(min(size, reach(self._latest(measured))))
        return size if smaller in [m.size for m in measured] else smaller

    def _with_a_plan(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        place: BatchSize,
        trials: Trials,
        room: _Room,
        largest: int,
    ) -> int:
        """Beside a planner: the size that is fastest under its own plan, which training then starts with."""
        for planner in callbacks_of(trainer):
            to_plan = planner.to_plan(pl_module) if isinstance(planner, ActivationCheckpointing) else None
            if to_plan is None:
                continue
            if trainer.world_size > 1:
                rank_zero_info(
                    "BatchSizeTuner: size and memory plan are chosen together in a single process only. Of these "
                    f"{trainer.world_size} each takes the largest size that fits with everything checkpointed"
                )
                return largest
            handle, policy = to_plan
            budget = min(room.target, policy.nbytes(room.limit))
            pair = Pair(trainer, pl_module, trials, handle, budget)
            tried = pair.try_sizes(self._search(room.target, place.most_samples), largest)
            if tried:
                best = max(tried, key=lambda paired: paired.rate)
                self.trials += [paired.trial for paired in tried]
                planner.load_state_dict({"plan": best.plan.to_json()})
                self._paired = True
                return best.trial.size
        return largest

    def _try(self, search: Search, trials: AgreedTrials, size: int) -> Measurement:
        measurement, seconds = trials.run(size)
        outcome = _outcome(search, measurement)
        self.trials.append(Trial(size, measurement.peak, seconds, outcome))
        return measurement

    @rank_zero_only
    def _report(self, trainer: Trainer, room: _Room, before: int | None, tried: Sequence[Trial]) -> None:
        if self._paired:
            what = "the most samples per second under a memory plan"
        else:
            fastest_so_far = self._is_at_plateau(tried)
            what = "the most samples per second of those measured" if fastest_so_far else "the largest measured"
        self._found = TrialReport(tried, room.limit, f"Batch size: {self.batch_size}, {what} within {room}")
        Console().print(self._found.table())
        if self._global_batch:
            rank_zero_info(
                f"BatchSizeTuner: an optimizer step takes {self.global_batch_size} samples, as asked: "
                f"{trainer.accumulate_grad_batches} batches of {self.batch_size} on {data_ranks(trainer)} ranks"
            )
        elif before != self.batch_size:
            of_each = trainer.accumulate_grad_batches * data_ranks(trainer)
            was = "" if before is None else f", not {before * of_each} as before"
            rank_zero_info(
                f"BatchSizeTuner: an optimizer step now takes {(self.batch_size or 0) * of_each} samples{was}; the "
                "learning rate may want to follow"
            )


def _outcome(search: Search, measurement: Measurement) -> Outcome:
    if measurement.out_of_memory:
        return "out of memory"
    return "fits" if search.fits(measurement) else "too large"


def _why(least: Measurement, search: Search, room: _Room, highest_in: str) -> str:
    """What to tell a person when no size fits."""
    reached = "ran out of memory after reaching" if least.out_of_memory else "has a measured peak of"
    untried = f"; smaller sizes, down to {search.smallest}, are untried: raise max_trials or lower init_val"
    return (
        f"BatchSizeTuner: not even a batch size of {least.size} fits: its {highest_in} {reached} "
        f"{format_size(least.peak)}, and it may use {room}{untried if least.size > search.smallest else ''}. "
        "Checkpoint more of the model, lower headroom, raise memory_limit, or use a smaller model"
    )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1")


def _check_probe(probe: object) -> None:
    if probe not in ("first", "longest"):
        raise ValueError(f'probe={probe!r}: accepted are "first" and "longest"')


def _check_growth(stop_at_plateau: object) -> None:
    number = isinstance(stop_at_plateau, int | float) and not isinstance(stop_at_plateau, bool)
    if stop_at_plateau is not None and not (number and 0 <= stop_at_plateau < 1):  # type: ignore[operator]
        raise ValueError(
            f"stop_at_plateau={stop_at_plateau!r}: give the share by which samples per second must grow, at least 0 "
            "and below 1, such as 0.05, or None"
        )


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: accepted are True and False")


def _check_range(min_val: int, max_val: int | None, init_val: int | None, multiple_of: int) -> None:
    Search(0, min_val, max_val, multiple_of)
    if init_val is not None and (init_val < min_val or (max_val is not None and init_val > max_val)):
        raise ValueError(f"init_val={init_val}: give a size from min_val={min_val} to max_val={max_val}")
