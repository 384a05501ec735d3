"""Train a small Vision Transformer on scikit-learn's handwritten digits, and print its accuracy.

python examples/train_vit.py
python examples/train_vit.py --policy none      # the same accuracy, bit for bit: replay changes no number
python examples/train_vit.py --depth 12 --epochs 20 --policy selective
"""

import argparse
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_ckpt import ActivationCheckpointing

PATCH, SIDE = 2, 8  # the digits are 8 x 8 grey pixels
warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory: workers would slow it


class ViT(L.LightningModule):
    """Patches with learned positions, PyTorch's own encoder layers, and the mean over patches."""

    def __init__(self, depth: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.5 * torch.randn(1, (SIDE // PATCH) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 8, 8) images to (batch, 10) logits."""
        x = self.embed(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        accuracy = (self(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("val/accuracy", accuracy, batch_size=len(batch[1]), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=3e-3, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 digits as (1, 8, 8) images in 0 to 1, a fifth of them kept for validation."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    everything = TensorDataset(images, torch.tensor(data.target))
    return random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"depth": 4, "width": 64, "heads": 4, "batch-size": 64, "epochs": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--policy", choices=["none", "full", "selective"], default="full", help="default full")
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    train, validate = digits()
    callbacks = [] if args.policy == "none" else [ActivationCheckpointing(args.policy)]
    trainer = L.Trainer(max_epochs=args.epochs, callbacks=callbacks, logger=False, enable_checkpointing=False)
    trainer.fit(
        ViT(args.depth, args.width, args.heads),
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        DataLoader(validate, batch_size=256),
    )
    accuracy = trainer.callback_metrics["val/accuracy"].item()
    print(f"\nPolicy {args.policy}: {accuracy:.1%} of {len(validate)} unseen digits right after {args.epochs} epochs.")


if __name__ == "__main__":
    main()
