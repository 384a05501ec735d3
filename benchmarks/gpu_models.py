"""The models of `gpu_check.py`: large enough to fill a card, or tiny, so that a CPU goes the same way."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from models import GPT, UNet, ViT, Workload, images, label, next_token, restored, tokens
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_ckpt import find_blocks
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.memory import GIB

Apply = Callable[[nn.Module], AbstractContextManager[object]]


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        workload: how it is made, fed and scored.
        samples: in a batch.
        tokens: in a batch; None where samples are no sequences.
        others: other people's ways to checkpoint it, by name.
    """

    workload: Workload
    samples: int
    tokens: int | None
    others: Mapping[str, Apply] = field(default_factory=dict)


def subjects(tiny: bool, room: int) -> dict[str, Subject]:
    """The models by name, with batches for a device of so many bytes."""
    share = 1 if tiny else min(8, max(1, room // (10 * GIB)))  # of the batch for 80 GiB, in eighths
    return {
        "GPT": _gpt(4 if tiny else share, tiny),
        "GPT-2 of Hugging Face": _hugging_face(4 if tiny else share, tiny),
        "ViT": _vit(16 if tiny else 8 * share, tiny),
        "U-Net": _unet(2 * share, tiny),
    }


def in_bf16(workload: Workload, device: torch.device) -> Workload:
    """The same, with its forward under autocast."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return workload.loss(model, batch)

    return replace(workload, loss=loss)


def _gpt(samples: int, tiny: bool) -> Subject:
    """GPT-2 medium, 355 million parameters, with a longer context."""
    size = {"depth": 24, "width": 1024, "vocabulary": 50_304, "heads": 16, "context": 2048, "tied": True}
    if tiny:
        size |= {"depth": 3, "width": 32, "vocabulary": 256, "heads": 4, "context": 64}

    def batch() -> Tensor:
        return tokens(samples, size["context"] + 1, size["vocabulary"])

    workload = Workload(lambda: GPT(**size), batch, next_token, blocks="blocks.*", uneven=False)
    return _with_wrapper(workload, samples, samples * size["context"])


def _hugging_face(samples: int, tiny: bool) -> Subject:
    """The same size of the same architecture, by others, with their dropout in three places."""
    size = {"n_positions": 2048, "n_embd": 1024, "n_layer": 24, "n_head": 16}
    if tiny:
        size = {"n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
    vocabulary = 256 if tiny else 50_304

    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel  # only here: without it the other models are measured

        return GPT2LMHeadModel(
            GPT2Config(**size, vocab_size=vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0)
        )

    def batch() -> Tensor:
        return tokens(samples, size["n_positions"], vocabulary)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    workload = Workload(make, batch, loss, blocks="transformer.h.*", uneven=False)
    return Subject(workload, samples, samples * size["n_positions"], {"Hugging Face's": checkpointed_by_hugging_face})


def _vit(samples: int, tiny: bool) -> Subject:
    """ViT-L/16, 304 million parameters."""
    size = {"depth": 24, "width": 1024, "heads": 16, "patch": 16, "classes": 1000}
    side = 224
    if tiny:
        size, side = {"depth": 3, "width": 32, "heads": 4, "patch": 8, "classes": 10}, 64
    workload = Workload(
        lambda: ViT(**size), lambda: images(samples, side, size["classes"]), label, blocks="layers.*", uneven=False
    )
    length = (side // size["patch"]) ** 2 + 1
    return _with_wrapper(workload, samples, samples * length)


def _unet(samples: int, tiny: bool) -> Subject:
    """Four stages whose resolution halves and whose width doubles."""
    width, side = (8, 32) if tiny else (64, 256)
    blocks = ["downs.*", "ups.*"]
    workload = Workload(lambda: UNet(width), lambda: torch.randn(samples, 3, side, side), restored, blocks=blocks)
    return _with_wrapper(workload, samples, None)


def _with_wrapper(workload: Workload, samples: int, tokens: int | None) -> Subject:
    return Subject(workload, samples, tokens, {"torch's wrapper": partial(wrapped_by_torch, blocks=workload.blocks)})


@contextmanager
def wrapped_by_torch(model: nn.Module, blocks: Blocks) -> Iterator[None]:
    """`apply_activation_checkpointing`, which puts a module around each block, taken back afterwards."""
    found = {block for _, block in find_blocks(model, blocks)}
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: module in found
    )
    try:
        yield
    finally:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, CheckpointWrapper):
                    setattr(parent, name, child._checkpoint_wrapped_module)


@contextmanager
def checkpointed_by_hugging_face(model: Any) -> Iterator[None]:
    """`gradient_checkpointing_enable`, which later releases of transformers call `activation_checkpointing_enable`."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()
        if hasattr(model, "disable_input_require_grads"):
            model.disable_input_require_grads()
