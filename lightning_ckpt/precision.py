"""Precisions by Lightning's names, for a step that runs without a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_TRUE = {"64-true": torch.float64, "32-true": None, "16-true": torch.float16, "bf16-true": torch.bfloat16}
_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """What a precision does to a step.

    Attributes:
        name: Lightning's name, `"bf16-mixed"`.
        dtype: what the model and the floating-point tensors of its batches are converted to; `None` to leave them.
        autocast: what autocast computes in during the forward pass; `None` for no autocast.
    """

    name: str
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @contextmanager
    def forward(self, *, cache: bool) -> Iterator[None]:
        """Run a forward pass in this precision on the host, and nothing else: backward is outside, as in Lightning.

        Args:
            cache: whether autocast keeps the weights that it has cast until the end. Lightning switches that off.
        """
        if self.autocast:
            with torch.autocast("cpu", dtype=self.autocast, cache_enabled=cache):
                yield
            return
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.dtype or before)
            yield
        finally:
            torch.set_default_dtype(before)


def resolve_precision(name: str | int) -> Precision:
    """The precision that one of Lightning's names stands for; `"32-true"` leaves a model as it is.

    Raises:
        ValueError: no such precision.
    """
    known = _ALIASES.get(str(name), str(name))
    if known not in {*_TRUE, *_MIXED}:
        accepted = ", ".join(map(repr, (*_TRUE, *_MIXED)))
        raise ValueError(f"precision={name!r}: accepted are {accepted}")
    return Precision(known, _TRUE.get(known), _MIXED.get(known))
