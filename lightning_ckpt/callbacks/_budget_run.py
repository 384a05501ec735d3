"""The budget loop of one `fit`: the trainer's hooks, optimizers, ranks and loggers."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from torch.optim import Optimizer

from lightning_ckpt.budget_loop import BudgetLoop, News
from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.callbacks._trainer import step_axis
from lightning_ckpt.causes import MemoryByCause
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.processes import Ranks
from lightning_ckpt.recompute import CheckpointedBlocks

# Blocks are measured in a moment; a bar is for models that keep a person waiting.
_MANY_BLOCKS = 24


class BudgetRun:
    """Drives a `BudgetLoop` from the hooks of a training run, and passes on what it tells."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        handle: CheckpointedBlocks,
        policy: MemoryBudget,
        known: Mapping[str, Any] | None,
        ranks: Ranks,
        *,
        silent: bool = False,
    ) -> None:
        self._trainer = trainer
        self._handle = handle
        self._known = known
        self._silent = silent
        self._steps = trainer.global_step
        self._stepped = False
        self._logged: BudgetPlan | None = None
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)]
        # A module that optimizes by hand may step an optimizer that Lightning does not count.
        self._hooks = [optimizer.register_step_post_hook(self._take_step) for optimizer in optimizers]
        self._loop = BudgetLoop(
            handle,
            pl_module,
            policy,
            optimizers=optimizers,
            device=trainer.strategy.root_device,
            ranks=ranks,
            known=known,
            progress=not silent and trainer.is_global_zero and len(handle.blocks) >= _MANY_BLOCKS,
        )

    @property
    def plan(self) -> BudgetPlan | None:
        """The plan that stands."""
        return self._loop.plan

    def state(self) -> dict[str, Any] | None:
        """What a resumed run starts with."""
        return self._loop.plan.to_json() if self._loop.plan else dict(self._known) if self._known else None

    def begin_batch(self) -> None:
        self._loop.begin_batch()

    def end_backward(self) -> None:
        self._loop.end_backward()

    def end_batch(self) -> None:
        if self._trainer.global_step == self._steps and not self._stepped:
            return  # gradients are gathered over further batches
        self._steps, self._stepped = self._trainer.global_step, False
        told = self._loop.end_step()
        if self._silent:
            return
        for news in told:
            self._tell(news)
        plan = self._loop.plan
        if plan is not None and plan is not self._logged:
            self._logged = plan
            self._log_plan(plan)

    def close(self) -> None:
        self._loop.close()
        for hook in self._hooks:
            hook.remove()

    def _take_step(self, *_: Any) -> None:
        self._stepped = True

    @rank_zero_only
    def _tell(self, news: News) -> None:
        if isinstance(news, str):
            rank_zero_info(news)
            return
        Console().print(news)
        if isinstance(news, MemoryByCause):
            for logger in self._trainer.loggers:
                logger.log_metrics(news.figures(), step=step_axis(self._trainer))

    @rank_zero_only
    def _log_plan(self, plan: BudgetPlan) -> None:
        coverage = self._handle.report()
        blocks = [portion.name for portion in coverage.checkpointed]
        config = {"policy": coverage.policy, "blocks": blocks, "plan": plan.summary()}
        for logger in self._trainer.loggers:
            logger.log_hyperparams({"activation_checkpointing": config})
