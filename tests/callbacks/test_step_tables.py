"""What a run's page shows beside its curves, and the same figures in every logger."""

import csv
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, MemoryBudget
from lightning_ckpt.callbacks._step_rows import KEYS
from lightning_ckpt.callbacks._step_tables import environment
from lightning_ckpt.memory import GIB, use_reader
from recording import Meter, Module, Rowed, Samples, trainer

TABLES = {"checkpointing/blocks", "batch_size/trials"}


class Deep(Module):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch["input_ids"].float(), batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)

    def train_dataloader(self) -> Any:
        collate = lambda rows: {"input_ids": torch.stack(rows).long()}  # noqa: E731
        return DataLoader(Samples(12), batch_size=self.hparams["batch_size"], collate_fn=collate)


class MLFlow(Logger):
    """Stands for the MLflow logger, which is not installed: keeps numbers alone, at whole steps, as its client does."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}

    name, version = "mlflow", "0"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params.update({key: str(value) for key, value in dict(params).items()})

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert isinstance(step, int)
        for key, figure in metrics.items():
            assert type(figure) in (int, float)
            self.metrics.append((key, float(figure), step))


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records_of(folder: Path) -> list[dict[str, Any]]:
    (run,) = folder.glob("wandb/offline-run-*")
    program = Path(sys.executable).with_name("wandb")
    found = subprocess.run(
        [str(program), "leet", "inspect", "--json", str(run)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_every_logger_has_the_same_figures(tmp_path: Path) -> None:
    """W&B, CSV, TensorBoard and MLflow, each at the same steps with the same keys, all of them documented."""
    own, mlflow = Rowed(), MLFlow()
    files = [CSVLogger(tmp_path, name=None, version="csv"), TensorBoardLogger(tmp_path, name=None, version="board")]
    wandb = WandbLogger(save_dir=tmp_path, project="test", offline=True)
    with use_reader(Meter()):
        trainer([ActivationCheckpointing(blocks="blocks.*")], [own, mlflow, *files, wandb]).fit(Deep())
    wandb.experiment.finish()
    expected = {(key, step): figure for step, row in own.rows() for key, figure in row.items()}
    assert {key for key, _ in expected} <= KEYS.keys()
    assert {key for key, _ in expected} >= {key for key in KEYS if key.startswith("checkpointing/")}

    with (tmp_path / "csv/metrics.csv").open() as file:
        rows = [(int(row["step"]), row) for row in csv.DictReader(file) if row["throughput/step_time_ms"]]
    in_csv = {(key, step): float(row[key]) for step, row in rows for key in row if "/" in key and row[key]}
    assert in_csv == pytest.approx(expected)

    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if "/" in tag]
    in_board = {(tag, event.step): event.value for tag in tags for event in board.Scalars(tag)}
    assert in_board == pytest.approx(expected, rel=1e-6)

    assert {(key, step): figure for key, figure, step in mlflow.metrics if "/" in key} == expected
    assert "environment" in mlflow.params

    items = [record["history"]["item"] for record in records_of(tmp_path) if record["type"] == "history"]
    in_wandb = {
        (key, item["trainer/global_step"]): item[key]
        for item in items
        if "throughput/step_time_ms" in item
        for key in item
        if "/" in key and key != "trainer/global_step"
    }
    assert in_wandb == pytest.approx(expected)


def test_the_environment_is_in_the_config(tmp_path: Path) -> None:
    """Versions, device and precision, with what is unknown left out."""
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    logger = CSVLogger(tmp_path, name=None, version="csv")
    with use_reader(Meter(limit=16 * GIB)):
        trainer([ActivationCheckpointing(blocks="layer")], logger).fit(Module(), loader)
    written = yaml.safe_load((tmp_path / "csv/hparams.yaml").read_text())["environment"]
    assert written["torch"] == str(torch.__version__)
    assert written["device_memory_gib"] == 16.0
    assert (written["ranks"], written["precision"]) == (1, "32-true")
    assert written["device"]
    assert not [key for key, value in written.items() if value is None]


def test_run_from_its_source_the_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was never installed the key is left out, and the rest is told."""
    running = trainer([], False)
    installed = environment(running, None)
    monkeypatch.setattr(sys, "path", [])
    installed.pop("lightning_ckpt", None)
    assert environment(running, None) == installed


