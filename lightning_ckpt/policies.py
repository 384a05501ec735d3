"""What a checkpointed block recomputes and what it keeps: policies as frozen values."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import count
from math import sqrt
from typing import Any, Literal, TypeAlias

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_ckpt._compat import OpOverload, OpOverloadPacket
from lightning_ckpt.kept_results import KeptResults
from lightning_ckpt.operators import COMPUTE, MATMULS, PRESETS, Operator, resolve, resolve_all
from lightning_ckpt.sizes import parse_size

_log = logging.getLogger(__name__)

Contexts: TypeAlias = tuple[AbstractContextManager[Any], Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Full:
    """Recompute whole blocks: the least memory, for one more forward pass of each block.

    A block keeps its inputs and nothing else; everything inside is replayed when backward reaches it. `every` and
    `select` leave some blocks alone: choose one of the two.

    Args:
        every: checkpoint one block in `every`, in the order in which the model holds them: 2 takes blocks 0, 2, 4, ...
        segment_size: how many blocks one replay spans; only the first one's inputs are kept. `"sqrt"` takes the square
            root of their number. Blocks are joined where one takes the result of the one before as it is. Long segments
            pay only where a block's inputs are large against what it keeps inside, as in thin, deep chains: their
            replay holds the activations of all their blocks at once.
        select: which blocks, counted from 0: `"first-4"`, `"last-4"`, `"middle-4"`, `"range-2-9"` (both ends included),
            the indices themselves (negative ones count from the end), or a number of blocks to spread evenly. A spread
            leaves the last block out first: its replay comes at once, so keeping it whole costs the peak least.

    Raises:
        ValueError: an argument is out of range, or both are given. An index that the model does not have is only seen
            when the policy is applied: `choose` raises it.
    """

    every: int = 1
    segment_size: int | Literal["sqrt"] = 1
    select: str | int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.every):
            raise ValueError(f"Full(every={self.every!r}): accepted is a whole number of at least 1")
        if self.segment_size != "sqrt" and not _is_count(self.segment_size):
            raise ValueError(
                f'Full(segment_size={self.segment_size!r}): accepted are a whole number of at least 1, and "sqrt"'
            )
        if self.every != 1 and self.segment_size != 1:
            raise ValueError(
                f"Full(every={self.every}, segment_size={self.segment_size!r}): blocks left alone in between leave no "
                "neighbours to join; give one of the two"
            )
        if self.select is None:
            return
        if self.every != 1:
            raise ValueError(
                f"Full(every={self.every}, select={self.select!r}): both choose blocks; give one of the two"
            )
        if isinstance(self.select, str):
            _parse_range(self.select)
        elif isinstance(self.select, Sequence):
            if not self.select or not all(isinstance(i, int) and not isinstance(i, bool) for i in self.select):
                raise ValueError(f"Full(select={self.select!r}): accepted is a list of block indices, at least one")
            object.__setattr__(self, "select", tuple(self.select))
        elif not _is_count(self.select):
            raise ValueError(f"Full(select={self.select!r}): {_SELECT_ACCEPTS}")

    def __str__(self) -> str:
        return _short(self)

    def choose(self, count: int) -> list[int]:
        """Indices of the blocks to checkpoint among `count` blocks, rising.

        Raises:
            ValueError: `select` names a block that `count` blocks do not have.
        """
        if self.select is None:
            return list(range(0, count, self.every))
        if isinstance(self.select, str):
            chosen = _indices_of_range(self.select, count)
        elif isinstance(self.select, int):
            wanted = self.select
            chosen = [i * count // wanted for i in range(wanted)] if wanted <= count else [count]
        else:
            chosen = sorted({i + count if i < 0 else i for i in self.select})
        if not chosen or chosen[0] < 0 or chosen[-1] >= count:
            raise ValueError(
                f"Full(select={self.select!r}): the model has {count} blocks, counted from 0 to {count - 1}"
            )
        return chosen

    def span(self, chosen: int) -> int:
        """How many blocks a segment takes at most, of `chosen` checkpointed ones (Chen et al. 2016, section 4.1)."""
        return max(1, round(sqrt(chosen))) if self.segment_size == "sqrt" else self.segment_size

    def contexts(self) -> "ReplayContexts":
        """Nothing around forward or replay: everything in the block is replayed."""
        return ReplayContexts()


@dataclass(frozen=True)
class SelectiveOps:
    """Recompute the cheap operators of a block and keep the results of the expensive ones.

    Most of a block's replay time goes into a few operators; keeping their results costs memory, and what remains to be
    replayed is nearly free. A kept result is a result even where autograd would not have saved it, so on blocks that
    are mostly matrix products this can keep more than no checkpointing at all: compare the measured peaks.
    A kept result is freed as it is used: a second backward over a retained graph replays the block whole.

    Args:
        save: the operators to keep, by the name of a preset or as a list.

            - `"compute"`: matrix products, convolutions, attention kernels, collectives, top-k.
            - `"attention"`: the attention kernel of whichever backend runs, and collectives.
            - `"every_other_matmul"`: as `"compute"`, with every second matrix product replayed.
            - a list of operators: `"aten.mm"` (every overload), `"aten.mm.default"`, or the objects themselves
              (`torch.ops.aten.mm`). A listed operator that never ran is said, once, in the log.

    Raises:
        ValueError: an unknown preset or operator, or an empty list.
    """

    save: Operator | Sequence[Operator] = "compute"

    def __post_init__(self) -> None:
        if isinstance(self.save, str) and self.save not in PRESETS and "." not in self.save:
            raise ValueError(
                f"SelectiveOps(save={self.save!r}): accepted are the presets {', '.join(map(repr, PRESETS))}, "
                'an operator such as "aten.mm", or a list of operators'
            )
        if isinstance(self.save, OpOverload | OpOverloadPacket):
            object.__setattr__(self, "save", str(self.save))
        if not isinstance(self.save, str | Iterable) or not self.save:
            raise ValueError(
                f"SelectiveOps(save={self.save!r}): accepted are a preset, an operator, and a list of at least one"
            )
        self._listed()
        if not isinstance(self.save, str):
            # By name: names compare, pickle and go into a run's config; `str` of an operator is its name.
            object.__setattr__(self, "save", tuple(map(str, self.save)))

    def __str__(self) -> str:
        return _short(self)

    def choose(self, count: int) -> list[int]:
        """Indices of the blocks to checkpoint among `count` blocks: all of them."""
        return list(range(count))

    def span(self, chosen: int) -> int:
        """How many blocks a segment takes at most: one."""
        return 1

    def contexts(self) -> "ReplayContexts":
        """What keeps the listed operators' results in one application of the policy."""
        listed = self._listed()
        kept = frozenset().union(*listed.values())
        thinned = resolve_all(MATMULS) if self.save == "every_other_matmul" else frozenset()
        ran: set[Any] = set()

        def choice() -> Callable[[Any], bool | None]:
            products = count(1)

            def keep(op: Any) -> bool | None:
                ran.add(op)
                if op not in kept:
                    return None
                return op not in thinned or next(products) % 2 == 1

            return keep

        def make() -> Contexts:
            results = KeptResults(choice())
            return results.forward(), results.replay

        def make_compiled() -> Any:
            keep = choice()

            def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                return CheckpointPolicy.MUST_SAVE if keep(op) else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        said = False

        def say_what_never_ran() -> None:
            nonlocal said
            if said:
                return
            said = True
            unused = [name for name, overloads in listed.items() if name and overloads.isdisjoint(ran)]
            if unused:
                expensive = sorted(str(op) for op in ran & resolve_all(COMPUTE))
                _log.warning(
                    "SelectiveOps keeps the results of %s, which never ran in the checkpointed blocks. "
                    "Expensive operators that did run: %s",
                    ", ".join(unused),
                    ", ".join(expensive) or "none",
                )

        return ReplayContexts(make, make_compiled, say_what_never_ran)

    def _listed(self) -> dict[str, frozenset[OpOverload]]:
        """The overloads to keep, by the name the user gave; a preset has no names, only what this PyTorch knows."""
        if isinstance(self.save, str) and self.save in PRESETS:
            return {"": resolve_all(PRESETS[self.save])}
        one = isinstance(self.save, str | OpOverload | OpOverloadPacket)
        operators: Iterable[Any] = (self.save,) if one else self.save  # type: ignore[assignment]
        return {str(operator): resolve(operator) for operator in operators}


