"""Whether a block speaks to other ranks while it runs, as synchronised norms and routed experts do.

All ranks must do that in one order. Which blocks share a replay is decided call by call, by what a model does between
two blocks, and that may differ from rank to rank: so a block that speaks shares its replay with none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_ckpt._compat import TorchDispatchMode, is_compiled


class Speakers:
    """Which blocks speak to other ranks, learned in the first forward of each, in training and in evaluation mode."""

    def __init__(self) -> None:
        self._speaks: dict[tuple[str, tuple[bool, ...]], bool] = {}

    def why_alone(self, name: str, block: nn.Module) -> str | None:
        """Why a block is to share its replay with none, in words; "" before that is known, `None` where it may."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        speaks = self._speaks.get((name, _modes(block)))
        if speaks is None and any(map(is_compiled, block.modules())):
            return "part of it is compiled, where nobody hears whether it speaks to other ranks"
        if speaks is None:
            return ""
        return "it speaks to other ranks, which may join other blocks" if speaks else None

    @contextmanager
    def listening_to(self, name: str, block: nn.Module) -> Iterator[None]:
        """Run the named block's forward and listen, where that is not known yet."""
        if self.why_alone(name, block) != "":
            yield
            return
        with _Listening() as listening:
            yield
        self._speaks[name, _modes(block)] = listening.heard


def _modes(block: nn.Module) -> tuple[bool, ...]:
    """Which parts are in training mode: a synchronised norm speaks in that alone."""
    return tuple(module.training for module in block.modules())


class _Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # comes back as the operators and collectives that it stands for
        run: Callable[..., Any] = func
        self.heard = self.heard or "c10d" in func.namespace or func.namespace in ("_dtensor", "symm_mem")
        return run(*args, **(kwargs or {}))
