"""Train a U-Net to clean noisy digits under three memory budgets, and print what each keeps, replays and takes.

    python examples/train_unet.py

A U-Net's outer blocks hold most of the memory and its inner ones cost as much time, so no rule of the kind "every
second block" suits it. `MemoryBudget` measures each block on the first batch, and keeps what buys the most time. On a
CPU the script counts every byte of PyTorch's allocator; on a card leave the reader out, and its counters are used.
"""

import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, MemoryBudget
from lightning_ckpt.memory import AllocatorReader, Interval, use_reader
from lightning_ckpt.sizes import format_size

warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Stage(nn.Sequential):
    """Two convolutions, each normalised."""

    def __init__(self, inside: int, outside: int) -> None:
        layers: list[nn.Module] = []
        for width in (inside, outside):
            layers += [nn.Conv2d(width, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()]
        super().__init__(*layers)


class UNet(L.LightningModule):
    """Takes noise out of images: four stages down, three up, with skips between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.downs = nn.ModuleList(Stage(i, o) for i, o in zip([1, *widths], widths, strict=False))
        self.ups = nn.ModuleList(Stage(b + o, o) for b, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(width, 1, 1)

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        x, skips = images + torch.randn_like(images), []
        for down in self.downs:
            x = down(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        x = skips.pop()
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return F.mse_loss(self.head(x), images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def digits() -> Tensor:
    """Handwritten digits, (32, 1, 48, 48), in 0 to 1."""
    images = torch.tensor(load_digits().images[:32], dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(images, scale_factor=6, mode="bilinear")


def train(policy: str | MemoryBudget) -> tuple[int, ActivationCheckpointing | None]:
    """Train eight steps, and return the last one's peak and the callback."""
    L.seed_everything(0, verbose=False)
    callback = None if policy == "none" else ActivationCheckpointing(policy, monitor=False)
    with AllocatorReader() as reader, use_reader(reader):
        step = Interval(reader)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        callbacks = [*filter(None, [callback]), LambdaCallback(on_train_batch_start=lambda *_: step.reset_peak())]
        trainer = L.Trainer(accelerator="cpu", max_steps=8, callbacks=callbacks, enable_model_summary=False, **quiet)
        trainer.fit(UNet(), DataLoader(digits(), batch_size=4))
        return step.peak(), callback


def main() -> None:
    plain, full = train("none")[0], train("full")[0]
    table = Table("policy", "peak", "of the budget", "replay", title="A U-Net under memory budgets")
    table.add_row("none", format_size(plain), "", "")
    for share in (0.75, 0.5, 0.25):
        budget = int(full + share * (plain - full))
        peak, callback = train(MemoryBudget(budget))
        assert callback is not None
        assert peak <= budget
        time = f"{callback.plan.seconds / callback.plan.profile.replay_seconds:.0%} of full"
        table.add_row(f"MemoryBudget({format_size(budget)})", format_size(peak), f"{peak / budget:.1%}", time)
    table.add_row("full", format_size(full), "", "100%")
    Console().print(table)
    print("Every budget was kept, and used.")


if __name__ == "__main__":
    main()
