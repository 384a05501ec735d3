"""Copies of a module and of a batch that have no memory: fake tensors in the places of theirs."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt._compat import FakeTensorMode, is_sharded
from lightning_ckpt.arguments import Arguments


class CannotEstimate(RuntimeError):
    """A step that does not run on fake tensors."""


def fake_copy(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module, on the host's fake tensors; the module itself is only read.

    Args:
        module: on any device, `meta` too.
        mode: makes the fake tensors.
        dtype: what floating-point parameters and buffers are converted to; `None` to leave them.

    Raises:
        ValueError: parameters that are sharded, or not made yet.
        CannotEstimate: it holds something that can't be copied.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{type(module).__name__}: {lazy[0]} is not made yet: run one batch through the module first")
    if any(map(is_sharded, module.modules())):
        raise ValueError(f"{type(module).__name__} is sharded: estimate the plain module, with ranks= for its shards")
    held = [value for part in module.modules() for value in vars(part).values()]
    # A trainer holds the data, the loggers and the callbacks of a run, which the copy must not reach.
    memo: dict[int, Any] = {id(value): None for value in held if type(value).__name__ == "Trainer"}
    # Data may be large, and no step changes them.
    memo |= {id(value): value for value in held if isinstance(value, Dataset | DataLoader | np.ndarray)}
    try:
        with _Faking(mode, {id(buffer) for buffer in module.buffers()}, dtype):
            made: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise CannotEstimate(
            f"{type(module).__name__} can't be copied, so there is nothing to estimate on: {error}"
        ) from error
    for part in made.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.device):  # such as that of a LightningModule, `self.device`
                vars(part)[name] = torch.device("cpu")
    return made


class _Faking(TorchFunctionMode):
    """While entered, a copied tensor is a fake one: parameters are copied by `clone`, others by `__deepcopy__`."""

    def __init__(self, mode: FakeTensorMode, buffers: set[int], dtype: torch.dtype | None) -> None:
        self._mode, self._buffers, self._dtype = mode, buffers, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            return self._fake(args[0], convert=True)
        if func is Tensor.__deepcopy__:  # asked of a tensor once: `copy` remembers what it has copied
            return self._fake(args[0], convert=id(args[0]) in self._buffers)
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: Tensor, *, convert: bool) -> Tensor:
        if tensor.layout is not torch.strided:
            return self._mode.from_tensor(tensor, static_shapes=True)
        dtype = self._dtype if convert and self._dtype and tensor.is_floating_point() else tensor.dtype
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, requires_grad=tensor.requires_grad)


@dataclass(frozen=True)
class _Shape:
    """What there is to know of a tensor of a batch."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class FakeBatch:
    """The shapes of a batch, to be made of fake tensors in any size.

    Args:
        batch: what a step takes: a tensor, or containers of tensors.
        dtype: what floating-point tensors are converted to; `None` to leave them.

    Attributes:
        size: the first dimension of the first tensor that has one; `None` without such a tensor.
    """

    def __init__(self, batch: Any, dtype: torch.dtype | None = None) -> None:
        self._arguments = Arguments((batch,), {})
        self._shapes = [
            _Shape(t.shape, dtype if dtype and t.is_floating_point() else t.dtype, t.requires_grad)
            for t in self._arguments.take_tensors()
        ]
        self.size: int | None = next((s.shape[0] for s in self._shapes if s.shape), None)

    def make(self, size: int | None = None) -> Any:
        """The batch, in its own size or in another: every first dimension that is its size becomes `size`.

        Raises:
            ValueError: another size of a batch that has none, or less than one.
        """
        if size is not None and (self.size is None or size < 1):
            has = "has no tensor with a first dimension" if self.size is None else "needs a size of at least 1"
            raise ValueError(f"batch_size={size}: the batch {has}")
        tensors = [
            torch.empty(
                (size, *s.shape[1:]) if size and s.shape and s.shape[0] == self.size else s.shape,
                dtype=s.dtype,
                requires_grad=s.requires_grad,
            )
            for s in self._shapes
        ]
        (batch,), _ = self._arguments.rebuild(tensors)
        return batch
