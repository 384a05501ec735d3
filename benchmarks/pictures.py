"""The figures and pictures of docs/compare.md, docs/doctor.md and docs/blocks.md: the GPT example.

python benchmarks/pictures.py            # measures, and writes docs/pictures/ and the text of the pages
python benchmarks/pictures.py --draw     # from the numbers of the last time
"""

import argparse
import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_ckpt.cli import blocks, doctor
from lightning_ckpt.cli import main as command
from lightning_ckpt.cli._findings import Finding
from lightning_ckpt.cli._measurement import Comparison
from lightning_ckpt.cli._plots import memory_over_a_step, time_against_memory
from lightning_ckpt.cli._style import as_file
from lightning_ckpt.cli.compare import show

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"
TARGET = "examples/train_gpt.py:training"
TRIES = 4  # a machine that does something else meanwhile shows in the spread of step times
NUMBERS, FINDINGS = PICTURES / "compare_gpt.json", PICTURES / "doctor_gpt.json"
BLOCKS = PICTURES / "blocks_gpt.json"


def comparison() -> Comparison:
    """Return the committed comparison."""
    return Comparison.from_json(json.loads(NUMBERS.read_text(encoding="utf-8")))


def pictures() -> dict[str, str]:
    """Return the pictures, by the names of their files."""
    compared = comparison()
    full = next(one for one in compared.measured if one.policy == "full")
    return {
        "compare_frontier.svg": as_file(time_against_memory(compared)),
        "compare_step.svg": as_file(memory_over_a_step(compared, full)),
    }


def printed() -> dict[str, str]:
    """Return what the commands print on a terminal of 80 columns, by the name of the page."""
    examined = json.loads(FINDINGS.read_text(encoding="utf-8"))
    findings = {row.pop("check"): Finding(**row) for row in examined["findings"]}
    table = doctor.table(examined["target"], findings)
    listed = json.loads(BLOCKS.read_text(encoding="utf-8"))
    rows = [blocks.Row(**row) for row in listed["blocks"]]
    return {
        "blocks.md": _text(lambda console: console.print(blocks.table(listed["target"], rows, listed["parameters"]))),
        "compare.md": _text(lambda console: show(comparison(), console)),
        "doctor.md": _text(lambda console: console.print(table)),
    }


def _text(show: Callable[[Console], None]) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        show(console)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def measure() -> None:
    """Run the commands on the example, and keep what they give: of several comparisons the least disturbed one."""
    os.chdir(ROOT)
    PICTURES.mkdir(exist_ok=True)
    tries = [_said("compare") for _ in range(TRIES)]
    least = min(tries, key=lambda said: _spread(Comparison.from_json(said)))
    for path, said in ((NUMBERS, least), (FINDINGS, _said("doctor")), (BLOCKS, _said("blocks"))):
        path.write_text(json.dumps(said) + "\n", encoding="utf-8")


def _said(name: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = command([name, TARGET, "--json"])
    if code == 2:
        raise SystemExit(code)
    return json.loads(said.getvalue())


def _spread(compared: Comparison) -> float:
    return max((one.spread[1] - one.spread[0]) / one.step_time for one in compared.measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the committed numbers again, measure nothing")
    if not parser.parse_args().draw:
        measure()
    for name, drawn in pictures().items():
        (PICTURES / name).write_text(drawn, encoding="utf-8")
    for name, text in printed().items():
        page = ROOT / "docs" / name
        block = re.compile(r"```text\n.*?```", flags=re.DOTALL)
        page.write_text(block.sub(lambda _, text=text: f"```text\n{text}```", page.read_text(), count=1))
        print(text)


if __name__ == "__main__":
    main()
