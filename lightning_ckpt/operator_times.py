"""The operator calls of a block's replay: bytes of each one's result, and the time to run it again."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_ckpt._compat import OpOverload, StorageWeakRef, TorchDispatchMode, storage_id
from lightning_ckpt.checkpointed_forward import Call
from lightning_ckpt.held import with_memory
from lightning_ckpt.kept_results import tensors_in, written
from lightning_ckpt.measured_replay import median_seconds, replay_alone, seconds_of
from lightning_ckpt.planning import frontier
from lightning_ckpt.policies import keeping_calls
from lightning_ckpt.profiles import OperatorCall, SelectionProfile

_REPLAYS = 3
# Operators whose results are never kept apart: casts, of which autocast may have one in its cache at one time and none
# at another.
_NOT_KEPT = ("aten._to_copy",)


def operator_calls(call: Call, tensors: Sequence[Tensor], wanted: int, seconds: float) -> tuple[OperatorCall, ...]:
    """The operator calls of a replay whose results could be kept.

    Each is timed by itself, which takes longer than all of them in a row: their times are shares of the replay's.

    Args:
        call: the call that is replayed.
        tensors: its inputs.
        wanted: the number of tensors that its replay saves.
        seconds: the time of its replay.
    """
    clocks = [_Clock(tensors) for _ in range(_REPLAYS)]
    for clock in clocks:
        saved = set(map(storage_id, with_memory(replay_alone(call, tensors, wanted, clock))))
    times = zip(*([one.seconds for one in clock.calls] for clock in clocks), strict=False)
    timed = [statistics.median(one) for one in times]
    share = min(1.0, seconds / sum(timed)) if sum(timed) else 1.0
    return tuple(
        OperatorCall(one.name, one.nbytes, not saved.isdisjoint(ref.cdata for ref in one.made), time * share)
        for one, time in zip(clocks[-1].calls, timed, strict=False)
        if one.made and one.nbytes
    )


def selections(
    call: Call, tensors: Sequence[Tensor], plain: float, seconds: float, operators: Sequence[OperatorCall]
) -> Iterator[SelectionProfile]:
    """Sets of operator calls worth keeping, each timed as it would run.

    A difference of two times may be less than what is left to replay, by chance: the larger of the two counts.

    Args:
        call: the call that is replayed.
        tensors: its inputs.
        plain: the time of a forward without checkpointing.
        seconds: the time that replaying all of it adds.
        operators: its operator calls, timed.
    """
    for indices in frontier([(operator.nbytes, operator.seconds) for operator in operators]):
        kept = [operators[index] for index in sorted(indices)]
        names = tuple(operator.name for operator in kept)
        rehearsed = median_seconds(partial(call.rehearse, tensors, keeping_calls(names)), tensors)
        left = seconds - sum(operator.seconds for operator in kept)
        nbytes = sum(operator.nbytes for operator in kept)
        beside = sum(operator.nbytes for operator in kept if not operator.saved)
        yield SelectionProfile(names, nbytes, beside, max(left, rehearsed - plain, 0.0))


@dataclass
class _TimedCall:
    name: str
    seconds: float
    made: list[StorageWeakRef]
    nbytes: int


class _Clock(TorchDispatchMode):
    """Times every operator call, and notes the memory that it makes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_TimedCall] = []
        self._counts: Counter[Any] = Counter()
        self._known = set(map(storage_id, with_memory(tensors)))
        self._makers: dict[int, _TimedCall] = {}
        self._tensors = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results: list[Any] = []
        seconds = seconds_of(lambda: results.append(func(*args, **(kwargs or {}))), self._tensors)
        self._note(func, args, kwargs or {}, results[0], seconds)
        return results[0]

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        for tensor in with_memory(written(func, args, kwargs)):
            if overwritten := self._makers.get(storage_id(tensor)):
                overwritten.made.clear()  # a result that is overwritten can't be kept
        given = set(map(storage_id, with_memory(tensors_in((args, tuple(kwargs.values()))))))
        storages = {storage_id(tensor): tensor.untyped_storage() for tensor in with_memory(tensors_in(result))}
        fresh = {key: storage for key, storage in storages.items() if key not in given | self._known}
        keeps = isinstance(func, OpOverload) and str(func.overloadpacket) not in _NOT_KEPT
        made = [StorageWeakRef(storage) for storage in fresh.values() if keeps]
        nbytes = sum(storage.nbytes() for storage in fresh.values())
        self.calls.append(_TimedCall(f"{func}#{self._counts[func]}", seconds, made, nbytes))
        self._makers.update(dict.fromkeys(fresh, self.calls[-1]))
        self._counts[func] += 1
