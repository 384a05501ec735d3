"""A figure that is said to be measured is that of the results file beside it, in README and in docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
# What is a ratio of two figures of a table: test_readme.py and test_docs.py compute it too.
COMPUTED = {"README.md": {"1.3"}, "exact-replay.md": {"2.2"}}


def statements_of(page: Path, text: str) -> list[tuple[str, set[Path]]]:
    """The paragraphs and list items of a page, without its code, each with the results files that it speaks of.

    Those are the files it links, and in the README those that the pages it links do, which say in full what it says in
    a line. An item that links none speaks of those of the paragraph before its list.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    statements = []
    for passage in re.split(r"\n\n+(?!- )", text):
        lead, *items = re.split(r"\n+(?=- )", passage)
        statements += [(lead, spoken_of(lead, page))]
        statements += [(item, spoken_of(item, page) or spoken_of(lead, page)) for item in items]
    return statements


def spoken_of(text: str, page: Path) -> set[Path]:
    linked = {(page.parent / target).resolve() for target in LINK.findall(text)}
    files = {file for file in linked if file.parent == ROOT / "benchmarks/results" and file.suffix == ".md"}
    if page.name == "README.md":
        files = files.union(*(spoken_of(path.read_text(encoding="utf-8"), path) for path in linked & set(PAGES)))
    return files


def numbers_in(text: str) -> list[str]:
    """The figures of a text, but for those in code and in addresses."""
    return [number.replace(",", "") for number in NUMBER.findall(LINK.sub("]", re.sub(r"`[^`]*`", "", text)))]


def unfounded(page: Path, text: str) -> list[str]:
    """Figures of statements about results that the results don't have, to the digits that are written."""
    found = []
    for statement, files in statements_of(page, text):
        results = "".join(file.read_text(encoding="utf-8") for file in files)
        known = [float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", results)]
        for number in numbers_in(statement) if files else []:
            digits = len(number.partition(".")[2])
            if f"{float(number):.{digits}f}" not in {f"{one:.{digits}f}" for one in known}:
                found.append(number)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_are_those_of_the_results(page: Path) -> None:
    """Each figure beside a link to a results file is in that file, rounded as it is written."""
    assert set(unfounded(page, page.read_text(encoding="utf-8"))) == COMPUTED.get(page.name, set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_was_measured_has_its_results_beside_it(page: Path) -> None:
    """Whoever says that something was measured on a CPU links the file that says so in full."""
    for statement, files in statements_of(page, page.read_text(encoding="utf-8")):
        if re.search(r"measured\s+\[?on a CPU", statement, flags=re.IGNORECASE):
            assert files, statement


def test_a_figure_from_nowhere_is_found() -> None:
    """A digit that was changed, a figure that was added, and one that has more digits than were measured."""
    page = ROOT / "docs/index.md"
    text = page.read_text(encoding="utf-8")
    assert "213.3 ms" in text
    for wrong, figure in (("214.3 ms", "214.3"), ("213.3 ms (or 8,123)", "8123"), ("213.35 ms", "213.35")):
        assert unfounded(page, text.replace("213.3 ms", wrong)) == [figure]
