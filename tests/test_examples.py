"""The examples run, prove what they print, and stay what they are with and without checkpointing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

import batch_size
import cli
import train_gan
import train_gpt
import train_llama
import train_unet
import train_vit
from lightning_ckpt import checkpoint_blocks
from lightning_ckpt.memory import AllocatorReader

SMALL = ["--depth", "3", "--width", "32", "--context", "32", "--steps", "8", "--logger", "none"]

pytestmark = [
    # Lightning's advice to people, about loaders this small and a root logger of its own.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def printed_by(
    example: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    example.main()
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_gpt_sees_only_what_is_before() -> None:
    """A character changed at one place changes no prediction before it."""
    torch.manual_seed(0)
    model = train_gpt.GPT(depth=2, width=16, heads=2, context=8).eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 77
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_the_labels_are_the_next_characters() -> None:
    """Real source text, one character ahead, in ASCII."""
    first, second = train_gpt.training(context=64)[1].dataset[:2]
    assert torch.equal(first["input_ids"][1:], first["labels"][:-1])
    assert first["labels"][-1] == second["input_ids"][0]
    text, last = (bytes(train_gpt.training(context=4096)[1].dataset[index]["input_ids"].tolist()) for index in (0, -1))
    assert "import" in text.decode("ascii")
    assert last.isascii()


@pytest.mark.supports(strategy="single device", precision="32-true", policy=["full", "selective", "auto"], compile="no")
@pytest.mark.parametrize("policy", ["full", "selective", "auto"])
def test_the_gpt_learns_the_same_with_every_policy(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every loss of the run equals the plain run's, bit for bit, and falls."""
    losses: list[list[torch.Tensor]] = []
    monkeypatch.setattr(train_gpt.GPT, "on_train_end", lambda model: losses.append(model.losses), raising=False)
    for chosen in ("none", policy):
        out = printed_by(train_gpt, [*SMALL, "--no-tune", "--policy", chosen], monkeypatch, capsys)
        assert ("Activation checkpointing, " in out) == (chosen == policy)
    plain, checkpointed = (torch.stack(run) for run in losses)
    assert torch.equal(plain, checkpointed)
    assert plain[-1] < plain[0]


def test_the_gpt_prints_the_batch_size_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tuner raises the size it was given, within the example's bound."""
    out = printed_by(train_gpt, [*SMALL, "--batch-size", "2"], monkeypatch, capsys)
    found = re.search(r"started from a batch size of 2 and settled on (\d+)", out)
    assert found is not None
    assert 2 < int(found[1]) <= 32


def test_the_gpt_writes_a_table_with_a_csv_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss, memory and throughput are columns."""
    printed_by(train_gpt, [*SMALL[:-1], "csv", "--no-tune"], monkeypatch, capsys)
    (table,) = tmp_path.glob("runs/train-gpt/version_*/metrics.csv")
    columns = table.read_text().splitlines()[0].split(",")
    assert {"train/loss", "throughput/step_time_ms", "throughput/tokens_per_sec"} <= set(columns)


def test_the_default_gpt_needs_a_third_of_the_memory() -> None:
    """Parameters, gradients, optimizer state and activations of a step, exact: with `Full()` at most a third."""

    def peak(checkpointed: bool) -> int:
        with AllocatorReader() as reader:
            torch.manual_seed(0)
            model = train_gpt.GPT()
            model.log = lambda *args, **kwargs: None
            if checkpointed:
                checkpoint_blocks(model, "full")
            optimizer = model.configure_optimizers()
            batch = default_collate(train_gpt.training()[1].dataset[:16])
            for _ in range(2):  # the optimizer's state is there from the second step on
                optimizer.zero_grad()
                model.training_step(batch, 0).backward()
                optimizer.step()
            return reader.peak()

    plain, full = peak(False), peak(True)
    assert full <= plain / 3, f"{full:,} of {plain:,} bytes"


@pytest.mark.slow
def test_the_unet_keeps_to_every_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three budgets between full checkpointing and none are kept, and less is replayed the larger they are."""
    out = printed_by(train_unet, [], monkeypatch, capsys)
    rows = re.findall(r"MemoryBudget\(([\d.]+) MiB\) +│ ([\d.]+) MiB +│ ([\d.]+)% +│ (\d+)% of full", out)
    assert len(rows) == 3
    assert all(float(peak) <= float(budget) for budget, peak, _, _ in rows)
    assert int(rows[0][3]) <= int(rows[-1][3]) < 100
    assert "Every budget was kept, and used." in out


