"""`lightning-ckpt report`: an offline run's files become a page of its own."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from chromium import PROGRAM, visit
from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.cli import _offline_run, main
from lightning_ckpt.cli._offline_run import OfflineRun, read
from lightning_ckpt.cli._run_page import page
from lightning_ckpt.memory import use_reader
from recording import Meter, Module, Samples, trainer


class Deep(Module):
    def __init__(self, meter: Meter | None = None) -> None:
        super().__init__(meter=meter)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was logged offline: six steps of two samples, a GiB a sample."""
    place, meter = tmp_path_factory.mktemp("offline"), Meter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        logger = WandbLogger(save_dir=place, project="test", offline=True)
        loader = DataLoader(Samples(12), batch_size=2, collate_fn=torch.stack)
        with use_reader(meter):
            trainer([ActivationCheckpointing(blocks="blocks.*")], logger).fit(Deep(meter), loader)
        logger.experiment.finish()
    return place


def figures(**curves: list[float]) -> OfflineRun:
    named = {key.replace("__", "/"): list(enumerate(curve)) for key, curve in curves.items()}
    return OfflineRun("offline-run-1", {}, named, ())


@pytest.mark.slow
def test_a_real_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder above the run will do; policy, figures, curves and blocks are on the page."""
    assert main(["report", str(folder), "--html", str(tmp_path / "run.html")]) == 0
    assert capsys.readouterr().out.strip() == f"written to {tmp_path / 'run.html'}"
    written = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Full() on 3 blocks" in written
    assert "<td>2 GiB</td>" in written
    assert "<td>14 GiB</td>" in written
    for name in ("peak_backward_gib", "step_time_ms", "saved_gib", "overhead_fraction", "blocks.1"):
        assert name in written
    for drawn in re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL):
        ElementTree.fromstring(drawn)


@pytest.mark.slow
def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure with its step."""
    (run,) = folder.glob("wandb/offline-run-*")
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == run.name
    assert found["figures"]["memory/peak_allocated_gib"] == [[step, 2.0] for step in range(6)]
    assert found["config"]["activation_checkpointing"]["policy"] == "Full()"
    assert len(read(run).blocks) == 3


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs a Chromium")
def test_a_browser_asks_for_nothing_else(folder: Path, tmp_path: Path) -> None:
    """The page is one file: no request, no error, and nothing wider than a narrow screen."""
    path = tmp_path / "run.html"
    path.write_text(page(read(folder)), encoding="utf-8")
    seen = visit(path, tmp_path / "profile", {"wide": "document.documentElement.scrollWidth <= window.innerWidth"})
    assert seen.requests == [path.as_uri()]
    assert seen.said == []
    assert seen.answers == {"wide": True}


def logged(place: Path, **row: float) -> Path:
    """The folder of an offline run that has logged one row."""
    settings = wandb.Settings(mode="offline", silent=True)
    with wandb.init(dir=place, project="test", settings=settings) as run:
        run.log({key.replace("__", "/"): figure for key, figure in row.items()})
    wandb.teardown()  # it remembers its settings, and other runs have others
    (folder,) = place.glob("wandb/offline-run-*")
    return folder


@pytest.mark.slow
def test_a_run_without_the_monitor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says in which folder nothing of it is, and how to get it."""
    folder = logged(tmp_path, loss=1.0, trainer__global_step=0)
    assert main(["report", str(tmp_path)]) == 2
    reason = "no row of StepMonitor is in it; add StepMonitor() to the trainer's callbacks"
    assert capsys.readouterr().err == f"lightning-ckpt: {folder}: {reason}\n"


@pytest.mark.slow
def test_a_run_without_blocks(tmp_path: Path) -> None:
    """The monitor's figures are read, and no table of blocks is missed."""
    run = read(logged(tmp_path, throughput__step_time_ms=2.0, trainer__global_step=7))
    assert run.figures["throughput/step_time_ms"] == [(7, 2.0)]
    assert run.blocks == ()


def test_a_short_run_is_drawn() -> None:
    """One step, and figures of zero, have places on the page too."""
    written = page(figures(throughput__step_time_ms=[2.0], checkpointing__saved_gib=[0.0]))
    assert "Without activation checkpointing" in written
    assert written.count("<svg") == 2
    assert "nan" not in written


def test_a_prefix_is_no_hindrance() -> None:
    """A monitor that writes behind a prefix has its page."""
    assert "3 ms" in page(figures(ours__throughput__step_time_ms=[3.0, 3.0]))


def test_names_are_escaped() -> None:
    """What a run says of itself is text."""
    run = OfflineRun("<run>", {"activation_checkpointing": {"policy": "<b>", "blocks": []}}, {}, ())
    assert "<b>" not in page(run)
    assert "&lt;run&gt;" in page(run)


@pytest.mark.parametrize("words", [["nowhere"], ["."]])
def test_no_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the place and what a run looks like."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    assert "no offline W&B run is there; give a folder like wandb/offline-run-" in capsys.readouterr().err


def test_a_file_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """W&B's reader says what is wrong, in one line."""
    (tmp_path / "run-1.wandb").write_text("nothing")
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "wandb 0.30" not in said


def test_a_reader_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says which release of W&B reads such files."""
    (tmp_path / "run-1.wandb").write_text("nothing")
    monkeypatch.setattr(_offline_run, "version", lambda name: "0.29.0")
    assert main(["report", str(tmp_path)]) == 2
    assert "; it takes wandb 0.30 or newer, and 0.29.0 is here" in capsys.readouterr().err


def test_no_folder_for_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the run is read."""
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "none/run.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
