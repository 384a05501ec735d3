"""LightningModules that tests train, and how two trainings are compared."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from zoo import GPT, ResNet, mlp


def is_estimated(batch: Tensor) -> bool:
    """Whether a step is run on fake tensors, and not taken."""
    return isinstance(batch, FakeTensor)


class Language(LightningModule):
    """A small GPT with dropout on random tokens."""

    batch_size = 4

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.gpt = GPT(depth=depth, width=width)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.gpt(batch["input_ids"][:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.gpt(batch["input_ids"]).square().mean())

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.gpt(batch["input_ids"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def _loader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        rows = [{"input_ids": torch.randint(0, 50, (9,), generator=generator)} for _ in range(16)]
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Images(Language):
    """A small ResNet with BatchNorm."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.net = ResNet()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def _loader(self) -> DataLoader:
        images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Adversaries(Images):
    """Two networks, two optimizers, manual optimization, in the usual order of toggles."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.automatic_optimization = False
        self.generator, self.critic = mlp(), mlp()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        for net, optimizer, sign in zip(("generator", "critic"), self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.critic(self.generator(torch.randn_like(real))) - self.critic(real)).square().mean()
            self.log(net, loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.critic(batch[0].flatten(1)).square().mean())

    test_step = validation_step

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)]


def trainer(callbacks: Sequence[Callback] = (), kind: Any = Trainer, **options: Any) -> Trainer:
    """A quiet trainer on one CPU process."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return kind(callbacks=list(callbacks), **(quiet | options))


def fit(
    module: LightningModule, callbacks: Sequence[Callback] = (), loaders: Any = None, **options: Any
) -> dict[str, Any]:
    """Train, and give back everything that training leaves behind, as named tensors."""
    seed_everything(3, verbose=False)
    running = trainer(callbacks, **options)
    running.fit(module, loaders)
    left: dict[str, Any] = {name: value.clone() for name, value in module.state_dict().items()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    left |= {f"metric {name}": value.clone() for name, value in running.callback_metrics.items()}
    left["random state"] = torch.get_rng_state()
    left["global step"] = torch.tensor(running.global_step)
    for index, optimizer in enumerate(running.optimizers):
        for key, state in enumerate(optimizer.state.values()):
            left |= {f"optimizer {index} {key} {name}": torch.as_tensor(value) for name, value in state.items()}
    return left


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names under which two trainings left different things."""
    return [
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    ]
