"""What is said, once in a run, of rows that need somebody to look at them."""

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ckpt.callbacks._distributions import is_a

_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "the optimizer's step"}


class RowWarnings:
    """Looks at each row that is written, on rank zero.

    Args:
        trainer: whose W&B loggers get an alert.
        headroom: the share of the memory that has to stay free; None for no warning.
    """

    def __init__(self, trainer: Trainer, headroom: float | None) -> None:
        self._trainer, self._headroom = trainer, headroom
        self._told_of_headroom = self._told_of_utilization = False

    def look(self, axis: int, figures: Mapping[str, float]) -> None:
        self._look_at_utilization(max(figures.get("throughput/mfu", 0.0), figures.get("throughput/hfu", 0.0)))
        share = figures.get("memory/peak_fraction")
        if self._headroom is None or share is None or self._told_of_headroom:
            return
        if 1 - share < self._headroom:
            self._told_of_headroom = True
            self._tell_of_headroom(_words_of_headroom(axis, figures, self._headroom))

    def _tell_of_headroom(self, text: str) -> None:
        rank_zero_warn(text)
        for logger in self._trainer.loggers:
            if is_a(logger, WandbLogger):
                logger.experiment.alert(title="Little memory left", text=text, level="WARN")

    def _look_at_utilization(self, utilization: float) -> None:
        if utilization > 1 and not self._told_of_utilization:
            self._told_of_utilization = True
            rank_zero_warn(
                f"StepMonitor: a utilization of {utilization:.2f} can't be: the model FLOPs are too high for the time "
                "measured. Check the number given as StepMonitor(flops=...), or report the model and the device."
            )


def _words_of_headroom(axis: int, figures: Mapping[str, float], headroom: float) -> str:
    share, left = figures["memory/peak_fraction"], figures["memory/headroom_gib"]
    phases = {words: figures.get(f"memory/peak_{name}_gib", 0.0) for name, words in _PHASES.items()}
    where = max(phases, key=phases.__getitem__)
    return (
        f"StepMonitor: by step {axis} the peak of memory has left {left:.2f} GiB, {1 - share:.1%} of what there is and "
        f"less than headroom={headroom:g}{f'; it fell in {where}' if phases[where] else ''}. A longer batch may not "
        'fit any more: take a smaller batch, or replay more (policy="full", or a MemoryBudget).'
    )
