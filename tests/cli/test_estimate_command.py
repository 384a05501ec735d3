"""`lightning-ckpt estimate`: what fits, up to which batch size, and its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ckpt.cli import main

TARGETS = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.inner(x)

class Model(L.LightningModule):
    def configure_model(self):
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Branching(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else -loss

class Broken(Model):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no such column")

class Scalar(Model):
    def training_step(self, batch, batch_idx):
        return self.blocks(torch.ones(16, 64) * batch).square().mean()

def training():
    return Model(), torch.randn(16, 64)

def with_a_loader():
    return Model(), DataLoader(torch.randn(64, 64), 32)

class Data(L.LightningDataModule):
    def prepare_data(self):
        self.width = 64

    def setup(self, stage):
        self.rows = torch.randn(64, self.width)

    def train_dataloader(self):
        return DataLoader(self.rows, 32)

class Own(Model):
    def train_dataloader(self):
        return DataLoader(torch.randn(64, 64), 32)

class Lost(Own):
    def train_dataloader(self):
        raise FileNotFoundError("train.csv")

def with_data():
    return Model(), Data()

class LostData(Data):
    def setup(self, stage):
        raise FileNotFoundError("train.csv")

def lost_data():
    return Model(), LostData()

def no_batches():
    return Model(), DataLoader(torch.randn(0, 64))

def branching():
    return Branching(), torch.randn(16, 64)

def broken():
    return Broken(), torch.randn(16, 64)

class ByHand(Model):
    automatic_optimization = False

def by_hand():
    return ByHand(), torch.randn(16, 64)

class Owned(Model):
    def configure_model(self):
        super().configure_model()
        self.gradient_checkpointing = True

def owned():
    return Owned(), torch.randn(16, 64)

def scalar():
    return Scalar(), torch.tensor(2.0)

def large():
    with torch.device("meta"):
        return Wide(), torch.empty(16, 2 ** 14)

class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(2 ** 14, 2 ** 16), nn.Linear(2 ** 16, 2 ** 14)) for _ in range(32)]
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def plain():
    return nn.Sequential(Block(), Block()), torch.randn(16, 64)
"""


