"""The README is true: its Python runs, its picture is the one that is computed, its tables match the code."""

import re
from pathlib import Path

import pytest
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_ckpt.cli import main
from train_gpt import GPT, training

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


# Lightning's advice about loaders as small as this one.
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")
def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snippet, in order, with a small model and data where a reader has their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    data = training(context=16)[1].dataset[:64]
    names = {
        "model": GPT(depth=3, width=16, heads=2, context=16),
        "loader": DataLoader(data, batch_size=2),
        "inputs": data[0]["input_ids"].unsqueeze(0),
        "labels": data[0]["labels"].unsqueeze(0),
        "loss_function": lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()),
    }
    for number, source in enumerate(blocks_of("python")):
        exec(compile(source, f"README.md, snippet {number}", "exec"), names)
    assert names["trainer"].global_step == 20
    assert names["model"].token.weight.grad is not None
    assert list(tmp_path.glob("wandb/offline-run-*"))
    names["trainer"].logger.experiment.finish()


def test_the_picture_is_the_computed_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The text block is what the command named above it prints."""
    command = re.search(r"`lightning-ckpt (explain [^`]*)`", README)
    assert command is not None
    assert main(command[1].split()) == 0
    printed = capsys.readouterr().out
    (picture,) = blocks_of("text")
    assert printed.startswith(picture)


def test_the_promise_is_the_computed_share() -> None:
    """The figure that is warned about is the picture's own."""
    assert "47.1% of plain" in README
    assert "**The 47.1 % is an illustration, not a promise.**" in README


def test_the_measured_figures_are_the_committed_ones() -> None:
    """What it says was measured is what the benchmark wrote."""
    page = (ROOT / "benchmarks/results/overhead_cpu_202611.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    ours, by_hand, plain = (
        next(row for row in rows if row[0].startswith(name)) for name in ("`ch", "by hand", "plain")
    )
    peaks = [int(re.search(r"\(([\d,]+) bytes\)", row[3])[1].replace(",", "")) for row in (ours, by_hand, plain)]
    assert f"{peaks[2] / 2**20:.1f} MiB plain, {peaks[0] / 2**20:.1f} MiB with" in README
    assert peaks[0] == peaks[1]
    times = [float(row[2].split()[0]) for row in (ours, plain)]
    assert f"about {times[0] / times[1]:.1f} times plain" in README


def test_the_depth_figures_are_the_committed_ones() -> None:
    """The share at 64 blocks, and an exponent of one half."""
    page = (ROOT / "benchmarks/results/depth_scaling_cpu_202611.md").read_text(encoding="utf-8")
    row = re.search(r"^\| 64 \|.*\| ([\d.]+)% \|[^|]*\|$", page, flags=re.MULTILINE)
    exponent = re.search(r"and ([\d.]+) with segments", page)
    assert row is not None
    assert exponent is not None
    assert f"{row[1]} % of the plain activation peak" in README
    assert round(float(exponent[1]), 1) == 0.5


def test_it_is_short() -> None:
    """A stranger reads it in a few minutes."""
    assert len(README.splitlines()) < 150


def test_its_links_lead_somewhere() -> None:
    """Every relative link is a file or folder here."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_make_targets_exist() -> None:
    """What it says to type can be typed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake (\w+)", "\n".join(blocks_of("sh"))))
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
