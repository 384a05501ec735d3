"""`lightning-ckpt explain`: the numbers, the drawing, and its errors."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from lightning_ckpt.cli import COMMANDS, main
from lightning_ckpt.theory import LEFT_OUT

SIXTEEN = ["explain", "--layers", "16", "--activation", "8MiB", "--segments", "4"]


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_every_number_of_the_picture_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the sixteen-layer picture carries its count, its size and its share."""
    assert main(SIXTEEN) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    assert lines["boundaries"] == "5 tensors 40 MiB"
    assert lines["scratch"] == "4 tensors 32 MiB while one segment replays"
    assert lines["peak"] == "9 tensors 72 MiB"
    assert lines["saved"] == "64 MiB 47.1% of plain"
    assert lines["cost"].startswith("48 units plain (forward 1, backward 2 a layer), 64 with one replay: 33.3% more")
    assert lines["best"] == "segments of 4, the square root of 16 layers: 4 of them"


def test_the_chain_is_drawn_with_its_bookmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """17 tensors plain, five bookmarks with twelve dropped, and the last segment made again."""
    plain, checkpointed, replaying = explain(capsys, *SIXTEEN[1:]).splitlines()[:3]
    assert plain == "plain         ●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●"
    assert checkpointed == "checkpointed  ●─·─·─·─●─·─·─·─●─·─·─·─●─·─·─·─●"
    assert replaying == "replaying     ●─·─·─·─●─·─·─·─●─·─·─·─●─○─○─○─○"


def test_what_the_model_leaves_out_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers never stand without their limits."""
    assert all(sentence in explain(capsys) for sentence in LEFT_OUT)


def test_a_long_chain_wraps_and_loses_no_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    """Seventy layers draw 71 tensors, all kept in the plain row."""
    lines = explain(capsys, "--layers", "70").splitlines()
    plain = lines[: next(number for number, line in enumerate(lines) if line.startswith("checkpointed"))]
    assert len(plain) == 3
    assert "".join(plain).count("●") == 71


def test_a_chain_too_long_to_draw_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand layers give the numbers without a drawing."""
    out = explain(capsys, "--layers", "1000")
    assert out.startswith("(a chain of 1000 layers is too long to draw)")
    assert "1001 tensors" in out


def test_without_segments_the_best_number_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty layers are cut into four segments of five, the square root rounded up."""
    out = explain(capsys, "--layers", "20")
    assert "segments of 5, the square root of 20 layers rounded up: 4 of them" in out
    assert " ".join(out.split()).count("5 tensors") == 2


def test_json_holds_every_number_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines get bytes and exact fractions."""
    assert main([*SIXTEEN, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["plain_bytes"] == 136 * 2**20
    assert numbers["peak_bytes"] == 72 * 2**20
    assert numbers["saved_fraction"] == pytest.approx(64 / 136)
    assert (numbers["plain_cost"], numbers["checkpointed_cost"]) == (48, 64)
    assert numbers["boundaries"] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["explain", "--activation", "8MB"],
            "explain: activation='8MB' is not a size: give a whole number of bytes, at least 1, or a number with B,",
        ),
        (["explain", "--segments", "17"], "explain: segments=17 is more than layers=16"),
        (["explain", "--layers", "0"], "explain: layers=0 is too small"),
        (["explain", "--layers", "x"], "--layers: Expected a whole number. Got value: x"),
        (["explain", "--colour"], "unrecognized arguments: --colour"),
        (["explian"], "invalid choice: 'explian' (choose from"),
        (["blocks"], "the following arguments are required: TARGET\n"),
        (["estimate"], "the following arguments are required: TARGET, --device-memory\n"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """No usage dump, no traceback: what is wrong, and what is accepted."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert text in captured.err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever types the name alone wants to know what there is."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"    {command} " in printed for command in COMMANDS)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """As in its metadata."""
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"lightning-ckpt {version('lightning-ckpt')}\n"


def test_one_layer_is_one_and_many_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    """No plural of one, no exponent."""
    assert "the square root of 1 layer: 1 of them" in explain(capsys, "--layers", "1")
    assert "300000000 units plain" in explain(capsys, "--layers", "100000000")


def test_traceback_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    """--traceback adds Python's own report above the line."""
    assert main(["explain", "--layers", "0", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "blocks"])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Each command's help ends with lines to copy."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"examples:\n  lightning-ckpt {command} " in capsys.readouterr().out


def test_the_examples_of_explain_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What the help says to copy works."""
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    examples = [line.split("  (")[0].split() for line in capsys.readouterr().out.split("examples:\n")[1].splitlines()]
    assert len(examples) == 3
    assert [main(example[1:]) for example in examples] == [0, 0, 0]


def test_explain_does_not_wait_for_torch() -> None:
    """Arithmetic needs no deep-learning library: the command answers without importing it."""
    code = (
        "import sys; from lightning_ckpt.cli import main; main(['explain']);"
        "sys.exit(sorted({'torch', 'lightning'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """As with `lightning-ckpt explain | head -1`: no traceback, and the exit code that shells give to a closed pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import sys; from lightning_ckpt.cli import main; sys.exit(main(['explain']))"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
