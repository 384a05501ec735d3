"""The table of what is checkpointed."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks
from lightning_ckpt.coverage import Coverage, Portion
from zoo import ResNet, mlp


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


class Headed(nn.Module):
    """A small body under a head whose logits are most of the memory."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = mlp(depth=4)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(64, classes), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.body(x)))


def test_a_measured_report_counts_what_is_let_go_and_what_is_kept() -> None:
    """Bytes by hand: a block lets go what ReLU returns and keeps its input; the rest is kept where it runs."""
    model, x = mlp(), torch.randn(32, 64)
    report = checkpoint_blocks(model).report(lambda: model(x))
    activation = 32 * 64 * 4
    # The first layer of a block saves the block's input, which is let go there and kept at the block's border.
    assert [portion.let_go for portion in report.portions] == [2 * activation] * 3
    assert dict(report.kept) == {"0": activation, "1": activation, "2": activation}


def test_a_measured_report_names_the_module_that_keeps_the_most() -> None:
    """A head of 4000 classes: checkpointing the body lowers the peak by little, and the table says why."""
    model, x = Headed(4000), torch.randn(32, 64)
    handle = checkpoint_blocks(model, blocks="body.*")
    report = handle.report(lambda: model(x).square().mean())
    name, most = report.kept[0]
    assert name == "head.1"
    assert most == 32 * 4000 * 4
    text = " ".join(text_of(report).split())
    assert "kept, most of it by 'head.1': more than all that is let go, so checkpoint or shrink that first" in text
    small = Headed(2)
    report = checkpoint_blocks(small, blocks="body.*").report(lambda: small(x).square().mean())
    assert "shrink" not in text_of(report)
    assert "Activations let go" in text_of(report)


def test_measuring_leaves_everything_as_found() -> None:
    """Random numbers, buffers, hooks; and without a run nothing is measured."""
    model, x = ResNet(), torch.randn(4, 1, 8, 8)
    handle = checkpoint_blocks(model)
    state, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    assert handle.report(lambda: model(x)).let_go > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert handle.report().kept == ()
    with pytest.raises(ZeroDivisionError):
        handle.report(lambda: 1 / 0)
    assert not any(part._forward_hooks for part in model.modules())
