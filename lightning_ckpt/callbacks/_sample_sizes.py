"""How large a sample or a batch is, before anything is computed of it."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor


def size_of(sample: object) -> int:
    """How large a sample is: the elements of its tensors and arrays, the length of its texts and lists, together."""
    return sum(size for size, _ in _parts(sample, set()))


def elements_of(batch: object) -> int:
    """The elements of the tensors in a batch; of one without tensors, its size."""
    parts = list(_parts(batch, set()))
    return sum(size for size, is_tensor in parts if is_tensor) or sum(size for size, _ in parts)


def _parts(value: Any, seen: set[int]) -> Iterator[tuple[int, bool]]:
    """The size of each thing in a value, and whether it is a tensor or array."""
    if isinstance(value, Tensor | np.ndarray):
        yield (value.numel() if isinstance(value, Tensor) else value.size), True
    elif isinstance(value, str | bytes) or _is_of_numbers(value):
        yield len(value), False
    elif (inner := _inner(value)) is None:
        yield 1, False
    elif id(value) not in seen:
        seen.add(id(value))  # an object may hold itself
        for each in inner:
            yield from _parts(each, seen)


def _is_of_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and isinstance(next(iter(value), None), int | float)


def _inner(value: Any) -> Iterable[Any] | None:
    """What a container, or an object by its attributes, is made of; None for anything else."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else None
