"""The pictures of a comparison: memory against step time, what the peak is made of, memory over one step."""

from lightning_ckpt.cli._measurement import CAUSES, PHASES, Comparison, Measurement
from lightning_ckpt.cli._svg import LETTER, Box, Scale, grid, path, picture, place_label, stairs, tag, text
from lightning_ckpt.sizes import UNITS, format_size

WIDTH = 720.0
COLOURS = 8  # how many policies get a colour of their own


def colour(comparison: Comparison, one: Measurement) -> str:
    """Return a policy's colour: the same in every picture, and grey for plain training."""
    others = [other.policy for other in comparison.measured if other.policy != "none"]
    number = 0 if one.policy == "none" else 1 + others.index(one.policy) % (COLOURS - 1)
    return f"var(--policy-{number})"


def time_against_memory(comparison: Comparison) -> str:
    """Draw every policy by step time and peak, and the line of those that no other one beats in both."""
    height, inside = 340.0, Box(64, 24, WIDTH - 24, 292)
    x = _times(max(one.spread[1] for one in comparison.measured), inside.left, inside.right)
    y = _sizes(max(one.memory.peak for one in comparison.measured), inside.bottom, inside.top)
    parts = [*grid(x, y, inside, "step time, ms", _unit(y))]
    frontier = [(x(one.step_time), y(one.memory.peak)) for one in comparison.frontier()]
    parts.append(path(stairs(frontier), class_="frontier"))
    taken = [_around(x(one.step_time), y(one.memory.peak)) for one in comparison.measured]
    for one in comparison.measured:
        parts.append(_point(one, x, y, colour(comparison, one)))
    for one in comparison.measured:
        at_x, at_y, anchor = place_label(one.policy, x(one.step_time), y(one.memory.peak), inside, taken)
        parts.append(text(one.policy, at_x, at_y, text_anchor=anchor, class_="name", fill=colour(comparison, one)))
    return picture("Peak memory against step time, one point a policy", WIDTH, height, *parts)


