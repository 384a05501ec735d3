"""How large the batches of a step are: samples and tokens."""

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ckpt.callbacks import _trainer


class Sizes(NamedTuple):
    """What is known of a batch, taken before the step may change it, or of all batches of an optimizer step.

    Args:
        samples, tokens: how many; None when it can't be told.
        largest: the samples of the largest batch.
        batches: how many batches.
    """

    samples: int | None = None
    tokens: int | None = None
    largest: int | None = None
    batches: int = 1

    def units(self) -> int:
        """What FLOPs are scaled by: tokens, else samples, else batches."""
        return self.tokens or self.samples or self.batches


def sizes_of(batch: Any, batch_size_fn: Callable[[Any], int] | None, tokens_fn: Callable[[Any], int] | None) -> Sizes:
    """Measure a batch, by the user's functions where there are any."""
    samples = _trainer.samples_in(batch) if batch_size_fn is None else _whole("batch_size_fn", batch_size_fn(batch))
    tokens = _tokens_in(batch) if tokens_fn is None else _whole("tokens_fn", tokens_fn(batch))
    return Sizes(samples, tokens, samples)


def sizes_together(batches: Sequence[Sizes]) -> Sizes:
    """Return the sizes of an optimizer step, from those of its batches."""
    if len(batches) == 1:
        return batches[0]
    largest = max((batch.samples for batch in batches if batch.samples is not None), default=None)
    samples, tokens = _sum([batch.samples for batch in batches]), _sum([batch.tokens for batch in batches])
    return Sizes(samples, tokens, largest, len(batches))


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
