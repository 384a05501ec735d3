"""`lightning-ckpt blocks`: targets, the list, and their errors."""

import json
from pathlib import Path

import pytest

from lightning_ckpt.cli import main

MODELS = """
import lightning as L
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

class Late(L.LightningModule):
    def configure_model(self):
        self.layers = nn.Sequential(*[Block() for _ in range(2)])

def with_a_batch():
    return Net(), [1, 2, 3]

class Trained(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        return self.layers(batch).mean()

class ByHand(Trained):
    automatic_optimization = False

def trained():
    return Trained(), torch.zeros(16, 8)

def by_hand():
    return ByHand(), torch.zeros(16, 8)

def frozen():
    model = Trained()
    model.layers.requires_grad_(False)
    return model, torch.zeros(16, 8)

def nothing_repeats():
    return nn.Linear(2, 2)

def fails():
    raise RuntimeError("no weights\\nhere")

def leaves():
    raise SystemExit("bye")

def no_model():
    return 3

number = 3
made = Net()
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "command_models.py"
    path.write_text(MODELS)
    return str(path)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["blocks", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["blocks"]


def test_json_lists_name_class_and_parameters(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """Three blocks of 8 x 8 + 8 parameters each, of 234 in the model."""
    rows = listed(capsys, f"{models}:Net")
    assert [(row["name"], row["type"], row["parameters"]) for row in rows] == [
        (f"blocks.{number}", "Block", 72) for number in range(3)
    ]
    assert rows[0]["share"] == pytest.approx(72 / 234)


def test_the_table_sums_what_is_covered(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """A person sees each block and the share of all parameters."""
    assert main(["blocks", f"{models}:Net"]) == 0
    out = capsys.readouterr().out
    assert "blocks.2" in out
    assert "216 of 234" in out
    assert "92.3%" in out


def test_blocks_can_be_named_more_than_once(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """Class names and globs add up."""
    rows = listed(capsys, f"{models}:Net", "--blocks", "Block", "--blocks", "hea*")
    assert [row["name"] for row in rows] == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_layers_made_in_configure_model_are_seen(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """A LightningModule that builds late is built before it is looked at."""
    assert [row["name"] for row in listed(capsys, f"{models}:Late")] == ["layers.0", "layers.1"]


def test_a_factory_may_return_more_than_the_model(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """The first of a tuple is the model."""
    assert len(listed(capsys, f"{models}:with_a_batch")) == 3


def test_blocks_are_measured_where_there_is_a_batch(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """A GELU's input and result stay inside, 2 x 16 x 8 numbers of four bytes; the block's input is the boundary."""
    rows = listed(capsys, f"{models}:trained")
    assert [(row["kept_bytes"], row["boundary_bytes"]) for row in rows] == [(1024, 512), (1024, 512)]
    assert all(row["replay_seconds"] > 0 for row in rows)
    assert main(["blocks", f"{models}:trained"]) == 0
    printed = capsys.readouterr().out
    assert "boundary" in printed
    assert "2 KiB" in printed  # both together


def test_blocks_are_listed_where_they_cannot_be_measured(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """Without a batch nothing is measured; without one loss or a gradient the reason is said; the list is the same."""
    assert [row["kept_bytes"] for row in listed(capsys, f"{models}:Trained")] == [None, None]
    for factory, reason in (("by_hand", "ByHand optimizes by hand"), ("frozen", "no block was measured: in this run")):
        assert main(["blocks", f"{models}:{factory}", "--json"]) == 0
        captured = capsys.readouterr()
        assert [row["kept_bytes"] for row in json.loads(captured.out)["blocks"]] == [None, None]
        assert f"blocks are not measured: {reason}" in captured.err


def test_a_model_that_is_made_already_is_taken(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """A module at the top of a script is no factory to call."""
    assert len(listed(capsys, f"{models}:made")) == 3


def test_a_target_can_be_a_module(
    capsys: pytest.CaptureFixture[str], models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`module:factory` is imported from the working directory, as `python -m` would."""
    monkeypatch.chdir(Path(models).parent)
    assert len(listed(capsys, "command_models:Net")) == 3


@pytest.mark.parametrize("arguments", [["nothing_repeats"], ["Net", "--blocks", "Attention"]])
def test_no_block_is_exit_code_one(capsys: pytest.CaptureFixture[str], models: str, arguments: list[str]) -> None:
    """The finder's own message says what it saw; nothing is listed."""
    assert main(["blocks", f"{models}:{arguments[0]}", *arguments[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lightning-ckpt: ")
    assert "blocks=" not in captured.err
    assert "--blocks" in captured.err


def test_one_name_of_several_that_matches_nothing_is_told(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """As typed, with the name that is near."""
    assert main(["blocks", f"{models}:Net", "--blocks", "blocks.*", "--blocks", "Blck"]) == 1
    assert "--blocks 'Blck' matches no module of Net. Did you mean 'Block'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("fails", "RuntimeError: no weights here"),
        ("leaves", "SystemExit: bye"),
        ("no_model", "returned a int: return a torch.nn.Module or a LightningModule"),
        ("number", "command_models.py has no function or class 'number'; it has: Block, Net, Late, with_a_batch"),
        ("", "is not a target: give module:factory or path/file.py:factory"),
    ],
)
def test_what_goes_wrong_in_a_factory_is_one_line(
    capsys: pytest.CaptureFixture[str], models: str, factory: str, text: str
) -> None:
    """Exit code 2, what failed and why, no traceback."""
    assert main(["blocks", f"{models}:{factory}"]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere.py:make", "lightning-ckpt: nowhere.py: no such file"),
        ("no_such_package.models:make", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("justaname", "justaname: is not a target"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], target: str, text: str) -> None:
    """Exit code 2 and the name that was looked for."""
    assert main(["blocks", target]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_only_names_of_the_file_itself_are_offered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a file imports is no factory of its own; one that only imports offers that."""
    (tmp_path / "own_models.py").write_text("from pathlib import Path\n\ndef make():\n    return 1\n")
    assert main(["blocks", f"{tmp_path}/own_models.py:nope"]) == 2
    assert capsys.readouterr().err.endswith("has no function or class 'nope'; it has: make\n")
    (tmp_path / "only_imports.py").write_text("from pathlib import Path\n")
    assert main(["blocks", f"{tmp_path}/only_imports.py:nope"]) == 2
    assert capsys.readouterr().err.endswith("it has: Path\n")


def test_traceback_leads_into_the_factory(capsys: pytest.CaptureFixture[str], models: str) -> None:
    """--traceback shows the user's own line."""
    assert main(["blocks", f"{models}:fails", "--traceback"]) == 2
    assert 'raise RuntimeError("no weights' in capsys.readouterr().err
