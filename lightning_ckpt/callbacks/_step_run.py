"""One run of the monitor: from the hooks of a `fit` to rows."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_ckpt.callbacks import _trainer
from lightning_ckpt.callbacks._clock import HostClock, clock_for
from lightning_ckpt.callbacks._memory_snapshot import MemorySnapshot
from lightning_ckpt.callbacks._oom_report import Failure, out_of_memory_report, tell
from lightning_ckpt.callbacks._step_memory import MemoryFigures, Phase
from lightning_ckpt.callbacks._step_replays import StepReplays
from lightning_ckpt.callbacks._step_rows import Row, Rows, TimedStep
from lightning_ckpt.callbacks._step_sizes import Sizes, sizes_of, sizes_together
from lightning_ckpt.callbacks._step_tables import RunTables
from lightning_ckpt.callbacks._step_work import WorkCount
from lightning_ckpt.throughput import WARMUP_STEPS, Step, Stopwatch

# Rows that are told of when memory runs out.
_REPORTED = 5


@dataclass(frozen=True)
class Settings:
    """The arguments of `StepMonitor`, checked."""

    every_n_steps: int
    batch_size_fn: Callable[[Any], int] | None
    tokens_fn: Callable[[Any], int] | None
    flops: Literal["auto"] | float | None
    peak_flops: float | None
    prefix: str
    headroom: float | None
    memory_snapshot: str | None


class Run:
    """One `fit`: all that is remembered from hook to hook, and put back at its end."""

    def __init__(self, settings: Settings, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settings, self._trainer = settings, trainer
        device = trainer.strategy.root_device
        clock = clock_for(device)
        self._step_watch, self._wait_watch = Stopwatch(clock.mark), Stopwatch(HostClock().mark)
        self._waited = 0.0
        self._batch: Sizes | None = None
        self._given: Any = None  # the batch that is being worked on
        self._latest: deque[Row] = deque(maxlen=_REPORTED)
        self._batches: list[Sizes] = []
        self._interval: list[TimedStep] = []
        self._disturbed = False
        self._steps = 0
        # Not "every n-th number": a module that gathers gradients by itself steps at some numbers only.
        self._rows_due = _trainer.step_axis(trainer) // settings.every_n_steps
        self._optimizers = _OptimizerSteps(trainer, pl_module, partial(self.end_phase, "optimizer"))
        self._undo_saving = _trainer.around_saving(
            trainer, before=partial(self.hold, "saving"), after=partial(self.release, "saving")
        )
        self.replays = StepReplays(pl_module, clock)
        self.work = WorkCount(settings.flops, trainer, pl_module, settings.peak_flops, lambda: self.replays.plan)
        self.rows = Rows(trainer, clock, settings.prefix, settings.headroom)
        self._memory = MemoryFigures(device)
        self._snapshot = MemorySnapshot(settings.memory_snapshot, trainer)
        self._tables = RunTables(trainer, pl_module, self.replays)
        self._tables.begin(self._memory.limit)
        self._restart_watches()

    def hold(self, reason: str) -> None:
        """Let time pass that is no part of a step."""
        self._step_watch.hold(reason)
        self._wait_watch.hold(reason)

    def release(self, reason: str) -> None:
        self._memory.end_phase(None)
        self._step_watch.release(reason)
        self._wait_watch.release(reason)

    def end_phase(self, phase: Phase) -> None:
        """A phase of the step is over."""
        if phase == "forward":
            self.replays.begin_backward()
        self._memory.end_phase(phase)

    def begin_epoch(self) -> None:
        if self._steps or self._batches:
            self.release("epoch")
        else:
            self._restart_watches()

    def begin_batch(self, batch: Any) -> None:
        self._wait_watch.hold("batch")
        for start, end in self._wait_watch.lap():
            self._waited += end - start
        self._given = batch
        self._batch = sizes_of(batch, self._settings.batch_size_fn, self._settings.tokens_fn)
        self._disturbed |= self.replays.plan is None or self.work.begin()

    def end_batch(self) -> None:
        batch, self._batch, self._given = self._batch or Sizes(), None, None
        self._batches.append(batch)
        self._memory.end_phase("optimizer")
        self.work.end(batch.units())
        if self._optimizers.stepped():
            self._end_step()
            self._tables.end_step()
        self.rows.write_due()
        self._wait_watch.release("batch")

    def ran_out_of_memory(self, pl_module: LightningModule) -> None:
        """Say what is known of it, for the rank it happened on: others may not have failed."""
        self._snapshot.save()
        try:
            tell(out_of_memory_report(self._failure(), self._trainer, pl_module), self._trainer)
        except Exception as error:  # the run's own error must come through
            rank_zero_info(f"StepMonitor: no report of what held memory can be made: {error}")

    def _failure(self) -> Failure:
        replays, memory = self.replays, self._memory
        rows = [(row.axis, row.figures()) for row in self._latest]
        return Failure(rows, memory.peak(), memory.limit, self._given, replays.policy, replays.let_go())

    def close(self) -> None:
        self._snapshot.close()
        self.work.close()
        self.replays.close()
        self._memory.close()
        self._optimizers.close()
        self._undo_saving()

    def _restart_watches(self) -> None:
        self._step_watch.restart()
        self._wait_watch.restart()

    def _end_step(self) -> None:
        spans = self._step_watch.lap()
        saved, replays = self.replays.take()
        sizes = sizes_together(self._batches)
        step = Step(
            seconds=math.nan,
            wait_seconds=self._waited,
            samples=sizes.samples,
            tokens=sizes.tokens,
            batches=sizes.batches,
            work=self.work.of(sizes.units()),
            warmup=self._disturbed or self._steps < WARMUP_STEPS,
        )
        self._interval.append(TimedStep(step, spans, replays, sizes.largest, saved))
        self._batches, self._waited, self._disturbed = [], 0.0, False
        self._steps += 1
        axis = _trainer.step_axis(self._trainer)
        due = (axis + 1) // self._settings.every_n_steps
        if due > self._rows_due:
            row = Row(axis, self._memory.since_last(), self._interval)
            self._latest.append(row)
            self.rows.add(row)
            self._interval, self._rows_due = [], due


class _OptimizerSteps:
    """Tells whether a batch ended an optimizer step.

    With automatic optimization Lightning's accumulation rule says so. With manual optimization only the optimizers
    know, since the module may gather gradients over batches by itself.

    Args:
        trainer: whose optimizers they are.
        pl_module: the module that may step them.
        each: called after each step of an optimizer, with manual optimization.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, each: Callable[[], None]) -> None:
        self._trainer, self._each = trainer, each
        self._manual = not pl_module.automatic_optimization
        self._taken = False
        optimizers = [each for each in trainer.optimizers if self._manual and isinstance(each, Optimizer)]
        self._hooks = [optimizer.register_step_post_hook(self._take) for optimizer in optimizers]
        self._before = trainer.global_step

    def stepped(self) -> bool:
        if not self._manual:
            return _trainer.gradients_are_complete(self._trainer)
        # Lightning's count moves where an optimizer is no torch optimizer, or where a scaler skipped its step.
        taken = self._taken or self._trainer.global_step != self._before
        self._taken, self._before = False, self._trainer.global_step
        return taken

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take(self, *_: Any) -> None:
        self._taken = True
        self._each()
