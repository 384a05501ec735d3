"""Operators by name: the presets of `SelectiveOps`, and what a name or an object stands for."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch

from lightning_ckpt._compat import OpOverload, OpOverloadPacket

Operator: TypeAlias = str | OpOverload | OpOverloadPacket

MATMULS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",  # float8 matrix products
    "aten._grouped_mm",  # the experts of a mixture, one product each
)
_CONVOLUTIONS = (
    "aten.convolution",
    "aten._convolution",  # what `torch.jit` traces call
    "aten.cudnn_convolution",
    "aten.convolution_overrideable",  # out-of-tree backends
)
# One kernel runs, whichever backend `scaled_dot_product_attention` picks: all are listed, and a test runs one of them.
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",  # out-of-tree backends
    "aten._flash_attention_forward",  # nested tensors call these two directly
    "aten._efficient_attention_forward",
    "flash_attn._flash_attn_forward",  # the flash-attn package, where it is imported
    "flash_attn_3.fwd",
)
# Communication that a replay would repeat on every rank. Waiting on a kept result is free: `wait_tensor` is not listed.
_COLLECTIVES = (
    "_c10d_functional.all_reduce",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.all_to_all_single",
)
# A router's choice must not flip between forward and replay, and its result is tiny.
_ROUTING = ("aten.topk",)

COMPUTE = (*MATMULS, *_CONVOLUTIONS, *_ATTENTION, *_COLLECTIVES, *_ROUTING)
PRESETS = {
    "compute": COMPUTE,
    "attention": (*_ATTENTION, *_COLLECTIVES),
    "every_other_matmul": COMPUTE,
}


def resolve(operator: Operator) -> frozenset[OpOverload]:
    """Every overload that an operator, or its name, stands for."""
    if isinstance(operator, OpOverload):
        return frozenset((operator,))
    if isinstance(operator, OpOverloadPacket):
        return frozenset(getattr(operator, overload) for overload in operator.overloads())
    if isinstance(operator, str):
        try:
            return resolve(_operator_named(operator))
        except (AttributeError, ValueError):
            raise ValueError(
                f"SelectiveOps(save={operator!r}): this PyTorch has no such operator{_near(operator)}. Accepted are "
                f'the presets {", ".join(map(repr, PRESETS))} and operators such as "aten.mm"'
            ) from None
    raise ValueError(
        f'SelectiveOps(save={operator!r}): accepted are names such as "aten.mm" and operators such as torch.ops.aten.mm'
    )


def _operator_named(name: str) -> Any:
    """`torch.ops.aten.mm` for `"aten.mm"`."""
    namespace, operator, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    return getattr(packet, *overload) if overload else packet


def _near(name: str) -> str:
    namespace, _, operator = name.partition(".")
    near = get_close_matches(operator, dir(getattr(torch.ops, namespace, None)), n=1)
    return f"; the nearest name is {namespace}.{near[0]}" if near else ""


def resolve_all(names: Iterable[str]) -> frozenset[OpOverload]:
    """The overloads of those operators that exist here: a preset also names other machines' operators."""
    found: set[OpOverload] = set()
    for name in names:
        try:
            found |= resolve(_operator_named(name))
        except AttributeError:
            continue
    return frozenset(found)
