"""What is shown and logged of a search for the batch size: a line while it runs, a table after it, one logged row."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from lightning_ckpt.callbacks._distributions import is_a
from lightning_ckpt.callbacks._trainer import callbacks_of, data_ranks, step_axis
from lightning_ckpt.callbacks._trials import Trial
from lightning_ckpt.callbacks.step_monitor import StepMonitor
from lightning_ckpt.memory import GIB
from lightning_ckpt.sizes import format_size

_COLUMNS = ("batch_size", "peak_gib", "share_of_limit", "seconds", "samples_per_sec", "outcome")


@dataclass(frozen=True)
class TrialReport:
    """The trials of one search, to be printed and logged.

    Attributes:
        trials: in their order.
        limit: what the device or the process can hold, in bytes.
        title: what was settled, and why.
    """

    trials: Sequence[Trial]
    limit: int
    title: str

    def table(self) -> Table:
        """The trials as a person reads them."""
        table = Table("Batch size", "Peak", "Of the limit", "Step", "Samples/s", "Outcome", title=self.title)
        for trial in self.trials:
            rate = _rate(trial.samples_per_second) if trial.samples_per_second else ""
            share = f"{trial.peak / self.limit:.1%}"
            table.add_row(
                f"{trial.size}", format_size(trial.peak), share, f"{trial.seconds:.3g} s", rate, trial.outcome
            )
        return table

    def log(self, trainer: Trainer, size: int) -> None:
        """Log the settled size in one row, unless a monitor logs it in each of its own, and the trials as W&B's table.

        On rank zero; on the axis of the loss, where the first step will be logged.
        """
        if not trainer.is_global_zero:
            return
        row = {} if any(isinstance(each, StepMonitor) for each in callbacks_of(trainer)) else _sizes(trainer, size)
        for logger in trainer.loggers:
            if row:
                logger.log_metrics(row, step=step_axis(trainer))
            if is_a(logger, WandbLogger):
                logger.log_table(
                    "batch_size/trials", columns=list(_COLUMNS), data=self._rows(), step=step_axis(trainer)
                )

    def _rows(self) -> list[list[Any]]:
        return [
            [each.size, each.peak / GIB, each.peak / self.limit, each.seconds, rate or None, each.outcome]
            for each in self.trials
            for rate in [each.samples_per_second]
        ]


def log_size(trainer: Trainer, name: str, size: int) -> None:
    """Log the batch size as the hyperparameter of that name, over the initial value that Lightning logs.

    A logger that takes no second value (MLflow's) keeps the first, with a warning: training has its size all the same.
    """
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams({name: size})
        except Exception as error:  # each service has its own
            rank_zero_warn(
                f"BatchSizeTuner: {type(logger).__name__} did not take {name}={size} as a hyperparameter: {error}"
            )


class SearchLine:
    """One line on the terminal that tells what is being tried; gone when the search is over.

    Not on other ranks, not where output goes to a file, and not without the trainer's progress bar.
    """

    def __init__(self, trainer: Trainer) -> None:
        console = Console()
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None and console.is_terminal
        # No thread: a loader's workers may be forked at any moment.
        self._live = Live(console=console, transient=True, auto_refresh=False) if shown else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show another text."""
        if self._live:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def trying(self, size: int, trials: Sequence[Trial], most: int) -> None:
        """Show the size that is about to be tried, and the best of the trials so far."""
        fitting = [trial.size for trial in trials if trial.outcome == "fits"]
        best = f"{max(fitting)} fits" if fitting else "none has fitted yet"
        self.say(f"Looking for the batch size: trying {size}, trial {len(trials) + 1} of {most} at most, {best}")


def _sizes(trainer: Trainer, size: int) -> dict[str, float]:
    """The keys of `StepMonitor`, with its meaning: samples of a batch, and of an optimizer step over all ranks."""
    batches = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
    return {"batch_size/per_device": float(size), "batch_size/global": float(size * batches * data_ranks(trainer))}


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"
