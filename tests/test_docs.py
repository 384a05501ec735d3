"""The pages under docs are true: their Python runs, their messages are printed, their links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_ckpt import checkpoint_blocks
from lightning_ckpt.cli import main
from lightning_ckpt.cli._checks import CHECKS
from lightning_ckpt.processes import Processes

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_runs(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snippet of a page, in order, with a small model; what a comment says is printed is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    saved = re.search(r"as `(training\.py)`.*?```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if saved:
        (tmp_path / saved[1]).write_text(saved[2], encoding="utf-8")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    names = {"torch": torch, "model": model, "batch": torch.randn(2, 4)}
    for number, source in enumerate(blocks_of(page, "python")):
        exec(compile(source, f"{page.name}, snippet {number}", "exec"), names)
        printed = capsys.readouterr().out
        for promised in re.findall(r"print\(.*\)  # (.*)", source):
            assert promised in printed
        if "# prints the table below" in source:
            after = page.read_text(encoding="utf-8").partition(f"{source}```\n\n```text\n")[2]
            assert after
            assert after.partition("```")[0] in re.sub(r" +\n", "\n", printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file or folder here; the site's own test knows the places on a page."""
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale).tanh()


def test_the_value_checks_message_is_the_printed_one() -> None:
    """The example of an error is what that error says."""
    model = nn.Sequential()
    model.blocks = nn.ModuleList([Block(), Block()])
    checkpoint_blocks(model, determinism_check="values")
    loss = model.blocks[1](torch.randn(2, 4)).sum()
    model.blocks[1].scale = 3.0
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    (message,) = blocks_of(DOCS / "exact-replay.md", "text")
    assert message.split() == str(caught.value).split()


def test_the_value_checks_cost_is_the_measured_one() -> None:
    """The factor on the page is the committed benchmark's."""
    page = (DOCS.parent / "benchmarks/results/overhead_cpu_202611.md").read_text(encoding="utf-8")
    times = [float(time) for time in re.findall(r"^\| [^|]* \| ([\d.]+) ms", page, flags=re.MULTILINE)]
    text = " ".join((DOCS / "exact-replay.md").read_text(encoding="utf-8").split())
    assert f"takes about {times[1] / times[0]:.1f} times as long" in text


def test_the_budgets_figures_are_the_measured_ones() -> None:
    """Shares, errors and ratios on the page, and on the front page, are the committed benchmark's."""
    results = (DOCS.parent / "benchmarks/results/planner_cpu_202612.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in results.splitlines() if line.startswith("|")][
        2:
    ]
    shares = [float(share) for row in rows for share in re.findall(r"\(([\d.]+)%\)", row[3])]
    page = " ".join((DOCS / "memory-budget.md").read_text(encoding="utf-8").split())
    assert len(rows) == 18
    assert "Peaks at or under the budget in every one: yes" in results
    assert f"{min(shares):.1f} to {max(shares):.1f} % of it used" in page
    off = re.search(r"against the measured one: ([\d.]+)% off \(median\), ([\d.]+)% \(worst\)", results)
    uneven = re.search(r"uneven models: ([\d.]+) \(median\).*even models: ([\d.]+) \(median\)", results)
    assert off is not None
    assert uneven is not None
    assert f"{off[1]} % off (median), {off[2]} % in the worst case" in page
    assert f"{uneven[1]} of it on models whose blocks differ (median), {uneven[2]} on equal blocks" in page
    assert f"{uneven[1]} of it on models whose blocks differ (median)" in (DOCS.parent / "README.md").read_text()
    beyond = re.search(r"of (\d+): faster than the best by hand in (\d+), slower in none", results)
    assert beyond is not None
    assert f"it was faster in {beyond[2]} of {beyond[1]} cases, and slower in none" in page


def test_the_tuners_messages_are_those_it_gives() -> None:
    """Each message that the page has a cure for is in the code, word for word."""
    rooms = (DOCS.parent / "lightning_ckpt/callbacks").glob("*.py")
    code = "".join(re.sub(r'["\']\n\s*f?["\']', "", room.read_text(encoding="utf-8")) for room in rooms)
    table = (DOCS / "batch-size.md").read_text(encoding="utf-8").split("| it says |")[1]
    messages = re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(messages) >= 9
    assert [text for text in messages if text.replace("size of 1 ", "size of {least.size} ") not in code] == []


def test_the_explanation_is_the_computed_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The arithmetic is what the command above it prints, to the last line."""
    page = DOCS / "how-it-works.md"
    command = re.search(r"`lightning-ckpt (explain [^`]*)`", page.read_text(encoding="utf-8"))
    assert command is not None
    assert main(command[1].split()) == 0
    assert blocks_of(page, "text") == [capsys.readouterr().out]


def test_every_check_has_its_mistake() -> None:
    """The page of mistakes names each of the doctor's checks, once, and links the page that explains it."""
    named = re.findall(
        r"^Check: \[([^]]+)\]\(doctor\.md#the-checks\)\.$", (DOCS / "common-mistakes.md").read_text(), re.M
    )
    assert sorted(named) == sorted(CHECKS)


def test_the_note_of_a_failed_rank_is_the_one_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of what the others say is what they say."""
    ranks = object.__new__(Processes)
    ranks._who, ranks._rank = "BatchSizeTuner", 0
    monkeypatch.setattr(Processes, "_note", lambda _: "rank 1 failed with FileNotFoundError: /data/part-7")
    (message,) = blocks_of(DOCS / "distributed.md", "text")
    assert message.strip() == f"BatchSizeTuner: {ranks._why(None)}"


def test_no_page_waits_to_be_written() -> None:
    """No placeholder is left."""
    for page in [*PAGES, DOCS.parent / "README.md"]:
        assert not re.findall(r"PLACEHOLDER|FIGURES|TODO|TBD", page.read_text(encoding="utf-8")), page
