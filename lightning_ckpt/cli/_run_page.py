"""An offline run as a page: its figures, curves and blocks."""

from collections.abc import Sequence
from html import escape
from statistics import median

from lightning_ckpt.cli._document import document, table
from lightning_ckpt.cli._offline_run import OfflineRun
from lightning_ckpt.cli._svg import Box, Scale, grid, path, picture, text
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
    """Return the page."""
    glance = table(("", "over the run"), _glance(run))
    sections = "".join(_section(run, name, plots) for name, plots in SECTIONS.items())
    return document(
        title=f"{run.name}: memory and throughput",
        kicker="A run, step by step",
        heading=run.name,
        lead=_policy(run),
        quiet=_environment(run),
        body=f"<section><h2>At a glance</h2>{glance}</section>{sections}{_blocks(run)}",
    )


def _policy(run: OfflineRun) -> str:
    found = run.config.get("activation_checkpointing", {})
    blocks = found.get("blocks", [])
    return f"{found['policy']} on {len(blocks)} blocks" if found else "Without activation checkpointing"


def _environment(run: OfflineRun) -> str:
    found = run.config.get("environment", {})
    return ", ".join(f"{key.replace('_', ' ')} {_cell(value)}" for key, value in found.items())


def _glance(run: OfflineRun) -> list[tuple[str, list[str]]]:
    rows = []
    for words, keys, made, pattern in _GLANCE:
        known = next((curve for key in keys if (curve := _curve(run, key))), None)
        if known:
            rows.append((escape(words), [pattern.format(made([figure for _, figure in known]))]))
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
    shown = table([name.replace("_", " ") for name in names], [(escape(of), cells) for of, *cells in rows])
    return f"<section><h2>Blocks</h2>{shown}</section>"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
