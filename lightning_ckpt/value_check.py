"""Every result of a replay against the forward's, bit for bit.

PyTorch compares shapes, dtypes and devices, and can't see another dropout mask. Here a dispatch mode in the forward and
one in the replay take a digest of each operator's results, on the device. Operators, shapes and modes are compared as
they come; the digests, once, when backward ends.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_ckpt._compat import (
    OpOverload,
    TorchDispatchMode,
    at_the_end_of_backward,
    backward_under_way,
    storage_id,
    without_modes,
)
from lightning_ckpt.witness import Witness

# Results that nobody wrote yet: any value is as good as another.
_UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
)
# Results that are a kernel's scratch memory, by their place.
_SCRATCH = {
    "aten.mkldnn_rnn_layer": 3,
    "aten._cudnn_rnn": 3,
    "aten.miopen_rnn": 3,
    "aten.cudnn_batch_norm": 3,
}
# On a CUDA device these add up in any order, as https://docs.pytorch.org/docs/stable/generated/
# torch.use_deterministic_algorithms.html lists them; those that only a backward runs are left out.
_ANY_ORDER = frozenset(
    f"aten.{name}"
    for name in (
        *("bincount", "cumsum", "cumsum_", "embedding_bag", "_embedding_bag", "histc", "put_"),
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"),
        *("index_put", "index_put_", "_index_put_impl_", "scatter_add", "scatter_add_", "scatter_reduce"),
    )
)
_CASTS = "autocast, or a dtype that the block decides on, differs"
# A digest's width. XOR alone can't see two results change places, or one value appear twice: these many lanes can.
_LANES = 64


# Stands among the operators for what autograd saves: a value may differ that no operator of a stopped replay shows.
_SAVED = "a tensor saved for backward"


class Differs(BaseException):
    """Ends a replay that differs. No `Exception`: the block's own handlers must not catch it."""


@dataclass(frozen=True)
class _Operator:
    """One operator call: what ran, whether gradients were recorded, and what it gave."""

    op: OpOverload | str
    gradients: bool
    kinds: tuple[tuple[torch.dtype, torch.Size], ...]


@dataclass
class _Trace:
    """The operators of one call of a block, with a digest of each one's results."""

    operators: list[_Operator] = field(default_factory=list)
    digests: list[Tensor] = field(default_factory=list)


class Comparisons:
    """The digests of replays that wait for the end of their backward pass, to be compared at once."""

    def __init__(self) -> None:
        # One backward pass may run inside another. The engine alone holds what waits for a pass, and lets it go with
        # one that fails.
        self._waiting: WeakValueDictionary[int, _Waiting] = WeakValueDictionary()

    def add(self, check: "ValueCheck") -> None:
        """Compare a check's digests when the running backward pass ends."""
        backward = backward_under_way()
        if backward == -1:
            return  # somebody looks at a saved tensor outside of a backward pass
        waiting = self._waiting.get(backward)
        if waiting is None:
            self._waiting[backward] = waiting = _Waiting()
            at_the_end_of_backward(waiting.compare)
        waiting.checks.append(check)


class _Waiting:
    """The checks that wait for one backward pass."""

    def __init__(self) -> None:
        self.checks: list[ValueCheck] = []

    def compare(self) -> None:
        checks = sorted(self.checks, key=lambda check: check.order)
        digests = [check.digests() for check in checks]
        different = [(then.to(now.device) != now).any(1) for then, now in digests]
        flags = torch.cat([flag.to(different[0].device) for flag in different]).cpu()  # the one synchronisation
        if flags.any():
            places = [
                (check, index) for check, flag in zip(checks, different, strict=True) for index in range(len(flag))
            ]
            check, index = places[int(flags.nonzero()[0])]
            raise check.error_of(index)


