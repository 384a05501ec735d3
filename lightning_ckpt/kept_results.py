"""Results of expensive operators, kept in the forward and given again in the replay.

The scheme of PyTorch's `create_selective_checkpoint_contexts`, with four differences: only the operators that may be
kept are counted, so that a cast which autocast cached outside of the block is no mismatch; a result that the block
overwrites is replayed instead of being wrong; a kept random operator leaves the random numbers as it left them in the
forward; and a second backward pass replays what the first has used up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_ckpt._compat import OpOverload, TorchDispatchMode, storage_id


@dataclass
class _Kept:
    """One operator call's result, and the random state that it left; no result where it is to be replayed."""

    result: Any = None
    memory: frozenset[int] = frozenset()
    random_state: "_RandomState | None" = None


class KeptResults:
    """What one call of a block keeps.

    Args:
        keep: for an operator that runs: whether to keep its result, or `None` for one that is never kept.
    """

    def __init__(self, keep: Callable[[Any], bool | None]) -> None:
        self._keep = keep
        self._calls: defaultdict[Any, list[_Kept]] = defaultdict(list)

    def forward(self) -> TorchDispatchMode:
        """The mode around the forward."""
        return _Keeping(self._note, self._kept)

    def replay(self) -> TorchDispatchMode:
        """The mode around one replay."""
        counts: defaultdict[Any, int] = defaultdict(int)
        return _Giving(lambda op: self._take(op, counts))

    def _kept(self) -> Iterator[Tensor]:
        return tensors_in([kept.result for calls in self._calls.values() for kept in calls])

    def _note(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if _written_places(op):
            self._forget_overwritten(op, args, kwargs)
        keep = self._keep(op)
        if keep is None:
            return
        kept = _Kept()
        if keep:
            kept.result = _detached(result)
            kept.memory = frozenset(map(storage_id, tensors_in(result)))
            kept.random_state = _RandomState(tensors_in(result)) if _is_random(op) else None
        self._calls[op].append(kept)

    def _take(self, op: Any, counts: defaultdict[Any, int]) -> _Kept | None:
        calls, index = self._calls.get(op, []), counts[op]
        counts[op] += 1
        if index >= len(calls) or calls[index].result is None:
            return None
        kept, calls[index] = calls[index], _Kept()
        return kept

    def _forget_overwritten(self, op: Any, args: Any, kwargs: Any) -> None:
        """Forget the kept results that an operator writes into.

        Told by memory, not by the tensors' versions: a GRU on the CPU overwrites parts of a result that share its
        memory and not its version.
        """
        memory = frozenset(map(storage_id, written(op, args, kwargs)))
        for kept in (kept for calls in self._calls.values() for kept in calls):
            if not kept.memory.isdisjoint(memory):
                kept.result, kept.memory = None, frozenset()


class _Keeping(TorchDispatchMode):
    def __init__(self, note: Callable[[Any, Any, Any, Any], None], kept: Callable[[], Iterator[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self.kept = note, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result


class _Giving(TorchDispatchMode):
    def __init__(self, take: Callable[[Any], _Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._take(func)
        if kept is None:
            return func(*args, **(kwargs or {}))
        if kept.random_state:
            kept.random_state.restore()
        return kept.result


class _RandomState:
    """The random numbers that come next, on the host and on the devices of some tensors."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        on_device = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        self._host = torch.get_rng_state()
        self._kind = on_device[0].device.type if on_device else None
        self._devices, self._states = get_device_states(*on_device) if on_device else ([], [])

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._kind:
            set_device_states(self._devices, self._states, device_type=self._kind)


def kept_by(context: object) -> Iterator[Tensor]:
    """The results kept so far by what is around a forward; none where it is no mode that keeps any."""
    return context.kept() if isinstance(context, _Keeping) else iter(())


def _is_random(op: Any) -> bool:
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def written(op: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors whose values an operator changes in place."""
    for index, name in _written_places(op):
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))


@cache
def _written_places(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to: asked of every operator that runs, and of few kinds."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return ()  # the last kind (`squeeze_`) changes a tensor's shape and none of its values
    given = enumerate(schema.arguments)
    return tuple((index, one.name) for index, one in given if one.alias_info is not None and one.alias_info.is_write)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, or of its result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def _detached(result: Any) -> Any:
    """The result apart from its place in the graph, in the same memory."""
    if isinstance(result, Tensor):
        return result.detach()
    return type(result)(map(_detached, result)) if isinstance(result, list | tuple) else result
