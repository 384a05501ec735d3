"""What is told when a step runs out of memory: the last peaks, what holds memory, and what would help."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

from lightning_ckpt._compat import storage_id
from lightning_ckpt.blocks import find_blocks
from lightning_ckpt.causes import WHAT_ELSE_HELPS, unique_bytes
from lightning_ckpt.policies import Policy
from lightning_ckpt.printed import whole
from lightning_ckpt.relief import Relief, relief
from lightning_ckpt.sizes import format_size

_BLOCKS = 5


@dataclass(frozen=True)
class Failure:
    """A step that ran out of memory, as the monitor knows it.

    Attributes:
        rows: the latest rows, by the step they belong to.
        peak: bytes held at most in the step; None when unknown.
        limit: bytes that the process can hold; None when unknown.
        batch: what the step took; None when it failed outside of one.
        policy: how blocks are checkpointed; None for not at all.
        let_go: bytes that each checkpointed block lets go, by name; None before it was counted.
    """

    rows: Sequence[tuple[int, Mapping[str, float]]]
    peak: int | None
    limit: int | None
    batch: Any
    policy: Policy | None
    let_go: Mapping[str, int | None]


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Prints as rich tables.

    Attributes:
        failure: the step.
        held: bytes by what holds them; the last is the rest of the peak.
        blocks: the largest blocks: name, class, bytes of parameters.
        relief: what would help; None where nobody can tell.
        problem: why nobody can.
    """

    failure: Failure
    held: Mapping[str, int]
    blocks: Sequence[tuple[str, str, int]]
    relief: Relief | None
    problem: str = ""

    def __rich__(self) -> Group:
        parts = (self._peaks(), self._causes(), self._largest(), self._help())
        return Group(*(part for part in parts if part is not None))

    def _peaks(self) -> RenderableType | None:
        keys = list(dict.fromkeys(key for _, row in self.failure.rows for key in row if key.startswith("memory/peak")))
        keys = [key for key in keys if key.endswith("_gib")]
        if not keys:
            return None
        table = Table("Step", title="The last steps before memory ran out, in GiB")
        for key in keys:
            table.add_column(key.removeprefix("memory/peak_").removesuffix("_gib"), justify="right")
        for axis, row in self.failure.rows:
            table.add_row(str(axis), *(f"{row[key]:.3f}" if key in row else "" for key in keys))
        return table

    def _causes(self) -> RenderableType:
        peak, limit = self.failure.peak, self.failure.limit
        title = f"Memory in the step that failed{f': {format_size(peak)}' if peak else ''}"
        table = Table("Held by", title=title + (f", of {format_size(limit)}" if limit else ""))
        table.add_column("size", justify="right")
        for name, size in self.held.items():
            table.add_row(name, format_size(size))
        return table

    def _largest(self) -> RenderableType | None:
        if not self.blocks:
            return None
        caption = "" if self.failure.let_go else "None is checkpointed"
        table = Table(whole("Largest blocks"), whole("Class"), caption=caption)
        for column in ("Parameters", "Activations let go"):
            table.add_column(column, justify="right")
        for name, kind, size in self.blocks:
            let_go = self.failure.let_go.get(name)
            table.add_row(name, kind, format_size(size), "-" if let_go is None else format_size(let_go))
        return table

    def _help(self) -> RenderableType:
        if self.relief is None or not self.relief.changes:
            return f"What would help can't be estimated: {self.problem}\n{WHAT_ELSE_HELPS}."
        title = f"What would help; the step that failed takes {format_size(self.relief.step.peak)} by estimate"
        table = Table("", "Change", title=title)
        for column in ("Peak", "Less", "Fits"):
            table.add_column(column, justify="right")
        for place, change in enumerate(self.relief.changes, 1):
            fits = "yes" if change.fits else "no"
            table.add_row(str(place), change.words, format_size(change.peak), format_size(change.saves), fits)
        return table


def tell(report: OutOfMemoryReport, trainer: Trainer) -> None:
    """Print the report, on the rank whose memory ran out."""
    console = Console(stderr=True)
    if trainer.world_size > 1:
        console.print(f"Rank {trainer.global_rank} ran out of memory:")
    console.print(report)


def out_of_memory_report(failure: Failure, trainer: Trainer, pl_module: LightningModule) -> OutOfMemoryReport:
    """Gather what is known. Nothing here takes memory on the device, or waits for another rank."""
    found, problem = None, "the batch is not known"
    if failure.batch is not None:
        try:
            found = relief(
                pl_module,
                failure.batch,
                policy=failure.policy,
                blocks=tuple(failure.let_go) or None,
                precision=str(trainer.precision),
                accumulate=trainer.accumulate_grad_batches,
                limit=failure.limit,
            )
            problem = "no change that was tried would take less"
        except Exception as error:  # any code of the user's may run in it, and the error of the run must come through
            problem = str(error)
    return OutOfMemoryReport(
        failure, _held(failure, trainer, pl_module), _blocks(pl_module, failure.let_go), found, problem
    )


def _held(failure: Failure, trainer: Trainer, module: nn.Module) -> dict[str, int]:
    parameters = list(module.parameters())
    states = [getattr(optimizer, "state", {}) for optimizer in trainer.optimizers]
    held = {
        "parameters and buffers": _nbytes([*parameters, *module.buffers()]),
        "gradients": _nbytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer state": _nbytes(tensor for state in states for part in state.values() for tensor in _tensors(part)),
    }
    if failure.peak is not None:
        held["activations, temporaries and the rest"] = max(0, failure.peak - sum(held.values()))
    return held


def _blocks(module: nn.Module, let_go: Mapping[str, int | None]) -> list[tuple[str, str, int]]:
    try:
        found = find_blocks(module, list(let_go) or None)
    except ValueError:  # no block repeats
        return []
    sized = [(name, type(block).__name__, _nbytes(block.parameters())) for name, block in found]
    return sorted(sized, key=lambda block: -block[2] - (let_go.get(block[0]) or 0))[:_BLOCKS]


def _tensors(state: Any) -> Iterable[Tensor]:
    return (value for value in state.values() if isinstance(value, Tensor)) if isinstance(state, Mapping) else ()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of unique memory, of sharded tensors the shard that is here."""
    local = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors)
    return unique_bytes((storage_id(t), t.untyped_storage().nbytes()) for t in local if t.layout is torch.strided)