@dataclass(frozen=True)
class MemoryBudget:
    """Recompute only what a memory budget asks, on measurement: the least replay time that meets it.

    Everything is checkpointed at first, which fits if anything does. The first steps measure what each block keeps and
    how long its replay takes, and give memory back where it buys the most time, until the budget is used.

    Args:
        budget: the highest peak of a training step: a fraction of the memory that the device has for this process,
            above 0 and up to 1.0, or a size: `"40GiB"`, or a whole number of bytes.

    Raises:
        ValueError: neither a fraction nor a size.
    """

    budget: float | int | str = 0.9

    def __post_init__(self) -> None:
        if isinstance(self.budget, float) and 0 < self.budget <= 1:
            return
        try:
            if isinstance(self.budget, float) or (isinstance(self.budget, int) and self.budget < 2**10):
                raise ValueError("")  # 1 and 40 are no bytes: 1.0 and "40GiB" are meant
            parse_size(self.budget)
        except ValueError as error:
            _, _, near = str(error).partition("; ")
            raise ValueError(
                f"MemoryBudget(budget={self.budget!r}): accepted are a fraction of the device's memory, above 0 and up "
                'to 1.0, and a size: "40GiB", or a whole number of bytes, at least a KiB'
                f"{near and f'; {near}'}"
            ) from None

    def __str__(self) -> str:
        return _short(self)

    def nbytes(self, limit: int | None) -> int:
        """The budget in bytes, where the process can hold `limit`.

        Raises:
            ValueError: a fraction of a limit that nobody knows.
        """
        if not isinstance(self.budget, float):
            return parse_size(self.budget)
        if limit is None:
            raise ValueError(
                f"{self}: a fraction of a memory that this device does not tell; give a size, MemoryBudget('40GiB')"
            )
        return int(limit * self.budget)

    def choose(self, count: int) -> list[int]:
        """Indices of the blocks to checkpoint among `count` blocks: all of them, until a plan says otherwise."""
        return list(range(count))

    def span(self, chosen: int) -> int:
        """How many blocks a segment takes at most: one."""
        return 1

    def contexts(self) -> "ReplayContexts":
        """Nothing around forward or replay, until a plan says otherwise."""
        return ReplayContexts()


