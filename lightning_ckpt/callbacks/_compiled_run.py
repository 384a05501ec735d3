"""The memory budget of one `fit` of a compiled model."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt.compiled_budget import compiled_budget
from lightning_ckpt.memory import reader_for
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.processes import Ranks


class CompiledRun:
    """Tells the compiler its share before the first batch is compiled, and takes it back at the end.

    It stays set meanwhile, since other shapes may be compiled at any time.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, policy: MemoryBudget, ranks: Ranks) -> None:
        self._trainer, self._module, self._policy, self._ranks = trainer, pl_module, policy, ranks
        self._budget = policy.nbytes(reader_for(trainer.strategy.root_device).limit())
        self._undo: Callable[[], None] | None = None

    def begin_batch(self, batch: Any) -> None:
        if self._undo is not None:
            return
        precision = str(self._trainer.precision)
        budget = self._ranks.from_first(compiled_budget(self._module, batch, self._budget, precision=precision))
        self._undo = budget.apply()
        rank_zero_info(
            f"{self._policy}: the model is compiled, so the compiler chooses what to recompute, and no block is "
            f"checkpointed. activation_memory_budget={budget.share:.3f} while training: {budget.why}."
        )
        for logger in self._trainer.loggers:
            config = {"policy": str(self._policy), "activation_memory_budget": budget.share}
            logger.log_hyperparams({"activation_checkpointing": config})

    def close(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
