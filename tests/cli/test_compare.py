"""`lightning-ckpt compare`: real steps in fresh processes, their numbers, their files, and errors for people."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch import nn

from lightning_ckpt.cli import _measured, main
from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._findings import OutOfMemory
from lightning_ckpt.cli._fresh import measure_fresh
from lightning_ckpt.cli._measured import measure
from lightning_ckpt.cli._measurement import STEP, Comparison, Measurement, Request
from lightning_ckpt.cli._policies import parse_policies, parse_policy
from lightning_ckpt.cli._target import elements_in, is_loader
from lightning_ckpt.cli._to_wandb import log
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Full, SelectiveOps

COMMAND = str(Path(sys.executable).with_name("lightning-ckpt"))

TARGETS = """
import os
import signal

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS, DEPTH = 64, 256, 4

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.inner(x)

class Model(L.LightningModule):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

def rows(count=ROWS):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

def loader():
    return DataLoader(TensorDataset(rows(2 * ROWS)), batch_size=ROWS)

class Data(L.LightningDataModule):
    def setup(self, stage):
        self.rows = TensorDataset(rows(2 * ROWS))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=ROWS)

class Own(Model):
    def train_dataloader(self):
        return loader()

class Counting(Block):
    # A replay finds the factor that the forward left behind.
    factor = 1.0

    def forward(self, x):
        self.factor = self.factor + 1.0
        return super().forward(x * self.factor)

class TooLarge(Model):
    def training_step(self, batch, batch_idx):
        if "forward" not in vars(self.blocks[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)

class Killed(Model):
    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGKILL)

class Stopping(Model):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None

class Iterating(Model):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

class Failing(Model):
    def training_step(self, batch, batch_idx):
        raise KeyError("labels")

def with_batch():
    return Model(), [rows()]

def with_loader():
    return Model(), loader()

def with_data():
    return Model(), Data()

def counting():
    return Model(Counting), [rows()]

def too_large():
    return TooLarge(), [rows()]

def killed():
    return Killed(), [rows()]

def stopping():
    return Stopping(), [rows()]

def iterating():
    return Iterating(), loader()

def frozen():
    model = Model()
    model.blocks[0].requires_grad_(False)
    return model, [rows()]

def failing():
    return Failing(), [rows()]

def no_data():
    return Model()

def plain_module():
    return nn.Linear(2, 2), rows()

def no_batches():
    return Model(), DataLoader(TensorDataset(rows(0)))

def no_blocks():
    model = Model()
    model.blocks = nn.ModuleList()
    model.only = nn.Linear(WIDTH, WIDTH)
    return model, [rows()]
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("targets") / "compared_models.py"
    path.write_text(TARGETS)
    return path


def measured(targets: Path, factory: str, policy: str = "none", **options: Any) -> Measurement:
    """Measured in this process, which is quicker than in a fresh one."""
    return measure(Request(**({"target": f"{targets}:{factory}", "policy": policy, "steps": 2, "seed": 0} | options)))


