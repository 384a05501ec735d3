"""Which portions of a model are checkpointed: a value that prints as a table."""

import re
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from lightning_ckpt.printed import as_text, whole
from lightning_ckpt.sizes import format_size


@dataclass(frozen=True)
class Portion:
    """One block.

    Attributes:
        name: its qualified name.
        kind: the name of its class.
        parameters: how many parameters it holds, in elements.
        left_alone: why it is not checkpointed; `None` if it is.
        let_go: bytes of activations that are not kept for backward; `None` where nothing was measured.
    """

    name: str
    kind: str
    parameters: int
    left_alone: str | None = None
    let_go: int | None = None


@dataclass(frozen=True)
class Coverage:
    """The blocks that were found in a model, and which of them are checkpointed.

    Attributes:
        policy: the policy that chose, as it prints.
        portions: every block found, in order.
        parameters: how many parameters the whole model holds, in elements, shared ones once.
        segments: the blocks that one replay spans, as the latest forward pass joined them; none before the first.
        kept: bytes of activations that are kept all the same, blocks' inputs among them, by the module that keeps them,
            the largest first; empty where nothing was measured.
    """

    policy: str
    portions: tuple[Portion, ...]
    parameters: int
    segments: tuple[tuple[str, ...], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()

    @property
    def checkpointed(self) -> tuple[Portion, ...]:
        """The blocks that are checkpointed."""
        return tuple(portion for portion in self.portions if portion.left_alone is None)

    @property
    def let_go(self) -> int:
        """Bytes of activations that are not kept for backward, as far as measured."""
        return sum(portion.let_go or 0 for portion in self.portions)

    @property
    def share(self) -> float:
        """The share of the model's parameters that lies in checkpointed blocks, 0 to 1."""
        return sum(portion.parameters for portion in self.checkpointed) / self.parameters if self.parameters else 0.0

    def summary(self) -> str:
        """How much is checkpointed and by which policy, in one line."""
        return f"{self._counts()}, {self.policy}"

    def __str__(self) -> str:
        return as_text(self.__rich__())

    def _counts(self) -> str:
        blocks = f"{len(self.checkpointed)} of {len(self.portions)} blocks"
        return f"{blocks}, {self.share:.1%} of {self.parameters:,} parameters"

    def __rich__(self) -> Table:
        title, caption = f"Activation checkpointing, {self.policy}", [self._counts()]
        if any(len(segment) > 1 for segment in self.segments):
            spans = (_between(segment[0], segment[-1]) for segment in self.segments)
            caption.append(f"One replay spans: {'; '.join(spans)}")
        if len(self.portions) == len(self.checkpointed) == 1 and self.share == 1:
            caption.append("One block is all of the model: its replay needs what the model does, and lowers no peak")
        if self.kept:
            caption.append(self._activations())
        columns = (whole("Blocks"), whole("Class"), "Parameters", whole("Recomputed"))
        table = Table(*columns, title=title, caption="\n".join(caption))
        if self.kept:
            table.add_column("Activations let go")
        for (_, kind, left_alone), group in groupby(self.portions, lambda p: (_parent(p.name), p.kind, p.left_alone)):
            portions = list(group)
            parameters = sum(portion.parameters for portion in portions)
            span = _between(portions[0].name, portions[-1].name)
            row = [span, kind, f"{parameters:,}", f"no: {left_alone}" if left_alone else "yes"]
            let_go = sum(portion.let_go or 0 for portion in portions)
            table.add_row(*row, *([format_size(let_go)] if self.kept else []))
        return table

    def _activations(self) -> str:
        """What is let go and what is kept, and where most of what is kept lies."""
        kept = sum(size for _, size in self.kept)
        name, most = self.kept[0]
        where = f"Activations: {format_size(self.let_go)} let go, {format_size(kept)} kept, most of it by {name!r}"
        if most > self.let_go:
            return f"{where}: more than all that is let go, so checkpoint or shrink that first"
        return f"{where}, {format_size(most)}"


def _parent(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _between(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last.removeprefix(_parent(last)) or last}"
