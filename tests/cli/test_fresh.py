"""A process that measures can end in any way, and each is told."""

import re
from pathlib import Path

import pytest

from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._findings import OutOfMemory
from lightning_ckpt.cli._fresh import measure_fresh
from lightning_ckpt.cli._measurement import Request

SOURCE = """
import os, signal
import lightning as L
import torch

class Model(L.LightningModule):
    def __init__(self, end):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.end = end

    def training_step(self, batch, batch_idx):
        self.end()
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def leaves():
    print("\\nthe last words", flush=True)
    os._exit(3)

def killed():
    return Model(lambda: os.kill(os.getpid(), signal.SIGKILL)), torch.ones(2, 4)

def gone():
    return Model(leaves), torch.ones(2, 4)

def silent():
    os._exit(4)

def sound():
    return Model(lambda: None), torch.ones(2, 4)
"""

pytestmark = pytest.mark.slow


def request_of(tmp_path: Path, factory: str) -> Request:
    path = tmp_path / "ending.py"
    path.write_text(SOURCE)
    return Request(target=f"{path}:{factory}", policy="none", steps=1, seed=0)


def test_a_process_that_the_system_killed(tmp_path: Path) -> None:
    """The kernel does so when the host's memory runs out, and it counts as that."""
    with pytest.raises(OutOfMemory, match="killed by the system, as it does when the host's memory runs out"):
        measure_fresh(request_of(tmp_path, "killed"))


@pytest.mark.parametrize(
    ("factory", "code", "last"), [("gone", 3, "the last words"), ("silent", 4, "it printed nothing")]
)
def test_a_process_that_leaves_by_itself(tmp_path: Path, factory: str, code: int, last: str) -> None:
    """The error has its policy, its exit code and the last line that it printed, if any."""
    text = f"ending.py:{factory}: the process that trained it with none ended with {code}: {last}"
    with pytest.raises(UsageError, match=re.escape(text)):
        measure_fresh(request_of(tmp_path, factory))


def test_whoever_interrupts_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ctrl-C while it steps ends the process that measures too, instead of waiting for it."""
    request = Request(target=request_of(tmp_path, "sound").target, policy="none", steps=10**9, seed=0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_fresh(request, interrupt)
