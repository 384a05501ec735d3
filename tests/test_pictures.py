"""The pages of `compare`, `doctor` and `blocks` show what the commands print and draw from the committed numbers."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from lightning_ckpt.cli import COMMANDS
from lightning_ckpt.cli._checks import CHECKS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["compare.md", "doctor.md", "blocks.md"])
def test_the_text_is_what_the_command_prints(script: ModuleType, page: str) -> None:
    """The first text block of each page, letter by letter."""
    first = re.search(r"```text\n(.*?)```", text_of(page), flags=re.DOTALL)
    assert first is not None
    assert first[1] == script.printed()[page]


def test_the_pictures_are_what_the_page_of_a_comparison_draws(script: ModuleType) -> None:
    """Each file is the drawing, well formed, and shown on a page."""
    for name, drawn in script.pictures().items():
        file = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")
        assert file == drawn
        assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
        assert f"(pictures/{name})" in text_of("compare.md")


def test_the_committed_comparison_holds_what_the_page_claims(script: ModuleType) -> None:
    """Every policy computed what plain training does, and full needs the least memory."""
    compared = script.comparison()
    assert compared.equal
    assert min(compared.measured, key=lambda one: one.memory.peak).policy == "full"


def test_every_check_is_in_the_table() -> None:
    """By the name that the command prints, in its order."""
    rows = re.findall(r"^\| ([^|]+) \| [A-Z][^|]*\? \|", text_of("doctor.md"), flags=re.MULTILINE)
    assert rows == list(CHECKS)


def test_the_committed_blocks_are_those_of_the_example(script: ModuleType) -> None:
    """Names, classes, parameters and bytes of the example as it is now; times are those of the day."""
    listed = json.loads(script.BLOCKS.read_text(encoding="utf-8"))
    now = script._said("blocks")
    for row in (*listed["blocks"], *now["blocks"]):
        assert row.pop("replay_seconds") > 0
    assert listed == now


@pytest.mark.parametrize("name", ["compare", "doctor", "blocks"])
def test_every_option_is_in_the_table(name: str) -> None:
    """And none that the command does not have."""
    actions = COMMANDS[name].parser()._actions
    options = {action.option_strings[-1] for action in actions if action.option_strings} - {"--help", "--traceback"}
    rows = re.findall(r"^\| (`--.*?) \|", text_of(f"{name}.md"), flags=re.MULTILINE)
    assert {option for row in rows for option in re.findall(r"--[\w-]+", row)} == options
