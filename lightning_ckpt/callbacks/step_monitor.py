"""Memory and throughput of each optimizer step, in every logger."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_ckpt.callbacks import _trainer
from lightning_ckpt.callbacks._clock import HostClock, clock_for
from lightning_ckpt.callbacks._step_rows import Row, Rows, TimedStep
from lightning_ckpt.callbacks._step_work import WorkCount
from lightning_ckpt.memory import GIB, AcceleratorReader, HostReader, MemoryReader, reader_for
from lightning_ckpt.throughput import WARMUP_STEPS, Step, Stopwatch


class StepMonitor(Callback):
    """Log memory and throughput of each optimizer step, to every logger of the trainer.

    One row a step, on the step axis of the loss, written by rank zero; with gradient accumulation the peak is the
    highest of the step's micro-batches, and samples and tokens are their sums. Nothing waits for the device: on an
    accelerator a row is written as soon as the device has finished its step, one or a few steps later, under the step
    it belongs to. Validation and the saving of checkpoints are no part of a step's time. A key that has no meaning on
    a machine is left out.

    | key | unit | over ranks |
    | --- | --- | --- |
    | `memory/peak_allocated_gib`, `memory/peak_reserved_gib` | GiB since the last row, accelerator | max |
    | `memory/peak_rss_gib` | GiB since the last row, resident size of the process, without an accelerator | max |
    | `memory/headroom_gib`, `memory/peak_fraction` | GiB, 0 to 1, of what the process can hold | min, max |
    | `memory/alloc_retries`, `memory/ooms` | count since the start, accelerator | max |
    | `throughput/step_time_ms`, `throughput/data_wait_ms` | ms an optimizer step, and waiting for data in it | max |
    | `throughput/samples_per_sec`, `throughput/tokens_per_sec` | 1/s | sum |
    | `throughput/tflops_per_sec` | TFLOP/s of the model's own work, a device | mean |
    | `throughput/mfu`, `throughput/hfu` | 0 to 1, without and with what is recomputed | mean |
    | `batch_size/per_device`, `batch_size/global` | samples of the largest micro-batch, of the step | max, sum |

    Args:
        every_n_steps: write a row every so many optimizer steps. Times and rates are then those of the median step
            since the last row, the first steps of a run left out, and peaks the highest since the last row.
        batch_size_fn: from a batch, its number of samples; without it the first dimension of its first tensor, as
            Lightning's own logging takes it.
        tokens_fn: from a batch, its number of tokens; without it the size of its `input_ids`, where it has any.
        flops: `"auto"` counts the operations of the first batch and scales them by tokens, or by samples where there
            are no tokens; a number is taken as the model FLOPs of one rank's optimizer step (then there is no
            `hfu`); `None` leaves `tflops_per_sec`, `mfu` and `hfu` out. They are left out too, and the log says why,
            where operations can't be counted: compiled code, kernels without a formula.
        prefix: written before every key.

    Raises:
        ValueError, TypeError: an argument is none of these.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[StepMonitor()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        flops: Literal["auto"] | float | None = "auto",
        prefix: str = "",
    ) -> None:
        _check_every(every_n_steps)
        _check_function("batch_size_fn", batch_size_fn)
        _check_function("tokens_fn", tokens_fn)
        _check_flops(flops)
        if not isinstance(prefix, str):
            raise TypeError(f'prefix={prefix!r}: accepted is text to write before every key, such as "baseline/"')
        self.every_n_steps = every_n_steps
        self.batch_size_fn = batch_size_fn
        self.tokens_fn = tokens_fn
        self.flops = flops
        self.prefix = prefix
        self._run: _Run | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        # Asked of all ranks, since a rank that measures alone would wait for the others for ever.
        if trainer.strategy.reduce_boolean_decision(bool(trainer.loggers), all=False):
            self._run = _Run(self, trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run:
            self._run.begin_batch(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._run and pl_module.automatic_optimization:
            self._run.work.pause()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run:
            self._run.end_batch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.hold("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.release("validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.hold("epoch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.rows.flush()
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._run and trainer.world_size == 1:  # other ranks may not have failed, and won't come to a gather
            self._run.rows.write_known()
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        if self._run:
            self._run.close()
        self._run = None


@dataclass(frozen=True)
class _Batch:
    """What is known of a batch, taken before the step may change it; a part is None when it can't be told."""

    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class _Sizes:
    """The batches of one optimizer step."""

    batches: tuple[_Batch, ...]

    def samples(self) -> int | None:
        return _sum(batch.samples for batch in self.batches)

    def tokens(self) -> int | None:
        return _sum(batch.tokens for batch in self.batches)

    def largest(self) -> int | None:
        known = [batch.samples for batch in self.batches if batch.samples is not None]
        return max(known, default=None)

    def units(self) -> int:
        """What FLOPs are scaled by: tokens, else samples, else batches."""
        return self.tokens() or self.samples() or len(self.batches) or 1


class _Run:
    """One `fit`: all that is remembered from hook to hook, and put back at its end."""

    def __init__(self, monitor: StepMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor, self._trainer = monitor, trainer
        device = trainer.strategy.root_device
        clock = clock_for(device)
        self._step_watch, self._wait_watch = Stopwatch(clock.mark), Stopwatch(HostClock().mark)
        self._waited = 0.0
        self._batch: _Batch | None = None
        self._batches: list[_Batch] = []
        self._interval: list[tuple[TimedStep, _Sizes]] = []
        self._steps = 0
        self._optimizers = _OptimizerSteps(trainer, pl_module)
        self._undo_saving = _trainer.around_saving(
            trainer, before=partial(self.hold, "saving"), after=partial(self.release, "saving")
        )
        self.work = WorkCount(monitor.flops, trainer, pl_module)
        self.rows = Rows(trainer, clock, monitor.prefix)
        self._memory = _Memory(device)
        self._restart_watches()

    def hold(self, reason: str) -> None:
        """Let time pass that is no part of a step."""
        self._step_watch.hold(reason)
        self._wait_watch.hold(reason)

    def release(self, reason: str) -> None:
        self._step_watch.release(reason)
        self._wait_watch.release(reason)

    def begin_epoch(self) -> None:
        if self._steps or self._batches:
            self.release("epoch")
        else:
            self._restart_watches()

    def begin_batch(self, batch: Any) -> None:
        self._waited += sum(end - start for start, end in self._wait_watch.lap())
        self._wait_watch.hold("batch")
        self._batch = _Batch(samples=self._samples(batch), tokens=self._tokens(batch))
        self.work.begin()

    def end_batch(self) -> None:
        batch, self._batch = self._batch or _Batch(), None
        self._batches.append(batch)
        self.work.end(_Sizes((batch,)).units())
        if self._optimizers.stepped():
            self._end_step()
        self.rows.write_known()
        self._wait_watch.release("batch")

    def close(self) -> None:
        self.work.close()
        self._optimizers.close()
        self._undo_saving()

    def _restart_watches(self) -> None:
        self._step_watch.restart()
        self._wait_watch.restart()

    def _end_step(self) -> None:
        spans = self._step_watch.lap()
        sizes = _Sizes(tuple(self._batches))
        step = Step(
            seconds=math.nan,
            wait_seconds=self._waited,
            samples=sizes.samples(),
            tokens=sizes.tokens(),
            work=self.work.of(sizes.units()),
            warmup=self._steps < WARMUP_STEPS,
        )
        self._interval.append((TimedStep(step, spans), sizes))
        self._batches, self._waited = [], 0.0
        self._steps += 1
        axis = _trainer.step_axis(self._trainer)
        if (axis + 1) % self._monitor.every_n_steps == 0:
            self._end_interval(axis)

    def _end_interval(self, axis: int) -> None:
        sizes = [sizes for _, sizes in self._interval]
        largest = {
            "batch_size/per_device": max((one.largest() or 0 for one in sizes), default=0),
            "batch_size/global": max((one.samples() or 0 for one in sizes), default=0),
        }
        figures = {**self._memory.since_last(), **{key: float(size) for key, size in largest.items() if size}}
        self.rows.add(Row(axis, figures, tuple(timed for timed, _ in self._interval)))
        self._interval = []

    def _samples(self, batch: Any) -> int | None:
        function = self._monitor.batch_size_fn
        return _trainer.samples_in(batch) if function is None else _whole("batch_size_fn", function(batch))

    def _tokens(self, batch: Any) -> int | None:
        function = self._monitor.tokens_fn
        return _tokens_in(batch) if function is None else _whole("tokens_fn", function(batch))


class _OptimizerSteps:
    """Tells whether a batch ended an optimizer step.

    With automatic optimization Lightning's accumulation rule says so. With manual optimization only the optimizers
    know, since the module may gather gradients over batches by itself.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
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


class _Memory:
    """The memory figures since they were last asked for."""

    def __init__(self, device: torch.device) -> None:
        self._reader: MemoryReader | None = reader_for(device)
        try:
            self._limit = self._reader.limit()
            self._reader.peak()
            self._reader.reset_peak()
        except OSError as error:
            rank_zero_info(f"StepMonitor: memory is left out: {error}")
            self._reader = None

    def since_last(self) -> dict[str, float]:
        if self._reader is None:
            return {}
        peak = self._reader.peak()
        figures = {**_peaks(self._reader, peak), **_room(peak, self._limit)}
        self._reader.reset_peak()
        return {f"memory/{name}": figure for name, figure in figures.items()}


def _peaks(reader: MemoryReader, peak: int) -> dict[str, float]:
    if isinstance(reader, HostReader):
        return {"peak_rss_gib": peak / GIB}
    if not isinstance(reader, AcceleratorReader):
        return {"peak_allocated_gib": peak / GIB}
    return {
        "peak_allocated_gib": peak / GIB,
        "peak_reserved_gib": reader.peak_reserved() / GIB,
        "alloc_retries": reader.alloc_retries(),
        "ooms": reader.ooms(),
    }


def _room(peak: int, limit: int | None) -> dict[str, float]:
    return {"headroom_gib": (limit - peak) / GIB, "peak_fraction": peak / limit} if limit else {}


def _tokens_in(batch: Any) -> int | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", None)
    return ids.numel() if isinstance(ids, Tensor) else None


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _whole(name: str, value: Any) -> int:
    """Return what a user's function returned, as the count it has to be."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} returned {value!r}; it has to return a whole number, 0 or more, for each batch")
    return number


def _check_function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r}: accepted are None and a function from a batch to a whole number")


def _check_every(every_n_steps: Any) -> None:
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(
            f"every_n_steps={every_n_steps!r}: accepted are whole numbers from 1, the optimizer steps from row to row"
        )


def _check_flops(flops: Any) -> None:
    if flops is None or flops == "auto":
        return
    number = isinstance(flops, int | float) and not isinstance(flops, bool)
    if not number or not 0 < flops < math.inf:
        raise ValueError(
            f'flops={flops!r}: accepted are "auto" (count the first batch), the model FLOPs of an optimizer step as a '
            "number above 0, and None (leave tflops_per_sec, mfu and hfu out)"
        )
