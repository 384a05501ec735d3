"""The table of what is checkpointed."""

import io

from rich.console import Console
from torch import nn

from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks
from lightning_ckpt.coverage import Coverage, Portion
from zoo import mlp


def text_of(coverage: Coverage) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(coverage)
    return console.export_text()


def test_neighbours_alike_share_a_row_and_the_others_say_why_not() -> None:
    """Twelve equal blocks take one line; a block that is left alone stands apart, with its reason."""
    portions = [Portion(f"net.{i}", "Block", 100, "left out by the policy" if i == 2 else None) for i in range(5)]
    lines = text_of(Coverage("Full()", tuple(portions), 1000)).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows == [
        ["net.0 .. 1", "Block", "200", "yes"],
        ["net.2", "Block", "100", "no: left out by the policy"],
        ["net.3 .. 4", "Block", "200", "yes"],
    ]
    assert "4 of 5 blocks, 40.0% of 1,000 parameters" in lines[-1]


def test_it_says_the_policy_as_a_user_would_write_it() -> None:
    """Arguments at their defaults are left out."""
    assert str(Full()) == "Full()"
    assert str(Full(every=2)) == "Full(every=2)"
    assert str(SelectiveOps(["aten.mm"])) == "SelectiveOps(save=('aten.mm',))"
    assert "Activation checkpointing, Full(every=2)" in text_of(checkpoint_blocks(mlp(), Full(every=2)).report())


def test_a_model_without_parameters_has_no_share() -> None:
    """No division by zero."""
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.ReLU()), nn.Sequential(nn.Tanh(), nn.ReLU()))
    assert checkpoint_blocks(model, blocks=["0", "1"]).report().share == 0.0
