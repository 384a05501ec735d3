"""Memory and throughput of each optimizer step, in every logger."""

import math
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lightning_ckpt.callbacks._distributions import Callback
from lightning_ckpt.callbacks._step_run import Run, Settings
from lightning_ckpt.oom import is_out_of_memory


class StepMonitor(Callback):
    """Log memory and throughput of each optimizer step, to every logger of the trainer.

    One row a step, on the step axis of the loss, written by rank zero; with gradient accumulation the peak is the
    highest of the step's micro-batches, and samples and tokens are their sums. Nothing waits for the device: on an
    accelerator a row is written as soon as the device has finished its step, one or a few steps later, under the step
    it belongs to; rows of steps that take but a few milliseconds are written some at a time. Validation and the saving
    of checkpoints are no part of a step's time. A key that has no meaning on a machine is left out.

    | key | unit | over ranks |
    | --- | --- | --- |
    | `memory/peak_allocated_gib`, `memory/peak_reserved_gib` | GiB since the last row, accelerator | max |
    | `memory/peak_rss_gib` | GiB since the last row, resident size of the process, without an accelerator | max |
    | `memory/peak_forward_gib`, `memory/peak_backward_gib`, `memory/peak_optimizer_gib` | GiB, by part of step | max |
    | `memory/headroom_gib`, `memory/peak_fraction` | GiB, 0 to 1, of what the process can hold | min, max |
    | `memory/alloc_retries`, `memory/ooms` | count since the start, accelerator | max |
    | `throughput/step_time_ms`, `throughput/data_wait_ms` | ms an optimizer step, and waiting for data in it | max |
    | `throughput/samples_per_sec`, `throughput/tokens_per_sec`, `throughput/batches_per_sec` | 1/s | sum |
    | `throughput/samples_per_sec_per_device`, `throughput/tokens_per_sec_per_device`, \
`throughput/batches_per_sec_per_device` | 1/s, with several ranks | the sum over ranks, by their number |
    | `throughput/tflops_per_sec` | TFLOP/s of the model's own work, a device | mean |
    | `throughput/mfu`, `throughput/hfu` | 0 to 1, without and with what is recomputed | mean |
    | `checkpointing/saved_gib` | GiB of activations that checkpointed blocks did not keep | max |
    | `checkpointing/recompute_ms` | ms of a step in which blocks were replayed | max |
    | `checkpointing/overhead_fraction` | 0 to 1, the share of the step | max |
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
        peak_flops: the FLOP/s that one device reaches at most, in the format the model computes in, for a device whose
            peak is not known or not the one you measure against; without it that of `hardware.py`, by device and
            format, and no `mfu` and `hfu` where there is none.
        prefix: written before every key.
        headroom: warn, once, and raise an alert in W&B, when a step's peak leaves less than this share of the memory
            free; `None` for no warning.
        memory_snapshot: a file that the allocator's own history is written to when memory runs out, for PyTorch's
            visualiser at https://pytorch.org/memory_viz; with several ranks the rank is put before its suffix. It
            costs some microseconds an allocation, and is left out, which is said, where there is no CUDA.

    When a step runs out of memory, the rank it happened on prints a report: the peaks of the last rows, what held
    memory, the largest blocks, and the changes most likely to help, each with the peak it would have by estimate.

    Raises:
        ValueError, TypeError: an argument is none of these.

    Examples:
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
        peak_flops: float | None = None,
        prefix: str = "",
        headroom: float | None = 0.05,
        memory_snapshot: str | None = None,
    ) -> None:
        _check_every(every_n_steps)
        _check_function("batch_size_fn", batch_size_fn)
        _check_function("tokens_fn", tokens_fn)
        _check_flops(flops)
        _check_peak(peak_flops)
        if not isinstance(prefix, str):
            raise TypeError(f'prefix={prefix!r}: accepted is text to write before every key, such as "baseline/"')
        _check_headroom(headroom)
        if not isinstance(memory_snapshot, str | None) or memory_snapshot == "":
            raise TypeError(f'memory_snapshot={memory_snapshot!r}: accepted are a file, such as "oom.pickle", and None')
        self.every_n_steps = every_n_steps
        self.batch_size_fn = batch_size_fn
        self.tokens_fn = tokens_fn
        self.flops = flops
        self.peak_flops = peak_flops
        self.prefix = prefix
        self.headroom = headroom
        self.memory_snapshot = memory_snapshot
        self._run: Run | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        # Asked of all ranks, since a rank that measures alone would wait for the others for ever.
        if trainer.strategy.reduce_boolean_decision(bool(trainer.loggers), all=False):
            self._run = Run(self._settings(), trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run:
            self._run.begin_batch(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._run:
            self._run.end_phase("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run:
            self._run.end_phase("backward")

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
        if self._run:
            self._run.rows.failed(exception)
        if self._run and trainer.world_size == 1:  # other ranks may not have failed, and won't come to a gather
            self._run.rows.write_known()
        if self._run and is_out_of_memory(exception):
            self._run.ran_out_of_memory(pl_module)
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _settings(self) -> Settings:
        return Settings(
            self.every_n_steps,
            self.batch_size_fn,
            self.tokens_fn,
            self.flops,
            self.peak_flops,
            self.prefix,
            self.headroom,
            self.memory_snapshot,
        )

    def _end(self) -> None:
        if self._run:
            self._run.close()
        self._run = None


def _check_function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r}: accepted are None and a function from a batch to a whole number")


def _check_every(every_n_steps: Any) -> None:
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(
            f"every_n_steps={every_n_steps!r}: accepted are whole numbers from 1, the optimizer steps from row to row"
        )


def _check_headroom(headroom: Any) -> None:
    number = isinstance(headroom, int | float) and not isinstance(headroom, bool)
    if headroom is not None and not (number and 0 <= headroom < 1):
        raise ValueError(
            f"headroom={headroom!r}: accepted are a share of the memory from 0 to below 1, such as 0.05, and None"
        )


def _check_peak(peak_flops: Any) -> None:
    if peak_flops is not None and not _is_amount(peak_flops):
        raise ValueError(
            f"peak_flops={peak_flops!r}: accepted are the FLOP/s of one device as a number above 0, such as 989e12, "
            "and None"
        )


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_flops(flops: Any) -> None:
    if flops is None or flops == "auto":
        return
    if not _is_amount(flops):
        raise ValueError(
            f'flops={flops!r}: accepted are "auto" (count the first batch), the model FLOPs of an optimizer step as a '
            "number above 0, and None (leave tflops_per_sec, mfu and hfu out)"
        )
