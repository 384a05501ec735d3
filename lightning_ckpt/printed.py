"""Rich tables: columns of names, titles, and a table as plain text, for `print` and for files."""

import io

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text


def whole(header: str) -> Column:
    """A column of names, which where it is too narrow are broken, not cut: what is cut can't be told apart."""
    return Column(header, overflow="fold")


def as_it_is(title: str) -> Text:
    """A title in which nothing stands for anything else: in others rich reads `:name:` as a picture."""
    return Text(title, style="table.title")


def as_text(table: Table) -> str:
    """The lines that rich would print to the terminal there is, or to one of 80 columns, without colours."""
    file = io.StringIO()
    Console(file=file, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
