"""Training as the search for its batch size: the hooks of one `fit` whose real steps are the trials."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info

from lightning_ckpt.callbacks import _trainer
from lightning_ckpt.callbacks._batch_size import places_of
from lightning_ckpt.callbacks._clock import clock_for
from lightning_ckpt.callbacks._distributions import MisconfigurationException, is_a
from lightning_ckpt.callbacks._global_batch import GlobalBatch
from lightning_ckpt.callbacks._growing_loader import GrowingLoader, growing, samples_to_grow_into
from lightning_ckpt.callbacks._growth import Growth, News
from lightning_ckpt.callbacks._loaders import changed, resized
from lightning_ckpt.callbacks._room import Room
from lightning_ckpt.callbacks._trainer_batches import (
    StepsCountedFrom,
    around_train_loaders,
    batches_held,
    batches_trained,
    put_train_loaders,
    recount_batches,
    take_epoch_for_over,
)
from lightning_ckpt.callbacks._trial_report import TrialReport, log_size
from lightning_ckpt.callbacks._trials import USABLE, Trial, floor_of
from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_ckpt.memory import HostReader, Interval, reader_for, release_unused
from lightning_ckpt.oom import is_out_of_memory
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.policy_names import resolve_policy
from lightning_ckpt.processes import Ranks
from lightning_ckpt.search import Search
from lightning_ckpt.sizes import format_size


@dataclass
class _Step:
    """An optimizer step under way: its micro-batches so far."""

    global_step: int
    scale: float | None
    peak: int = 0
    full: bool = True
    spans: list[tuple[Any, Any]] = field(default_factory=list)


class Growing:
    """One `fit` that grows its batch size.

    Args:
        trainer: whose run it is.
        pl_module: what it trains.
        ranks: the processes that train together.
        name: of the attribute or hyperparameter that holds the batch size.
        first: size of the first step.
        settled: whether that size was settled by a run before.
        global_batch: what an optimizer step takes in all, to be kept; None to let it grow.
        trials: where sizes measured are added.

    Attributes:
        usable: share of the target that a step may show.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        ranks: Ranks,
        *,
        name: str,
        first: int,
        settled: bool,
        global_batch: GlobalBatch | None,
        trials: list[Trial],
    ) -> None:
        _refuse(trainer)
        self._trainer, self._module, self._ranks, self._name = trainer, pl_module, ranks, name
        self._size, self._settled, self._trials = first, settled, trials
        self._global_batch = global_batch
        self._counted = StepsCountedFrom(trainer) if global_batch else None
        self._growth: Growth | None = None
        self._resumed: Mapping[str, Any] = {}
        self._was_over = False
        self._undo = around_train_loaders(trainer, self._take)
        handed = _trainer.train_loaders_handed(trainer)
        if is_a(handed, CombinedLoader):  # Lightning puts what it prepares into this very object
            _trainer.hand_train_loaders(trainer, changed(handed, lambda leaf: leaf))
        self._interval = Interval(reader_for(trainer.strategy.root_device))
        self._clock = clock_for(trainer.strategy.root_device)
        self.usable = USABLE if self._creeping else 1.0
        self._steps = self._highest = 0
        self._begin_step()
        self._accumulate()

    @property
    def size(self) -> int:
        """Samples in the next step's batches."""
        return self._growth.size if self._growth else self._size

    @property
    def settled(self) -> bool:
        """Whether growing is over."""
        return self._growth.settled if self._growth else self._settled

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from: of a size that was not measured to fit it knows nothing."""
        proven = self.size if self.settled or self._growth is None else self._growth.proven
        return {
            "size": proven or self._size,
            "settled": self.settled,
            "loaders": [leaf.state() for leaf in self._leaves()],
            "since": self._counted.since if self._counted else 0,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        self._resumed = {"loaders": list(state["loaders"]), "since": state["since"]}
        self._size, self._settled = state["size"], state["settled"]
        for leaf in self._leaves():
            self._prepare(leaf)
        self._accumulate()

    def start(self, room: Room, search: Callable[[int, int | None], Search]) -> None:
        """Begin to measure: training is about to start.

        Args:
            room: what a step may need.
            search: makes a search, of a target in bytes and the number of samples where that is known.

        Raises:
            MisconfigurationException: when no train loader has a batch size that can change.
        """
        leaves = self._leaves()
        if not leaves:
            raise MisconfigurationException(
                'BatchSizeTuner(mode="grow") found no DataLoader with a batch size among the train loaders: give it '
                "one, or leave the callback out"
            )
        release_unused(self._trainer.strategy.root_device)
        self._room = room
        # Ranks with less room than others are compared by what they lack.
        target = self._ranks.most(room.target)
        samples = [count for count in self._ranks.gather(samples_to_grow_into(leaves)) if count is not None]
        looked_for = search(target, min(samples, default=None))
        size = looked_for.nearest(self.size)
        self._growth = Growth(
            looked_for,
            size=size,
            settled=self._settled,
            creeping=self._creeping,
            ceiling=int(target / self.usable),  # what was kept back for creeping may be used by it
        )
        self._at_rest = self._resting()
        self._change(size)
        over = bool(self._resumed) and batches_trained(self._trainer) > 0
        self._was_over = over and not any(leaf.is_resumed for leaf in leaves)
        if self._was_over:
            take_epoch_for_over(self._trainer)
        if self._counted:
            self._counted.since = 0 if self._was_over else self._resumed.get("since", 0)
        self._begin_step()

    def begin_epoch(self) -> None:
        """Every hook of an epoch's beginning comes after this one."""
        if self._growth is None or self._was_over:
            return
        if self._trainer.current_epoch > 0 and not self._resumed:  # loaded anew, and about to be read from the front
            for leaf in self._leaves():
                leaf.end_epoch()
        self._recount(begins=True)

    def begin_batch(self) -> None:
        if self._was_over:
            self._was_over = False
            self._recount(begins=True)
        self._interval.reset_peak()
        self._began = self._clock.mark()

    def end_batch(self) -> None:
        assert self._growth is not None
        held = batches_held(self._trainer)
        samples = [leaf.trained(held) for leaf in self._leaves()]
        self._step.full &= all(count == self._growth.size for count in samples)
        self._step.peak = max(self._step.peak, self._interval.peak())
        self._step.spans.append((self._began, self._clock.mark()))
        if self._has_stepped():
            self._end_step()

    def end_epoch(self) -> None:
        """The last batch of an epoch is done with."""
        self._resumed = {}
        for leaf in self._leaves():
            leaf.end_epoch()
        if self._counted:
            self._counted.since = 0
        self._begin_step()

    def end(self) -> None:
        """Training is over."""
        if self._growth is not None and not self.settled:
            known = self._growth.proven
            reached = "no size was measured to fit yet" if known is None else f"{known} is the largest measured to fit"
            rank_zero_info(
                f"BatchSizeTuner: training ended before the batch size was settled; {reached}, and a resumed run goes "
                "on from it"
            )

    def fail(self, error: BaseException) -> None:
        """Training ends with an error."""
        if self._growth is not None and is_out_of_memory(error):
            known = self._growth.proven
            before = "" if known is None else f"; {known} was measured to fit"
            rank_zero_info(
                f"BatchSizeTuner: memory ran out in a real step of {self.size} samples, which can't be taken back"
                f"{before}. Resume from the last checkpoint with max_val below {self.size}, or with more headroom"
            )

    def close(self) -> None:
        """Put back all that was replaced; the size stays."""
        self._undo()
        plain = self.size
        put_train_loaders(
            self._trainer, lambda leaf: resized(leaf.loader, plain) if isinstance(leaf, GrowingLoader) else leaf
        )
        if self._counted:
            self._counted.remove()

    @property
    def _creeping(self) -> bool:
        return isinstance(self._interval.reader, HostReader)

    def _take(self, loader: Any) -> Any:
        """Replace a loader that Lightning has prepared."""
        leaf = growing(loader, self.size)
        if isinstance(leaf, GrowingLoader):
            self._prepare(leaf)
        return leaf

    def _prepare(self, leaf: GrowingLoader) -> None:
        leaf.resize(self.size)
        if self._resumed and self._resumed["loaders"]:
            leaf.resume(self._resumed["loaders"].pop(0))

    def _leaves(self) -> list[GrowingLoader]:
        loaded = _trainer.loaded_train_loaders(self._trainer)
        found = [] if loaded is None else loaded.flattened
        return [leaf for leaf in found if isinstance(leaf, GrowingLoader)]

    def _begin_step(self) -> None:
        scale = None if self.settled else _trainer.scale(self._trainer)
        self._step = _Step(self._trainer.global_step, scale)

    def _has_stepped(self) -> bool:
        if self._module.automatic_optimization:
            return _trainer.gradients_are_complete(self._trainer)
        optimizers = len(self._trainer.optimizers)
        return len(self._step.spans) >= optimizers and self._trainer.global_step > self._step.global_step

    def _shows_all(self) -> bool:
        """Whether the step was one as every later one: activations beside old gradients, and not skipped."""
        before = self._step.scale
        skipped = before is not None and (_trainer.scale(self._trainer) or 0) < before
        return (
            self._step.full and not skipped and len(self._step.spans) >= min(self._trainer.accumulate_grad_batches, 2)
        )

    def _end_step(self) -> None:
        assert self._growth is not None
        self._steps += 1
        growth, before = self._growth, self._growth.size
        if self._steps == 1 or not (growth.settled or growth.measured):
            self._learn_floor()
        peak = self._ranks.most(self._step.peak - self._room.target) + growth.target
        full = growth.settled or not self._ranks.most(int(not self._shows_all()))
        self._highest = max(self._highest, self._step.peak)
        news = growth.step(peak, full=full)
        if news is not None:
            highest, self._highest = self._ranks.most(self._highest), 0
            self._follow(news, before, highest)
        elif growth.settled:
            self._highest = 0
        self._begin_step()

    def _follow(self, news: News, before: int, peak: int) -> None:
        """Do what has come of a step of size `before`."""
        if news in ("measured", "settled", "nothing fits"):
            self._note(before, peak)
        if self.size != before:
            self._change(self.size)
        if news != "measured":
            self._tell(news, before, peak)

    def _learn_floor(self) -> None:
        assert self._growth is not None
        floor = floor_of(self._trainer, at_rest=self._at_rest, now=self._resting())
        self._growth.floor = max(-self._ranks.most(self._room.target - floor) + self._growth.target, 0)

    def _resting(self) -> int:
        self._interval.reset_peak()
        return self._interval.peak()

    def _note(self, size: int, peak: int) -> None:
        self._clock.wait(self._step.spans)
        seconds = self._clock.seconds(self._step.spans) or 0.0
        assert self._growth is not None
        fits = self._growth.measured[-1].peak <= self._growth.target
        self._trials.append(Trial(size, peak, seconds, "fits" if fits else "too large"))

    def _change(self, size: int) -> None:
        for place in places_of(self._trainer, self._module, self._name):
            place.write(size)
        for leaf in self._leaves():
            leaf.resize(size)
        self._accumulate()
        self._recount()
        release_unused(self._trainer.strategy.root_device)

    def _accumulate(self) -> None:
        if self._global_batch and self._counted:
            self._counted.here()
            self._global_batch.accumulate(self.size)

    def _recount(self, *, begins: bool = False) -> None:
        def count(leaf: Any, share: float) -> int | None:
            return leaf.batches(share) if isinstance(leaf, GrowingLoader) and leaf.total is not None else None

        recount_batches(self._trainer, count, begins=begins)

    def _tell(self, news: News, before: int, peak: int) -> None:
        if news == "settled":
            rank_zero_info(
                f"BatchSizeTuner: settled on a batch size of {self.size} after {self._steps} steps, the largest "
                f"measured within {self._room}; an optimizer step takes {self._samples_of_a_step()} samples"
            )
        elif news == "shrunk":
            rank_zero_info(
                f"BatchSizeTuner: a step with batches of {before} samples peaked at {format_size(peak)}, and it may "
                f"use {self._room}: from the next step on the batch size is {self.size}"
            )
        else:
            rank_zero_info(
                f"BatchSizeTuner: a step with batches of {before} samples, the smallest allowed, peaked at "
                f"{format_size(peak)}, and it may use {self._room}; training goes on with it"
            )
        log_size(self._trainer, self._name, self.size)
        if news in ("settled", "nothing fits"):
            title = f"Batch size: {self.size}, the largest measured within {self._room}"
            TrialReport(self._trials, self._room.limit, title).log(self._trainer, self.size)

    def _samples_of_a_step(self) -> int:
        return self.size * self._trainer.accumulate_grad_batches * _trainer.data_ranks(self._trainer)


def _refuse(trainer: Trainer) -> None:
    planners = (other for other in _trainer.callbacks_of(trainer) if isinstance(other, ActivationCheckpointing))
    if any(isinstance(resolve_policy(other.policy), MemoryBudget) for other in planners):
        raise MisconfigurationException(
            'BatchSizeTuner(mode="grow") and ActivationCheckpointing("auto") would both follow the peak of the same '
            'steps, one by more samples and one by more replays: use mode="search", or a policy that stays'
        )
