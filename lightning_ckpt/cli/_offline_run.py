"""The figures of an offline W&B run, from its files."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_ckpt.cli._command import UsageError

_AXIS = "trainer/global_step"


@dataclass(frozen=True)
class OfflineRun:
    """What a run has logged.

    Attributes:
        name: of its folder.
        config: what was set at its start and since.
        figures: by key, each step and its figure, in order.
        blocks: the latest table of its blocks, one mapping a row; none where it was not written.
    """

    name: str
    config: Mapping[str, Any]
    figures: Mapping[str, list[tuple[int, float]]]
    blocks: tuple[Mapping[str, Any], ...]


def read(path: Path) -> OfflineRun:
    """Read a run.

    Args:
        path: its folder `offline-run-*`, or one that holds such folders, of which the latest is taken.

    Raises:
        UsageError: there is no run, or it has no rows of the monitor.
    """
    folder = _folder(path)
    config: dict[str, Any] = {}
    figures: dict[str, list[tuple[int, float]]] = {}
    for record in _records(folder):
        config.update(record.get("config", {}).get("update", {}))
        item = record.get("history", {}).get("item", {})
        for key, figure in item.items() if _AXIS in item else ():
            if isinstance(figure, int | float):
                figures.setdefault(key, []).append((item[_AXIS], figure))
    figures.pop(_AXIS, None)
    if not any(key.endswith("throughput/step_time_ms") for key in figures):
        raise UsageError(f"{folder}: no row of StepMonitor is in it; add StepMonitor() to the trainer's callbacks")
    return OfflineRun(folder.name, config, figures, _blocks(folder))


def _folder(path: Path) -> Path:
    if any(path.glob("*.wandb")):
        return path
    found = sorted([*path.glob("offline-run-*"), *path.glob("wandb/offline-run-*")])
    if not found:
        raise UsageError(
            f"{path}: no offline W&B run is there; give a folder like wandb/offline-run-20260101_120000-abc"
        )
    return found[-1]


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    # W&B's own reader of its file, a program beside Python; there is no public function.
    program = Path(sys.executable).with_name("wandb")
    command = [str(program) if program.exists() else "wandb", "leet", "inspect", "--json", str(folder)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UsageError(f"{folder} can't be read: {said[-1] if said else error}{_too_old()}") from error
    yield from map(json.loads, found.stdout.splitlines())


def _too_old() -> str:
    """What to do where W&B's reader is not there yet."""
    here = version("wandb")
    too_old = tuple(map(int, here.split(".")[:2])) < (0, 30)
    return f"; it takes wandb 0.30 or newer, and {here} is here" if too_old else ""


def _blocks(folder: Path) -> tuple[Mapping[str, Any], ...]:
    tables = sorted(folder.glob("files/media/table/checkpointing/blocks_*.table.json"), key=_number)
    if not tables:
        return ()
    table = json.loads(tables[-1].read_text(encoding="utf-8"))
    return tuple(dict(zip(table["columns"], row, strict=True)) for row in table["data"])


def _number(table: Path) -> int:
    """The row a table was written in: `blocks_12_4f0c.table.json`."""
    return int(table.name.split("_")[1])
