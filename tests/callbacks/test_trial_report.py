"""What is shown and logged of the trials: a table, one row, a table of W&B, and a line that goes away."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, StepMonitor
from lightning_ckpt.callbacks import _trial_report
from lightning_ckpt.callbacks._trial_report import TrialReport
from lightning_ckpt.callbacks._trials import Trial
from lightning_ckpt.memory import GIB, use_reader
from recording import Meter, Module, Rowed, Samples, trainer

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.fixture
def meter() -> Iterator[Meter]:
    """With a GiB a sample, 16 GiB and a tenth of headroom, 14 samples fit."""
    with use_reader(Meter(limit=16 * GIB)) as reader:
        yield reader  # type: ignore[misc]


def fit(meter: Meter, callbacks: list[Callback], logger: Any, module: Module | None = None, **options: Any) -> Trainer:
    running = trainer(callbacks, logger, **options)
    running.fit(module or Module(meter=meter), DataLoader(Samples(42), batch_size=2, collate_fn=torch.stack))
    return running


def test_the_table_has_every_trial() -> None:
    """Size, peak, its share of the limit, seconds, samples per second where there are any, outcome."""
    trials = [Trial(8, 2 * GIB, 0.5, "fits"), Trial(64, 15 * GIB, 0.25, "out of memory")]
    console = Console(file=io.StringIO(), width=100)
    console.print(TrialReport(trials, 16 * GIB, "Found").table())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["8", "2 GiB", "12.5%", "0.5 s", "16", "fits"],
        ["64", "15 GiB", "93.8%", "0.25 s", "", "out of memory"],
    ]
    assert "Found" in lines[0]


def test_a_second_fit_shows_its_own_trials(meter: Meter, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares are of the limit that was then, so trials of before are not shown again; all are kept."""
    tuner = BatchSizeTuner()
    fit(meter, [tuner], False)
    capsys.readouterr()
    fit(meter, [tuner], False)
    assert [trial.size for trial in tuner.trials[-2:]] == [14, 14]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]) == 1


def test_without_a_monitor_the_size_is_one_row(meter: Meter) -> None:
    """At the step where the first loss is, with what accumulation makes of it, and no other row but the losses."""
    logger = Rowed()
    fit(meter, [BatchSizeTuner()], logger, accumulate_grad_batches=3)
    assert logger.calls[0] == (0, {"batch_size/per_device": 14.0, "batch_size/global": 42.0})
    assert logger.loss_steps() == [0]
    assert len(logger.calls) == 2