@pytest.mark.slow
def test_the_tuner_finds_sizes_for_each_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger batch fits with checkpointing than without, and beside a planner one between the two or equal."""
    out = printed_by(batch_size, [], monkeypatch, capsys)
    sizes = {name: int(size) for name, size in re.findall(r"│ (none|full|auto) +│ (\d+) +│", out)}
    assert sizes["none"] < sizes["full"]
    assert 1 <= sizes["auto"] <= 1.1 * sizes["full"]
    assert "the most samples per second under a memory plan" in " ".join(out.split())


def test_the_vit_reads_digits_the_same_with_checkpointing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two epochs it is far better than chance, and exactly as good as the plain run."""
    small = ["--depth", "2", "--width", "32", "--epochs", "2"]
    outs = [printed_by(train_vit, [*small, "--policy", policy], monkeypatch, capsys) for policy in ("none", "full")]
    plain, full = (re.search(r"Policy \w+: ([\d.]+)% of 359 unseen digits", out) for out in outs)
    assert plain is not None
    assert full is not None
    assert plain[1] == full[1]
    assert float(plain[1]) > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_the_llama_trains_the_same_adapters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With frozen weights and a frozen input the adapters learn, bit for bit as plain, in half the memory."""
    out = printed_by(train_llama, [], monkeypatch, capsys)
    plain, full = (
        re.search(rf"│ {policy} +│ ([\d.]+) MiB +│ ([\d.]+) +│ ([\d.]+)", out) for policy in ("none", "full")
    )
    assert plain is not None
    assert full is not None
    assert float(full[1]) < float(plain[1]) / 2
    assert plain.groups()[1:] == full.groups()[1:]
    assert float(full[3]) < float(full[2]) - 0.2
    assert "All 12 losses and all 84 adapters are equal, bit for bit." in out


def test_the_gan_counts_every_batch_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two optimizers by hand, BatchNorm and spectral normalisation: all is what it is plain, in less memory."""
    out = printed_by(train_gan, [], monkeypatch, capsys)
    plain, full = (re.search(rf"│ {policy} +│ ([\d.]+) MiB +│.*│ (\d+) +│", out) for policy in ("none", "full"))
    assert plain is not None
    assert full is not None
    assert float(full[1]) < float(plain[1])
    assert plain[2] == full[2] == "14"
    assert "All 28 losses, weights and buffers are equal, bit for bit." in out


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)  # of how Lightning calls it
def test_the_file_brings_all_three_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tuner raises the file's batch size, digits are learnt, and memory and throughput are columns of the table."""
    config = Path(cli.__file__).with_name("cli.yaml")
    out = printed_by(cli, ["fit", "--config", str(config), "--trainer.max_epochs", "2"], monkeypatch, capsys)
    assert "From the file: ActivationCheckpointing, StepMonitor, BatchSizeTuner." in out
    found = re.search(r"Trained with (\d+) digits a batch; ([\d.]+)% of unseen digits right", out)
    assert found is not None
    assert 16 < int(found[1]) <= 128
    assert float(found[2]) > 20
    columns = (tmp_path / "runs/cli/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"memory/peak_rss_gib", "throughput/step_time_ms", "checkpointing/saved_gib"} <= set(columns)


@pytest.mark.parametrize("script", sorted(Path(cli.__file__).parent.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_is_short_and_listed(script: Path) -> None:
    """Fewer than 100 lines, on the list of the folder, and by the command that its docstring gives."""
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert f"python examples/{script.name}" in text
    assert f"]({script.name})" in script.with_name("README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_every_rank_needs_less_and_ends_with_the_same(name: str) -> None:
    """Two processes, as Lightning starts them: each needs less with checkpointing, and losses and weights are equal."""
    script = Path(train_gpt.__file__).with_name(f"{name}.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    rows = re.findall(r"│ (\d) +│ ([\d.]+) MiB +│ ([\d.]+) MiB +│ equal", ran.stdout)
    assert [rank for rank, _, _ in rows] == ["0", "1"]
    assert all(float(checkpointed) < 0.7 * float(plain) for _, plain, checkpointed in rows)
