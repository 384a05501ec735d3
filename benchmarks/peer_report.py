"""What `benchmarks/peers.py` measured, as values, tables, a page and pictures; all from the committed numbers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
OURS, PLAIN, BY_HAND, FULL = "ours: ", "plain", "checkpoint by hand", "ours: full"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one way to treat a model took, and whether training and the model are what they were.

    Attributes:
        name: of the way.
        blocks: how many blocks the model has.
        budget: bytes that a step may take; 0 for those that keep to none.
        peak: the highest bytes of a training step: weights, gradients, optimizer state and batch included.
        kept: bytes that live from the forward pass to the backward pass.
        gradients: how many losses and gradients differ from plain training's, and of how many.
        buffers: how many buffers do, and of how many.
        keys: whether `state_dict` has the plain model's keys.
        names: whether parameters have the plain model's names.
        copies: what is wrong with a deep copy; empty where it trains its own weights.
        seconds: of one training step in each round, the process's own.
    """

    name: str
    blocks: int
    budget: int
    peak: int
    kept: int
    gradients: Sequence[int]
    buffers: Sequence[int]
    keys: bool
    names: bool
    copies: str
    seconds: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether everything but the budget is as it should be."""
        return not self.gradients[0] and not self.buffers[0] and self.keys and self.names and not self.copies

    def ratios(self, other: "Arm") -> list[float]:
        """Step times over another's of the same rounds."""
        return [mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)]

    def ratio(self, other: "Arm") -> float:
        return statistics.median(self.ratios(other))


@dataclass(frozen=True, kw_only=True)
class Side:
    """All ways to treat one model.

    Attributes:
        model: its name.
        arms: those that ran.
        left_out: why the others did not, by name.
    """

    model: str
    arms: list[Arm]
    left_out: dict[str, str]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def ours(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.name.startswith(OURS)]

    def picture(self, stem: str) -> str:
        """The name of its picture's file."""
        return f"{stem}_{self.model.lower().replace('-', '')}.png"

    def fastest_peer(self, budget: int) -> Arm | None:
        """The peer with the shortest step among those that meet a budget and have plain training's gradients."""
        plain = self.arm(PLAIN)
        able = [arm for arm in self.arms if arm not in self.ours and arm.peak <= budget and arm is not plain]
        return min((arm for arm in able if not arm.gradients[0]), key=lambda arm: arm.ratio(plain), default=None)

    def table(self) -> str:
        plain = self.arm(PLAIN)
        rows = "\n".join(_row(arm, plain) for arm in self.arms)
        left_out = "\n".join(f"- {name}: {why}." for name, why in self.left_out.items())
        return f"""## {self.model}, {plain.blocks} blocks

| | peak, MiB | of plain | kept, MiB | step, ms | of plain (quartiles) | gradients | buffers | keys | names | copy |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

{self._said()}
{
            left_out
            and f'''
Not run here:

{left_out}
'''
        }"""

    def _said(self) -> str:
        """Ours beside the peers that do the same."""
        plain, full, hand = self.arm(PLAIN), self.arm(FULL), self.arm(BY_HAND)
        peak, time = full.peak / hand.peak, full.ratio(hand)
        lines = [f"- `full` beside `checkpoint` by hand: {peak:.4f} of its peak, {time:.3f} of its step time."]
        for arm in (one for one in self.ours if one.budget):
            beside = "no peer is within it"
            if peer := self.fastest_peer(arm.budget):
                differ = ", whose buffers differ" if peer.buffers[0] else ""
                beside = f"{peer.ratio(plain):.2f} with the fastest peer within it, {peer.name}{differ}"
            lines.append(f"- Within {arm.budget / MIB:.1f} MiB: {arm.ratio(plain):.2f} of plain's step; {beside}.")
        return "\n".join(lines)


def _row(arm: Arm, plain: Arm) -> str:
    low, _, high = statistics.quantiles(arm.ratios(plain), n=4) if len(arm.seconds) > 1 else [arm.ratio(plain)] * 3
    name = f"{arm.name}: {arm.budget / MIB:.1f} MiB" if arm.budget else arm.name
    cells = [
        name,
        f"{arm.peak / MIB:.2f}",
        f"{arm.peak / plain.peak:.1%}",
        f"{arm.kept / MIB:.2f}",
        f"{1e3 * statistics.median(arm.seconds):.1f}",
        f"{arm.ratio(plain):.3f} ({low:.3f} to {high:.3f})",
        _equal(arm.gradients),
        _equal(arm.buffers),
        _yes(arm.keys),
        _yes(arm.names),
        f"**no: {arm.copies}**" if arm.copies else "yes",
    ]
    return f"| {' | '.join(cells)} |"


