"""Writes docs/support.md from the `supports` markers of the tests, so that the page says what they show and no more.

    python tests/support_page.py

A marker names one or several values of each axis, and stands for all their products. It may be split: what a test's
own marker leaves open, those of its parameters (`pytest.param(..., marks=...)`) say.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
COMMAND = "python tests/support_page.py"
OF_FSDP2 = "FSDP2 mixed precision policy"

AXES = {
    "strategy": ("single device", "DDP", "FSDP2", "FSDP1", "DeepSpeed"),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", OF_FSDP2),
    "policy": ("full", "selective", "segments", "auto"),
    "compile": ("no", "whole", "by block"),
}
SKIPS = re.compile(r"(?<!mark\.)\b(?:importorskip|skip|xfail)\(")  # in the code of a test, where no marker tells of it
NEEDS = {
    "FSDP1": "The GPU script needs two GPUs to show sharding: on one its test runs, and PyTorch shards nothing.",
    "DeepSpeed": "The GPU script needs the package `deepspeed`, which no extra brings, or it skips these and says so;\n"
    "and two GPUs to show sharding: on one its test runs, and nothing is shared out.",
}
CI, GPU, NOWHERE = "CI on a CPU", "GPU script", "not yet"

Combination = tuple[str, ...]  # a value of each axis


@dataclass(frozen=True)
class Shown:
    """What one test shows.

    Attributes:
        file: below tests/.
        test: its name, without parameters.
        where: `CI` or `GPU`.
        combinations: for all its parameters together.
    """

    file: str
    test: str
    where: str
    combinations: frozenset[Combination]

    def of(self, strategy: str) -> list[Combination]:
        """Those of one strategy, in the order of the axes."""
        return [one for one in product(*AXES.values()) if one[0] == strategy and one in self.combinations]


# --- from tests ---


class _Collected:
    """A plugin of pytest that keeps the tests it finds."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collected() -> list[pytest.Item]:
    """Every test of a file that has such a marker, none of them run.

    Raises:
        RuntimeError: pytest can't collect them.
    """
    files = [
        file for file in sorted(Path(__file__).parent.rglob("test_*.py")) if "supports(" in file.read_text("utf-8")
    ]
    found, said = _Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        ended = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *map(str, files)], plugins=[found])
    if ended is not pytest.ExitCode.OK:
        raise RuntimeError(f"the tests can't be collected: {said.getvalue()}")
    return found.items


def shown_by(items: Iterable[pytest.Item]) -> list[Shown]:
    """What tests show, by test.

    Raises:
        ValueError: a marker that says something else than is accepted, or one of a test that may be skipped: by a
            marker, or, unless it is marked `gpu`, by any call in its file.
    """
    found: dict[tuple[str, str, str], set[Combination]] = {}
    for item in items:
        markers = list(item.iter_markers("supports"))
        if not markers:
            continue
        where = GPU if item.get_closest_marker("gpu") else CI
        may = [name for name in ("skip", "skipif", "xfail") if item.get_closest_marker(name)]
        may += [f"{call}...) in its file" for call in SKIPS.findall(item.path.read_text("utf-8"))]
        if may and where == CI:
            raise ValueError(
                f"{item.nodeid}: marked supports and {may[0]}; what may not run shows nothing: mark it gpu, or take "
                "one of the two away"
            )
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        name = getattr(item, "originalname", None) or item.name
        found.setdefault((file, name, where), set()).update(combinations(markers, item.nodeid))
    return [Shown(*about, frozenset(combined)) for about, combined in sorted(found.items())]


def combinations(markers: Sequence[pytest.Mark], test: str) -> set[Combination]:
    """What the markers of one test say: each by itself where it names every axis, the rest of them joined.

    Raises:
        ValueError: an axis or a value that does not exist, or an axis that is missing.
    """
    found: set[Combination] = set()
    joined: dict[str, Any] = {}
    for mark in markers:  # the closest first
        if mark.args:
            raise ValueError(f"{test}: supports takes {', '.join(f'{axis}=' for axis in AXES)} and nothing else")
        if mark.kwargs.keys() >= AXES.keys():
            found |= _product(mark.kwargs, test)
        else:
            joined = {**mark.kwargs, **joined}
    return found | (_product(joined, test) if joined else set())


