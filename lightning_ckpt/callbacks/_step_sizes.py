"""How large the batches of a step are: samples and tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

from torch import Tensor

from lightning_ckpt.callbacks import _trainer


@dataclass(frozen=True)
class BatchSizes:
    """What is known of a batch, taken before the step may change it; a part is None when it can't be told."""

    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class StepSizes:
    """The batches of one optimizer step."""

    batches: tuple[BatchSizes, ...]

    @cached_property
    def samples(self) -> int | None:
        return _sum([batch.samples for batch in self.batches])

    @cached_property
    def tokens(self) -> int | None:
        return _sum([batch.tokens for batch in self.batches])

    @cached_property
    def largest(self) -> int | None:
        known = [batch.samples for batch in self.batches if batch.samples is not None]
        return max(known, default=None)

    def units(self) -> int:
        """What FLOPs are scaled by: tokens, else samples, else batches."""
        return self.tokens or self.samples or len(self.batches) or 1


def sizes_of(
    batch: Any, batch_size_fn: Callable[[Any], int] | None, tokens_fn: Callable[[Any], int] | None
) -> BatchSizes:
    """Measure a batch, by the user's functions where there are any."""
    samples = _trainer.samples_in(batch) if batch_size_fn is None else _whole("batch_size_fn", batch_size_fn(batch))
    tokens = _tokens_in(batch) if tokens_fn is None else _whole("tokens_fn", tokens_fn(batch))
    return BatchSizes(samples, tokens)


def _tokens_in(batch: Any) -> int | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", None)
    return ids.numel() if isinstance(ids, Tensor) else None


def _sum(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(number for number in numbers if number is not None)


def _whole(name: str, value: Any) -> int:
    """Return what a user's function returned, as the count it has to be."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} returned {value!r}; it has to return a whole number, 0 or more, for each batch")
    return number
