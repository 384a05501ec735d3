"""Pages show what commands print and draw from the committed numbers, and what scripts draw of the textbook model."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import drawings
import leet
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


def test_the_pictures_are_what_the_scripts_draw(script: ModuleType) -> None:
    """Each file is the drawing, well formed, and shown on its page."""
    for page, drawn in (("compare.md", script.pictures()), ("how-it-works.md", drawings.drawings())):
        for name, picture in drawn.items():
            file = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")
            assert file == picture
            assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
            assert f"(pictures/{name})" in text_of(page)


def test_every_picture_is_made_by_a_script(script: ModuleType) -> None:
    """Those in docs by the three scripts, as the numbers beside them; those of a result by the one its page names."""
    made = {ROOT / "docs/pictures" / name for name in (*script.pictures(), *drawings.drawings(), leet.PICTURE.name)}
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    for file in (ROOT / "docs/pictures").iterdir():
        assert file in made or any(file.name in code for code in scripts.values()), file
    for result in (ROOT / "benchmarks/results").glob("*.md"):
        text = result.read_text(encoding="utf-8")
        named = re.search(r"Made by `[^`]*(benchmarks/\w+\.py)", text)
        assert named is not None
        assert ROOT / named[1] in scripts
        made |= {result.parent / name for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert {(page.parent / name).resolve() for name in shown} <= made, page


def test_the_drawn_steps_are_those_of_the_textbook() -> None:
    """Peaks and lengths of both curves are the model's, whatever the chain; all that is left is the chain's input."""
    for layers, segments in ((16, 4), (12, 3), (8, 8), (5, 1)):
        chain = drawings.Chain(layers=layers, segments=segments, activation_bytes=1)
        for levels, peak, cost in (
            (drawings.plain_step(chain), chain.plain_tensors, chain.plain_cost),
            (drawings.checkpointed_step(chain), chain.peak_tensors, chain.checkpointed_cost),
        ):
            assert max(held for _, held in levels) == peak
            assert levels[-1] == (cost, 1)


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