def _product(given: Mapping[str, Any], test: str) -> set[Combination]:
    for axis in given.keys() ^ AXES.keys():
        wrong = "is no axis" if axis in given else "is missing"
        raise ValueError(f"{test}: supports: {axis} {wrong}; the axes are {', '.join(AXES)}")
    values = {axis: [value] if isinstance(value, str) else list(value) for axis, value in given.items()}
    for axis, accepted in AXES.items():
        for value in values[axis]:
            if value not in accepted:
                raise ValueError(f"{test}: supports({axis}={value!r}): accepted are {', '.join(map(repr, accepted))}")
    if OF_FSDP2 in values["precision"] and values["strategy"] != ["FSDP2"]:
        raise ValueError(f"{test}: supports(precision={OF_FSDP2!r}): only FSDP2 has one; give strategy='FSDP2'")
    return set(product(*(values[axis] for axis in AXES)))


# --- to a page ---


def page(shown: Sequence[Shown]) -> str:
    """The page, chapter by chapter."""
    chapters = "\n".join(_chapter(strategy, shown) for strategy in AXES["strategy"])
    return f"""# What is tested

A checkpointed run trains as the plain run does: loss, gradients, buffers and random numbers are equal, on a CPU bit for
bit where nothing is compiled. These tables say in which combinations a test shows it, and where that test runs.

- **{CI}**: with every change, in continuous integration; on two processes where there is a strategy.
- **{GPU}**: where somebody runs [`python benchmarks/gpu_check.py`](../benchmarks/gpu_check.py), or `pytest -m gpu`.
- **{NOWHERE}**: it may well work, and no test shows it.

Strategies and precisions are Lightning's. A policy is `full`, `selective`, `Full(segment_size=...)` or a
`MemoryBudget`. Compiled are the whole model, or its blocks one by one.

{chapters}
This page is written by `{COMMAND}` from the markers of the tests, and a test holds it to them.
"""


def _chapter(strategy: str, shown: Sequence[Shown]) -> str:
    places: dict[Combination, set[str]] = {}
    for one in shown:
        for combination in one.of(strategy):
            places.setdefault(combination, set()).add(one.where)
    rows = [
        f"| {', '.join(precisions)} | {', '.join(compiled)} | {' | '.join(cells)} |"
        for precisions, compiled, cells in _rows(strategy, places)
    ]
    head = ["precision", "compiled", *AXES["policy"]]
    table = "\n".join([f"| {' | '.join(head)} |", "| " + " | ".join(["---"] * len(head)) + " |", *rows])
    tests = "\n".join(f"- {line}" for line in _tests(strategy, shown)) or "No test yet."
    needs = f"{NEEDS[strategy]}\n\n" if strategy in NEEDS else ""
    return f"## {strategy[0].upper()}{strategy[1:]}\n\n{table}\n\n{needs}{tests}\n"


Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _rows(strategy: str, places: Mapping[Combination, set[str]]) -> list[Row]:
    """(precisions, ways to compile, a cell for each policy), rows that say the same in one."""
    whole: dict[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...], list[str]] = {}
    for precision in AXES["precision"]:
        if precision == OF_FSDP2 and strategy != "FSDP2":
            continue
        alike: dict[tuple[str, ...], list[str]] = {}
        for compiled in AXES["compile"]:
            cells = (places.get((strategy, precision, policy, compiled), set()) for policy in AXES["policy"])
            words = tuple(", ".join(sorted(cell)) or NOWHERE for cell in cells)
            alike.setdefault(words, []).append(compiled)
        same = tuple((tuple(compiled), words) for words, compiled in alike.items())
        whole.setdefault(same, []).append(precision)
    return [(tuple(precisions), *row) for rows, precisions in whole.items() for row in rows]


def _tests(strategy: str, shown: Sequence[Shown]) -> Iterator[str]:
    for one in shown:
        found = one.of(strategy)
        if found:
            where = "" if one.where == CI else f" ({one.where})"
            yield f"[{one.file}](../tests/{one.file}), `{one.test}`{where}: {_in_words(found)}"


def _in_words(combinations: Sequence[Combination]) -> str:
    """`32-true, bf16-mixed with full, selective`: precisions of the same policies together."""
    policies: dict[tuple[str, str], list[str]] = {}
    for _, precision, policy, compiled in combinations:
        policies.setdefault((precision, compiled), []).append(policy)
    precisions: dict[tuple[str, ...], list[str]] = {}
    for (precision, compiled), some in policies.items():
        precisions.setdefault((compiled, *some), []).append(precision)
    return "; ".join(
        f"{', '.join(some)} with {', '.join(used)}{'' if compiled == 'no' else f', compiled {compiled}'}"
        for (compiled, *used), some in precisions.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="where to write it, default docs/support.md")
    args = parser.parse_args()
    try:
        written = page(shown_by(collected()))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    args.out.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