def _equal(counts: Sequence[int]) -> str:
    different, of = counts
    return f"**no, {different} of {of}**" if different else "yes" if of else "none"


def _yes(right: bool) -> str:
    return "yes" if right else "**no**"


@dataclass(frozen=True, kw_only=True)
class Results:
    """One run.

    Attributes:
        rounds: of steps.
        environment: device, versions, commit and command.
        sides: one for each model.
    """

    rounds: int
    environment: dict[str, str]
    sides: list[Side]

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Results":
        """What `dataclasses.asdict` gave."""
        sides = [Side(**(side | {"arms": [Arm(**arm) for arm in side["arms"]]})) for side in value["sides"]]
        return Results(**(value | {"sides": sides}))

    @property
    def reached(self) -> bool:
        """Whether ours is right everywhere, keeps to every budget, and needs no more memory than by hand."""
        ours = [arm for side in self.sides for arm in side.ours]
        within = all(arm.peak <= arm.budget for arm in ours if arm.budget)
        by_hand = all(side.arm(FULL).peak <= side.arm(BY_HAND).peak for side in self.sides)
        return within and by_hand and all(arm.right for arm in ours)

    def judged(self) -> str:
        return (
            "Targets: ours is right in every column, keeps to every budget, and `full` needs no more memory than by "
            f"hand: {'reached' if self.reached else 'NOT reached'}."
        )


def page(results: Results, stem: str) -> str:
    """Return the results as a Markdown page."""
    sides = "\n".join(
        f"{side.table()}\n![Peak memory against step time, {side.model}]({side.picture(stem)})\n"
        for side in results.sides
    )
    environment = dict(results.environment)
    command = environment.pop("command", "python benchmarks/peers.py")
    about = "\n".join(f"- {name.capitalize()}: {value}." for name, value in environment.items())
    return f"""# Side by side with the peers

Each row is a way to treat the same blocks of the same model, in a fresh process, with the same seed and batch. `peak`
is the highest of a training step, weights, gradients, optimizer state and batch included; `kept` is what lives from the
forward pass to the backward pass. Step times are those of {results.rounds} interleaved rounds, and their ratio is taken
round by round. `gradients` and `buffers`: whether they equal plain training's, bit for bit; `keys`: whether
`state_dict` has the plain model's; `names`: whether parameters have; `copy`: whether a deep copy trains weights of its
own. Budgets are 25, 50 and 75 % of the way from the peak of `full` to that of plain training.

{sides}
{results.judged()}

{about}
- Made by `{command}`.
"""


def plot(side: Side, path: Path) -> None:
    """Draw peaks against step times: ours filled and joined, the peers hollow."""
    from matplotlib import colormaps  # only here: a run that writes nothing needs no matplotlib
    from matplotlib.figure import Figure

    plain = side.arm(PLAIN)
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    line = [arm for arm in side.arms if arm.name in (PLAIN, FULL) or arm.budget]
    line.sort(key=lambda arm: arm.peak)
    axes.plot([arm.ratio(plain) for arm in line], [arm.peak / MIB for arm in line], "-", color="0.7", zorder=1)
    blues, markers, inks = iter((0.95, 0.4, 0.8, 0.65, 0.5)), iter("osDv^<>phX"), iter(range(1, 11))
    for arm in side.arms:
        if arm is plain or arm in side.ours:
            ink = "black" if arm is plain else colormaps["Blues"](next(blues))
            style = {"s": 60, "marker": "o", "color": ink}
        else:
            style = {"s": 110, "marker": next(markers), "edgecolors": f"C{next(inks)}", "facecolors": "none"}
        axes.scatter(arm.ratio(plain), arm.peak / MIB, label=arm.name, **style)
    axes.set(xlabel="step time, of plain", ylabel="peak of a training step (MiB)", title=side.model)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
