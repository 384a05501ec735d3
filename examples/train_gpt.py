"""Train a character GPT, which knows nothing of checkpointing, on the sources of Python's own standard library.

python examples/train_gpt.py                                 # all three callbacks, an offline W&B run
python examples/train_gpt.py --policy none --no-tune         # the same training, plain
lightning-ckpt compare examples/train_gpt.py:training        # what each policy takes, measured
"""

import argparse
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, StepMonitor
from lightning_ckpt.memory import HostReader

warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory: workers would slow it


class Block(nn.Module):  # causal attention and a two-layer network, each normalised before and added to its input
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.1)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.project(attended))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(L.LightningModule):
    def __init__(self, depth: int = 10, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(128, width), nn.Embedding(context, width)  # 128 characters: ASCII
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train/loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def training(batch_size: int = 8, context: int = 128, **sizes: int) -> tuple[GPT, torch.utils.data.DataLoader]:
    """Return a GPT and its data: windows of `context` characters, each with its next characters as labels."""
    text = b"\n".join(file.read_bytes() for file in sorted(Path(argparse.__file__).parent.glob("*.py")))[:1_000_000]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens.unfold(0, context + 1, context)]
    return GPT(context=context, **sizes), torch.utils.data.DataLoader(rows, batch_size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"depth": 12, "width": 64, "heads": 4, "context": 128, "steps": 30, "batch-size": 8, "max-batch-size": 32}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--policy", choices=["full", "selective", "auto", "none"], default="full", help="default full")
    parser.add_argument("--logger", choices=["wandb", "csv", "none"], default="wandb", help="default wandb, offline")
    parser.add_argument("--no-tune", action="store_true", help="train with --batch-size instead of searching for one")
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    model, loader = training(args.batch_size, args.context, depth=args.depth, width=args.width, heads=args.heads)
    callbacks = [StepMonitor() if args.policy == "none" else ActivationCheckpointing(args.policy)]  # brings one along
    if not args.no_tune:  # on a CPU, which has more memory than this model fills in seconds, into 320 MiB
        limit = None if torch.accelerator.is_available() else HostReader().current() + 320 * 2**20
        callbacks.append(BatchSizeTuner(max_val=args.max_batch_size, memory_limit=limit))
    wandb = args.logger == "wandb" and WandbLogger(project="lightning-ckpt", save_dir="runs", offline=True)
    logger = wandb or (args.logger == "csv" and CSVLogger("runs", name="train-gpt"))
    options = {"log_every_n_steps": 1, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=args.steps, callbacks=callbacks, logger=logger, **options)
    trainer.fit(model, loader)
    size, first, last = trainer.train_dataloader.batch_size, model.losses[0], torch.stack(model.losses[-5:]).mean()
    print(f"\nLoss {first:.2f} -> {last:.2f} in {args.steps} steps of {size} x {args.context} characters.")
    print("" if args.no_tune else f"The tuner started from a batch size of {args.batch_size} and settled on {size}.")
    if wandb:
        run, command = Path(wandb.experiment.dir).parent, Path(sys.executable).with_name("wandb")
        wandb.experiment.finish()
        print(f"The run is in {run}\n  {command} leet {run}    # look at it\n  {command} sync {run}    # or in W&B")


if __name__ == "__main__":
    main()
