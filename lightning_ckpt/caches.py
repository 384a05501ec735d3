"""Key-value caches, which a language model in training fills for nobody: off where blocks are checkpointed."""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from lightning_ckpt.processes import is_first_rank

_log = logging.getLogger(__name__)

# What Hugging Face's models call a cache that their caller brings, old and new names.
_BROUGHT = ("cache", "past_key_values", "cache_params", "past_key_value", "layer_past", "mems")


def caching_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model whose configuration has `use_cache` on and whose forward takes it, by qualified name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "config", None), "use_cache", False) is True and _place(module) is not None
    }


def trained_caching_parts(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Those of a model's caching parts that hold one of the checkpointed `blocks`, given by qualified names."""
    names = list(blocks)
    parts = caching_parts(model)
    return {part: module for part, module in parts.items() if any(_within(name, part) for name in names)}


def outermost(parts: Iterable[str]) -> list[str]:
    """Those of some qualified names that lie within no other of them."""
    names = list(parts)
    return [name for name in names if not any(_within(name, other) for other in names)]


def turn_caches_off(model: nn.Module, blocks: Iterable[str]) -> Callable[[], None]:
    """Let a model whose `blocks` are checkpointed fill no cache in training; return what undoes it.

    A cache in training keeps every layer's keys and values, for nobody to read. The configuration is the user's, and is
    saved with the model: it stays as it is. Instead `use_cache=False` is put into calls that record gradients, unless
    the caller says otherwise or brings a cache.
    """
    parts = trained_caching_parts(model, blocks)
    hooks = [
        module.register_forward_pre_hook(partial(_without_cache, place), with_kwargs=True)
        for module in parts.values()
        if (place := _place(module)) is not None
    ]
    if parts and is_first_rank():
        _tell(", ".join(repr(name) if name else "the model" for name in outermost(parts)))

    def undo() -> None:
        while hooks:
            hooks.pop().remove()

    return undo


@cache
def _tell(where: str) -> None:
    """Say it once, however often a run puts its checkpointing in place."""
    _log.warning(
        "use_cache is on in %s: turned off in training while blocks are checkpointed; the configuration stays as it "
        "is, and use_cache=True in a call is obeyed",
        where,
    )


def _within(name: str, outer: str) -> bool:
    """Whether a qualified name lies within another; the model's own is empty."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _place(module: nn.Module) -> int | None:
    """The place of `use_cache` among the arguments of a forward."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("use_cache") if "use_cache" in names else None


def _without_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before a forward; no closure, so that copies of the model can be made and saved."""
    asked = len(args) > place or kwargs.get("use_cache") is not None
    if asked or not torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in _BROUGHT):
        return None
    return args, {**kwargs, "use_cache": False}
