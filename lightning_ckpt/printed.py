"""A rich table as plain text, for `print` and for files."""

import io

from rich.console import Console
from rich.table import Table


def as_text(table: Table) -> str:
    """The lines that rich would print to the terminal there is, or to one of 80 columns, without colours."""
    file = io.StringIO()
    Console(file=file, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
