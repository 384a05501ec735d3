"""Checkpointing that a model's owner has turned on: found, so that no block is replayed twice, or turned off."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from lightning_ckpt._compat import composable_checkpoint

Existing = Literal["keep", "replace"]

# Flags that a model sets on itself or its parts: Hugging Face's `gradient_checkpointing_enable`, and timm's
# `set_grad_checkpointing`.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def check_existing(existing: str) -> None:
    """Refuse what is no way with existing checkpointing.

    Raises:
        ValueError: it is none.
    """
    if existing not in get_args(Existing):
        raise ValueError(f"existing={existing!r}: accepted are {', '.join(map(repr, get_args(Existing)))}")


@dataclass(frozen=True)
class Owner:
    """What already checkpoints a block, its parts or its parents.

    Attributes:
        words: what it is and where.
        holder: the object with the attribute that turns it off; `None` where no such is known.
        switch: the name of the attribute.
        off: its value while nothing is checkpointed.
    """

    words: str
    holder: Any = None
    switch: str = ""
    off: Any = False


def owners_of(model: nn.Module, name: str) -> Iterator[Owner]:
    """What already checkpoints the block `name` of `model`, its parts or its parents, from the root on."""
    for where, module in _around(model, name):
        inside = where.startswith(name)
        for flag in _FLAGS:
            if getattr(module, flag, False) is True:
                yield Owner(f"{flag}=True{'' if inside else f' on {_quoted(where)}'}", module, flag)
        at = "" if inside else f" at {_quoted(where)}"
        # By name: PyTorch keeps the wrapper in a private module, and FairScale has one of the same name.
        if any(kind.__name__ == "CheckpointWrapper" for kind in type(module).__mro__):
            how = vars(module).get("checkpoint_fn")
            if how is None:
                yield Owner(f"a CheckpointWrapper of {type(module).__module__}{at}")
            elif how is not _straight:
                yield Owner(f"a CheckpointWrapper{at}", module, "checkpoint_fn", _straight)
        state = composable_checkpoint(module)
        if state is not None and state.enable_hook:
            yield Owner(f"torch.distributed._composable.checkpoint{at}", state, "enable_hook")


def owner_of(model: nn.Module, name: str, existing: Existing = "keep") -> str | None:
    """What goes on to checkpoint the block `name` of `model`, in words; `None` if nothing.

    Under `"replace"` that is what can't be turned off.
    """
    owners = owners_of(model, name)
    return next((owner.words for owner in owners if existing == "keep" or owner.holder is None), None)


def turn_owners_off(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Turn off what already checkpoints these blocks, their parts and their parents; return what turns it on again."""
    found: list[tuple[Any, str, Any]] = []
    for name in names:
        for owner in list(owners_of(model, name)):
            if owner.holder is not None:
                found.append((owner.holder, owner.switch, getattr(owner.holder, owner.switch)))
                setattr(owner.holder, owner.switch, owner.off)

    def undo() -> None:
        while found:
            setattr(*found.pop())

    return undo


def _straight(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for the function that a `CheckpointWrapper` checkpoints with: call what it wraps."""
    return module(*args, **kwargs)


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
