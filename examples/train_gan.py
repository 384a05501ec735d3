"""Train a GAN on scikit-learn's handwritten digits by manual optimization, plain and checkpointed, and compare the two.

    python examples/train_gan.py

Two optimizers take turns, and the critic runs twice before one backward pass. The generator's BatchNorm counts batches
and the critic's spectral normalisation takes a step of its power iteration in each forward: a replay must do neither
once more. On a CPU the script counts every byte of PyTorch's allocator.
"""

import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.sizes import format_size

warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Residual(nn.Module):
    """Adds to its input what some layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class GAN(L.LightningModule):
    def __init__(self, width: int = 128, depth: int = 4, noise: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        ups = [Residual(nn.BatchNorm1d(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth)]
        downs = [Residual(spectral_norm(nn.Linear(width, width)), nn.SiLU()) for _ in range(depth)]
        self.generator = nn.Sequential(nn.Linear(noise, width), *ups, nn.Linear(width, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, width), *downs, nn.Linear(width, 1))
        self.losses: list[Tensor] = []

    def training_step(self, digits: Tensor, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(digits), self.noise))
        critic_loss = softplus(-self.critic(digits)).mean() + softplus(self.critic(fake.detach())).mean()
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        generator_loss = softplus(-self.critic(fake)).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.losses += [critic_loss.detach(), generator_loss.detach()]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.critic)
        return [torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.99)) for network in networks]


def train(policy: str) -> tuple[GAN, int]:
    """Train two epochs, and return the module and the peak of the last step."""
    L.seed_everything(0, verbose=False)
    module, digits = GAN(), torch.tensor(load_digits().data, dtype=torch.float32) / 16
    callbacks = [] if policy == "none" else [ActivationCheckpointing(policy, blocks="Residual", monitor=False)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with AllocatorReader() as reader:
        callbacks.append(LambdaCallback(on_train_batch_start=lambda *_: reader.reset_peak()))
        trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, enable_model_summary=False, **quiet)
        trainer.fit(module, DataLoader(digits, batch_size=256, shuffle=True, drop_last=True))
        return module, reader.peak()


def main() -> None:
    (plain, most), (module, least) = train("none"), train("full")
    table = Table("policy", "peak of a step", "critic's loss", "generator's loss", "batches counted", title="A GAN")
    for policy, gan, peak in (("none", plain, most), ("full", module, least)):
        counted = gan.generator[1].layers[0].num_batches_tracked
        table.add_row(policy, format_size(peak), f"{gan.losses[-2]:.3f}", f"{gan.losses[-1]:.3f}", f"{counted}")
    Console().print(table)
    assert all(map(torch.equal, module.losses, plain.losses))
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    print(f"All {len(plain.losses)} losses, weights and buffers are equal, bit for bit.")


if __name__ == "__main__":
    main()
