"""Elements, scales and places for labels: what the plots of a page are drawn with, as inline SVG."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

LETTER = 7.9  # the width of a letter of the labels, in pixels, on the safe side
LINE = 15.0  # and the height of their line


def tag(name: str, *content: str, **attributes: object) -> str:
    """Return an element. Content is markup; attributes are escaped, and `stroke_width` is written `stroke-width`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>"


def text(said: str, x: float, y: float, **attributes: object) -> str:
    """Return a label; `said` is plain text."""
    return tag("text", escape(said), x=x, y=y, **attributes)


def path(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    """Return a line through points."""
    return tag("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


def picture(description: str, width: float, height: float, *content: str) -> str:
    """Return a whole picture that is as wide as its place allows."""
    return tag("svg", *content, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=description)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Numbers from zero up, on pixels.

    Attributes:
        most: the largest number that has to fit.
        start: the pixel of zero.
        end: the last pixel.
        unit: what the labels count in, in the numbers' own unit.
        ticks: how many marks to aim for.
    """

    most: float
    start: float
    end: float
    unit: float = 1.0
    ticks: int = 5

    @property
    def step(self) -> float:
        """The distance of two marks: 1, 2 or 5 times a power of ten of the unit."""
        rough = max(self.most, 1e-12) / self.unit / self.ticks
        power = 10.0 ** math.floor(math.log10(rough))
        return self.unit * power * next(nice for nice in (1, 2, 5, 10) if nice * power >= rough * 0.999)

    @property
    def top(self) -> float:
        """The number at the last pixel: a mark."""
        return self.step * math.ceil(self.most / self.step - 1e-9) or self.step

    def __call__(self, value: float) -> float:
        """Return the pixel of a number."""
        return self.start + (self.end - self.start) * value / self.top

    def marks(self) -> list[tuple[float, str]]:
        """Return the pixel and the label of each mark."""
        values = [self.step * number for number in range(round(self.top / self.step) + 1)]
        return [(self(value), f"{value / self.unit:.10g}") for value in values]


@dataclass(frozen=True)
class Box:
    """A rectangle that a label takes."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether the two share any place."""
        apart = self.right < other.left or other.right < self.left or self.bottom < other.top or other.bottom < self.top
        return not apart


def grid(x: Scale, y: Scale, inside: Box, x_title: str, y_title: str = "") -> list[str]:
    """Return the lines and labels of two scales around a place, and what each of them counts."""
    lines = [tag("line", x1=inside.left, x2=inside.right, y1=at, y2=at, class_="grid") for at, _ in y.marks()]
    across = [text(label, at, inside.bottom + 17, text_anchor="middle", class_="tick") for at, label in x.marks()]
    up = [text(label, inside.left - 8, at + 4, text_anchor="end", class_="tick") for at, label in y.marks()]
    titles = [text(x_title, inside.right, inside.bottom + 36, text_anchor="end", class_="axis")]
    if y_title:
        titles.append(text(y_title, inside.left - 8, inside.top - 12, text_anchor="end", class_="axis"))
    return [*lines, *across, *up, *titles]


def stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Hold each point's level up to the next point's place."""
    corners = [point for (_, y), (next_x, next_y) in pairwise(points) for point in ((next_x, y), (next_x, next_y))]
    return [*points[:1], *corners]


def place_label(said: str, x: float, y: float, within: Box, taken: list[Box]) -> tuple[float, float, str]:
    """Find a place beside a point for its label, free of `taken`, to which it is added.

    Returns:
        The label's position, and its `text-anchor`.
    """
    width = LETTER * len(said)
    # To the upper right first: a frontier leaves its points to the right and downwards.
    levels = [LINE * level for level in (-0.7, 0.7, -1.7, 1.7, -2.7, 2.7)]
    sides = ((1, "start"), (-1, "end"))
    places = [(x + 10 * side, y + 4 + level, anchor) for level in levels for side, anchor in sides]
    boxes = [_box(at, width) for at in places]
    fits = [
        number
        for number, box in enumerate(boxes)
        if within.left <= box.left and box.right <= within.right and within.top <= box.top
        if not any(box.overlaps(other) for other in taken)
    ]
    best = fits[0] if fits else 0
    taken.append(boxes[best])
    return places[best]


def _box(at: tuple[float, float, str], width: float) -> Box:
    x, y, anchor = at
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
    return Box(left, y - LINE + 3, left + width, y + 3)


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
