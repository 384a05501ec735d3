"""A constant number of samples in an optimizer step, over all ranks and micro-batches, whatever the batch size."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_ckpt.callbacks._distributions import MisconfigurationException, is_a
from lightning_ckpt.callbacks._trainer import callbacks_of, data_ranks


class GlobalBatch:
    """Lets `accumulate_grad_batches` follow the batch size, so that an optimizer step takes `samples` in all.

    Args:
        trainer: whose steps they are.
        pl_module: the module it trains.
        samples: of an optimizer step over all ranks.

    Attributes:
        per_rank: samples of an optimizer step on each rank, which every batch size divides.

    Raises:
        MisconfigurationException: something else sets the accumulation, or none is possible.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, samples: int) -> None:
        self.samples, self._trainer = samples, trainer
        _refuse(trainer, pl_module, samples)
        self._found = trainer.accumulate_grad_batches
        self.per_rank = samples // data_ranks(trainer)

    def accumulate_for_trials(self) -> None:
        """Let trials have two micro-batches, where any step has several: new activations beside old gradients."""
        self._trainer.accumulate_grad_batches = min(self.per_rank, 2)

    def accumulate(self, size: int) -> None:
        """Let a step gather the gradients of as many batches of `size` as make it whole."""
        self._trainer.accumulate_grad_batches = self.per_rank // size

    def put_back(self) -> None:
        """Give the trainer the number back that it had."""
        self._trainer.accumulate_grad_batches = self._found


def _refuse(trainer: Trainer, pl_module: LightningModule, samples: int) -> None:
    asked = f"BatchSizeTuner(global_batch_size={samples})"
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"{asked} is kept by accumulate_grad_batches, which Lightning does not use in manual optimization: leave "
            "global_batch_size out, or optimize automatically"
        )
    if any(is_a(other, GradientAccumulationScheduler) for other in callbacks_of(trainer)):
        raise MisconfigurationException(
            f"{asked} and GradientAccumulationScheduler both set accumulate_grad_batches: leave one of them out"
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"{asked} sets accumulate_grad_batches by itself, and the trainer has {trainer.accumulate_grad_batches}: "
            "leave that out"
        )
    if samples % data_ranks(trainer):
        raise MisconfigurationException(f"{asked} can't be divided among {data_ranks(trainer)} processes")
