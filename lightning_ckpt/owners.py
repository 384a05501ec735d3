"""Checkpointing that a model's owner has already turned on, so that no block is replayed twice."""

from collections.abc import Iterator

from torch import nn

# Flags that a model sets on itself or its parts: Hugging Face's `gradient_checkpointing_enable`, and timm's
# `set_grad_checkpointing`.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def owner_of(model: nn.Module, name: str) -> str | None:
    """What already checkpoints the block `name` of `model`, its parts or its parents, in words; `None` if nothing."""
    for where, module in _around(model, name):
        for flag in _FLAGS:
            if getattr(module, flag, False) is True:
                return f"{flag}=True{'' if where.startswith(name) else f' on {_quoted(where)}'}"
        # By name: PyTorch keeps the wrapper in a private module, and FairScale has one of the same name.
        if any(kind.__name__ == "CheckpointWrapper" for kind in type(module).__mro__):
            return f"a CheckpointWrapper{'' if where.startswith(name) else f' at {_quoted(where)}'}"
    return None


def _around(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The parents of a block from the root on, the block, and every part of it."""
    yield "", model
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        yield above, model.get_submodule(above)
    for below, module in model.get_submodule(name).named_modules():
        yield f"{name}.{below}".rstrip("."), module


def _quoted(name: str) -> str:
    return repr(name) if name else "the model itself"
