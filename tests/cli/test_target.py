"""What a target's factory may make, where its batches come from, and how large they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._target import elements_in, load_target

SOURCE = """
import lightning as L
import torch

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

class Own(Model):
    def train_dataloader(self):
        return [torch.full((2, 4), 7.0)]

class Data(L.LightningDataModule):
    def prepare_data(self):
        self.done = ["prepared"]

    def setup(self, stage):
        self.done.append(stage)

    def train_dataloader(self):
        assert self.done == ["prepared", "fit"]
        return [torch.full((3, 4), 8.0)]

def own():
    return Own()

def data():
    return Model(), Data()

def one_batch():
    return Model(), torch.full((5, 4), 9.0)

def empty():
    return Model(), iter(())
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("factory", "first"), [("own", 7.0), ("data", 8.0), ("one_batch", 9.0)])
def test_a_batch_comes_from_wherever_the_data_are(made: Path, factory: str, first: float) -> None:
    """The module's own loader, a data module that is prepared and set up for training, or a batch as it is."""
    assert load_target(f"{made}:{factory}").batch()[0, 0] == first


def test_a_loader_without_a_batch(made: Path) -> None:
    """It is named, since nothing can be measured."""
    with pytest.raises(UsageError, match=r"made\.py:empty: the loader gives no batch"):
        load_target(f"{made}:empty").batch()


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str = "graph"


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (torch.ones(2, 3), 6),
        ({"ids": torch.ones(4), "more": {"mask": torch.ones(5)}}, 5),
        ((torch.ones(2), [torch.ones(7)]), 7),
        (Graph(torch.ones(8)), 8),
        (["text"], 0),
        ([], 0),
    ],
)
def test_the_elements_of_a_batch(batch: Any, elements: int) -> None:
    """Those of its largest tensor, in mappings, sequences and objects that hold one; none where there is no tensor."""
    assert elements_in(batch) == elements
