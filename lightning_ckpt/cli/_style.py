"""What pictures look like, in a page and as files of their own: colours by day and by night, lines, letters."""

import re

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1c1d20; --quiet: #62656c; --line: #e4e4e0; --ghost: #9a9da3;
  --cause-0: #8c9097; --cause-1: #b0b3b8; --cause-2: #d0d2d5;
  --policy-0: #5d6168; --policy-1: #1f6fd6; --policy-2: #c75a00; --policy-3: #0b7d6e; --policy-4: #7a45cf;
  --policy-5: #bd2b73; --policy-6: #6b6f00; --policy-7: #8a5527;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #17181b; --ink: #ececea; --quiet: #a0a3aa; --line: #2c2e33; --ghost: #74777e;
    --cause-0: #757982; --cause-1: #565a62; --cause-2: #3f4249;
    --policy-0: #b4b7bd; --policy-1: #6cabff; --policy-2: #ff9d52; --policy-3: #45cdb9; --policy-4: #b695ff;
    --policy-5: #ff86bb; --policy-6: #c8cb55; --policy-7: #d6a274;
  }
}
"""

DRAWN = """
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
svg .name { font-weight: 600; font-size: 13px; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
svg .value { font-size: 12px; font-variant-numeric: tabular-nums; }
svg .tick, svg .axis { fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); }
svg .frontier { fill: none; stroke: var(--ghost); stroke-width: 1.5; }
svg .curve { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
svg .area { opacity: 0.14; }
svg .ghost { fill: none; stroke: var(--ghost); stroke-width: 1; }
svg .phase { stroke: var(--quiet); stroke-dasharray: 2 4; }
svg .level { stroke-dasharray: 1 3; }
"""


def as_file(picture: str) -> str:
    """Return an inline picture as the content of an SVG file, with its own paper and the size it is drawn for."""
    width, height = re.findall(r'viewBox="0 0 (\S+) (\S+)"', picture)[0]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    paper = "svg { background: var(--paper); color: var(--ink); }"
    return picture.replace("<svg", head, 1).replace(">", f"><style>{COLOURS}{DRAWN}{paper}</style>", 1) + "\n"
