"""Train a character GPT sharded over several devices, with checkpointing and without, and print what each rank needed.

    python examples/fsdp2.py

On every GPU that there is, or else in two processes on a CPU. Each block is sharded by itself: its parameters are
gathered before its forward, freed after it, and gathered once more in backward, where its replay uses them too.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp import DEVICES, GPUS, compare
from train_gpt import GPT


class Sharded(L.LightningModule):
    """The GPT of the other examples, sharded over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.sharded = GPT(), False
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.sharded:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)
        self.sharded = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.gpt(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy() -> Any:
    """All devices share one model, and each has batches of its own."""
    return ModelParallelStrategy(data_parallel_size=DEVICES, tensor_parallel_size=1)


if __name__ == "__main__":
    compare(Sharded, strategy, f"FSDP2 on {DEVICES} {'GPUs' if GPUS else 'CPU processes'}: memory of a step")
