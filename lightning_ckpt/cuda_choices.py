"""What PyTorch does on CUDA where it does otherwise on the host, for steps estimated on fake tensors of the host.

Fake tensors that claim to be on CUDA need a PyTorch that is built for it, so they are on the host, and what shows in
memory is made as on CUDA: attention runs in one kernel that keeps no scores, autocast computes the same functions in
float32, optimizers update many parameters at once, and the allocator rounds up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# The caching allocator's smallest block: c10/cuda/CUDACachingAllocator.h, kMinBlockSize.
BLOCK = 512

# Functions that autocast runs in float32 on CUDA and not on the CPU: ATen/autocast_mode.h, AT_FORALL_FP32 and
# AT_FORALL_FP32_SET_OPT_DTYPE, those that training steps call.
_IN_FLOAT32 = frozenset(
    {
        *(F.layer_norm, F.group_norm, F.softplus, F.cosine_similarity, F.nll_loss, F.cross_entropy, F.kl_div),
        *(F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.mse_loss, F.binary_cross_entropy_with_logits),
        *(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
        *(torch.layer_norm, torch.group_norm, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.pow, Tensor.pow),
        *(Tensor.__pow__, torch.square, Tensor.square, torch.rsqrt, Tensor.rsqrt, torch.reciprocal, Tensor.reciprocal),
        *(torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.cumsum, Tensor.cumsum, torch.logsumexp),
        *(Tensor.logsumexp, torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.cdist, torch.dist),
    }
)
_HALF = (torch.float16, torch.bfloat16)
# The largest head that flash attention takes: sdp_utils.cpp, check_head_dim_size_flash.
_LARGEST_FLASH_HEAD = 256


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let attention and autocast go the way they go on CUDA; attention in all threads, while it lasts."""
    with patch.object(F, "scaled_dot_product_attention", _attention), _Float32UnderAutocast():
        yield


def update_as_on_cuda(optimizer: Optimizer) -> None:
    """Let an optimizer that leaves the choice to PyTorch update many parameters in one operator, as on CUDA."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


class _Float32UnderAutocast(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_float32, args))
            kwargs = {name: _float32(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with the kernel that CUDA takes: flash, else memory-efficient, else plain."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    shapes_fit = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    grouped = query.shape[1] != key.shape[1] if shapes_fit else enable_gqa
    if _flash(query, attn_mask) and shapes_fit:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if shapes_fit and not grouped and torch.backends.cuda.mem_efficient_sdp_enabled():
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return _own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


# Before anything is patched.
_own = F.scaled_dot_product_attention


def _flash(query: Tensor, attn_mask: Tensor | None) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and attn_mask is None
        and query.dtype in _HALF
        and query.shape[-1] <= _LARGEST_FLASH_HEAD
    )
