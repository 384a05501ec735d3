"""Train a character GPT on the sources of Python's own standard library.

    python examples/train_gpt.py                                    # all three callbacks, an offline W&B run
    python examples/train_gpt.py --policy none --no-tune            # the same training, plain
    python examples/train_gpt.py --depth 24 --context 256 --logger csv
    lightning-ckpt compare examples/train_gpt.py:training           # what each policy takes, measured

The model knows nothing of checkpointing: the callbacks at the bottom do it all.
"""

import argparse
import sys
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, StepMonitor
from lightning_ckpt.memory import HostReader

VOCABULARY = 128  # ASCII
warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory: workers would slow it


class Sources(Dataset):
    """Windows of `context` characters from the standard library's modules, each with its next characters as labels."""

    def __init__(self, context: int, characters: int = 4_000_000) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:characters]
        self.tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


class Block(nn.Module):
    """Causal attention and a two-layer network, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.project(attended))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(L.LightningModule):
    """A decoder-only Transformer over characters, trained with AdamW."""

    def __init__(
        self, depth: int = 10, width: int = 128, heads: int = 4, context: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) token numbers to (batch, time, vocabulary) logits."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train/loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def training() -> tuple[GPT, DataLoader]:
    """Give `lightning-ckpt compare` and `lightning-ckpt doctor` what they train."""
    return GPT(), DataLoader(Sources(context=128), batch_size=8, shuffle=True, drop_last=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"depth": 12, "width": 64, "heads": 4, "context": 128, "steps": 30, "batch-size": 8, "max-batch-size": 32}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--policy", choices=["none", "full", "selective", "auto"], default="full", help="default full")
    parser.add_argument("--logger", choices=["wandb", "csv", "none"], default="wandb", help="default wandb, offline")
    parser.add_argument("--no-tune", action="store_true", help="train with --batch-size instead of searching for one")
    return parser.parse_args()


def make_logger(name: str) -> Logger | bool:
    Path("runs").mkdir(exist_ok=True)
    if name == "wandb":  # offline: it needs no account, and can be synced later
        return WandbLogger(project="lightning-ckpt", name="train-gpt", save_dir="runs", offline=True)
    return CSVLogger("runs", name="train-gpt") if name == "csv" else False


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    model = GPT(args.depth, args.width, args.heads, args.context)
    loader = DataLoader(Sources(args.context), batch_size=args.batch_size, shuffle=True, drop_last=True)

    # Checkpointing brings a StepMonitor of its own; the plain run, for comparison, gets one alone.
    callbacks = [StepMonitor() if args.policy == "none" else ActivationCheckpointing(args.policy)]
    if not args.no_tune:
        # On a card, its memory; a CPU has more than this model can fill in seconds, so there let it fill 320 MiB.
        limit = None if torch.accelerator.is_available() else HostReader().current() + 320 * 2**20
        callbacks.append(BatchSizeTuner(max_val=args.max_batch_size, memory_limit=limit))
    logger = make_logger(args.logger)
    options = {"log_every_n_steps": 1, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=args.steps, callbacks=callbacks, logger=logger, **options)
    trainer.fit(model, loader)

    size, losses = trainer.train_dataloader.batch_size, torch.stack(model.losses)
    first, last = losses[0], losses[-5:].mean()
    print(f"\nLoss {first:.2f} -> {last:.2f} in {args.steps} steps of {size} x {args.context} characters.")
    if not args.no_tune:
        print(f"The tuner started from a batch size of {args.batch_size} and settled on {size}.")
    if isinstance(logger, WandbLogger):
        run, command = Path(logger.experiment.dir).parent, Path(sys.executable).with_name("wandb")
        logger.experiment.finish()
        print(
            f"The run is in {run}\n  {command} leet {run}    # look at it here\n  {command} sync {run}    # or in W&B"
        )


if __name__ == "__main__":
    main()
