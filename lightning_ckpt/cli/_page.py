"""A comparison as a page."""

from html import escape

from lightning_ckpt.cli._document import document, table
from lightning_ckpt.cli._measurement import CAUSES, Comparison, Measurement
from lightning_ckpt.cli._plots import colour, memory_over_a_step, peak_by_cause, time_against_memory
from lightning_ckpt.cli._svg import tag
from lightning_ckpt.cli._words import COLUMNS, described, finding, row
from lightning_ckpt.sizes import format_size


def page(comparison: Comparison) -> str:
    """Return the page."""
    one = next(iter(comparison.measured), None)
    return document(
        title=f"{comparison.target}: activation checkpointing compared",
        kicker="Activation checkpointing, compared",
        heading=comparison.target,
        lead=finding(comparison),
        quiet=f"{described(one)}, seed {comparison.seed}" if one else "",
        body=f"{_sections(comparison) if comparison.measured else ''}{_failures(comparison)}",
    )


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
{table([*COLUMNS, *CAUSES[:-1]], (_row(comparison, one) for one in comparison.measured))}
</section>"""


def _row(comparison: Comparison, one: Measurement) -> tuple[str, list[str]]:
    name, *cells = row(one, comparison.plain)
    swatch = tag("i", style=f"background:{colour(comparison, one)}")
    return f"{swatch}{escape(name)}", [*cells, *(format_size(one.memory.causes[cause]) for cause in CAUSES[:-1])]


def _failures(comparison: Comparison) -> str:
    lines = [tag("li", tag("b", escape(name)), f": {escape(why)}") for name, why in comparison.failed.items()]
    return f"<section><h2>Not measured</h2><ul>{''.join(lines)}</ul></section>" if lines else ""


_OVER_A_STEP = """All of PyTorch's tensors, from the allocator's own events. Recording slows a step, so that the places
are stretched onto the timed one. The grey outline is plain training."""
