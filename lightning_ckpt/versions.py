"""How often a tensor was written to."""

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """The tensor's version. Inference tensors have none; nothing can write to them in training."""
    return -1 if tensor.is_inference() else tensor._version
