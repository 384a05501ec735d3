"""docs/support.md says what the tests' markers say, and markers say nothing that is not understood."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support_page import CI, COMMAND, GPU, NOWHERE, PAGE, ROOT, SKIPS, Shown, combinations, page, shown_by

WHOLE: dict[str, Any] = {"strategy": "DDP", "precision": "32-true", "policy": "full", "compile": "no"}


def marks(*given: dict[str, Any]) -> list[pytest.Mark]:
    return [pytest.mark.supports(**one).mark for one in given]


@pytest.mark.slow
def test_the_page_is_what_the_markers_say(tmp_path: Path) -> None:
    """The committed page is the one that the script writes from the tests as they are."""
    written = tmp_path / "support.md"
    done = subprocess.run(
        [sys.executable, "tests/support_page.py", "--out", written],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert written.read_text("utf-8") == PAGE.read_text("utf-8"), f"docs/support.md is not up to date: run {COMMAND}"


def test_lists_stand_for_all_their_products() -> None:
    """Two precisions and two policies are four combinations."""
    found = combinations(marks(WHOLE | {"precision": ["32-true", "bf16-mixed"], "policy": ["full", "auto"]}), "test")
    assert found == {
        ("DDP", precision, policy, "no") for precision in ("32-true", "bf16-mixed") for policy in ("full", "auto")
    }


def test_a_parameters_marker_says_what_the_tests_own_leaves_open() -> None:
    """Parts are joined, the closest first; a marker that names every axis stands by itself."""
    closest, own = {"policy": "selective"}, {"strategy": "FSDP2", "precision": "32-true", "compile": "no"}
    found = combinations(marks(closest, own | {"policy": "full", "compile": "whole"}, own), "test")
    assert found == {("FSDP2", "32-true", "full", "whole"), ("FSDP2", "32-true", "selective", "no")}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (WHOLE | {"policy": "ful"}, r"test: supports\(policy='ful'\): accepted are 'full', 'selective', "),
        (WHOLE | {"compile": ["no", "twice"]}, r"supports\(compile='twice'\): accepted are 'no', 'whole', 'by block'"),
        (WHOLE | {"device": "cpu"}, r"supports: device is no axis; the axes are strategy, precision, policy, compile"),
        ({"policy": "full", "compile": "no", "strategy": "DDP"}, r"supports: precision is missing"),
        (WHOLE | {"precision": "FSDP2 mixed precision policy"}, r"only FSDP2 has one; give strategy='FSDP2'"),
    ],
)
def test_what_a_marker_can_not_say_is_named(given: dict[str, Any], text: str) -> None:
    """With the test, the axis, the value, and what is accepted."""
    with pytest.raises(ValueError, match=text):
        combinations(marks(given), "test")


def item(name: str, *markers: pytest.MarkDecorator) -> Any:
    """A collected test, as far as the page looks at it; the file is any that never skips."""
    found = [marker.mark for marker in markers]
    return SimpleNamespace(
        nodeid=f"tests/test_theory.py::{name}",
        path=ROOT / "tests/test_theory.py",
        name=f"{name}[one]",
        originalname=name,
        iter_markers=lambda kind: (mark for mark in found if mark.name == kind),
        get_closest_marker=lambda kind: next((mark for mark in found if mark.name == kind), None),
    )


def test_tests_are_told_by_where_they_run() -> None:
    """A test marked `gpu` counts for the script; parameters of one test are one entry; others have none."""
    supports = pytest.mark.supports(**WHOLE)
    other = pytest.mark.supports(**(WHOLE | {"policy": "auto"}))
    found = shown_by(
        [item("test_a", supports), item("test_a", other), item("test_b", supports, pytest.mark.gpu), item("c")]
    )
    assert [(one.test, one.where, len(one.combinations)) for one in found] == [("test_a", CI, 2), ("test_b", GPU, 1)]


@pytest.mark.parametrize("mark", [pytest.mark.skipif(True, reason="no"), pytest.mark.xfail])
def test_a_test_that_may_not_run_shows_nothing(mark: pytest.MarkDecorator) -> None:
    """It is an error where the page would say that continuous integration runs it."""
    with pytest.raises(ValueError, match=rf"test_a: marked supports and {mark.name}; what may not run shows nothing"):
        shown_by([item("test_a", pytest.mark.supports(**WHOLE), mark)])


@pytest.mark.parametrize(
    ("file", "call"), [("callbacks/test_distributions.py", "importorskip"), ("test_demo.py", "skip")]
)
def test_a_file_that_may_skip_its_tests_shows_nothing(file: str, call: str) -> None:
    """No marker tells of it; a test marked `gpu` may, for the script lists what was skipped."""
    supports = pytest.mark.supports(**WHOLE)
    here, gpu = item("test_a", supports), item("test_a", supports, pytest.mark.gpu)
    here.path = gpu.path = ROOT / "tests" / file
    with pytest.raises(ValueError, match=rf"test_a: marked supports and {call}\(...\) in its file; what may not run"):
        shown_by([here])
    assert [(one.file, one.where) for one in shown_by([gpu])] == [(file, GPU)]


def test_only_calls_skip_a_file() -> None:
    """However they are imported; markers say by themselves which test they are of."""
    code = "skip('a'); pytest.xfail('b'); @pytest.mark.skip('c'); @pytest.mark.xfail('d'); skipif(e); to_skip(f)"
    assert SKIPS.findall(code) == ["skip(", "xfail("]


def test_the_page_says_what_the_gpu_script_needs() -> None:
    """In the chapter it is of: a package that no extra brings, and a second device."""
    chapters = dict(chapter.split("\n", 1) for chapter in page([]).split("## ")[1:])
    assert "needs the package `deepspeed`" in chapters["DeepSpeed"]
    assert [name for name, text in chapters.items() if "two GPUs" in text] == ["FSDP1", "DeepSpeed"]
    assert "deepspeed" not in (ROOT / "pyproject.toml").read_text("utf-8")


def test_rows_that_say_the_same_are_one() -> None:
    """A cell for each policy, both places where there are two, and the test by name with what it shows."""
    ours = frozenset({("DDP", "32-true", "full", "no"), ("DDP", "32-true", "auto", "no")})
    written = page(
        [Shown("test_it.py", "test_a", CI, ours), Shown("test_it.py", "test_b", GPU, frozenset([min(ours)]))]
    )
    chapter = written.split("## DDP\n")[1].split("## ")[0]
    assert [line for line in chapter.splitlines() if line.startswith("| ")] == [
        "| precision | compiled | full | selective | segments | auto |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| 32-true | no | {CI} | {NOWHERE} | {NOWHERE} | {CI}, {GPU} |",
        f"| 32-true | whole, by block | {NOWHERE} | {NOWHERE} | {NOWHERE} | {NOWHERE} |",
        f"| bf16-mixed, 16-mixed, bf16-true | no, whole, by block | {NOWHERE} | {NOWHERE} | {NOWHERE} | {NOWHERE} |",
    ]
    assert "- [test_it.py](../tests/test_it.py), `test_a`: 32-true with full, auto\n" in chapter
    assert "- [test_it.py](../tests/test_it.py), `test_b` (GPU script): 32-true with auto\n" in chapter
