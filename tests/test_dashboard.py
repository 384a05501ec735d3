"""The dashboard draws every key, says what it would save, and what is missing; its page in docs is true."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leet
import pytest
import wandb

from lightning_ckpt import dashboard
from lightning_ckpt.callbacks._step_rows import KEYS
from lightning_ckpt.cli import main

# Of W&B's library, which is built on it.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "dashboard.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No account of whoever runs the tests, and no network, which W&B remembers while it is set up."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


def test_every_key_is_drawn_once() -> None:
    """In the section of its group; one picture has one unit."""
    drawn = [key for plots in dashboard.SECTIONS.values() for plot in plots for key in plot.keys]
    assert sorted(drawn) == sorted(KEYS)
    for name, plots in dashboard.SECTIONS.items():
        assert {key.split("/")[0] for plot in plots for key in plot.keys} == {name.lower().replace(" ", "_")}
    for plot in (plot for plots in dashboard.SECTIONS.values() for plot in plots):
        units = {(found := re.search(r"_(gib|ms|per_sec)(_per_device)?$", key)) and found[1] for key in plot.keys}
        assert len(units) == 1, plot


def test_the_workspace_has_a_section_for_each_group() -> None:
    """Its curves are the keys, behind the monitor's prefix, over the trainer's own steps."""
    sections = dashboard.workspace("team", "project", prefix="ours/").sections
    assert [section.name for section in sections] == list(dashboard.SECTIONS)
    assert [panel.x for panel in sections[0].panels] == ["trainer/global_step"] * len(sections[0].panels)
    drawn = [key for section in sections for panel in section.panels for key in panel.y]
    assert sorted(drawn) == sorted(f"ours/{key}" for key in KEYS)


def test_the_report_compares_by_policy() -> None:
    """Runs are grouped by the policy in their config; each bar is a key's."""
    report = dashboard.report("team", "project")
    grid = report.blocks[1]
    assert grid.runsets[0].groupby == ["config.activation_checkpointing.policy"]
    assert {key for panel in grid.panels for key in panel.metrics} <= KEYS.keys()


def test_what_would_be_saved_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an account: JSON with every key of the workspace, and the report's panels."""
    assert main(["dashboard", "--entity", "team", "--project", "project", "--print"]) == 0
    printed = capsys.readouterr().out
    spec = json.loads(printed)
    assert (spec["workspace"]["entity"], spec["workspace"]["project"]) == ("team", "project")
    assert all(f'"{key}"' in printed for key in KEYS)
    assert len(spec["report"]["panels"]) == len(dashboard.COMPARED)


@pytest.mark.parametrize("as_json", [True, False])
def test_what_was_saved_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """Workspace and report are saved as they were described, and their addresses printed; exit code 0."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    saved: list[Any] = []
    for kind in (ws.Workspace, wr.Report):
        monkeypatch.setattr(kind, "save", lambda self: saved.append(self) or self)
        monkeypatch.setattr(
            kind, "url", property(lambda self: f"https://wandb.ai/{type(self).__name__}/{self in saved}")
        )
    json_too = ["--json"] if as_json else []
    assert main(["dashboard", "--entity", "team", "--project", "project", "--prefix", "ours/", *json_too]) == 0
    printed = capsys.readouterr().out
    view, page = "https://wandb.ai/Workspace/True", "https://wandb.ai/Report/True"
    if as_json:
        assert json.loads(printed) == {"workspace": view, "report": page}
    else:
        assert printed == f"workspace  {view}\nreport     {page}\n"
    assert {(each.entity, each.project) for each in saved} == {("team", "project")}
    drawn = [key for panel in saved[0].sections[0].panels for key in panel.y]
    compared = [key for panel in saved[1].blocks[1].panels for key in panel.metrics]
    assert all(key.startswith("ours/") for key in (*drawn, *compared))


def test_without_an_account(capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what was not saved, why, and what to do; nothing else, and exit code 2."""
    assert main(["dashboard", "--entity", "team", "--project", "project"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("lightning-ckpt: W&B did not save the dashboard of team/project: ")
    assert "wandb login" in said
    assert "`--print` shows what would be saved" in said
    assert len(said.splitlines()) == 1


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the extra to install."""
    for name in ("wandb_workspaces", "wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["dashboard", "--entity", "team", "--project", "project", "--print"]) == 2
    assert "pip install 'lightning-ckpt[dashboard]'" in capsys.readouterr().err


def test_the_page_explains_every_key() -> None:
    """Each key of the rows has its line in the table, and no other has."""
    assert re.findall(r"^\| `(\w+/\w+)` \|", PAGE, flags=re.MULTILINE) == list(KEYS)


def test_the_capture_is_the_committed_one() -> None:
    """What the page shows of the terminal is what the script wrote."""
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert shown == (DOCS / "pictures/leet_gpt.txt").read_text(encoding="utf-8")
    assert "checkpointing/saved_gib" in shown
    assert "memory/headroom_gib" in shown
    assert (DOCS / "pictures/leet_gpt.svg").read_text(encoding="utf-8") == leet.picture(shown)
