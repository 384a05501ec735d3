"""Bytes that tensors hold: unique memory, of sharded tensors the shard that is here."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_ckpt._compat import storage_id


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """The memory behind these tensors, each once."""
    here = with_memory(map(local, tensors))
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in here}.values())


def local(tensor: Tensor) -> Tensor:
    """A sharded tensor's own shard, any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of one piece."""
    return tensor.layout is torch.strided and not is_lazy(tensor)


def with_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have memory of one piece; sparse, jagged and lazy ones are not counted anywhere."""
    return [tensor for tensor in tensors if has_memory(tensor)]


def tensors_of(value: Any) -> Iterable[Tensor]:
    """The tensors in nested mappings, lists and tuples, such as an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
