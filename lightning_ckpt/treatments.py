"""How one block may be treated, from all of it replayed to all of it kept, and what each way costs by its profile."""

from dataclasses import dataclass
from typing import Any

from lightning_ckpt.planning import Option
from lightning_ckpt.profiles import BlockProfile

# A part whose replay frees less than this share of what its block keeps is no option of its own.
_WORTH_REPLAYING = 0.1


@dataclass(frozen=True)
class Treatment:
    """What is replayed of one block, and what is kept.

    Attributes:
        kept: `"nothing"`: all of the block is replayed; `"calls"`: the results of some operator calls are kept;
            `"rest"`: all but one submodule is kept; `"everything"`: the block runs plain.
        calls: which operator calls, as `OperatorCall.name`.
        part: which submodule is replayed, by its name below the block.
    """

    kept: str = "nothing"
    calls: tuple[str, ...] = ()
    part: str = ""

    def __str__(self) -> str:
        if self.kept == "calls":
            return f"replayed but for {', '.join(map(_short, self.calls))}"
        if self.kept == "rest":
            return f"{self.part} replayed"
        return "kept" if self.kept == "everything" else "replayed"

    def to_json(self) -> dict[str, Any]:
        """What differs from replaying everything, as plain values."""
        return {"kept": self.kept, "calls": list(self.calls), "part": self.part}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Treatment":
        """The treatment that `to_json` gave away."""
        return cls(found["kept"], tuple(found["calls"]), found["part"])


def choices(block: BlockProfile) -> list[tuple[Treatment, Option]]:
    """Every way to treat a block, the one that replays all of it first."""
    ways = [(Treatment(), Option("replayed", 0, 0, block.replay_seconds * block.calls))]
    for chosen in block.selections:
        treatment = Treatment("calls", calls=chosen.calls)
        cost = Option(str(treatment), chosen.kept_bytes, chosen.beside_bytes, chosen.seconds * block.calls)
        ways.append((treatment, cost))
    for part in block.parts:
        if part.kept_bytes <= block.kept_bytes * (1 - _WORTH_REPLAYING):
            treatment = Treatment("rest", part=part.name)
            ways.append((treatment, Option(str(treatment), part.kept_bytes, 0, part.replay_seconds * block.calls)))
    ways.append((Treatment("everything"), Option("kept", block.kept_bytes, 0, 0.0)))
    return [way for way in ways if way[0].kept == "nothing" or way[1].seconds < ways[0][1].seconds]


def _short(call: str) -> str:
    """`mm 2` for `"aten.mm.default#1"`."""
    operator, _, place = call.partition("#")
    return f"{operator.split('.')[1]} {int(place) + 1}"