class ValueCheck:
    """The check of one call of one block.

    Args:
        name: the block's qualified name.
        block: the block.
        preserve_rng_state: whether its replay gets the random numbers of its forward.
        comparisons: where its digests wait.
        order: its place among the calls of the forward pass.
    """

    def __init__(
        self, name: str, block: nn.Module, preserve_rng_state: bool, comparisons: Comparisons, order: int
    ) -> None:
        self.order = order
        self._name = name
        self._block = block
        self._preserves = preserve_rng_state
        self._comparisons = comparisons
        self._then, self._now = _Trace(), _Trace()
        self._watch = _Watch(self._then, lambda operator: None)
        self._before = self._seen()
        self._after = self._before

    def forward(self) -> TorchDispatchMode:
        """The mode that watches the forward."""
        return self._watch

    def saves(self, tensor: Tensor) -> None:
        """Take note of a tensor that autograd saves, in the forward or in a replay."""
        self._watch.note_saved(tensor)

    def replay(self) -> TorchDispatchMode:
        """The mode that watches a replay and compares what can be compared without waiting for the device."""
        self._now = _Trace()
        with without_modes():
            self._after = self._seen()
        self._comparisons.add(self)
        self._watch = _Watch(self._now, self._follow)
        return self._watch

    def digests(self) -> tuple[Tensor, Tensor]:
        """Forward's and replay's, one row an operator, as far as the replay went."""
        count = len(self._now.digests)
        none = torch.empty(0, _LANES, dtype=torch.int64)
        return (torch.stack(self._then.digests[:count]), torch.stack(self._now.digests)) if count else (none, none)

    def error_of(self, index: int) -> CheckpointError:
        """The error for the operator at a place among those that ran."""
        return CheckpointError(self._text(index, "gave other values than in the forward"))

    def _seen(self) -> tuple[Witness, dict[str, Tensor]]:
        buffers = {name: _digest([buffer]) for name, buffer in self._block.named_buffers()}
        return Witness(self._block), buffers

    def _follow(self, operator: _Operator) -> None:
        index = len(self._now.operators)
        if index >= len(self._then.operators):
            raise self._differs(index - 1, f"was the forward's last, and the replay goes on with {operator.op}")
        expected = self._then.operators[index]
        if operator.op is not expected.op:
            casts = torch.ops.aten._to_copy.default in (operator.op, expected.op)
            raise self._differs(index, f"is {operator.op} in the replay", _CASTS if casts else None)
        if operator.gradients != expected.gradients:
            state = {True: "on", False: "off"}
            what = f"ran with gradients {state[expected.gradients]}, and its replay with gradients "
            raise self._differs(
                index, what + state[operator.gradients], "the block turns gradients on or off by a global"
            )
        if operator.kinds != expected.kinds:
            raise self._differs(
                index,
                f"gave {_listed(expected)}, and gives {_listed(operator)} now",
                self._of_kinds(operator, expected),
            )

    def _of_kinds(self, now: _Operator, then: _Operator) -> str | None:
        if [dtype for dtype, _ in now.kinds] != [dtype for dtype, _ in then.kinds]:
            return _CASTS
        if sum(shape.numel() for _, shape in now.kinds) > sum(shape.numel() for _, shape in then.kinds):
            return "something grew that the block keeps or was given, such as a key-value cache"
        return None

    def _differs(self, index: int, what: str, cause: str | None = None) -> Differs:
        with without_modes():  # the watch itself among them
            return Differs(self._text(index, what, cause))

    def _text(self, index: int, what: str, cause: str | None = None) -> str:
        operators = self._then.operators
        op = operators[index].op
        calls = Counter(operator.op for operator in operators[: index + 1])
        place = "" if isinstance(op, str) else f" and operator {calls.total() - calls[_SAVED]} of the block"
        unpreserved = isinstance(op, OpOverload) and _is_random(op) and not self._preserves
        likely = (None if unpreserved else self.visible_cause() or cause) or self._cause_of(op)
        return (
            f"The replay of block {self._name!r} ({type(self._block).__name__}) differs from its forward: {op}, "
            f"{'number' if isinstance(op, str) else 'call'} {calls[op]}{' of it' + place if place else ''}, {what}. "
            f"Likely cause: {likely}."
        )

    def visible_cause(self) -> str | None:
        """What can be seen to have changed between forward and the latest replay, in words."""
        (then, buffers), (now, later_buffers) = self._before, self._after
        if changed := then.changes(now):
            listed = ", ".join(f"{name!r} {change}" for name, change in changed.items())
            return f"an attribute changed between forward and replay: {listed}"
        moved = [
            name for name in buffers.keys() & later_buffers.keys() if not _same(buffers[name], later_buffers[name])
        ]
        return f"a buffer changed behind autograd's back: {', '.join(map(repr, moved))}" if moved else None

    def _cause_of(self, op: OpOverload | str) -> str:
        if isinstance(op, str):
            return (
                "a context that was entered around the forward and is not there in backward, such as a "
                "TorchFunctionMode, or a function compiled by torch.jit.script that runs for the first time"
            )
        if _is_random(op):
            if not self._preserves:
                return "random numbers are not preserved; leave preserve_rng_state on"
            return "it draws from a generator of its own, or the block seeds the global one"
        on_host = all(parameter.device.type == "cpu" for parameter in self._block.parameters())
        if torch.Tag.nondeterministic_bitwise in op.tags or (str(op.overloadpacket) in _ANY_ORDER and not on_host):
            return "the operator has no deterministic implementation; see torch.use_deterministic_algorithms"
        return "random numbers of Python or NumPy, or a global or an object that the block reads"


