"""An offline run as one HTML file that needs nothing else: its figures, curves and blocks."""

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from lightning_ckpt.cli._offline_run import OfflineRun
from lightning_ckpt.cli._page import _STYLE
from lightning_ckpt.cli._style import COLOURS, DRAWN
from lightning_ckpt.cli._svg import Box, Scale, grid, path, picture, tag, text
from lightning_ckpt.dashboard import SECTIONS, Plot

WIDTH, HEIGHT = 720.0, 240.0
_INSIDE = Box(64, 30, WIDTH - 24, 190)

# What a reader looks for first: words, key, how its figure is made of the run's, and how it prints.
_GLANCE = (
    ("highest peak", ("memory/peak_allocated_gib", "memory/peak_rss_gib"), max, "{:.3g} GiB"),
    ("least headroom", ("memory/headroom_gib",), min, "{:.3g} GiB"),
    ("activations not kept", ("checkpointing/saved_gib",), max, "{:.3g} GiB"),
    ("replay, of a step", ("checkpointing/overhead_fraction",), median, "{:.1%}"),
    ("step", ("throughput/step_time_ms",), median, "{:.4g} ms"),
    ("samples per second", ("throughput/samples_per_sec",), median, "{:.4g}"),
)


def page(run: OfflineRun) -> str:
    """Return the page. Colours follow the reader's light or dark setting."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(run.name)}: memory and throughput</title>
<style>{COLOURS}{DRAWN}{_STYLE}</style>
</head>
<body>
<main>
<header>
<p class="kicker">A run, step by step</p>
<h1>{escape(run.name)}</h1>
<p class="lead">{escape(_policy(run))}</p>
<p class="quiet">{escape(_environment(run))}</p>
</header>
<section>
<h2>At a glance</h2>
<div class="scroll">{_table(("", "over the run"), _glance(run))}</div>
</section>
{"".join(_section(run, name, plots) for name, plots in SECTIONS.items())}
{_blocks(run)}
</main>
</body>
</html>
"""


def _policy(run: OfflineRun) -> str:
    found = run.config.get("activation_checkpointing", {})
    blocks = found.get("blocks", [])
    return f"{found['policy']} on {len(blocks)} blocks" if found else "Without activation checkpointing"


def _environment(run: OfflineRun) -> str:
    found = run.config.get("environment", {})
    return ", ".join(f"{key.replace('_', ' ')} {_cell(value)}" for key, value in found.items())


def _glance(run: OfflineRun) -> list[list[str]]:
    rows = []
    for words, keys, made, pattern in _GLANCE:
        known = next((curve for key in keys if (curve := _curve(run, key))), None)
        if known:
            rows.append([words, pattern.format(made([figure for _, figure in known]))])
    return rows


def _section(run: OfflineRun, name: str, plots: Sequence[Plot]) -> str:
    drawn = "".join(_drawn(run, plot) for plot in plots)
    return f"<section><h2>{escape(name)}</h2>{drawn}</section>" if drawn else ""


def _drawn(run: OfflineRun, plot: Plot) -> str:
    curves = {key: curve for key in plot.keys if (curve := _curve(run, key))}
    if not curves:
        return ""
    steps = max(step for curve in curves.values() for step, _ in curve)
    x = Scale(most=max(steps, 1), start=_INSIDE.left, end=_INSIDE.right)
    most = max(0.0, *(figure for curve in curves.values() for _, figure in curve))
    y = Scale(most=most, start=_INSIDE.bottom, end=_INSIDE.top)
    parts = [*grid(x, y, _INSIDE, "optimizer step"), *_legend(list(curves))]
    for number, curve in enumerate(curves.values(), 1):
        points = [(x(step), y(max(0.0, figure))) for step, figure in curve]
        points = points if len(points) > 1 else [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
        parts.append(path(points, class_="curve", stroke=f"var(--policy-{number})"))
    return f'<p class="quiet">{escape(plot.title)}</p>{picture(plot.title, WIDTH, HEIGHT, *parts)}'


def _legend(keys: list[str]) -> list[str]:
    names = [key.split("/")[1] for key in keys]
    starts = [_INSIDE.left + 8.5 * (len(", ".join(names[:place])) + 2 * bool(place)) for place in range(len(names))]
    return [
        text(name, start, 16, class_="name", fill=f"var(--policy-{number})")
        for number, (name, start) in enumerate(zip(names, starts, strict=True), 1)
    ]


def _curve(run: OfflineRun, key: str) -> list[tuple[int, float]]:
    """The key's figures; also behind a prefix, where no run has it without."""
    found = run.figures.get(key)
    return found or next((curve for name, curve in run.figures.items() if name.endswith(key)), [])


def _blocks(run: OfflineRun) -> str:
    if not run.blocks:
        return ""
    names = [name for name in run.blocks[0] if any(block[name] is not None for block in run.blocks)]
    rows = [[_cell(block[name]) for name in names] for block in run.blocks]
    table = _table([name.replace("_", " ") for name in names], rows)
    return f'<section><h2>Blocks</h2><div class="scroll">{table}</div></section>'


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = tag("tr", *(tag("th", escape(name), scope="col") for name in names))
    lines = (
        tag("tr", tag("th", escape(row[0]), scope="row"), *(tag("td", escape(cell)) for cell in row[1:]))
        for row in rows
    )
    return tag("table", tag("thead", head), tag("tbody", *lines))
