"""A measurement in a fresh process: no policy finds what another one left in memory, caches or random numbers."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_ckpt.cli._command import NoBlocks, UsageError, in_options
from lightning_ckpt.cli._findings import OutOfMemory
from lightning_ckpt.cli._measurement import STEP, Measurement, Request


class _There(Exception):
    """What went wrong in the other process, with its traceback for a text."""


def measure_fresh(request: Request, on_step: Callable[[], object] = lambda: None) -> Measurement:
    """Measure in a new process of this interpreter.

    Args:
        request: what to measure.
        on_step: called after each timed step.

    Raises:
        OutOfMemory: the steps did not fit into memory.
        NoBlocks: there is nothing to checkpoint, and the request needs some.
        UsageError: the target can't be found, or the user's code fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        code, printed = _run([str(asked), str(answer)], on_step)
        if answer.exists():
            return _measurement(request, json.loads(answer.read_text(encoding="utf-8")))
    if code == -getattr(signal, "SIGKILL", 9):
        raise OutOfMemory("killed by the system, as it does when the host's memory runs out")
    last = printed[-1] if printed else "it printed nothing"
    raise UsageError(f"{request.target}: the process that trained it with {request.policy} ended with {code}: {last}")


def _run(arguments: list[str], on_step: Callable[[], object]) -> tuple[int, list[str]]:
    """Run the measuring process; return its exit code and what the user's code printed."""
    command = [sys.executable, "-m", "lightning_ckpt.cli._measured", *arguments]
    printed = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(STEP):
                    on_step()
                elif line.strip():
                    printed.append(line.strip())
        except BaseException:
            process.kill()
            raise
    return process.returncode, printed


def _measurement(request: Request, said: dict[str, Any]) -> Measurement:
    if "measurement" in said:
        return Measurement.from_json(said["measurement"])
    if said["out_of_memory"]:
        raise OutOfMemory(said["error"]) from _There(said["traceback"])
    if said["no_blocks"]:  # said of the target, whatever the policy
        raise NoBlocks(said["error"]) from _There(said["traceback"])
    raise UsageError(f"{request.policy}: {in_options(said['error'])}") from _There(said["traceback"])