@pytest.fixture(scope="module")
def compared(targets: Path) -> tuple[dict[str, Any], Path]:
    """The numbers of one run of the command, as it prints them, and the folder with its files."""
    folder = targets.parent
    arguments = ["--policies", "full,none,full:every=2", "--steps", "3", "--blocks", "blocks.*", "--json"]
    files = ["--html", str(folder / "page.html"), "--output", str(folder / "numbers.json")]
    command = [COMMAND, "compare", f"{targets}:with_batch", *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.slow
def test_plain_training_comes_first_and_once(compared: tuple[dict[str, Any], Path]) -> None:
    """What the others are compared with is measured wherever it stands in the list."""
    numbers, _ = compared
    assert [one["policy"] for one in numbers["policies"]] == ["none", "full", "full:every=2"]
    assert [one["blocks"] for one in numbers["policies"]] == [0, 4, 2]


@pytest.mark.slow
def test_every_policy_computes_what_plain_training_does(compared: tuple[dict[str, Any], Path]) -> None:
    """Loss and every gradient are there, and equal bit for bit, in processes of their own."""
    numbers, _ = compared
    plain, *others = numbers["policies"]
    names = {f"gradient of blocks.{block}.inner.{layer}" for block in range(4) for layer in (0, 3)}
    assert set(plain["digests"]) == {"loss", *(f"{name}.{part}" for name in names for part in ("weight", "bias"))}
    assert [other["digests"] for other in others] == [plain["digests"]] * 2
    assert [other["different"] for other in others] == [[], []]


@pytest.mark.slow
def test_only_the_steps_asked_for_are_timed(compared: tuple[dict[str, Any], Path]) -> None:
    """Neither warm-up nor recorded steps are among them; the rate is that of the median."""
    for one in compared[0]["policies"]:
        assert len(one["seconds"]) == 3
        assert one["step_time"] == sorted(one["seconds"])[1]
        assert one["samples_per_second"] == pytest.approx(256 / one["step_time"])


@pytest.mark.slow
def test_full_needs_less_memory_and_keeps_the_rest(compared: tuple[dict[str, Any], Path]) -> None:
    """Activations are what falls; parameters and optimizer state stay to the byte."""
    plain, full, _ = (one["memory"] for one in compared[0]["policies"])
    assert full["causes"]["activations"] < 0.5 * plain["causes"]["activations"]
    for cause in ("parameters", "optimizer state"):
        assert full["causes"][cause] == plain["causes"][cause]


@pytest.mark.slow
def test_the_files_hold_what_is_printed(compared: tuple[dict[str, Any], Path]) -> None:
    """The JSON file is the JSON printed, and the page names every policy."""
    numbers, folder = compared
    assert json.loads((folder / "numbers.json").read_text()) == numbers
    page = (folder / "page.html").read_text()
    assert all(f">{one['policy']}</text>" in page for one in numbers["policies"])


def test_the_peak_is_made_of_its_causes(targets: Path) -> None:
    """Momentum is as large as the parameters, and at the end of forward so are the gradients of the step before."""
    one = measured(targets, "with_batch")
    size = 4 * 4 * (64 * 256 + 256 + 256 * 64 + 64)  # four blocks of two linear layers, four bytes an element
    causes = one.memory.causes
    assert (causes["parameters"], causes["optimizer state"], causes["gradients"]) == (size, size, size)
    assert sum(causes.values()) == one.memory.peak


def test_the_curve_has_the_peak_and_ends_where_it_began(targets: Path) -> None:
    """A step in the middle of training leaves what it found; its phases follow one another."""
    memory = measured(targets, "with_batch", "full").memory
    places, held = zip(*memory.curve, strict=True)
    assert max(held) == memory.peak
    assert abs(held[-1] - held[0]) < 1024  # a few scalars
    assert list(places) == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 1
    assert 0 < memory.phases[0] < memory.phases[1] < memory.phases[2] == 1


def test_the_peak_is_that_of_a_bare_loop(targets: Path) -> None:
    """What a trainer's step takes is what the same step takes without one, but for a few scalars."""
    one = measured(targets, "with_batch")
    model = sys.modules["compared_models"].Model()
    optimizer, batch = model.configure_optimizers(), [sys.modules["compared_models"].rows()]

    def step() -> None:
        loss = model.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with AllocatorReader() as reader:
        step()  # its gradients are the first whose end the allocator can tell the size of
        before = reader.current()
        reader.reset_peak()
        step()
    held = one.memory.curve[0][1]
    assert abs((one.memory.peak - held) - (reader.peak() - before)) < 1024


@pytest.mark.parametrize(
    "factory",
    [
        "with_loader",
        "with_data",
        "Own",
        pytest.param("iterating", marks=pytest.mark.filterwarnings("ignore:.*dataloader_iter:UserWarning")),
    ],
)
def test_every_source_of_data_trains_alike(targets: Path, factory: str) -> None:
    """A loader, a data module, the module's own loader and an iterator give their first batch, again and again."""
    one = measured(targets, factory)
    assert one.samples == 256
    assert one.digests == measured(targets, factory, "full").digests
    assert one.loss == measured(targets, "with_loader").loss


def test_the_first_batch_comes_as_often_as_it_is_asked_for() -> None:
    """Neither another batch nor one more, whoever counts."""
    again = _measured._Again([1, 2], 3)
    assert list(again) == [1, 1, 1]
    assert len(again) == 3


def test_what_does_not_train_has_no_gradient_to_compare(targets: Path) -> None:
    """The first of four blocks is frozen; each of the others has two layers of two parameters."""
    digests = measured(targets, "frozen").digests
    assert {name.split(".")[1] for name in digests if name != "loss"} == {"1", "2", "3"}
    assert len(digests) == 1 + 3 * 4


def test_a_device_goes_by_its_name_and_else_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every backend of PyTorch knows what its devices are called."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert _measured._device(torch.device("cuda")) == "NVIDIA H200"
    monkeypatch.delattr(torch.cuda, "get_device_name")
    assert _measured._device(torch.device("cuda")) == "cuda"


def test_a_seed_decides_the_weights(targets: Path) -> None:
    """The same seed gives the same loss, another one another."""
    first, again, other = (measured(targets, "with_batch", seed=seed).loss for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.slow
def test_other_gradients_are_exit_code_one(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block whose replay differs is told, with what differs and what to type next."""
    assert main(["compare", f"{targets}:counting", "--policies", "full", "--steps", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert 'With "full" the first step differs from plain training\'s in its gradient of' in printed
    assert re.search(r"lightning-ckpt doctor \S+ --policy \S+", printed)


@pytest.mark.slow
def test_what_cannot_be_measured_is_told_and_the_rest_goes_on(
    targets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain training that runs out of memory is why people are here; nor does a policy that fails end the others."""
    policies = "full:select=range-2-9,full"
    assert main(["compare", f"{targets}:too_large", "--policies", policies, "--steps", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "none: out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in printed
    assert "full:select=range-2-9: ValueError: Full(select='range-2-9'): the model has 4 blocks" in printed
    assert "Plain training could not be measured" in printed
    assert "full" in printed


@pytest.mark.slow
def test_a_process_that_the_system_kills_is_out_of_memory(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where the host's memory runs out; with nothing measured there is no table and no W&B run; exit code 1."""
    assert main(["compare", f"{targets}:killed", "--policies", "none", "--wandb"]) == 1
    assert " ".join(capsys.readouterr().out.split()) == (
        "none: out of memory: killed by the system, as it does when the host's memory runs out "
        "Plain training could not be measured, so there is nothing to compare with."
    )


def measuring(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Request:
    """What to ask for, where the process that measures is a script."""
    program = folder / "measuring"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return Request(target="models.py:make", policy="full", steps=2, seed=0)


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("echo; echo no space; echo; exit 3", UsageError, "with full ended with 3: no space"),
        ("exit 3", UsageError, "with full ended with 3: it printed nothing"),
        ("kill -TERM $$", UsageError, "with full ended with -15: it printed nothing"),
        ("echo; kill -KILL $$", OutOfMemory, "killed by the system"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, error: type[Exception], text: str
) -> None:
    """How it ended, and the last that it said."""
    request = measuring(monkeypatch, tmp_path, script)
    with pytest.raises(error, match=text):
        measure_fresh(request)


def test_whoever_stops_the_comparison_stops_the_process_that_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is gone when the interrupt is raised, and does not train on."""
    request = measuring(monkeypatch, tmp_path, f"echo '{STEP}'; sleep 3; touch {tmp_path}/trained_on")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_fresh(request, stop)
    assert not (tmp_path / "trained_on").exists()


@pytest.mark.slow
def test_on_a_terminal_a_bar_is_shown_for_each_policy(
    targets: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it is doing, and goes away before the table; lines are for files."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["compare", f"{targets}:with_batch", "--policies", "none", "--steps", "2"]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"none +\S*━+\S* +warming up", shown)
    assert "lightning-ckpt: measuring" not in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


@pytest.mark.slow
def test_what_goes_wrong_in_the_fresh_process_is_one_line(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the line says with which policy, what and where, without a traceback."""
    assert main(["compare", f"{targets}:failing", "--policies", "none"]) == 2
    assert capsys.readouterr().err == "lightning-ckpt: measuring none\nlightning-ckpt: none: KeyError: 'labels'\n"


@pytest.mark.slow
def test_a_model_without_blocks_is_one_error(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks are looked for once, before a step is timed, however many policies need them."""
    assert main(["compare", f"{targets}:no_blocks", "--policies", "full,selective", "--steps", "100000"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("No repeated block was found in Model") == 1
    assert captured.err.splitlines()[0] == "lightning-ckpt: measuring none"
    assert "measuring full" not in captured.err
    assert "--blocks ABlockClass, --blocks 'encoder.layers.*', again for more." in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_traceback_leads_into_the_users_code(targets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--traceback shows the line that failed in the other process."""
    assert main(["compare", f"{targets}:failing", "--policies", "none", "--traceback"]) == 2
    assert 'raise KeyError("labels")' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "policy", "text"),
    [
        (
            "no_data",
            "none",
            "returned a model alone, and Model has no train_dataloader: return (model, batch), (model, D",
        ),
        (
            "plain_module",
            "none",
            "returned a Linear, which has no training_step and no optimizer: return a LightningMod",
        ),
        ("nothing", "none", "has no function or class 'nothing'; it has: "),
        ("no_batches", "none", "the loader gives no batch"),
        (
            "stopping",
            "none",
            "stopping: training ended by itself after 3 of 12 steps: take out what ends it early",
        ),
        ("no_blocks", "full", "No repeated block was found in Model"),
    ],
)
def test_what_cannot_be_trained_is_told(targets: Path, factory: str, policy: str, text: str) -> None:
    """The text says what the factory returned and what it must return."""
    with pytest.raises((UsageError, ValueError), match=re.escape(text)):
        measured(targets, factory, policy)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--policies", "full:evry=2"],
            "policy='full:evry=2': has no option 'evry=2'; it has every, segment_size, sel",
        ),
        (
            ["--policies", "full:every=0"],
            "policy='full:every=0': Full(every=0): accepted is a whole number of at least",
        ),
        (["--policies", "most"], "policy='most': accepted are"),
        (["--policies", ","], "--policies ',': names no policy"),
        (["--steps", "0"], "--steps 0: accepted is a whole number of at least 1"),
        (["--precision", "fp16"], "--precision fp16: accepted are '64-true', '32-true', '16-true'"),
        (["--seed", "-1"], "--seed -1: accepted is a whole number from 0 to 4294967295"),
        (["--html", "no_such_folder/page.html"], "--html no_such_folder/page.html: there is no folder no_such_folder"),
        (["--output", "no_such_folder/n.json"], "--output no_such_folder/n.json: there is no folder no_such_folder"),
    ],
)
def test_a_mistyped_option_is_one_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """Exit code 2 for what can be known at once: the target is not even looked for."""
    assert main(["compare", "nowhere.py:make", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_policies_are_written_with_their_options() -> None:
    """As everywhere, and `none` besides."""
    assert parse_policies("none, full,full:every=2,selective:attention") == {
        "none": None,
        "full": Full(),
        "full:every=2": Full(every=2),
        "selective:attention": SelectiveOps("attention"),
    }
    assert parse_policy("none") is None


@pytest.mark.slow
def test_the_run_in_wandb_has_the_tables_plots_and_figures(targets: Path, tmp_path: Path) -> None:
    """An offline run, read back by W&B's own reader."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [COMMAND, "compare", f"{targets}:with_batch", "--wandb"]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "--policies", "full", "--steps", "1", "--json"], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    peaks = {one["policy"]: one["memory"]["peak"] for one in json.loads(done.stdout)["policies"]}
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    reader = str(Path(sys.executable).with_name("wandb"))
    read = subprocess.run([reader, "leet", "inspect", "--json", str(log)], **options)
    records = [json.loads(line) for line in read.stdout.splitlines()]
    (row,) = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert row["policies._type"] == row["memory_over_a_step._type"] == "table-file"
    assert row["policies.nrows"] == 2
    assert row["page._type"] == "html-file"
    plots = {"memory_against_time", "activations", "timeline"}
    assert all(row[f"{plot}_table._type"] == "table-file" for plot in plots)
    summary = json.dumps([record for record in records if record["type"] == "summary"])
    for policy, peak in peaks.items():
        assert f"peak_gib/{policy}" in summary
        assert str(peak / 2**30) in summary


@pytest.fixture
def without_plain(targets: Path) -> Comparison:
    """A comparison whose plain training did not fit."""
    full = measured(targets, "with_batch", "full")
    return Comparison(target="models.py:make", seed=0, measured=(full,), failed={"none": "out of memory"})


def test_without_plain_training_nothing_is_compared(without_plain: Comparison) -> None:
    """The JSON has what was measured and no ratio, and gives the same comparison again."""
    written = json.loads(json.dumps(without_plain.as_json()))
    (full,) = written["policies"]
    assert full["step_time"] > 0
    assert full.keys().isdisjoint({"step_time_ratio", "peak_ratio", "different"})
    assert Comparison.from_json(written) == without_plain


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that W&B writes to, without the account of whoever runs the tests, which it would remember."""
    for name in [name for name in os.environ if name.startswith("WANDB")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": tmp_path, "WANDB_DIR": tmp_path, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, str(value))
    wandb.teardown()
    yield tmp_path
    wandb.teardown()


@pytest.mark.slow
def test_without_plain_training_the_tables_cells_are_empty(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, without_plain: Comparison
) -> None:
    """What would be against plain training, and nothing else."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log(without_plain)
    (written,) = nobody.glob("wandb/offline-run-*/files/media/table/policies_*.table.json")
    table = json.loads(written.read_text(encoding="utf-8"))
    (row,) = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [name for name, cell in row.items() if cell is None] == ["step_time_ratio", "peak_ratio", "different"]


@pytest.mark.slow
@pytest.mark.usefixtures("nobody")
def test_a_run_that_wandb_does_not_begin_is_one_line(without_plain: Comparison) -> None:
    """W&B's own reason, and what needs no account."""
    with pytest.raises(UsageError, match=r"^--wandb: .*API key.*; WANDB_MODE=offline needs no account$"):
        log(without_plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_recorded_curve_has_the_allocators_peak(targets: Path) -> None:
    """The events of the caching allocator add up to its own counter."""
    memory = measured(targets, "with_batch", "full").memory
    assert max(held for _, held in memory.curve) == memory.peak


def test_blocks_of_a_plain_list_are_a_batch() -> None:
    """Tensors, lists and mappings are one batch; what is gone through batch by batch is a loader."""
    from torch.utils.data import DataLoader

    assert is_loader(DataLoader([1, 2]))
    assert is_loader(iter([1, 2]))
    assert not any(map(is_loader, (torch.ones(2), [1], (1, 2), {"a": 1}, nn.Identity())))


@dataclass
class Sample:
    text: str
    tokens: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (torch.ones(2, 3), 6),
        ([torch.ones(2), (torch.ones(2, 3), "label")], 6),
        ({"tokens": torch.ones(2, 3), "mask": [torch.ones(1)]}, 6),
        ([Sample("words", torch.ones(2, 3))], 6),
        ({"text": "words", "count": 3}, 0),
        ([], 0),
    ],
)
def test_a_batch_is_as_long_as_its_largest_tensor(batch: Any, elements: int) -> None:
    """Wherever that lies: in lists, mappings and objects."""
    assert elements_in(batch) == elements
