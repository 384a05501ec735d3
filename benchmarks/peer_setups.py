"""How each peer of `benchmarks/peers.py` is set up, as its own documentation says: a few lines each.

All treat the blocks that `find_blocks` finds. Where a peer has no place for a model, its set-up says why.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from models import GPT, WORKLOADS, ResNet, UNet, ViT, Workload
from peer_report import BY_HAND, FULL, OURS, PLAIN
from planner import FRACTIONS, settle
from torch import Tensor, nn
from torch._functorch.partitioners import get_default_op_list
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from lightning_ckpt import checkpoint_blocks, find_blocks
from lightning_ckpt.memory import AllocatorReader


class NotHereError(Exception):
    """A peer has no place for this model; says why."""


@dataclass(frozen=True)
class Subject:
    """A model that is to be set up, and what it is trained with.

    Attributes:
        model: changed in place.
        workload: where the model is from.
        batch: that it is trained on.
        reader: counts the memory, and is entered.
        budget: bytes that a step may take; 0 for those that keep to none.
    """

    model: nn.Module
    workload: Workload
    batch: Any
    reader: AllocatorReader
    budget: int = 0

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return find_blocks(self.model, self.workload.blocks)

    @property
    def chain(self) -> nn.Sequential:
        """What runs the blocks, each on the result of the one before."""
        parents = {name.rpartition(".")[0] for name, _ in self.blocks}
        parent = self.model.get_submodule(parents.pop()) if len(parents) == 1 else None
        if not isinstance(parent, nn.Sequential):
            raise NotHereError("takes chains alone")
        return parent


def by_hand(subject: Subject) -> None:
    for _, block in subject.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def wrapped(subject: Subject, every: int = 1, **options: Any) -> None:
    """Put PyTorch's wrapper around one block in `every`, the last of them."""
    blocks = {block for _, block in subject.blocks[every - 1 :: every]}
    wrap = partial(checkpoint_wrapper, **options)
    apply_activation_checkpointing(subject.model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in blocks)


def composed(subject: Subject) -> None:
    for _, block in subject.blocks:
        composable(block)


def sequential(subject: Subject) -> None:
    chain = subject.chain
    chain.forward = partial(checkpoint_sequential, chain, round(math.sqrt(len(chain))), use_reentrant=False)


def hugging_face(subject: Subject) -> None:
    model: Any = subject.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotHereError("takes Hugging Face's models alone")
    # What transformers 5.24 calls it, where the old name warns.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})


def every_second_block(subject: Subject) -> None:
    """The second, the fourth and so on: torchtitan's `selective_ac_option = "2"`."""
    wrapped(subject, every=2)


def every_second_matmul(subject: Subject) -> None:
    """Keep what operators cost most, and of matrix products the first, the third and so on: its option `"op"`.

    It counts `mm` alone; a linear layer with a bias runs `addmm` here.
    """
    listed = get_default_op_list().compute_intensive_ops
    kept = {getattr(packet, name) for packet in listed for name in packet.overloads()}
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def contexts() -> Any:
        counts: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in products:
                counts[context.is_recompute] += 1
            second = op in products and counts[context.is_recompute] % 2 == 0
            return CheckpointPolicy.MUST_SAVE if op in kept and not second else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    wrapped(subject, context_fn=contexts)


def planned(subject: Subject) -> None:
    """ckptplan, told to keep half of the activations, as its documentation does."""
    import ckptplan

    chain, seen = subject.chain, []
    with chain.register_forward_pre_hook(lambda module, args: seen.append(args)):
        subject.workload.loss(subject.model, subject.batch)
    blocks = ckptplan.declare_blocks(chain, list(chain.named_children()))
    profiles = ckptplan.profile_blocks(blocks, seen[0], device="cpu", dtype=torch.float32)
    kept = sum(profile.activation_bytes_estimate or 0 for profile in profiles)
    half = {"target_kind": "activation_budget_bytes", "target_value": kept // 2, "planner": "dynamic_programming"}
    plan = ckptplan.plan_checkpoints(profiles, blocks, **half)
    chain.forward = ckptplan.apply_plan(blocks, plan, seen[0], None).forward


class RandomState:
    """What torch_remat asks its users to bring, so that a replay draws the forward's random numbers."""

    snapshot = staticmethod(torch.get_rng_state)
    restore = staticmethod(torch.set_rng_state)


def rematerialized(subject: Subject) -> None:
    import torch_remat

    for name, block in subject.blocks:
        region = torch_remat.checkpoint(region_name=name, recompute_state_hooks=(RandomState(),))
        block.forward = partial(_through, region, block.forward)


def _through(region: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return region(forward)(*args, **kwargs)


def ours(policy: str) -> Callable[[Subject], object]:
    return lambda subject: checkpoint_blocks(subject.model, policy, blocks=subject.workload.blocks)


def auto(subject: Subject) -> None:
    handle = checkpoint_blocks(subject.model, "auto", blocks=subject.workload.blocks)
    optimizer = torch.optim.AdamW(subject.model.parameters())
    settle(handle, subject.model, subject.workload, subject.batch, subject.budget, subject.reader, optimizer)


# Of the way from the peak of full checkpointing to that of none.
BUDGETS = {f"{OURS}auto, {share:.0%}": share for share in FRACTIONS}
SETUPS: dict[str, Callable[[Subject], object]] = {
    PLAIN: lambda subject: None,
    BY_HAND: by_hand,
    "apply_activation_checkpointing": wrapped,
    "composable checkpoint": composed,
    "checkpoint_sequential": sequential,
    "Hugging Face": hugging_face,
    "torchtitan, every second block": every_second_block,
    "torchtitan, every second matmul": every_second_matmul,
    "ckptplan": planned,
    "torch_remat": rematerialized,
    FULL: ours("full"),
    f"{OURS}selective": ours("selective"),
    **dict.fromkeys(BUDGETS, auto),
}


def _llama(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes))


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())


LLAMA = Workload(
    partial(_llama, hidden_size=128, intermediate_size=344, num_hidden_layers=10, num_key_value_heads=2),
    lambda: torch.randint(0, 256, (8, 129)),
    _next_token,
)
SUBJECTS = {name: WORKLOADS[name] for name in ("GPT", "ViT", "ResNet", "U-Net")} | {"Llama": LLAMA}


def tiny(name: str) -> Workload:
    """The same kind of model, for a try: a step of milliseconds."""
    makes: dict[str, Callable[[], nn.Module]] = {
        "GPT": partial(GPT, depth=4, width=32),
        "ViT": partial(ViT, depth=4, width=32),
        "ResNet": partial(ResNet, width=4),
        "U-Net": partial(UNet, width=4),
        "Llama": partial(_llama, hidden_size=32, intermediate_size=64, num_hidden_layers=4),
    }
    return replace(SUBJECTS[name], make=makes[name], batch=lambda: _first(SUBJECTS[name].batch()))


def _first(batch: Any) -> Any:
    return tuple(map(_first, batch)) if isinstance(batch, tuple) else batch[:4]
