"""Which portions of a model are checkpointed: a value that prints as a table."""

import re
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table


@dataclass(frozen=True)
class Portion:
    """One block.

    Attributes:
        name: its qualified name.
        kind: the name of its class.
        parameters: how many parameters it holds, in elements.
        left_alone: why it is not checkpointed; `None` if it is.
    """

    name: str
    kind: str
    parameters: int
    left_alone: str | None = None


@dataclass(frozen=True)
class Coverage:
    """The blocks that were found in a model, and which of them are checkpointed.

    Attributes:
        policy: the policy that chose, as it prints.
        portions: every block found, in order.
        parameters: how many parameters the whole model holds, in elements, shared ones once.
        segments: the blocks that one replay spans, as the latest forward pass joined them; none before the first.
    """

    policy: str
    portions: tuple[Portion, ...]
    parameters: int
    segments: tuple[tuple[str, ...], ...] = ()

    @property
    def checkpointed(self) -> tuple[Portion, ...]:
        """The blocks that are checkpointed."""
        return tuple(portion for portion in self.portions if portion.left_alone is None)

    @property
    def share(self) -> float:
        """The share of the model's parameters that lies in checkpointed blocks, 0 to 1."""
        return sum(portion.parameters for portion in self.checkpointed) / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.checkpointed)} of {len(self.portions)} blocks, "
            f"{self.share:.1%} of {self.parameters:,} parameters, {self.policy}"
        )

    def __rich__(self) -> Table:
        table = Table("Blocks", "Class", "Parameters", "Recomputed", title=f"Activation checkpointing: {self}")
        for alike, group in groupby(self.portions, lambda p: (_parent(p.name), p.kind, p.left_alone)):
            portions = list(group)
            parameters = sum(portion.parameters for portion in portions)
            table.add_row(_span(portions), alike[1], f"{parameters:,}", "no: " + alike[2] if alike[2] else "yes")
        if any(len(segment) > 1 for segment in self.segments):
            table.caption = "One replay spans: " + "; ".join(
                _between(segment[0], segment[-1]) for segment in self.segments
            )
        return table


def _parent(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _span(portions: list[Portion]) -> str:
    """`net.blocks.0 .. 7` for neighbours."""
    return _between(portions[0].name, portions[-1].name)


def _between(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last.removeprefix(_parent(last)) or last}"
