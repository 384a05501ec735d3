"""Hugging Face's models as users hold them: the right blocks, the plain training, less memory, one level."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from equality import Replays
from lightning_ckpt import ActivationCheckpointing, find_blocks
from modules import differences, fit
from steps import enlarged, real_peak
from zoo import TRANSFORMERS, Specimen

each_model = pytest.mark.parametrize("kind", TRANSFORMERS)

BLOCKS = {
    "llama": {"LlamaDecoderLayer": 3},
    "gpt2": {"GPT2Block": 3},
    "t5": {"T5Block": 3 + 2},  # of the encoder, and of the decoder
    "vit": {"ViTLayer": 3},
    "mixtral": {"MixtralDecoderLayer": 3},
}


class Held(LightningModule):
    """A LightningModule around one of them."""

    def __init__(self, specimen: Specimen) -> None:
        super().__init__()
        self.model, self.specimen = specimen.build(), specimen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.specimen.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(1)
        return DataLoader(torch.cat([self.specimen.batch() for _ in range(2)]), batch_size=2)  # type: ignore[arg-type]


class CheckpointsItself(Held):
    """Its owner turns checkpointing on."""

    def __init__(self, specimen: Specimen) -> None:
        super().__init__(specimen)
        self.model.activation_checkpointing_enable()


class CheckpointsItselfLate(Held):
    """Its owner turns checkpointing on when the trainer asks for layers, after the callback's own setup."""

    def configure_model(self) -> None:
        self.model.activation_checkpointing_enable()


class Gradients(Callback):
    """Keeps the gradients of the last step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.kept = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}


def held(kind: str, make: Callable[[Specimen], Held] = Held) -> Held:
    torch.manual_seed(0)
    return make(TRANSFORMERS[kind])


@pytest.mark.parametrize("policy", ["full", "auto"])
@each_model
def test_the_callback_finds_the_layers_and_trains_as_plain(kind: str, policy: str) -> None:
    """Encoder and decoder, dropout, experts, balancing loss: gradients, losses, weights and optimizer bit for bit.

    A budget measures layers within the forward pass, from whose router logits Mixtral makes its balancing loss.
    """
    ours = held(kind)
    assert Counter(type(block).__name__ for _, block in find_blocks(ours)) == BLOCKS[kind]
    plain = copy.deepcopy(ours)
    counted = [Replays(block) for _, block in find_blocks(ours)]
    seen, expected = Gradients(), Gradients()
    left = fit(ours, [ActivationCheckpointing(policy, monitor=False), seen])
    assert not differences(left, fit(plain, [expected]))
    assert not differences(seen.kept, expected.kept)
    assert len(seen.kept) == len(list(plain.named_parameters()))
    assert all(count.replays for count in counted)


@each_model
def test_memory_falls(kind: str) -> None:
    """The allocator's exact peak of a step, without an optimizer, on larger batches."""
    specimen = enlarged(TRANSFORMERS[kind], 8)
    plain = real_peak(specimen, "none", None)
    assert real_peak(specimen, "full", None) < 0.75 * plain


# --- checkpointing that the owner has turned on ---


def layer_runs(module: Held) -> Replays:
    """Counts the runs of the layers of the second block's feed-forward part."""
    return Replays(module.model.model.layers[1].mlp)


STEPS, PARTS = 2, 4  # steps of a fit; the layers of a feed-forward part, its activation among them


@pytest.mark.parametrize("make", [CheckpointsItself, CheckpointsItselfLate])
def test_a_model_that_checkpoints_itself_is_left_alone(make: Callable[[Specimen], Held]) -> None:
    """One warning, also where the owner comes last; each layer runs twice a step, and training is the plain one."""
    ours, plain = held("llama", make), held("llama")
    counted = layer_runs(ours)
    text = r"Left alone: .*: checkpointed by its owner: gradient_checkpointing=True.*; existing=\"replace\" takes over$"
    with pytest.warns(UserWarning, match=text):
        left = fit(ours, [ActivationCheckpointing(monitor=False)])
    assert (counted.calls, counted.replays) == (2 * STEPS * PARTS, 0)
    assert not differences(left, fit(plain))


@pytest.mark.parametrize("make", [CheckpointsItself, CheckpointsItselfLate])
def test_its_checkpointing_is_replaced_on_request(make: Callable[[Specimen], Held]) -> None:
    """`existing="replace"`: one level, ours; afterwards the model checkpoints itself as it did."""
    ours, plain = held("llama", make), held("llama")
    counted = layer_runs(ours)
    left = fit(ours, [ActivationCheckpointing(existing="replace", monitor=False)])
    assert (counted.calls, counted.replays) == (2 * STEPS * PARTS, STEPS * PARTS)
    assert not differences(left, fit(plain))
    assert ours.model.is_activation_checkpointing
    assert all(layer.gradient_checkpointing for layer in ours.model.model.layers)
