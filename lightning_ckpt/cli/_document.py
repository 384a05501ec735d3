"""An HTML file that needs nothing else: no script, font or request. Its colours follow the reader's light or dark."""

from collections.abc import Iterable, Sequence
from html import escape

from lightning_ckpt.cli._style import COLOURS, DRAWN
from lightning_ckpt.cli._svg import tag


def document(*, title: str, kicker: str, heading: str, lead: str, quiet: str, body: str) -> str:
    """Return the whole page.

    Args:
        title: what a browser shows of it, a text.
        kicker: the line above its heading, a text like the next three.
        heading: what the page is of.
        lead: what there is to know in a sentence.
        quiet: under which conditions.
        body: what follows, as HTML.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{COLOURS}{DRAWN}{_STYLE}</style>
</head>
<body>
<main>
<header>
<p class="kicker">{escape(kicker)}</p>
<h1>{escape(heading)}</h1>
<p class="lead">{escape(lead)}</p>
<p class="quiet">{escape(quiet)}</p>
</header>
{body}
</main>
</body>
</html>
"""


def table(names: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table that scrolls where it is wider than the page.

    Args:
        names: of the columns.
        rows: what each row is of, as HTML, and its other cells, as texts.
    """
    head = tag("tr", *(tag("th", escape(name), scope="col") for name in names))
    lines = (tag("tr", tag("th", of, scope="row"), *(tag("td", escape(cell)) for cell in cells)) for of, cells in rows)
    return f'<div class="scroll">{tag("table", tag("thead", head), tag("tbody", *lines))}</div>'


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
