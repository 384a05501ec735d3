"""Rows of figures, one a logged step: put together when they are known, written by rank zero."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger

from lightning_ckpt.callbacks._clock import Clock, HostClock, Spans
from lightning_ckpt.callbacks._distributions import is_a
from lightning_ckpt.callbacks._ranks import Reduced, reducer
from lightning_ckpt.callbacks._step_warnings import RowWarnings
from lightning_ckpt.callbacks._trainer import batch_share, wandb_names
from lightning_ckpt.memory import GIB
from lightning_ckpt.processes import Processes
from lightning_ckpt.throughput import Step, throughput


@dataclass(frozen=True)
class Key:
    """How a figure becomes one over ranks ("share": a rank's part of a sum), and one over the run in W&B's summary."""

    ranks: Literal["max", "min", "sum", "mean", "share"]
    summary: Literal["max", "min", "mean"]


KEYS: Mapping[str, Key] = {
    "memory/peak_allocated_gib": Key("max", "max"),
    "memory/peak_reserved_gib": Key("max", "max"),
    "memory/peak_rss_gib": Key("max", "max"),
    "memory/peak_forward_gib": Key("max", "max"),
    "memory/peak_backward_gib": Key("max", "max"),
    "memory/peak_optimizer_gib": Key("max", "max"),
    "memory/headroom_gib": Key("min", "min"),  # the room that was left when the peak was highest
    "memory/peak_fraction": Key("max", "max"),
    "memory/alloc_retries": Key("max", "max"),
    "memory/ooms": Key("max", "max"),
    "throughput/step_time_ms": Key("max", "mean"),
    "throughput/data_wait_ms": Key("max", "mean"),
    "throughput/samples_per_sec": Key("sum", "mean"),
    "throughput/tokens_per_sec": Key("sum", "mean"),
    "throughput/batches_per_sec": Key("sum", "mean"),
    "throughput/samples_per_sec_per_device": Key("share", "mean"),
    "throughput/tokens_per_sec_per_device": Key("share", "mean"),
    "throughput/batches_per_sec_per_device": Key("share", "mean"),
    "throughput/tflops_per_sec": Key("mean", "mean"),
    "throughput/mfu": Key("mean", "mean"),
    "throughput/hfu": Key("mean", "mean"),
    "checkpointing/saved_gib": Key("max", "max"),
    "checkpointing/recompute_ms": Key("max", "mean"),
    "checkpointing/overhead_fraction": Key("max", "mean"),
    "batch_size/per_device": Key("max", "max"),  # the last one would be that of an epoch's odd end
    "batch_size/global": Key("sum", "max"),
}

# Rows that several ranks of an accelerator let pass before they put one together, so that the device has come to the
# end of its step. All ranks have to do it at the same step, and none can wait to see what the others know.
LAG = 4

# Seconds in which rows gather, to be written together: what is done once for many short steps costs each of them a part
# of what it costs alone. Steps that take longer are written one by one.
PAUSE = 0.02

# What each of several devices has, and the sum that it is a part of.
_SHARES = {name: name.removesuffix("_per_device") for name, key in KEYS.items() if key.ranks == "share"}

_GROUPS = {"recompute_ms": "checkpointing", "overhead_fraction": "checkpointing"}


class TimedStep(NamedTuple):
    """A step, and what its figures are made from when they are written.

    Args:
        step: its times hold nothing yet.
        spans: what its time is the sum of.
        replays: the spans of its replays; None when unknown.
        largest: the samples of its largest micro-batch; None when unknown.
        saved: the bytes that its blocks let go; None when unknown.
    """

    step: Step
    spans: Spans
    replays: Spans | None = None
    largest: int | None = None
    saved: int | None = None

    def known(self, clock: Clock) -> Step | None:
        seconds = clock.seconds(self.spans)
        if seconds is None or self.replays is None:
            return None if seconds is None else self.step._replace(seconds=seconds)
        replaying = clock.seconds(self.replays)
        return None if replaying is None else self.step._replace(seconds=seconds, replay_seconds=replaying)


class Row(NamedTuple):
    """An interval that ends with a logged step.

    Its figures are made when they are written: for many short steps at once, that costs each of them little.

    Args:
        axis: the logged step, as Lightning numbers it.
        memory: makes the memory figures.
        steps: the interval's steps.
    """

    axis: int
    memory: Callable[[], dict[str, float]]
    steps: Sequence[TimedStep]

    def figures(self) -> dict[str, float]:
        """Return what is known as soon as the interval ends: memory, bytes saved, and sizes, none of them 0."""
        figures = self.memory()
        saved = [step.saved for step in self.steps if step.saved is not None]
        if len(saved) == len(self.steps):
            figures["checkpointing/saved_gib"] = max(saved) / GIB
        if largest := max(step.largest or 0 for step in self.steps):
            figures["batch_size/per_device"] = float(largest)
        if samples := max(timed.step.samples or 0 for timed in self.steps):
            figures["batch_size/global"] = float(samples)
        return figures

    def rates(self, clock: Clock) -> dict[str, float] | None:
        """Return the times and rates, or None while the device has not come to the end of the interval."""
        steps = [timed.known(clock) for timed in self.steps]
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return None
        return {f"{_GROUPS.get(name, 'throughput')}/{name}": figure for name, figure in throughput(known).items()}


class Rows:
    """The rows of one run on their way to the loggers, in order.

    On one rank a row is written when its times are known, at most every `PAUSE` seconds. On several, each row is
    reduced when `LAG` more have followed it (at once where the host computes), with the times that are known by then,
    and written when the result has come from the device.
    """

    def __init__(self, trainer: Trainer, clock: Clock, prefix: str = "", headroom: float | None = None) -> None:
        self._trainer, self._clock, self._prefix = trainer, clock, prefix
        self._open: deque[Row] = deque()
        self._reduced: deque[tuple[int, Reduced]] = deque()
        self._lag = 0 if isinstance(clock, HostClock) else LAG
        self._reduce = self._ranks = None
        if trainer.world_size > 1:
            how = {name: key.ranks for name, key in KEYS.items() if key.ranks != "share"}
            device = trainer.strategy.root_device
            self._ranks = Processes("StepMonitor") if device.type == "cpu" else None
            self._reduce = reducer(how, device, batch_share(trainer), self._ranks)
        self._declared: set[str] = set()
        self._due = 0.0  # when rows are written next, by the host's own clock
        self._warnings = RowWarnings(trainer, headroom)

    def add(self, row: Row) -> None:
        """Take a row; on several ranks, all take one at the same step."""
        self._open.append(row)
        if self._reduce:
            self._reduce_down_to(self._lag)

    def write_due(self) -> None:
        """Write the rows that are known by now, unless some have been written just before."""
        if perf_counter() >= self._due:
            self.write_known()
            self._due = perf_counter() + PAUSE

    def write_known(self) -> None:
        """Write the rows that are known by now, waiting for none."""
        while self._reduced and self._reduced[0][1].ready():
            axis, reduced = self._reduced.popleft()
            figures = reduced.figures()
            self._write(axis, {**figures, **_of_each_device(figures, self._trainer.world_size)})
        while not self._reduce and self._open and (rates := self._open[0].rates(self._clock)) is not None:
            row = self._open.popleft()
            self._write(row.axis, {**row.figures(), **rates})

    def failed(self, error: BaseException) -> None:
        """Let ranks that wait for this one's row know that none will come."""
        if self._ranks:
            self._ranks.failed(error)

    def flush(self) -> None:
        """Write the rows that are left, waiting for the device: after training, on all ranks."""
        for row in self._open:
            for timed in row.steps:
                self._clock.wait(timed.spans)
        if self._reduce:
            self._reduce_down_to(0)
        for _, reduced in self._reduced:
            reduced.wait()
        self.write_known()

    def _reduce_down_to(self, left: int) -> None:
        assert self._reduce is not None
        while len(self._open) > left:
            row = self._open.popleft()
            rates = row.rates(self._clock) or {}
            self._reduced.append((row.axis, self._reduce({**row.figures(), **rates})))

    def _write(self, axis: int, figures: Mapping[str, float]) -> None:
        if not self._trainer.is_global_zero:
            return
        self._warnings.look(axis, figures)
        if not figures.keys() <= self._declared:
            self._declare([key for key in KEYS if key in figures and key not in self._declared])
        for logger in self._trainer.loggers:
            logger.log_metrics({self._prefix + key: figure for key, figure in figures.items()}, step=axis)

    def _declare(self, keys: Sequence[str]) -> None:
        """Tell W&B the axis of each key, and what its summary is to show."""
        self._declared.update(keys)
        for logger in self._trainer.loggers:
            if is_a(logger, WandbLogger):
                axis, prefix = wandb_names(logger)
                logger.experiment.define_metric(axis)
                for key in keys:
                    logger.experiment.define_metric(
                        prefix + self._prefix + key, step_metric=axis, step_sync=True, summary=KEYS[key].summary
                    )


def _of_each_device(figures: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Return what each of several ranks has of the sums over all."""
    return {name: figures[of] / ranks for name, of in _SHARES.items() if of in figures}
