"""Find the batch size for a small memory, alone and together with a memory plan, and print what each trains with.

    python examples/batch_size.py

`BatchSizeTuner` takes a few real steps before training and settles on the largest size that leaves the headroom. Beside
`ActivationCheckpointing("auto")` it chooses size and plan together: the pair with the most samples per second. On a CPU
the script counts every byte of PyTorch's allocator; on a card leave the reader out, and its counters are used.
"""

import sysconfig
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner
from lightning_ckpt.memory import AllocatorReader, use_reader

warnings.filterwarnings("ignore", ".*does not have many workers.*")

LENGTH = 32


def text() -> Tensor:
    """Bytes of Python's own library, in rows."""
    source = Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()
    rows = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return rows[: len(rows) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1).long()


class Language(L.LightningModule):
    """Predicts the next byte with four Transformer layers."""

    def __init__(self, batch_size: int = 4, width: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, 256)

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        x, mask = self.embed(rows[:, :-1]), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(text(), batch_size=self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """The shortest time of a step."""

    seconds = float("inf")

    def on_train_batch_start(self, *args: object) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, *args: object) -> None:
        self.seconds = min(self.seconds, time.perf_counter() - self.started)


def train(policy: str, limit: int) -> tuple[BatchSizeTuner, float]:
    """Find the size under a limit in bytes, train six steps with it, and return the tuner and samples per second."""
    L.seed_everything(0, verbose=False)
    tuner, clock = BatchSizeTuner(), Clock()
    checkpointing = [] if policy == "none" else [ActivationCheckpointing(policy, monitor=False)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    with AllocatorReader(limit=limit) as reader, use_reader(reader):
        callbacks = [*checkpointing, tuner, clock]
        L.Trainer(accelerator="cpu", max_steps=6, callbacks=callbacks, enable_progress_bar=False, **quiet).fit(
            Language()
        )
    return tuner, (tuner.batch_size or 0) / clock.seconds


def main() -> None:
    table = Table("Policy", "Batch size", "Steps tried", "Samples per second", title="A Transformer in 10 MiB")
    for policy in ("none", "full", "auto"):
        tuner, rate = train(policy, 10 * 2**20)
        table.add_row(policy, f"{tuner.batch_size}", f"{len(tuner.trials)}", f"{rate:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
