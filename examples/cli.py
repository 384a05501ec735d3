"""Train a classifier of scikit-learn's handwritten digits from a file, which brings all three callbacks.

python examples/cli.py fit --config examples/cli.yaml
python examples/cli.py fit --config examples/cli.yaml --model.depth 12 --trainer.max_epochs 8
python examples/cli.py fit --config examples/cli.yaml --print_config        # every option, with its default
"""

import warnings

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory: workers would slow it


class Digits(L.LightningDataModule):
    """The 1,797 digits as rows of pixels, each row a token; a fifth of them kept for validation.

    Args:
        batch_size: digits in a batch; `BatchSizeTuner` finds it by this name.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        data = load_digits()
        everything = TensorDataset(torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target))
        self.train, self.validate = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Dataset]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Dataset]:
        return DataLoader(self.validate, batch_size=256)


class Classifier(L.LightningModule):
    """A Transformer over the eight rows of a digit.

    Args:
        depth: how many layers.
        width: of each layer.
        learning_rate: of AdamW.
    """

    def __init__(self, depth: int = 4, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(0.5 * torch.randn(8, width))
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 8, 8) images to (batch, 10) logits."""
        return self.head(self.layers(self.embed(images) + self.position).mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        accuracy = (self(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("val/accuracy", accuracy, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    cli = LightningCLI(Classifier, Digits)
    ours = [type(one).__name__ for one in cli.trainer.callbacks if type(one).__module__.startswith("lightning_ckpt")]
    print(f"\nFrom the file: {', '.join(ours)}.")
    accuracy = cli.trainer.callback_metrics["val/accuracy"]
    print(f"Trained with {cli.datamodule.batch_size} digits a batch; {accuracy:.1%} of unseen digits right.")
    print(f"Memory and throughput of the steps are in {cli.trainer.log_dir}/metrics.csv, all settings in config.yaml.")


if __name__ == "__main__":
    main()