def test_modules_that_step_by_themselves_take_a_batch_a_step(meter: Meter) -> None:
    """What they gather is theirs to know."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    logger = Rowed()
    fit(meter, [BatchSizeTuner()], logger, Manual(meter=meter))
    assert logger.calls[0] == (0, {"batch_size/per_device": 14.0, "batch_size/global": 14.0})


@pytest.mark.parametrize(
    "bring", [StepMonitor, lambda: ActivationCheckpointing(blocks="layer")], ids=["own", "brought"]
)
def test_a_monitor_logs_the_size_by_itself(bring: Any, meter: Meter) -> None:
    """Its rows have the keys already: no row comes before them."""
    logger = Rowed()
    fit(meter, [BatchSizeTuner(), bring()], logger)
    assert all("loss" in row or "throughput/step_time_ms" in row for _, row in logger.calls)
    assert set(logger.column("batch_size/per_device")) == {14.0}


def test_nothing_is_logged_of_a_fit_without_trials(meter: Meter) -> None:
    """A dry run after a search says nothing of the search."""
    tuner, logger = BatchSizeTuner(), Rowed()
    fit(meter, [tuner], False)
    fit(meter, [tuner], logger, fast_dev_run=True)
    assert logger.calls == []


def test_a_file_of_rows_has_one_of_the_search(meter: Meter, tmp_path: Path) -> None:
    """Losses of three steps and the size."""
    fit(meter, [BatchSizeTuner()], CSVLogger(tmp_path, name=None, version="csv"))
    with (tmp_path / "csv/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["batch_size/per_device"], bool(row["loss"])) for row in rows] == [
        ("0", "14.0", False),
        ("0", "", True),
        ("1", "", True),
        ("2", "", True),
    ]


class FirstValues(CSVLogger):
    """Takes one value of a hyperparameter and no other, as MLflow does."""

    def log_hyperparams(self, params: Any) -> None:  # type: ignore[override]
        for name, value in dict(params).items():
            if self.experiment.hparams.setdefault(name, value) != value:
                raise RuntimeError("Changing param values is not allowed")


@pytest.mark.parametrize("mode", ["search", "grow"])
def test_a_logger_that_keeps_the_first_value_ends_no_run(mode: Any, meter: Meter, tmp_path: Path) -> None:
    """It is said that the found size is not among its hyperparameters, and training has that size."""
    logger = FirstValues(tmp_path)
    logger.log_hyperparams({"batch_size": 2})
    tuner = BatchSizeTuner(mode)
    with pytest.warns(UserWarning, match="FirstValues did not take batch_size=14 as a hyperparameter: Changing param"):
        running = fit(meter, [tuner], logger, max_epochs=6)
    assert tuner.batch_size == running.train_dataloader.batch_size == 14


def test_a_resumed_run_logs_where_it_goes_on(meter: Meter, tmp_path: Path) -> None:
    """Not back at the first step, where a chart would jump."""
    fit(meter, [BatchSizeTuner()], False).save_checkpoint(tmp_path / "half.ckpt")
    logger = Rowed()
    running = trainer([BatchSizeTuner()], logger, max_epochs=2)
    loader = DataLoader(Samples(42), batch_size=2, collate_fn=torch.stack)
    running.fit(Module(meter=meter), loader, ckpt_path=str(tmp_path / "half.ckpt"))
    assert [(step, "loss" in row) for step, row in logger.calls] == [(3, False), (3, True), (4, True), (5, True)]


@pytest.mark.slow
def test_a_run_of_wandb_has_the_table_the_row_and_the_size(
    meter: Meter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back from an offline run: a history row of the size and one of the table at step 0, the config's size."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger, tuner = WandbLogger(save_dir=tmp_path, project="test", offline=True), BatchSizeTuner()
    fit(meter, [tuner], logger)
    logger.experiment.finish()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    program = Path(sys.executable).with_name("wandb")
    read = subprocess.run([program, "leet", "inspect", "--json", run], capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in read.stdout.splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    size, *tables = [item for item in items if any(key.startswith("batch_size/") for key in item)]
    assert (size["batch_size/per_device"], size["batch_size/global"], size["trainer/global_step"]) == (14, 14, 0)
    assert len(tables) == 1
    assert tables[0]["trainer/global_step"] == 0
    assert [item["trainer/global_step"] for item in items if "loss" in item] == [0, 1, 2]
    (table,) = run.glob("files/media/table/batch_size/trials_*.table.json")
    written = json.loads(table.read_text())
    assert written["columns"] == ["batch_size", "peak_gib", "share_of_limit", "seconds", "samples_per_sec", "outcome"]
    assert [row[:3] + row[5:] for row in written["data"]] == [
        [trial.size, trial.size, trial.size / 16, "fits"] for trial in tuner.trials
    ]
    assert [row[4] for row in written["data"]] == pytest.approx([t.size / t.seconds for t in tuner.trials])
    configs = [record["config"]["update"] for record in records if record["type"] == "config"]
    assert {"batch_size": 14} in configs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def barred(callbacks: list[Callback], **options: Any) -> Trainer:
    """A trainer with a progress bar."""
    quiet = {"logger": False, "limit_val_batches": 0, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", callbacks=callbacks, max_epochs=1, **quiet, **options)  # type: ignore[arg-type]


def shown(monkeypatch: pytest.MonkeyPatch, meter: Meter, module: Module | None = None, **options: Any) -> str:
    """What a terminal is sent while a search runs, the table left out."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        _trial_report, "Console", lambda: Console(file=terminal, force_terminal=True, width=100, color_system=None)
    )
    barred([BatchSizeTuner()], **options).fit(
        module or Module(meter=meter), DataLoader(Samples(42), batch_size=2, collate_fn=torch.stack)
    )
    return terminal.getvalue()


def test_the_line_tells_what_is_tried_and_what_fits(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, written over by the next, and at the end erased, with the cursor at its start."""
    sent = shown(monkeypatch, meter)
    texts = re.findall(r"Looking [^\n\r\x1b]*", sent)
    assert [text.strip() for text in texts[:3]] == [
        "Looking at the data",
        "Looking for the batch size: trying 2, trial 1 of 8 at most, none has fitted yet",
        "Looking for the batch size: trying 14, trial 1 of 8 at most, none has fitted yet",
    ]
    after = sent.rpartition(texts[-1])[2]
    assert "\x1b[2K" in after
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\s", "", after) == ""


def test_the_line_is_erased_after_an_error(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """And standard output is the one that was."""

    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ZeroDivisionError("in the user's code")

    output = sys.stdout
    with pytest.raises(ZeroDivisionError):
        shown(monkeypatch, meter, Fails(meter=meter))
    assert sys.stdout is output


def test_no_line_without_a_progress_bar(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, meter, enable_progress_bar=False) == ""


def test_no_line_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Where output is no terminal nothing is sent to it."""
    with _trial_report.SearchLine(barred([])) as line:
        line.say("hidden")
    assert capsys.readouterr().out == ""


def test_other_ranks_show_and_log_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank zero speaks for all."""
    terminal, logger = Terminal(), Rowed()
    monkeypatch.setattr(_trial_report, "Console", lambda: Console(file=terminal, force_terminal=True))
    other: Any = SimpleNamespace(is_global_zero=False, progress_bar_callback=object(), callbacks=[], loggers=[logger])
    with _trial_report.SearchLine(other) as line:
        line.say("hidden")
    TrialReport([], GIB, "").log(other, 4)
    assert (terminal.getvalue(), logger.calls) == ("", [])
