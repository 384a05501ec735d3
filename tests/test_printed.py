"""Tables as plain text."""

import pytest
import torch
from rich.table import Table

from lightning_ckpt import checkpoint_blocks, estimate_memory, profile_blocks
from lightning_ckpt.printed import as_it_is, as_text, whole
from zoo import mlp


def test_a_table_is_lines_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for colours elsewhere changes nothing, and no line ends in blanks."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table("Blocks", title="Title", caption="Caption")
    table.add_row("[0]", style="red")
    text = as_text(table)
    assert "\x1b" not in text
    assert [line.strip("│ ") for line in text.splitlines() if "0" in line] == ["[0]"]
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_what_the_package_finds_prints_as_its_table() -> None:
    """`print` shows the rows that rich shows: of what is covered, estimated and profiled."""
    model, x = mlp(), torch.randn(4, 64)
    with checkpoint_blocks(model) as handle:
        covered, profile = handle.report(), profile_blocks(model, lambda: model(x).sum())
    estimate = estimate_memory(model, x, lambda model, x: model(x).sum())
    for found, column in ((covered, "Recomputed"), (profile, "Boundary"), (estimate, "Temporary")):
        assert str(found) == as_text(found.__rich__())
        assert column in str(found)


def test_a_long_name_is_broken_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character is there, in a terminal that is too narrow for them."""
    monkeypatch.setenv("COLUMNS", "40")
    name = ".".join(f"part{number}" for number in range(12))
    table = Table(whole("Blocks"), "Class")
    table.add_row(name, "Block")
    rows = [line for line in as_text(table).splitlines() if line.startswith("│")]
    assert "".join(row.split("│")[1].strip() for row in rows) == name


def test_a_title_is_printed_as_it_is() -> None:
    """A target's name is no picture, and no style."""
    title = "tgt:llama: [bold]4[/bold] blocks"
    table = Table("a column wide enough for its title", title=as_it_is(title))
    assert as_text(table).splitlines()[0].strip() == title