def _is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


class _Watch(TorchDispatchMode):
    """Writes down what runs, and a digest of what it gives."""

    def __init__(self, trace: _Trace, compare: Callable[[_Operator], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._compare = compare
        self._scratch: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and not _is_view(func):
            results, scratch = _apart(func, result)
            self._scratch.difference_update(map(storage_id, results))
            self._scratch.update(map(storage_id, scratch))
            if results or not scratch:
                self._note(func, results)
        return result

    def note_saved(self, tensor: Tensor) -> None:
        """Write down a tensor that autograd saves."""
        if type(tensor) is Tensor and storage_id(tensor) not in self._scratch:
            self._note(_SAVED, [tensor])

    def _note(self, op: OpOverload | str, results: list[Tensor]) -> None:
        operator = _Operator(op, torch.is_grad_enabled(), tuple((t.dtype, t.shape) for t in results))
        self._compare(operator)
        self._trace.operators.append(operator)
        with without_modes():  # what it takes to make a digest is none of the block's
            self._trace.digests.append(_digest(results))


@cache
def _is_view(op: OpOverload) -> bool:
    """Whether an operator's result is a view of something seen before."""
    views = [result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns]
    return bool(views) and all(views)


def _apart(op: OpOverload, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """An operator's results, and what among them is memory that nobody has written to, or scratch."""
    name = str(op.overloadpacket)
    if name in _UNINITIALISED:
        return [], list(_tensors(result))
    if name not in _SCRATCH:
        return list(_tensors(result)), []
    place = _SCRATCH[name]
    return list(_tensors((*result[:place], *result[place + 1 :]))), list(_tensors(result[place]))


def _tensors(result: Any) -> Iterator[Tensor]:
    """The plain tensors among an operator's results; wrappers such as DTensor run operators of their own."""
    if type(result) in (Tensor, nn.Parameter, nn.Buffer):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)


@torch.no_grad()
def _digest(tensors: list[Tensor]) -> Tensor:
    """A digest of values, of shape (64,), on their device, without waiting for it."""
    digests = [_lanes(tensor) for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    if not digests:
        return torch.zeros(_LANES, dtype=torch.int64)
    total = digests[0]
    for digest in digests[1:]:
        total = total * 31 + digest
    return total


def _lanes(tensor: Tensor) -> Tensor:
    """XOR of every 64th value, for each of the 64 positions, as 64-bit patterns."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.view(torch.uint8) if values.is_floating_point() and values.element_size() == 1 else values
    values = values.reshape(-1)
    whole = len(values) // _LANES * _LANES
    rest = values[whole:].double().view(torch.int64)
    lanes = torch.nn.functional.pad(rest, (0, _LANES - len(rest)))
    if whole:
        lanes = lanes * 31 + torch.hash_tensor(values[:whole].view(-1, _LANES), dim=0).view(torch.int64)
    return lanes


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())


def _listed(operator: _Operator) -> str:
    return ", ".join(f"{dtype} of shape {tuple(shape)}" for dtype, shape in operator.kinds) or "nothing"
