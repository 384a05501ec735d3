"""The benchmark beside the peers: it finds what differs, and its committed page is what its committed numbers say."""

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from peer_report import Arm, Results, Side, page
from peer_setups import SETUPS, SUBJECTS, tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

COMMITTED = sorted(peers.RESULTS.glob("peers_cpu_*.json"))


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    return peers.main()


@pytest.mark.slow
def test_a_try_measures_every_way_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On BatchNorm ours is right in every column and within its budgets, and the peers count batches twice."""
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    code = run(["--tiny", "--models", "ResNet", "--rounds", "2"], monkeypatch)
    (file,) = tmp_path.glob("peers_cpu_*.json")
    results = Results.from_json(json.loads(file.read_text()))
    (side,) = results.sides
    assert {arm.name for arm in side.arms} | set(side.left_out) == set(SETUPS)
    assert side.left_out["Hugging Face"] == "takes Hugging Face's models alone"
    assert code == 0
    assert results.reached
    assert all(len(arm.seconds) == 2 for arm in side.arms)
    plain, hand, full = (side.arm(name) for name in ("plain", "checkpoint by hand", "ours: full"))
    assert plain.right
    assert full.kept < plain.kept
    assert not hand.gradients[0]
    assert hand.buffers[0] > 0
    assert not side.arm("apply_activation_checkpointing").names
    assert file.with_suffix(".md").read_text() == page(results, file.stem)
    file.with_suffix(".md").unlink()
    assert run(["--draw", str(file)], monkeypatch) == 0
    assert file.with_suffix(".md").read_text() == page(results, file.stem)
    assert file.with_name(side.picture(file.stem)).read_bytes().startswith(b"\x89PNG")
    assert "reached." in capsys.readouterr().out


class Closed(nn.Module):
    """Blocks whose forwards are closures: what a deep copy then runs is the original."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def closed(model: Any) -> None:
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)


def test_a_copy_that_runs_the_originals_weights_is_found() -> None:
    """The recipe with a closure, by which a deep copy trains nothing of its own; the plain model's copy is right."""
    workload = peers.Workload(Closed, lambda: torch.randn(2, 4), lambda model, batch: model(batch).square().mean())
    model, batch = Closed(), workload.batch()
    assert peers.copies(model, workload, batch) == ""
    closed(model)
    assert peers.copies(model, workload, batch) == "runs the original's weights"


class GradientOf(nn.Linear):
    """Its result is by its own weights, the gradient of its input also by those it was made with."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        mine = self.weight
        self.other = lambda: mine  # a deep copy keeps it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_other = nn.functional.linear(x, self.other().detach())
        return super().forward(x) + (by_other - by_other.detach())


def test_a_copy_whose_gradients_come_from_the_originals_weights_is_found() -> None:
    """Its loss is right, every weight has a gradient, and the original has none: their values tell."""
    workload = peers.Workload(
        lambda: nn.Sequential(GradientOf(4), GradientOf(4)),
        lambda: torch.randn(2, 4),
        lambda model, batch: model(batch).square().mean(),
    )
    assert peers.copies(workload.make(), workload, workload.batch()) == "runs the original's weights"


def test_what_a_peer_computes_otherwise_is_no_fault_of_its_copies() -> None:
    """A replay with other random numbers is told by the column for gradients; the copy does the same."""
    workload = tiny("GPT")
    batch, model = workload.batch(), workload.make()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    assert peers.copies(model, workload, batch) == ""


def test_the_example_draws_from_where_results_are() -> None:
    """From the root of the repository, where the line is typed."""
    (file,) = re.findall(r"--draw (\S+)", peers.__doc__ or "")
    assert (peers.ROOT / file).parent == peers.RESULTS


def test_gradients_of_other_random_numbers_are_found() -> None:
    """A replay without the forward's random numbers gives other gradients, and the table would say how many."""
    workload = tiny("GPT")
    torch.manual_seed(0)
    batch, model = workload.batch(), workload.make()
    plain = peers.like(model, workload)
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(
            forward, x, use_reentrant=False, preserve_rng_state=False
        )
    ours, theirs = (peers.observed(one, workload, batch)[0] for one in (model, plain))
    assert 0 < peers.unequal(ours, theirs) < len(ours)


def arm(name: str, **changed: Any) -> Arm:
    values: dict[str, Any] = {
        "name": name, "blocks": 3, "budget": 0, "peak": 2**20, "kept": 2**19, "gradients": (0, 8), "buffers": (0, 0),
        "keys": True, "names": True, "copies": "", "seconds": [0.002, 0.002],
    }  # fmt: skip
    return Arm(**(values | changed))


def side(hand: Sequence[int] = (0, 0), **changed: Any) -> Side:
    arms = [
        arm("plain", peak=3 * 2**20, seconds=[0.001, 0.001]),
        arm("checkpoint by hand", buffers=hand),
        arm("quick and wrong", gradients=(2, 8), seconds=[0.0011, 0.0011]),
        arm("ours: full"),
        arm("ours: auto, 50%", budget=2**21, peak=2**21, seconds=[0.0015, 0.0015], **changed),
    ]
    return Side(model="U-Net", arms=arms, left_out={"another": "not installed: no module another"})


def test_the_table_says_what_is_wrong_and_who_is_fastest() -> None:
    """Ratios are those of the same round; a peer with other gradients is no rival; what did not run is named."""
    table = side().table()
    assert "| ours: auto, 50%: 2.0 MiB | 2.00 | 66.7% | 0.50 | 1.5 | 1.500 (1.500 to 1.500) | yes | none |" in table
    assert "| **no, 2 of 8** | none | yes | yes | yes |" in table
    assert "- Within 2.0 MiB: 1.50 of plain's step; 2.00 with the fastest peer within it, checkpoint by hand." in table
    assert "the fastest peer within it, checkpoint by hand, whose buffers differ." in side(hand=(1, 2)).table()
    assert "- another: not installed: no module another." in table
    assert side().picture("peers_cpu_202611") == "peers_cpu_202611_unet.png"


@pytest.mark.parametrize(
    "changed", [{"peak": 2**21 + 1}, {"copies": "TypeError"}, {"buffers": (1, 4)}, {"keys": False}, {"names": False}]
)
def test_the_target_is_missed_where_ours_is_wrong(changed: dict[str, Any]) -> None:
    """One byte above a budget, or one column that is wrong."""
    arms = side().arms
    assert Results(rounds=2, environment={}, sides=[side()]).reached
    wrong = Side(model="U-Net", arms=[*arms[:-1], Arm(**(vars(arms[-1]) | changed))], left_out={})
    results = Results(rounds=2, environment={}, sides=[wrong])
    assert not results.reached
    assert "NOT reached" in page(results, "peers")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_the_committed_page_is_what_its_numbers_say(file: Path) -> None:
    """Every model is there, the targets are reached, the page is the numbers', and its pictures are beside it."""
    results = Results.from_json(json.loads(file.read_text(encoding="utf-8")))
    assert [side.model for side in results.sides] == list(SUBJECTS)
    assert results.reached
    assert file.with_suffix(".md").read_text(encoding="utf-8") == page(results, file.stem)
    assert all(file.with_name(side.picture(file.stem)).exists() for side in results.sides)
