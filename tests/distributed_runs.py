"""Two trainings on the same ranks, checkpointed and plain, and everything in which they may differ."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from equality import Replays
from lightning_ckpt import ActivationCheckpointing, Full, MemoryBudget
from lightning_ckpt.held import local
from lightning_ckpt.memory import AllocatorReader, use_reader
from modules import Language, differences, fit
from recording import Peaks

SEGMENTS = Full(segment_size=2)
POLICIES = ("full", "selective", SEGMENTS, "auto")
QUICK = {"max_epochs": 4, "limit_val_batches": 0}


class Watched(Callback):
    """Keeps the loss of each batch and the gradients of each step, as this rank has them."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.seen[f"loss {len(self.seen)}"] = outputs["loss"].clone()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self.seen[f"gradient of {name} in {trainer.global_step}"] = local(parameter.grad).clone()


def trained(module: LightningModule, strategy: Strategy, callbacks: Iterable[Callback], **options: Any) -> Any:
    """What a run leaves on this rank, its losses and gradients too, and the highest peak of its later steps."""
    with AllocatorReader(limit=2**40) as reader, use_reader(reader):
        watched, peaks = Watched(), Peaks(reader)
        left = fit(module, [*callbacks, watched, peaks], devices=2, strategy=strategy, **(QUICK | options))
    return {name: local(value) for name, value in left.items()} | watched.seen, max(peaks.seen[2:])


def equal_with_every_policy(
    make: Callable[[], Language], strategy: Callable[[], Strategy], policies: Iterable[Any], **options: Any
) -> None:
    """Train plain and with every policy; the budget of `"auto"` lies halfway between plain and `"full"`, before it."""
    torch.manual_seed(0)
    module = make()
    plain, most = trained(copy.deepcopy(module), strategy(), [], **options)
    assert len(plain) > 40
    least = 0
    for policy in policies:
        ours = copy.deepcopy(module)
        replays = Replays(ours.gpt.blocks[0])
        callback = ActivationCheckpointing(
            MemoryBudget((most + least) // 2) if policy == "auto" else policy, monitor=False
        )
        left, peak = trained(ours, strategy(), [callback], **options)
        least = peak if policy == "full" else least
        assert replays.replays > 0, policy
        assert policy != "auto" or callback.plan is not None
        found = differences(left, plain)
        assert not found, f"{policy}, {options}: {found[:5]} differ from the plain run"
