"""What a training step's peak is made of: a value that prints as a table, and the keys it is logged under."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.table import Table

from lightning_ckpt.sizes import UNITS, format_size

_WORDS = {
    "params": "parameters and buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "kept activations",
    "boundaries": "boundaries of checkpointed blocks",
    "temporaries": "temporaries, replayed activations among them",
    "other": "other: libraries, and whatever was there before",
}
# Below this share of the model's own memory, activations are not what to save on.
_LITTLE = 0.25


@dataclass(frozen=True, kw_only=True)
class MemoryByCause:
    """Bytes at the moment of a step's peak.

    Attributes:
        params: parameters and buffers.
        gradients: gradients that were there at that moment.
        optimizer: optimizer state.
        activations: what blocks keep for their backward, beyond their boundaries.
        boundaries: inputs of checkpointed blocks.
        temporaries: the rest: replayed activations, results on their way, workspaces.
        other: what was there before and is none of these.
        plain: activations and boundaries without any checkpointing, as far as blocks were measured.
    """

    params: int
    gradients: int
    optimizer: int
    activations: int
    boundaries: int
    temporaries: int
    other: int
    plain: int

    @property
    def peak(self) -> int:
        """All of it, in bytes."""
        return sum(size for name, size in asdict(self).items() if name != "plain")

    def figures(self) -> dict[str, float]:
        """The causes by logged key, in GiB."""
        return {f"memory/{name}_gib": getattr(self, name) / UNITS["GiB"] for name in _WORDS}

    def advice(self) -> str | None:
        """What to say where activations are not the problem; `None` where they are."""
        fixed = self.params + self.gradients + self.optimizer
        if self.plain >= _LITTLE * (fixed + self.plain):
            return None
        return (
            f"Activations are not what fills the memory: blocks would keep {format_size(self.plain)} without "
            f"checkpointing, and parameters, gradients and optimizer state are {format_size(fixed)}. "
            f"{WHAT_ELSE_HELPS}"
        )

    def __rich__(self) -> Table:
        table = Table("Memory at the peak of a step", title=f"Peak: {format_size(self.peak)}", caption=self.advice())
        table.add_column("size", justify="right")
        table.add_column("share", justify="right")
        for name, words in _WORDS.items():
            size = getattr(self, name)
            if size:
                table.add_row(words, format_size(size), f"{size / self.peak:.1%}")
        return table


WHAT_ELSE_HELPS = (
    "What helps beside checkpointing: a smaller micro-batch with accumulate_grad_batches; sharding or a lower "
    "precision of the optimizer state (FSDP2, an 8-bit optimizer, or one without state); bf16 parameters; offloading"
)


def unique_bytes(memories: Iterable[tuple[int, int]]) -> int:
    """The sum of sizes, each memory once.

    Args:
        memories: pairs of a memory's identity and its size in bytes.
    """
    return sum(dict(memories).values())
