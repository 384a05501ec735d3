"""Train a character GPT on several devices, with checkpointing and without, and print what each rank needed.

    python examples/ddp.py

On every GPU that there is, or else in two processes on a CPU. Nothing but the strategy is distributed: each rank
checkpoints its own copy of the model, and ends with the losses and weights of the plain run.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.memory import AllocatorReader, Interval, reader_for, use_reader
from lightning_ckpt.sizes import format_size
from train_gpt import GPT, training

warnings.filterwarnings("ignore", ".*does not have many workers.*")

GPUS = torch.cuda.device_count()
DEVICES = GPUS or 2
if not GPUS:
    torch.set_num_threads(1)  # threads of two processes on the same cores share a sum now one way, now another


class Peak(L.Callback):
    """The most that a step of this rank takes beyond what is held between steps, once the first one is over."""

    nbytes = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.interval = Interval(reader_for(trainer.strategy.root_device))
            self.interval.reset_peak()
            self.before = self.interval.peak()

    def on_train_end(self, *args: Any) -> None:
        self.nbytes = self.interval.peak() - self.before


def train(model: Any, strategy: Any, callbacks: list[L.Callback]) -> tuple[int, list[Tensor]]:
    """Train six steps, and return this rank's peak in bytes, its losses, and the weights."""
    peak = Peak()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="gpu" if GPUS else "cpu",
        devices=DEVICES,
        strategy=strategy,
        max_steps=6,
        deterministic="warn",
        callbacks=[*callbacks, peak],
        enable_progress_bar=False,
        **quiet,
    )
    with contextlib.ExitStack() as stack:
        if not GPUS:  # exact, where the size of a process is noisy
            stack.enter_context(use_reader(stack.enter_context(AllocatorReader())))
        trainer.fit(model, DataLoader(training()[1].dataset, batch_size=16))
    # A sharded weight is put together on every rank.
    weights = [getattr(weight, "full_tensor", weight.detach)().detach().cpu() for weight in model.parameters()]
    return peak.nbytes, [torch.stack(model.losses).cpu(), *weights]


def compare(make: Callable[[], Any], strategy: Callable[[], Any], title: str) -> None:
    """Train with checkpointing and without, and print a table of all ranks."""
    runs = []
    for callbacks in ([ActivationCheckpointing(monitor=False)], []):
        L.seed_everything(0, verbose=False)
        runs.append(train(make(), strategy(), callbacks))
    (ours, checkpointed), (plain, left) = runs
    difference = max(float((a - b).abs().max()) for a, b in zip(checkpointed, left, strict=True))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (plain, ours, difference))
    if dist.get_rank() == 0:
        table = Table("Rank", "Plain", "Checkpointed", "Losses and weights", title=title)
        for rank, (before, after, off) in enumerate(rows):
            equal = "equal" if off == 0 else f"up to {off:.1e} apart"
            table.add_row(str(rank), format_size(before), format_size(after), equal)
        Console().print(table)


if __name__ == "__main__":
    compare(GPT, lambda: "ddp", f"DDP on {DEVICES} {'GPUs' if GPUS else 'CPU processes'}: memory of a step")
