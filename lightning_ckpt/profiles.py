"""What was measured of a model's blocks: values that print as a table and save as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_ckpt.printed import as_text, whole
from lightning_ckpt.sizes import format_size


@dataclass(frozen=True)
class OperatorCall:
    """One operator call of a block's replay.

    Attributes:
        name: the operator and which of its calls in the block this is, from 0: `"aten.mm.default#1"`.
        nbytes: bytes of its result; 0 where the result lies in memory that is kept anyway.
        saved: whether autograd keeps the result for backward.
        seconds: time it takes to run again.
    """

    name: str
    nbytes: int
    saved: bool
    seconds: float


@dataclass(frozen=True)
class SelectionProfile:
    """Some operator calls of a block whose results are kept, while the rest of the block is replayed.

    Attributes:
        calls: their names.
        kept_bytes: bytes of their results.
        beside_bytes: those among them that backward does not need.
        seconds: time that this adds to a step: the replay, and what watching operators takes in forward and replay.
    """

    calls: tuple[str, ...]
    kept_bytes: int
    beside_bytes: int
    seconds: float


@dataclass(frozen=True)
class PartProfile:
    """One submodule of a block, replayed alone while the rest of the block is kept.

    Attributes:
        name: its name below the block.
        kept_bytes: bytes that the whole block then keeps, as `BlockProfile.kept_bytes`.
        replay_seconds: time of its replay.
    """

    name: str
    kept_bytes: int
    replay_seconds: float


@dataclass(frozen=True)
class BlockProfile:
    """One block, measured on its first call of a forward pass.

    Attributes:
        name: its qualified name.
        kind: the name of its class.
        calls: how often one forward pass calls it.
        kept_bytes: bytes that autograd keeps for backward without checkpointing: unique memory; parameters, buffers,
            the block's own inputs, and outputs that are inputs of other blocks left out.
        boundary_bytes: bytes of the inputs that checkpointing keeps; memory that several blocks take counts for the
            first.
        replay_seconds: time that checkpointing one call of it adds to a step, as rehearsed: what a backward pass
            really replays, up to the last tensor that it needs, and the bookkeeping around it.
        operators: every operator call of the replay that makes memory of its own, in order.
        selections: the sets of operator calls that are worth keeping, from few to many.
        parts: the submodules that could be replayed alone.
    """

    name: str
    kind: str
    calls: int
    kept_bytes: int
    boundary_bytes: int
    replay_seconds: float
    operators: tuple[OperatorCall, ...] = ()
    selections: tuple[SelectionProfile, ...] = ()
    parts: tuple[PartProfile, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The blocks of a model in the order in which they first run; prints as a rich table."""

    blocks: tuple[BlockProfile, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes that all blocks keep together without checkpointing, beside their boundaries."""
        return sum(block.kept_bytes * block.calls for block in self.blocks)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the boundaries that full checkpointing keeps."""
        return sum(block.boundary_bytes for block in self.blocks)

    @property
    def replay_seconds(self) -> float:
        """Time that full checkpointing adds to a step."""
        return sum(block.replay_seconds * block.calls for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values: sizes in bytes, times in seconds."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Profile":
        """The profile that `to_json` gave away."""
        return cls(tuple(_block(block) for block in found["blocks"]))

    def save(self, path: str | Path) -> None:
        """Write it as a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a file that `save` wrote."""
        return cls.from_json(json.loads(Path(path).read_text()))

    def __str__(self) -> str:
        return as_text(self.__rich__())

    def __rich__(self) -> Table:
        title = (
            f"Blocks: {format_size(self.kept_bytes)} kept plain beside {format_size(self.boundary_bytes)} of "
            f"boundaries, {self.replay_seconds * 1e3:.3g} ms to replay"
        )
        table = Table(whole("Blocks"), whole("Class"), title=title)
        for column in ("Kept", "Boundary", "Replay", "MiB per ms"):
            table.add_column(column, justify="right")
        for _, group in groupby(self.blocks, lambda b: (b.kind, b.kept_bytes, b.replay_seconds)):
            blocks = list(group)
            table.add_row(names_of([block.name for block in blocks]), blocks[0].kind, *_figures(blocks))
        return table


def _block(found: dict[str, Any]) -> BlockProfile:
    operators = tuple(OperatorCall(**call) for call in found["operators"])
    selections = tuple(SelectionProfile(**{**one, "calls": tuple(one["calls"])}) for one in found["selections"])
    parts = tuple(PartProfile(**part) for part in found["parts"])
    return BlockProfile(**{**found, "operators": operators, "selections": selections, "parts": parts})


def names_of(names: Sequence[str]) -> str:
    """Neighbours in few words: the first and the last, and how many."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}, each of {len(names)}"


def _figures(blocks: Sequence[BlockProfile]) -> list[str]:
    kept, replay = blocks[0].kept_bytes, blocks[0].replay_seconds
    boundary = max(block.boundary_bytes for block in blocks)
    rate = f"{kept / 2**20 / (replay * 1e3):.3g}" if replay else "-"
    return [format_size(kept), format_size(boundary), f"{replay * 1e3:.3g} ms", rate]
