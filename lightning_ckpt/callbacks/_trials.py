"""Training steps taken to measure their memory, of which nothing remains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import Self

from lightning_ckpt.callbacks._batch_size import BatchSize
from lightning_ckpt.callbacks._evaluation import Evaluation
from lightning_ckpt.callbacks._first_jump import Seen
from lightning_ckpt.callbacks._loaders import MOST_BATCHES
from lightning_ckpt.callbacks._phases import Held, Phases
from lightning_ckpt.callbacks._trainer import (
    by_itself,
    datamodule_of,
    loaded_checkpoint,
    optimizer_steps,
    optimizer_wrappers,
    scaler_of,
    set_callbacks,
    steps_alone,
    unseen,
    validate_one_batch,
)
from lightning_ckpt.held import bytes_held, tensors_of
from lightning_ckpt.memory import HostReader, Interval, reader_for, release_unused
from lightning_ckpt.oom import is_out_of_memory, is_refused_by_a_kernel, release
from lightning_ckpt.search import Measurement, Phase
from lightning_ckpt.snapshot import Snapshot

# On the host, steps of one size are taken until the peak grows by less than a hundredth, and no more than this.
_STILL_GROWING, _MOST_SETTLING_STEPS = 1.01, 4
# Over later steps the resident size was seen to creep up by 1 to 3 hundredths more.
USABLE = 0.96

_T = TypeVar("_T")

Outcome = Literal["fits", "too large", "out of memory", "planned"]


@dataclass(frozen=True)
class Trial:
    """One batch size tried.

    Attributes:
        size: samples in the batch.
        peak: highest memory of the step in bytes; where memory ran out, what it had reached.
        seconds: time of the measured step, the fastest where several were; where memory ran out, until it did.
        outcome: whether the step was within the target, above it, ran out of memory (or of what a kernel can be
            launched for), or ran under a memory plan.
    """

    size: int
    peak: int
    seconds: float
    outcome: Outcome

    @property
    def samples_per_second(self) -> float:
        """Samples a second of this process; 0 where memory ran out."""
        return 0.0 if self.outcome == "out of memory" else self.size / self.seconds


class Trials:
    """While entered, steps can be tried; on leaving, all is as it was before.

    Args:
        trainer: whose steps they are.
        place: where the batch size lives.
        evaluation: gives a validation batch for each trial; None for none.
        timed_steps: steps to time, of which the fastest counts.

    Attributes:
        copies: bytes of the copies that the readings of this reader would count; readings are given without them.
        usable: share of the target that a trial may show.
        floor: bytes that are there whatever the batch size, as far as known.
        highest_in: what of the latest trial took the most memory, in words.
        decisive: on the host, peaks below this many bytes or above need not be exact: nothing will be settled by them.
        alone: whether no other rank is waited for within a step.
    """

    def __init__(
        self, trainer: Trainer, place: BatchSize, evaluation: Evaluation | None = None, timed_steps: int = 1
    ) -> None:
        self._trainer, self._place = trainer, place
        self._evaluation, self._timed_steps = evaluation, timed_steps
        self.highest_in = "step"
        self._device = trainer.strategy.root_device
        self._reader = Interval(reader_for(self._device))
        self._on_host = isinstance(self._reader.reader, HostReader)
        self._phases = Phases(self._reader.reader)
        self._warm = self._has_run = False
        self._drawn: Snapshot | None = None
        self.copies = self.floor = self._gradients = 0
        self.decisive = range(2**62)
        self.alone = steps_alone(trainer)
        self.usable = USABLE if self._on_host else 1.0

    def __enter__(self) -> Self:
        self._state = Snapshot(
            _changed_by_a_step(self._trainer), data=[datamodule_of(self._trainer)], device=self._device
        )
        # A resident size counts everything; an allocator's counters don't see memory that is not theirs.
        resumed = bytes_held(tensors_of(loaded_checkpoint(self._trainer)))
        self.copies = self._state.nbytes + resumed if self._on_host else 0
        self._at_rest = self._resting()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        self._place.put_back()
        release_unused(self._device)

    def prepare(self, size: int) -> None:
        """Get hold of loaders, at a first size."""
        self._place.prepare(size)
        self._drawn = Snapshot([], data=self._place.drawn_from())

    def warm_up(self, size: int) -> tuple[Measurement | None, Any]:
        """Take the first step, which makes gradients and optimizer state, and tell what a second would measure.

        Returns:
            What a second would measure, None where that can't be told: of a step that is not forward, backward and
            optimizer, or by a resident size; and the batch of the step, None where memory ran out.

        Raises:
            Exception: whatever the step raises, except running out of memory.
        """
        taken = self.unless_out_of_memory(lambda: self._first_step(size))
        return (Measurement(size, self._peak(), out_of_memory=True), None) if taken is None else taken

    def run(self, size: int) -> tuple[Measurement, float]:
        """Take one step, after a first one that makes gradients and optimizer state where there are none.

        Further ones where several are timed, and a validation batch where one is wanted. Where memory ran out within
        the target, somebody else has held it, perhaps only then: the step is tried once more.

        Returns:
            What was measured, and the seconds it took.

        Raises:
            Exception: whatever the step raises, except running out of memory.
        """
        started, self.highest_in = perf_counter(), "step"
        taken = self.unless_out_of_memory(lambda: self._step(size))
        if taken is None and self.alone and self._peak() < self.decisive.stop:
            taken = self.unless_out_of_memory(lambda: self._step(size))
        if taken is None:
            return Measurement(size, self._peak(), out_of_memory=True), perf_counter() - started
        return taken

    def unless_out_of_memory(self, steps: Callable[[], _T]) -> _T | None:
        """What steps return; None where memory ran out, after which all is as it was before.

        Raises:
            Exception: whatever else they raise.
        """
        try:
            return steps()
        except Exception as error:
            too_much = self._has_run and self.alone and is_refused_by_a_kernel(error)
            if not (too_much or is_out_of_memory(error)):
                rank_zero_info(
                    "BatchSizeTuner: a step failed in a trial. Trials run before the module's on_fit_start and "
                    "on_train_start: what a step needs is to be made in setup"
                )
                raise
            release(error)
        # Cleaned up here, where the exception is gone and with it what it held.
        self._put_back()
        self._warm = False
        release_unused(self._device)
        return None

    @contextmanager
    def steps(self, size: int) -> Iterator[Callable[[], None]]:
        """Yield a function that takes one optimizer step with batches of this size."""
        release_unused(self._device)
        with unseen(self._trainer), by_itself(self._trainer):
            loaders = self._place.trial_loaders(size)
            with optimizer_steps(self._trainer, loaders, most_batches=MOST_BATCHES) as step:
                yield step

    def timed(self, step: Callable[[], None]) -> float:
        """Take a step, and return the seconds until the device has done it."""
        started = perf_counter()
        step()
        _wait_for(self._device)
        return perf_counter() - started

    def _first_step(self, size: int) -> tuple[Measurement | None, Any]:
        seen = Seen()
        with self._steps_with_phases(size) as step:
            set_callbacks(self._trainer, [self._phases, seen])
            return self._begin(step, size), seen.batch

    def _step(self, size: int) -> tuple[Measurement, float]:
        with self._steps_with_phases(size) as step:
            if not self._warm:
                self._begin(step, size)
            self._phases.forget()
            self._reader.reset_peak()
            seconds = min(self.timed(step) for _ in range(self._timed_steps))
            self._settle_heap(step)
            phases = self._phases.peaks(floor=self.floor, gradients=self._gradients)
            peak, validation = self._peak(), self._evaluate(size)
            if validation is None:
                return Measurement(size, peak, phases=phases), seconds
            self.highest_in = "validation batch" if validation > peak else "step"
            phases += (Phase(validation, self.floor + self._gradients),) if phases else ()
            return Measurement(size, max(peak, validation), phases=phases), seconds

    def _evaluate(self, size: int) -> int | None:
        """The peak of a validation batch; None where there is none to run."""
        loaders = self._evaluation.trial_loaders(size) if self._evaluation else None
        if loaders is None:
            return None
        self.highest_in = "validation batch"  # until it has shown not to be
        self._reader.reset_peak()
        validate_one_batch(self._trainer, loaders)
        return self._peak()

    @contextmanager
    def _steps_with_phases(self, size: int) -> Iterator[Callable[[], None]]:
        with self.steps(size) as step:
            set_callbacks(self._trainer, [self._phases])
            self._reader.reset_peak()
            yield self._phases.around(step)

    def _begin(self, step: Callable[[], None], size: int) -> Measurement | None:
        """Take the first step, and learn from it."""
        self._phases.forget()
        before = _held(self._trainer)
        step()
        self._warm, after = True, _held(self._trainer)
        self._has_run = True
        self.floor = floor_of(self._trainer, at_rest=self._at_rest, now=self._resting())
        if not self._trainer.lightning_module.automatic_optimization:  # who knows when gradients are let go
            return None
        self._gradients = after.gradients
        return self._phases.as_if_later(size, before=before, after=after, floor=self.floor)

    def _settle_heap(self, step: Callable[[], None]) -> None:
        """Take further steps while the resident size grows.

        The C library keeps what a step frees in pieces that the next one can't all use, so that the same step takes up
        to a quarter more pages the third time than the first. Allocators of accelerators are counted in tensors. Ranks
        that wait for one another take equally many.
        """
        if not self._on_host:
            return
        for _ in range(_MOST_SETTLING_STEPS):
            before = self._peak()
            if self.alone and before not in self.decisive:
                return
            step()
            if self.alone and self._peak() < _STILL_GROWING * before:
                return

    def _resting(self) -> int:
        self._reader.reset_peak()
        return self._peak()

    def _peak(self) -> int:
        return max(self._reader.peak() - self.copies, 0)

    def _put_back(self) -> None:
        if self._evaluation is not None:
            self._evaluation.put_back()
        if self._drawn is not None:
            self._drawn.restore()
        self._state.restore()


def floor_of(trainer: Trainer, *, at_rest: int, now: int) -> int:
    """Bytes that are there whatever the batch size, after a first step.

    Estimated from below, twice, and the lower taken: a resident size keeps what a step has freed.

    Args:
        trainer: with gradients and optimizer state.
        at_rest: bytes before the first step.
        now: bytes between two steps.
    """
    held = _held(trainer)
    return max(min(at_rest + held.optimizer, now - held.gradients), 0)


def _held(trainer: Trainer) -> Held:
    optimizer = bytes_held(tensors_of([optimizer.state for optimizer in trainer.optimizers]))
    gradients = bytes_held(tensors_of([p.grad for p in trainer.lightning_module.parameters()]))
    return Held(optimizer, gradients)


def _changed_by_a_step(trainer: Trainer) -> list[object]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    wrappers = optimizer_wrappers(trainer)
    return [trainer.lightning_module, trainer.model, *trainer.optimizers, *schedulers, scaler_of(trainer), *wrappers]


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