def keeping_calls(calls: Iterable[str]) -> "ReplayContexts":
    """Keep the results of single operator calls: `"aten.mm.default#1"` is the second `mm` of a block's forward."""
    wanted: defaultdict[Any, set[int]] = defaultdict(set)
    for call in calls:
        name, _, place = call.partition("#")
        for overload in resolve(name):
            wanted[overload].add(int(place))

    def make() -> Contexts:
        counts: Counter[Any] = Counter()

        def keep(op: Any) -> bool | None:
            if op not in wanted:
                return None
            counts[op] += 1
            return counts[op] - 1 in wanted[op]

        results = KeptResults(keep)
        return results.forward(), results.replay

    return ReplayContexts(make)


@dataclass(frozen=True)
class ReplayContexts:
    """What a policy puts around the calls of its blocks.

    Args:
        make: gives, for one call, the context around its forward, and what makes one around each of its replays.
        make_compiled: what `torch.utils.checkpoint` takes as `context_fn`, for the compiler; `None` for nothing.
        on_replay: called when a block is about to be replayed; the first time, the forward pass is over.
    """

    make: Callable[[], Contexts] = lambda: (nullcontext(), nullcontext)
    make_compiled: Callable[[], Any] | None = None
    on_replay: Callable[[], None] = lambda: None


Policy: TypeAlias = Full | SelectiveOps | MemoryBudget


def _short(policy: Policy) -> str:
    """A policy as a user would write it: `Full(every=2)`."""
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    changed = (f"{field.name}={given[field.name]!r}" for field in fields(policy) if given[field.name] != field.default)
    return f"{type(policy).__name__}({', '.join(changed)})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_SELECT_ACCEPTS = (
    'accepted are "first-4", "last-4", "middle-4", "range-2-9", a list of block indices, or a count of blocks to spread'
)


def _parse_range(select: str) -> tuple[str, list[int]]:
    """The word and the numbers of `"first-4"`, `"last-4"`, `"middle-4"` or `"range-2-9"`."""
    word, *numbers = select.split("-")
    wanted = {"first": 1, "last": 1, "middle": 1, "range": 2}.get(word)
    if len(numbers) != wanted or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"Full(select={select!r}): {_SELECT_ACCEPTS}")
    values = [int(number) for number in numbers]
    if (word == "range" and values[0] > values[1]) or (word != "range" and values[0] == 0):
        raise ValueError(f"Full(select={select!r}) chooses no block: {_SELECT_ACCEPTS}")
    return word, values


def _indices_of_range(select: str, count: int) -> list[int]:
    word, values = _parse_range(select)
    if word == "range":
        return list(range(values[0], values[1] + 1))
    start = {"first": 0, "last": count - values[0], "middle": (count - values[0]) // 2}[word]
    return list(range(start, start + values[0]))