@pytest.fixture
def targets(tmp_path: Path) -> str:
    path = tmp_path / "estimate_targets.py"
    path.write_text(TARGETS)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["estimate", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_has_every_policy_and_batch_size_in_bytes(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Parts that add up to the peak, whether it fits, and the largest batch."""
    arguments = ("--device-memory", "8MiB", "--batch-sizes", "64,16", "--policies", "none,full:every=2")
    answer = told(capsys, f"{targets}:training", *arguments, "--device", "cpu")
    assert (answer["device_memory"], answer["usable_memory"]) == (8 * 2**20, int(8 * 2**20 * 0.9))
    assert [policy["policy"] for policy in answer["policies"]] == ["none", "full:every=2"]
    for policy in answer["policies"]:
        assert [step["batch_size"] for step in policy["steps"]] == [16, 64]
        for step in policy["steps"]:
            parts = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries")
            assert step["peak"] == sum(step[part] for part in parts)
            assert step["fits"] == (step["peak"] <= answer["usable_memory"])
            assert step["fits"] == (step["batch_size"] <= policy["largest_batch_size"])
    plain, thinned = answer["policies"]
    assert thinned["largest_batch_size"] > plain["largest_batch_size"] > 64


def test_the_table_tells_what_fits(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Marks at each peak, the batch's own size doubled, and what the marks mean."""
    assert main(["estimate", f"{targets}:with_a_loader", "--device-memory", "9MiB", "--policies", "none,full"]) == 0
    out = capsys.readouterr().out
    for size in (32, 64, 128, 256):
        assert f"batch {size}" in out
    assert "✓" in out
    assert "stays within 8.1 MiB of 9 MiB" in out
    assert "largest batch" in out


@pytest.mark.parametrize("factory", ["with_data", "Own"])
def test_every_source_of_data_gives_its_first_batch(
    capsys: pytest.CaptureFixture[str], targets: str, factory: str
) -> None:
    """A data module, set up first, and the model's own loader are estimated as a loader of the same is."""
    arguments = ("--device-memory", "9MiB", "--policies", "full")
    one, other = (told(capsys, f"{targets}:{name}", *arguments)["policies"] for name in (factory, "with_a_loader"))
    assert one == other
    assert one[0]["steps"][0]["batch_size"] == 32


def test_nothing_fits_is_exit_code_one(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Neither the sizes asked about nor a single sample."""
    answer = told(capsys, f"{targets}:training", "--device-memory", "1MiB", "--policies", "full", code=1)
    assert answer["policies"][0]["largest_batch_size"] == 0


def test_a_smaller_batch_that_fits_is_an_answer(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """The batch of the target does not fit, another does."""
    answer = told(
        capsys, f"{targets}:training", "--device-memory", "8MiB", "--batch-sizes", "4096", "--policies", "full"
    )
    assert not answer["policies"][0]["steps"][0]["fits"]
    assert answer["policies"][0]["largest_batch_size"] > 16


def test_headroom_is_left_free(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """None of it, if asked: for contexts, workspaces and fragmentation there is a tenth by default."""
    arguments = (f"{targets}:training", "--device-memory", "8MiB", "--policies", "none")
    tight, loose = (
        told(capsys, *arguments, "--headroom", headroom)["policies"][0]["largest_batch_size"]
        for headroom in ("0", "0.3")
    )
    assert tight > loose


def test_a_batch_without_samples_is_estimated_as_it_is(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """One column, and no largest batch."""
    answer = told(capsys, f"{targets}:scalar", "--device-memory", "8MiB", "--policies", "full")
    assert [step["batch_size"] for step in answer["policies"][0]["steps"]] == [None]
    assert answer["policies"][0]["largest_batch_size"] is None
    assert main(["estimate", f"{targets}:scalar", "--device-memory", "8MiB", "--policies", "full"]) == 0
    assert "the batch" in capsys.readouterr().out


def test_a_model_larger_than_this_machine(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Sixty-eight billion parameters on the meta device, shared by many ranks."""
    arguments = ("--device-memory", "80GiB", "--policies", "full", "--ranks", "32", "--batch-sizes", "1")
    answer = told(capsys, f"{targets}:large", *arguments)
    (step,) = answer["policies"][0]["steps"]
    assert 8 * 2**30 < step["parameters"] < 8.1 * 2**30
    assert step["fits"]


def test_two_ways_to_write_one_policy_are_both_listed(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Rows are what the user wrote."""
    arguments = ("--device-memory", "8MiB", "--policies", "full,full:every=1", "--batch-sizes", "16")
    one, other = told(capsys, f"{targets}:training", *arguments)["policies"]
    assert (one.pop("policy"), other.pop("policy")) == ("full", "full:every=1")
    assert one == other


def test_a_budget_is_the_peak_where_full_fits_in_it_and_plain_does_not(
    capsys: pytest.CaptureFixture[str], targets: str
) -> None:
    """Plain's peak below the budget, full's above it; the parts add up, and what it fits follows from both."""
    arguments = (f"{targets}:training", "--device-memory", "8MiB", "--batch-sizes", "16,256,4096", "--device", "cpu")
    names = ("none", "full", "auto", "auto:4MiB", "auto:1.0")
    answer = told(capsys, *arguments, "--policies", ",".join(names))
    plain, full, *budgets = (policy["steps"] for policy in answer["policies"])
    whole, usable = answer["device_memory"], answer["usable_memory"]
    for steps, budget in zip(budgets, (usable, 4 * 2**20, whole), strict=True):
        for step, one, other in zip(steps, plain, full, strict=True):
            assert step["peak"] == min(one["peak"], max(other["peak"], budget))
            parts = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries")
            assert step["peak"] == sum(step[part] for part in parts)
    assert [step["peak"] for step in budgets[0]] == [plain[0]["peak"], plain[1]["peak"], full[2]["peak"]]
    assert budgets[1][1]["peak"] == 4 * 2**20
    largest = {policy["policy"]: policy["largest_batch_size"] for policy in answer["policies"]}
    assert largest["none"] < largest["full"]
    assert largest == {
        "none": largest["none"],
        "full": largest["full"],
        "auto": largest["full"],
        "auto:4MiB": largest["full"],
        "auto:1.0": largest["none"],
    }


def test_a_budget_alone_is_estimated_and_explained(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """Its row alone, and what it means below the table."""
    assert main(["estimate", f"{targets}:training", "--device-memory", "8MiB", "--policies", "auto:0.5"]) == 0
    out = capsys.readouterr().out
    assert "auto:0.5: up to its budget of 4 MiB where full fits in it" in out
    assert "none" not in out


CONVOLVING = """
import lightning as L
import torch
from torch import nn

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def training():
    return Model(), torch.randn(4, 8, 16, 16)
"""


def test_kernels_are_measured_if_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """More than fake tensors know of, and nothing is left to be named."""
    (tmp_path / "convolving.py").write_text(CONVOLVING)
    arguments = (f"{tmp_path}/convolving.py:training", "--device-memory", "8MiB", "--policies", "none")
    how = ("--batch-sizes", "4", "--device", "cpu")
    without, measured = (told(capsys, *arguments, *how, *more) for more in ((), ("--measure-kernels",)))
    assert (without["uncounted"], measured["uncounted"]) == (["aten.convolution"], [])
    assert measured["policies"][0]["steps"][0]["peak"] > without["policies"][0]["steps"][0]["peak"]
    assert measured["policies"][0]["largest_batch_size"] < without["policies"][0]["largest_batch_size"]
    assert main(["estimate", *arguments, *how]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not counted: what the kernels of aten.convolution take for themselves" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is not there, which is")
def test_kernels_that_are_not_there_are_not_measured(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """The device assumed by default is CUDA's; the error says what to do without one."""
    assert main(["estimate", f"{targets}:training", "--device-memory", "8MiB", "--measure-kernels"]) == 2
    assert "there is no CUDA device here; give device='cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        ("training", ["--device-memory", "8GB"], "--device-memory='8GB' is not a size"),
        ("training", ["--headroom", "1"], "--headroom 1.0: accepted is a share from 0 to below 1"),
        ("training", ["--batch-sizes", "1,x"], "--batch-sizes 1,x: give whole numbers of at least 1 by comma"),
        ("training", ["--batch-sizes", "0"], "--batch-sizes 0: give whole numbers"),
        ("training", ["--policies", "most"], "policy='most': accepted are"),
        ("training", ["--precision", "8-true"], "--precision 8-true: accepted are"),
        ("training", ["--ranks", "0"], "--ranks 0: accepted is a whole number"),
        ("training", ["--device", "tpu"], "--device tpu: accepted are cuda and cpu"),
        ("training", ["--blocks", "Attention"], "--blocks 'Attention' matches no module of Model"),
        (
            "by_hand",
            [],
            "ByHand optimizes by hand, so its training_step gives no one loss to estimate: measure it inst",
        ),
        ("branching", [], "CannotEstimate: The step runs aten._local_scalar_dense.default"),
        ("broken", [], "RuntimeError: no such column"),
        ("plain", [], "Sequential has no training_step"),
        ("no_batches", [], "estimate_targets.py:no_batches: the loader gives no batch"),
        ("lost_data", [], "estimate_targets.py:lost_data: train_dataloader: FileNotFoundError: train.csv"),
        ("Lost", [], "estimate_targets.py:Lost: train_dataloader: FileNotFoundError: train.csv"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(
    capsys: pytest.CaptureFixture[str], targets: str, target: str, arguments: list[str], text: str
) -> None:
    """Exit code 2, what and why, no traceback."""
    memory = [] if "--device-memory" in arguments else ["--device-memory", "8MiB"]
    assert main(["estimate", f"{targets}:{target}", *memory, *arguments]) == 2
    captured = capsys.readouterr()
    *working, last = captured.err.splitlines()
    assert text in last
    assert working in ([], ["lightning-ckpt: running steps on fake tensors"])
    assert captured.out == ""


def test_what_can_be_known_at_once_is_known_before_the_target_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """The target is not even looked for."""
    for option, value in (("--device", "tpu"), ("--precision", "fp16"), ("--accumulate", "0"), ("--policies", "most")):
        assert main(["estimate", "nowhere.py:make", "--device-memory", "8GiB", option, value]) == 2
        assert value in capsys.readouterr().err


def test_a_warning_comes_once_and_equal_rows_are_explained(capsys: pytest.CaptureFixture[str], targets: str) -> None:
    """A model that checkpoints its own blocks takes the same with every policy."""
    assert main(["estimate", f"{targets}:owned", "--device-memory", "64MiB"]) == 0
    said = capsys.readouterr().err
    assert said.count("Left alone: blocks.0") == 1
    assert said.count("the rows are equal, since no policy changes the blocks that are left alone") == 1
    assert main(["estimate", f"{targets}:training", "--device-memory", "64MiB"]) == 0
    assert capsys.readouterr().err == "lightning-ckpt: running steps on fake tensors\n"


def test_on_a_terminal_what_is_going_on_is_shown_while_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, targets: str
) -> None:
    """A spinner that is erased at the end, instead of a line that stays."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["estimate", f"{targets}:training", "--device-memory", "64MiB", "--policies", "full"]) == 0
    said = capsys.readouterr().err
    assert "running steps on fake tensors" in said
    assert "lightning-ckpt:" not in said
    assert said.endswith("\x1b[2K")


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/estimating.md"


@pytest.mark.slow
def test_the_pages_tables_are_the_printed_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/estimating.md shows, word for word, of each command it shows."""
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"```sh\nlightning-ckpt ([^\n]*)\n```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(shown) == page.count("```sh") == 2
    for command, text in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.split() == text.split()


def test_the_pages_accuracy_is_the_measured_one() -> None:
    """The figures are those of the committed benchmark."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    results = (ROOT / "benchmarks/results/estimate_accuracy_cpu_202611.md").read_text(encoding="utf-8")
    summaries = re.findall(r"^- Error .*median (\S+), worst (\S+), of (\d+) cases", results, flags=re.MULTILINE)
    (measured, counted, uncounted) = summaries
    assert f"{measured[2]} cases: median error {measured[0]}, worst {measured[1]}" in page
    assert f"{counted[2]} cases: median error {counted[0]}, worst {counted[1]}" in page
    assert f"other {uncounted[2]} cases: median error {uncounted[0]}, worst {uncounted[1]}" in page
    plain = re.findall(r"^\| .* \| `none` \| .* \| ([\d.]+) \| [^|]*\|$", results, flags=re.MULTILINE)
    assert set(plain) == {"1.0000"}
