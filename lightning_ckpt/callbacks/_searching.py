"""One `fit`'s search for its batch size, by steps taken before training."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console

from lightning_ckpt.callbacks._agreed_trials import AgreedTrials
from lightning_ckpt.callbacks._batch_size import BatchSize
from lightning_ckpt.callbacks._evaluation import Evaluation
from lightning_ckpt.callbacks._first_jump import first_jump
from lightning_ckpt.callbacks._global_batch import GlobalBatch
from lightning_ckpt.callbacks._pair import Pair
from lightning_ckpt.callbacks._plateau import TIMED_STEPS, fastest, has_levelled_off, reach
from lightning_ckpt.callbacks._probe import Probing
from lightning_ckpt.callbacks._room import Room, room_of
from lightning_ckpt.callbacks._trainer import OptimizerSetup, callbacks_of, data_ranks, wrap_anew
from lightning_ckpt.callbacks._trial_report import SearchLine, TrialReport
from lightning_ckpt.callbacks._trials import Outcome, Trial, Trials
from lightning_ckpt.callbacks._tuner_options import TunerOptions
from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_ckpt.processes import Ranks
from lightning_ckpt.search import Measurement, NothingFits, Search
from lightning_ckpt.sizes import format_size


class Searching:
    """Tries sizes, settles one, and gives it to the run.

    Args:
        trainer: whose run it is.
        pl_module: what it trains.
        options: what is asked for.
        ranks: the processes that train together.
        known: the size that a fit before or a checkpoint has settled.
        global_batch: the samples of an optimizer step, where they are to stay the same.

    Attributes:
        trials: every trial, in order.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        options: TunerOptions,
        ranks: Ranks,
        *,
        known: int | None,
        global_batch: GlobalBatch | None,
    ) -> None:
        self._trainer, self._module, self._options = trainer, pl_module, options
        self._known, self._global_batch = known, global_batch
        self._divides = global_batch.per_rank if global_batch else None
        self._ranks = ranks
        self._probing = Probing(options.probe)
        self._place = BatchSize(trainer, pl_module, options.batch_arg_name, self._probing.for_trial)
        self._paired = False
        self.trials: list[Trial] = []

    def run(self, setup: OptimizerSetup) -> tuple[int, TrialReport]:
        """Settle a size, set it everywhere, and return it with what there is to tell.

        Args:
            setup: of the optimizers, which is made once more where the number of batches changes.

        Raises:
            NothingFits: not even the smallest size allowed fits.
        """
        options, trainer, place = self._options, self._trainer, self._place
        evaluates = options.evaluation and trainer.enable_validation
        evaluation = Evaluation(trainer, self._probing.for_trial) if evaluates else None
        if self._global_batch:
            self._global_batch.accumulate_for_trials()
        timed_steps = 1 if options.stop_at_plateau is None else TIMED_STEPS
        with SearchLine(trainer) as line, Trials(trainer, place, evaluation, timed_steps) as trials:
            line.say("Looking at the data")
            trials.prepare(options.first(self._known, self._divides))
            self._probing.look(place)
            mine = room_of(trainer, options, usable=trials.usable, copies=trials.copies)
            room = min(self._ranks.gather(mine), key=lambda room: room.target)
            size = self._settle(room, AgreedTrials(trials, self._ranks, mine.target), line)
            if size != self._known:
                size = self._with_a_plan(trials, room, size)
        wrap_anew(trainer)
        if self._global_batch:
            self._global_batch.accumulate(size)
        if place.settle(size) or self._global_batch:
            setup.again(trainer)
        if evaluation is not None:
            evaluation.settle(size)
        return size, self._report(size, room)

    def _search(self, target: int, samples: int | None) -> Search:
        return self._options.search(target, samples, self._divides)

    def _settle(self, room: Room, trials: AgreedTrials, line: SearchLine) -> int:
        """Try sizes until the search is over, or until the size that was settled before has shown to fit."""
        measured: list[Measurement] = []
        hint: Measurement | None = None
        samples = [count for count in self._ranks.gather(self._place.most_samples) if count is not None]
        search = self._search(room.target, min(samples, default=None))
        size: int | None = search.nearest(self._options.first(self._known, self._divides))
        while size is not None:
            there = min(self._ranks.gather(self._place.samples_up_to(size)))
            if there < size:  # a stream that turned out short
                search = self._search(room.target, there)
                size = search.nearest(size)
                if size in [m.size for m in measured]:
                    break
            line.trying(size, self.trials, search.max_trials)
            if hint is None and not measured and self._takes_hints(size):
                hint, jump = self._warm_up(trials, size, search)
                if hint is not None:
                    size = jump or search.propose([], floor=trials.floor, hint=hint)
                    continue
            measured.append(self._try(search, trials, size))
            if size == self._known and search.fits(measured[0]):
                return size
            if self._is_at_plateau():
                return fastest(self.trials)
            size = self._within_reach(search.propose(measured, floor=trials.floor, hint=hint), search)
        try:
            return search.settled(measured)
        except NothingFits:
            least = min(measured, key=lambda m: m.size)
            raise NothingFits(_why(least, search, room, trials.highest_in)) from None

    def _try(self, search: Search, trials: AgreedTrials, size: int) -> Measurement:
        measurement, seconds = trials.run(size)
        self.trials.append(Trial(size, measurement.peak, seconds, _outcome(search, measurement)))
        return measurement

    def _warm_up(self, trials: AgreedTrials, size: int, search: Search) -> tuple[Measurement | None, int | None]:
        """What a first step tells of a second, and how far to jump: the least that a rank estimates, if all can."""
        hint, batch = trials.warm_up(size)
        if hint is None:
            return None, None
        mine = first_jump(self._trainer, self._module, batch, hint, search) if search.fits(hint) else None
        jumps = self._ranks.gather(mine)
        return hint, None if None in jumps else min(jump for jump in jumps if jump is not None)

    def _takes_hints(self, size: int) -> bool:
        """Whether what the first step tells of a second may stand for a trial: only training counts, and its memory."""
        return size != self._known and self._options.stop_at_plateau is None and not self._options.evaluation

    def _is_at_plateau(self) -> bool:
        growth = self._options.stop_at_plateau
        return growth is not None and has_levelled_off(self.trials, growth)

    def _within_reach(self, size: int | None, search: Search) -> int | None:
        """The proposed size, or a smaller one that does not pass over a plateau."""
        if size is None or self._options.stop_at_plateau is None:
            return size
        smaller = search.nearest(min(size, reach(self.trials)))
        return size if smaller in [trial.size for trial in self.trials] else smaller

    def _with_a_plan(self, trials: Trials, room: Room, largest: int) -> int:
        """Beside a planner: the size that is fastest under its own plan, which training then starts with."""
        for planner in callbacks_of(self._trainer):
            if not isinstance(planner, ActivationCheckpointing):
                continue
            to_plan = planner.to_plan(self._module)
            if to_plan is None:
                continue
            if self._trainer.world_size > 1:
                rank_zero_info(
                    "BatchSizeTuner: size and memory plan are chosen together in a single process only. Each of these "
                    f"{self._trainer.world_size} takes the largest size that fits with everything checkpointed"
                )
                return largest
            handle, policy = to_plan
            budget = min(room.target, policy.nbytes(room.limit))
            pair = Pair(self._trainer, self._module, trials, handle, budget)
            tried = pair.try_sizes(self._search(room.target, self._place.most_samples), largest)
            best = max(tried, key=lambda paired: paired.rate, default=None)
            planner.keep_to(budget, best.plan if best else None)
            self.trials += [paired.trial for paired in tried]
            if best:
                self._paired = True
                return best.trial.size
        return largest

    def _report(self, size: int, room: Room) -> TrialReport:
        if self._paired:
            what = "the most samples per second under a memory plan"
        else:
            levelled_off = self._is_at_plateau()
            what = "the most samples per second of those measured" if levelled_off else "the largest measured"
        report = TrialReport(self.trials, room.limit, f"Batch size: {size}, {what} within {room}")
        self._tell(size, report)
        return report

    @rank_zero_only
    def _tell(self, size: int, report: TrialReport) -> None:
        Console().print(report.table())
        searched = [trial for trial in self.trials if trial.outcome != "planned"]
        if len(searched) >= self._options.max_trials:
            rank_zero_info(
                f"BatchSizeTuner: max_trials={self._options.max_trials} are used up, so that sizes above "
                f"{max(trial.size for trial in searched if trial.outcome == 'fits')} may fit too"
            )
        if self._known not in (None, size):
            rank_zero_info(
                f"BatchSizeTuner: the batch size of {self._known}, settled before, no longer fits: {size} does"
            )
        ranks, accumulated = data_ranks(self._trainer), self._trainer.accumulate_grad_batches
        before = self._known or self._place.size
        if self._global_batch:
            rank_zero_info(
                f"BatchSizeTuner: an optimizer step takes {self._global_batch.samples} samples, as asked: "
                f"batch size {size}, accumulated {accumulated} times, on {ranks} "
                f"{'process' if ranks == 1 else 'processes'}; at an epoch's end it takes what is left of the data"
            )
        elif before != size:
            was = "" if before is None else f", not {before * accumulated * ranks} as before"
            rank_zero_info(
                f"BatchSizeTuner: an optimizer step now takes {size * accumulated * ranks} samples{was}; the learning "
                "rate may want to follow"
            )


def _outcome(search: Search, measurement: Measurement) -> Outcome:
    if measurement.out_of_memory:
        return "out of memory"
    return "fits" if search.fits(measurement) else "too large"


def _why(least: Measurement, search: Search, room: Room, highest_in: str) -> str:
    """What to tell a person when no size fits."""
    reached = "ran out of memory after reaching" if least.out_of_memory else "has a measured peak of"
    untried = f"; smaller sizes, down to {search.smallest}, are untried: raise max_trials or lower init_val"
    return (
        f"BatchSizeTuner: not even a batch size of {least.size} fits: its {highest_in} {reached} "
        f"{format_size(least.peak)}, and it may use {room}{untried if least.size > search.smallest else ''}. "
        "Checkpoint more of the model, lower headroom, raise memory_limit, or use a smaller model"
    )
