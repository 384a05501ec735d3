"""A comparison as one HTML file that needs nothing else: no script, no font, no request."""

from html import escape

from lightning_ckpt.cli._measurement import CAUSES, Comparison, Measurement
from lightning_ckpt.cli._plots import colour, memory_over_a_step, peak_by_cause, time_against_memory
from lightning_ckpt.cli._style import COLOURS, DRAWN
from lightning_ckpt.cli._svg import tag
from lightning_ckpt.cli._words import COLUMNS, described, finding, row
from lightning_ckpt.sizes import format_size


def page(comparison: Comparison) -> str:
    """Return the page. Colours follow the reader's light or dark setting."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(comparison.target)}: activation checkpointing compared</title>
<style>{COLOURS}{DRAWN}{_STYLE}</style>
</head>
<body>
<main>
{_head(comparison)}
{_sections(comparison) if comparison.measured else ""}
{_failures(comparison)}
</main>
</body>
</html>
"""


def _head(comparison: Comparison) -> str:
    one = next(iter(comparison.measured), None)
    return f"""<header>
<p class="kicker">Activation checkpointing, compared</p>
<h1>{escape(comparison.target)}</h1>
<p class="lead">{escape(finding(comparison))}</p>
<p class="quiet">{escape(f"{described(one)}, seed {comparison.seed}") if one else ""}</p>
</header>"""


def _sections(comparison: Comparison) -> str:
    multiples = "".join(memory_over_a_step(comparison, one) for one in comparison.measured)
    return f"""<section>
<h2>Memory against time</h2>
<p class="quiet">Median step, with its quartiles. The line joins the policies that no other one beats in both: what is
to the right of it or above it costs more than it has to.</p>
{time_against_memory(comparison)}
</section>
<section>
<h2>What the peak is made of</h2>
<p class="quiet">Bytes held at the moment of the highest use. Checkpointing changes the last part only.</p>
{peak_by_cause(comparison)}
</section>
<section>
<h2>Memory over one step</h2>
<p class="quiet">{_OVER_A_STEP}</p>
<div class="multiples">{multiples}</div>
</section>
<section>
<h2>The numbers</h2>
<div class="scroll">{_table(comparison)}</div>
</section>"""


def _table(comparison: Comparison) -> str:
    names = [*COLUMNS, *CAUSES[:-1]]
    head = tag("tr", *(tag("th", escape(name), scope="col") for name in names))
    return tag("table", tag("thead", head), tag("tbody", *(_row(comparison, one) for one in comparison.measured)))


def _row(comparison: Comparison, one: Measurement) -> str:
    name, *cells = row(one, comparison.plain)
    swatch = tag("i", style=f"background:{colour(comparison, one)}")
    causes = [format_size(one.memory.causes[cause]) for cause in CAUSES[:-1]]
    return tag(
        "tr", tag("th", swatch, escape(name), scope="row"), *(tag("td", escape(cell)) for cell in [*cells, *causes])
    )


def _failures(comparison: Comparison) -> str:
    lines = [tag("li", tag("b", escape(name)), f": {escape(why)}") for name, why in comparison.failed.items()]
    return f"<section><h2>Not measured</h2><ul>{''.join(lines)}</ul></section>" if lines else ""


_OVER_A_STEP = """All of PyTorch's tensors, from the allocator's own events. Recording slows a step, so that the places
are stretched onto the timed one. The grey outline is plain training."""

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 56px clamp(16px, 5vw, 40px) 72px; }
h1 { margin: 0 0 14px; font-size: 27px; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 18px; font-weight: 650; }
p { margin: 0 0 12px; }
section { margin-top: 52px; }
.kicker { margin: 0 0 6px; color: var(--quiet); font-size: 13px; letter-spacing: 0.02em; }
.lead { font-size: 18px; }
.quiet { color: var(--quiet); font-size: 14px; max-width: 640px; }
.multiples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 20px 24px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 7px 0 7px 14px; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--quiet); vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; }
table { width: 100%; }
tbody th { font-weight: 600; }
td i, th i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
"""