def peak_by_cause(comparison: Comparison) -> str:
    """Draw each policy's peak as a bar: what no policy changes in greys, activations in the policy's colour."""
    names = max(len(one.policy) for one in comparison.measured) * LETTER + 16
    row, top = 34.0, 30.0
    bottom = top + row * len(comparison.measured)
    x = _sizes(max(one.memory.peak for one in comparison.measured), names, WIDTH - 88)
    parts = _legend(names)
    parts += [tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid") for at, _ in x.marks()]
    for number, one in enumerate(comparison.measured):
        parts += _bar(one, x, top + row * number + 6, row - 12, colour(comparison, one))
    parts += [text(label, at, bottom + 16, text_anchor="middle", class_="tick") for at, label in x.marks()]
    parts.append(text(f"peak memory, {_unit(x)}", x.end, bottom + 34, text_anchor="end", class_="axis"))
    return picture("What the memory of each policy's peak is held for", WIDTH, bottom + 42, *parts)


def memory_over_a_step(comparison: Comparison, one: Measurement) -> str:
    """Draw one policy's memory over one step, on the scales that all policies share, over plain training's outline."""
    height, inside = 236.0, Box(52, 30, 348, 188)
    x = _times(max(m.step_time for m in comparison.measured), inside.left, inside.right, ticks=4)
    y = _sizes(max(m.memory.peak for m in comparison.measured), inside.bottom, inside.top, ticks=4)
    ink = colour(comparison, one)
    parts = [*grid(x, y, inside, "time, ms", _unit(y)), text(one.policy, inside.left, 14, class_="name", fill=ink)]
    if comparison.plain and comparison.plain is not one:
        parts.append(path(_curve(comparison.plain, x, y), class_="ghost"))
    curve = _curve(one, x, y)
    floor = [(curve[-1][0], y(0)), (curve[0][0], y(0))] if curve else []
    parts.append(path([*curve, *floor], class_="area", fill=ink) if curve else "")
    parts.append(path(curve, class_="curve", stroke=ink) if curve else text("peak only", 60, 60, class_="tick"))
    parts += _phases(one, x, inside) if curve else []
    peak = y(one.memory.peak)
    parts.append(tag("line", x1=inside.left, x2=inside.right, y1=peak, y2=peak, class_="level", stroke=ink))
    parts.append(
        text(format_size(one.memory.peak), inside.right, peak - 5, text_anchor="end", class_="value", fill=ink)
    )
    return picture(f"Memory over one training step with {one.policy}", 360, height, *parts)


def _times(most: float, start: float, end: float, ticks: int = 6) -> Scale:
    return Scale(most=most, start=start, end=end, unit=1e-3, ticks=ticks)


def _sizes(most: int, start: float, end: float, ticks: int = 5) -> Scale:
    unit = max((size for size in UNITS.values() if size <= most), default=1)
    return Scale(most=most, start=start, end=end, unit=unit, ticks=ticks)


def _unit(scale: Scale) -> str:
    return next(name for name, size in UNITS.items() if size == scale.unit)


def _point(one: Measurement, x: Scale, y: Scale, ink: str) -> str:
    low, high = one.spread
    at = y(one.memory.peak)
    said = f"{one.policy}: {1000 * one.step_time:.1f} ms, {format_size(one.memory.peak)}"
    whisker = tag("line", x1=x(low), x2=x(high), y1=at, y2=at, stroke=ink, stroke_width=2)
    return tag("g", tag("title", said), whisker, tag("circle", cx=x(one.step_time), cy=at, r=6, fill=ink))


def _around(x: float, y: float) -> Box:
    return Box(x - 8, y - 8, x + 8, y + 8)


def _legend(start: float) -> list[str]:
    parts = []
    for number, cause in enumerate(CAUSES):
        fill = "none" if cause == "activations" else f"var(--cause-{number})"
        outline = "currentColor" if cause == "activations" else "none"
        parts.append(tag("rect", x=start, y=5, width=11, height=11, rx=2, fill=fill, stroke=outline))
        parts.append(text(cause if fill != "none" else f"{cause} and scratch", start + 17, 15, class_="tick"))
        start += 17 + len(cause) * LETTER + 18
    return parts


def _bar(one: Measurement, x: Scale, top: float, thick: float, ink: str) -> list[str]:
    parts, held = [], 0
    for number, cause in enumerate(CAUSES):
        size = one.memory.causes[cause]
        fill = ink if cause == "activations" else f"var(--cause-{number})"
        said = tag("title", f"{one.policy}, {cause}: {format_size(size)}")
        width = x(held + size) - x(held)
        parts.append(tag("rect", said, x=x(held), y=top, width=max(0.0, width - 1), height=thick, rx=2, fill=fill))
        held += size
    middle = top + thick / 2 + 4
    name = text(one.policy, x.start - 10, middle, text_anchor="end", class_="name", fill=ink)
    return [name, *parts, text(format_size(held), x(held) + 8, middle, class_="value")]


def _curve(one: Measurement, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Memory holds its level until the next event. A recorded step is slower: its places are put on the timed one."""
    points = [(x(place * one.step_time), y(held)) for place, held in one.memory.curve]
    return [*stairs(points), (x(one.step_time), points[-1][1])] if points else []


def _phases(one: Measurement, x: Scale, inside: Box) -> list[str]:
    parts, start = [], 0.0
    for name, end in zip(PHASES, one.memory.phases, strict=True):
        left, right = x(start * one.step_time), x(end * one.step_time)
        if name != PHASES[-1]:
            parts.append(tag("line", x1=right, x2=right, y1=inside.top, y2=inside.bottom, class_="phase"))
        if right - left > LETTER * len(name):
            parts.append(text(name, (left + right) / 2, inside.bottom - 6, text_anchor="middle", class_="tick"))
        start = end
    return parts
