"""The drawings of docs/how-it-works.md: the textbook model alone, nothing is measured.

python benchmarks/drawings.py
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from lightning_ckpt.cli._style import as_file
from lightning_ckpt.cli._svg import Box, Scale, grid, path, picture, stairs, tag, text
from lightning_ckpt.cli.explain import DROPPED, KEPT, REPLAYED, rows
from lightning_ckpt.theory import Chain

PICTURES = Path(__file__).resolve().parent.parent / "docs/pictures"
CHAIN = Chain(layers=16, segments=4, activation_bytes=8 * 2**20)  # that of the page and of the README
WIDTH = 720.0
PLAIN, OURS, AGAIN = "var(--policy-0)", "var(--policy-1)", "var(--policy-2)"


def drawings() -> dict[str, str]:
    """Return the drawings, by the names of their files."""
    drawn = {"bookmarks": bookmarks(CHAIN), "chain_step": over_a_step(CHAIN), "chain_segments": by_segments(CHAIN)}
    return {f"{name}.svg": as_file(content) for name, content in drawn.items()}


def bookmarks(chain: Chain) -> str:
    """Draw what `lightning-ckpt explain` draws: which tensors are kept, dropped and made again."""
    counts = {
        "plain": f"{chain.plain_tensors} tensors",
        "checkpointed": f"{chain.boundary_tensors} tensors",
        "replaying": f"{chain.boundary_tensors} + {chain.scratch_tensors} tensors",
    }
    parts, x = [], Scale(most=chain.layers, start=124, end=596, ticks=chain.layers)
    for number, (name, symbols) in enumerate(rows(chain).items()):
        y = 28.0 + 40 * number
        parts += [text(name, 12, y + 5, class_="name"), text(counts[name], 620, y + 5, class_="value")]
        parts.append(tag("line", x1=x(0), x2=x(chain.layers), y1=y, y2=y, class_="grid"))
        parts += [_tensor(symbol, x(place), y) for place, symbol in enumerate(symbols)]
    legend = {KEPT: "kept", DROPPED: "dropped", REPLAYED: "made again for its segment's backward pass"}
    for (symbol, meaning), at in zip(legend.items(), (124.0, 204.0, 304.0), strict=True):
        parts += [_tensor(symbol, at, 156), text(meaning, at + 14, 161, class_="tick")]
    return picture(f"A chain of {chain.layers} layers in {chain.segments} segments", WIDTH, 176, *parts)


def _tensor(symbol: str, x: float, y: float) -> str:
    if symbol == DROPPED:
        return tag("circle", cx=x, cy=y, r=2.5, fill="var(--ghost)")
    if symbol == REPLAYED:
        return tag("circle", cx=x, cy=y, r=6, fill="var(--paper)", stroke=AGAIN, stroke_width=2.5)
    return tag("circle", cx=x, cy=y, r=7, fill=OURS)


def plain_step(chain: Chain) -> list[tuple[float, int]]:
    """Return when how many tensors are held in a plain step: each layer's output, until its backward pass."""
    return _held([*[(chain.forward_cost, 1)] * chain.layers, *[(chain.backward_cost, -1)] * chain.layers])


def checkpointed_step(chain: Chain) -> list[tuple[float, int]]:
    """Return the same with checkpointing: bookmarks, and the outputs of the one segment that is replayed.

    In a forward pass the output of a layer makes place for that of the next one, unless it is a bookmark.
    """
    forward, backward = chain.forward_cost, chain.backward_cost
    lengths = [end - start for start, end in pairwise(chain.boundaries)]
    changes = [change for length in lengths for change in ((forward, 1), *[(forward, 0)] * (length - 1))]
    for length in reversed(lengths):
        changes += [*[(forward, 1)] * length, *[(backward, -1)] * (length - 1)]
        changes.append((backward, -2))  # the segment's last output, and the bookmark that it was
    return _held(changes)


def _held(changes: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Add up what layers take and change: what one makes is there as it starts, what it frees until it ends."""
    time, held, points = 0.0, 1, []
    for duration, change in changes:
        held += max(change, 0)
        points.append((time, held))
        time += duration
        held += min(change, 0)
    return [*points, (time, held)]


def over_a_step(chain: Chain) -> str:
    """Draw the tensors held over one step, plain and checkpointed."""
    inside = Box(52, 30, WIDTH - 20, 248)
    x = Scale(most=chain.checkpointed_cost, start=inside.left, end=inside.right, ticks=8)
    y = Scale(most=chain.plain_tensors, start=inside.bottom, end=inside.top)
    parts = grid(x, y, inside, "time, in forward passes of one layer", "tensors")
    curves = (("plain", plain_step(chain), PLAIN, "start"), ("checkpointed", checkpointed_step(chain), OURS, "middle"))
    for name, levels, ink, anchor in curves:
        curve = stairs([(x(time), y(held)) for time, held in levels])
        parts.append(path([*curve, (curve[-1][0], y(0)), (curve[0][0], y(0))], class_="area", fill=ink))
        parts.append(path(curve, class_="curve", stroke=ink))
        time, most = max(levels, key=lambda level: level[1])
        said = f"{name}, {most}"
        parts.append(text(said, x(time) + 14, y(most) - 8, text_anchor=anchor, class_="name", fill=ink))
    turn = x(chain.layers * chain.forward_cost)
    parts.append(tag("line", x1=turn, x2=turn, y1=inside.top, y2=inside.bottom, class_="phase"))
    parts.append(text("forward", turn - 8, inside.top + 10, text_anchor="end", class_="tick"))
    return picture("Tensors held over one step, plain and checkpointed", WIDTH, 294, *parts)


def by_segments(chain: Chain) -> str:
    """Draw the peak for every number of segments: bookmarks, and one segment's layers on top."""
    inside = Box(52, 40, WIDTH - 20, 248)
    x = Scale(most=chain.layers, start=inside.left, end=inside.right - 16, ticks=chain.layers)
    y = Scale(most=chain.plain_tensors, start=inside.bottom, end=inside.top)
    parts = grid(x, y, inside, "segments", "tensors")
    chains = [
        Chain(layers=chain.layers, segments=count, activation_bytes=chain.activation_bytes)
        for count in range(1, chain.layers + 1)
    ]
    for count, each in enumerate(chains, 1):
        middle, top = y(each.boundary_tensors), y(each.peak_tensors)
        bar = {"x": x(count) - 13, "width": 26}
        parts.append(tag("rect", **bar, y=middle, height=y(0) - middle, fill=OURS))
        parts.append(tag("rect", **bar, y=top, height=middle - top, fill=AGAIN))
        parts.append(text(str(each.peak_tensors), x(count), top - 5, text_anchor="middle", class_="value"))
    level = y(chain.plain_tensors)
    parts.append(tag("line", x1=inside.left, x2=inside.right, y1=level, y2=level, class_="level", stroke=PLAIN))
    for name, at, ink in (("bookmarks", 120.0, OURS), ("one segment", 220.0, AGAIN), ("plain", 340.0, PLAIN)):
        parts.append(text(name, at, 16, class_="name", fill=ink))
    return picture("Peak for every number of segments: bookmarks and one segment", WIDTH, 294, *parts)


def main() -> None:
    for name, drawn in drawings().items():
        (PICTURES / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