class Tabled(WandbLogger):
    """A W&B logger that keeps the tables it is given."""

    def __init__(self) -> None:
        super().__init__(offline=True)
        self.tables: list[tuple[str, list[dict[str, Any]]]] = []

    @property
    def experiment(self) -> Any:
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_table(self, key: str, columns: Any = None, data: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        self.tables.append((key, [dict(zip(columns, row, strict=True)) for row in data]))


def test_blocks_are_a_table() -> None:
    """One row a block, written once, with what it lets go: eight numbers a sample, of two samples."""
    logger = Tabled()
    with use_reader(Meter()):
        trainer([ActivationCheckpointing(blocks="blocks.*")], logger).fit(Deep())
    ((key, rows),) = logger.tables
    assert key == "checkpointing/blocks"
    assert [row["block"] for row in rows] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {row["class"] for row in rows} == {"Sequential"}
    assert {row["parameters"] for row in rows} == {4 * 8 + 8 + 8 * 4 + 4}
    assert {row["treatment"] for row in rows} == {"Full()"}
    assert {row["let_go_gib"] for row in rows} == {2 * 8 * 4 / GIB}
    assert {row["replay_ms"] for row in rows} == {None}


def test_the_profile_of_a_plan_is_in_the_table() -> None:
    """Under a budget the table has the treatment of the plan that stands, and what was measured to make it."""
    logger = Tabled()
    with use_reader(Meter()):
        trainer([ActivationCheckpointing(MemoryBudget("4GiB"), blocks="blocks.*")], logger, max_epochs=4).fit(Deep())
    key, rows = logger.tables[-1]
    assert key == "checkpointing/blocks"
    assert {row["treatment"] for row in rows} == {"kept"}
    assert all(row["kept_plain_gib"] > 0 and row["replay_ms"] > 0 for row in rows)


def test_trials_are_a_table() -> None:
    """Every size that the tuner tried, in its order, written once, and no other row of theirs."""
    logger, meter = Tabled(), Meter(limit=16 * GIB)

    class Metered(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            meter.use(len(batch["input_ids"]) * GIB)
            return super().training_step(batch, batch_idx)

    tuner = BatchSizeTuner(max_val=8)
    with use_reader(meter):
        trainer([tuner, ActivationCheckpointing(blocks="blocks.*")], logger).fit(Metered())
    key, rows = logger.tables[0]
    assert key == "batch_size/trials"
    assert [row["batch_size"] for row in rows] == [trial.size for trial in tuner.trials]
    assert all(math.isclose(row["peak_gib"], trial.peak / GIB) for row, trial in zip(rows, tuner.trials, strict=True))
    assert [key for key, _ in logger.tables] == ["batch_size/trials", "checkpointing/blocks"]


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_tables_and_rows_of_a_real_run(tmp_path: Path) -> None:
    """The tables are files of an offline run, and every step still has one row."""
    logger = WandbLogger(save_dir=tmp_path, project="test", offline=True)
    with use_reader(Meter()):
        trainer([ActivationCheckpointing(blocks="blocks.*")], logger).fit(Deep())
    logger.experiment.finish()
    items = [record["history"]["item"] for record in records_of(tmp_path) if record["type"] == "history"]
    assert [item["trainer/global_step"] for item in items if "throughput/step_time_ms" in item] == list(range(6))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/checkpointing/blocks_*.table.json")
    assert [row[0] for row in json.loads(table.read_text())["data"]] == ["blocks.0", "blocks.1", "blocks.2"]
