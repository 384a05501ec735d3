"""What a run's page shows beside its curves: where it ran, and its blocks."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.callbacks._distributions import is_a
from lightning_ckpt.callbacks._step_replays import StepReplays
from lightning_ckpt.callbacks._trainer import callbacks_of
from lightning_ckpt.memory import GIB
from lightning_ckpt.treatments import Treatment

_BLOCKS = ("block", "class", "parameters", "treatment", "let_go_gib", "kept_plain_gib", "boundary_gib", "replay_ms")


def environment(trainer: Trainer, limit: int | None) -> dict[str, Any]:
    """What the figures depend on, for the run's config; what is not known is left out."""
    device = trainer.strategy.root_device
    name = getattr(torch.get_device_module(device), "get_device_name", lambda device: platform.processor())(device)
    known = {
        "device": name or device.type,
        "device_memory_gib": None if limit is None else limit / GIB,
        "ranks": trainer.world_size,
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "lightning_ckpt": _own_version(),
    }
    return {key: value for key, value in known.items() if value is not None}


def _own_version() -> str | None:
    try:
        return version("lightning-ckpt")
    except PackageNotFoundError:  # run from its source
        return None


class RunTables:
    """Writes the environment to every logger, and tables to those of W&B, which alone show them; on rank zero.

    Args:
        trainer: whose loggers and plan they are.
        pl_module: whose blocks.
        replays: what they let go.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, replays: StepReplays) -> None:
        self._trainer, self._module, self._replays = trainer, pl_module, replays
        loggers = trainer.loggers if trainer.is_global_zero else []
        self._loggers = [logger for logger in loggers if is_a(logger, WandbLogger)]
        self._written: int | None = None  # the plan that the table is of

    def begin(self, limit: int | None) -> None:
        """Write what is known before the first step."""
        for logger in self._trainer.loggers if self._trainer.is_global_zero else []:
            logger.log_hyperparams({"environment": environment(self._trainer, limit)})

    def end_step(self) -> None:
        """Write the blocks, once they are measured, and again when another plan of what is replayed stands."""
        if not self._loggers:
            return
        plan = self._replays.plan
        if plan is None or plan == self._written:
            return
        let_go = self._replays.let_go()
        if let_go:
            self._write("checkpointing/blocks", _BLOCKS, self._blocks(let_go))
        self._written = plan

    def _blocks(self, let_go: Mapping[str, int | None]) -> list[list[Any]]:
        plan = _found(self._trainer, "plan", BudgetPlan)
        profiled = {block.name: block for block in plan.profile.blocks} if plan else {}
        rows: list[list[Any]] = []
        for name, nbytes in let_go.items():
            block, of = self._module.get_submodule(name), profiled.get(name)
            treatment = str(plan.treatments.get(name, Treatment())) if plan else str(self._replays.policy)
            parameters = sum(parameter.numel() for parameter in block.parameters())
            measured = (of.kept_bytes / GIB, of.boundary_bytes / GIB, of.replay_seconds * 1e3) if of else (None,) * 3
            size = None if nbytes is None else nbytes / GIB
            rows.append([name, type(block).__name__, parameters, treatment, size, *measured])
        return rows

    def _write(self, key: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        for logger in self._loggers:
            logger.log_table(key, columns=list(columns), data=rows)


def _found(trainer: Trainer, name: str, kind: type) -> Any:
    """An attribute of one of the trainer's callbacks: not by the callback's class, whose room knows this one's."""
    values = (getattr(callback, name, None) for callback in callbacks_of(trainer))
    return next((value for value in values if isinstance(value, kind)), None)
