"""The simple attributes of a block, as they are at one moment: what a replay can't put back, only tell of."""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.versions import version_of

# Kinds of attributes that are cheap to look at. Others, such as lists and objects, go unseen.
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class _Held:
    """A tensor on a module, by its identity and version; held weakly, since it may hold the graph that holds this."""

    tensor: weakref.ref[Tensor]
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.tensor() is other.tensor() and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


class Witness:
    """The numbers, flags, texts and tensors among the attributes of a block and its parts, by qualified name."""

    def __init__(self, block: nn.Module) -> None:
        self._seen: dict[str, Any] = {
            f"{below}.{name}".lstrip("."): _Held(weakref.ref(value), version_of(value))
            if isinstance(value, Tensor)
            else value
            for below, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, (*_SIMPLE, Tensor))
        }

    def changes(self, later: "Witness") -> dict[str, str]:
        """The attributes that differ in `later`, each with what became of it, in words."""
        then, now = self._seen, later._seen
        names = sorted(then.keys() | now.keys())
        return {name: _words(then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)}


def _words(then: Any, now: Any) -> str:
    if isinstance(then, _Held) and isinstance(now, _Held):
        return "written to in place" if then.tensor() is now.tensor() else "from one tensor to another"
    return f"from {_word(then)} to {_word(now)}"


def _word(value: Any) -> str:
    return "a tensor" if isinstance(value, _Held) else "nothing" if value is None else repr(value)
