"""What is advised when memory runs out would really take less, in the order it is given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import Full, MemoryBudget, SelectiveOps, estimate_memory
from lightning_ckpt.policies import Policy
from lightning_ckpt.relief import Relief, relief


class Deep(nn.Module):
    """Blocks whose activations are most of what a step takes; a step of its own, as a LightningModule has."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def relief_of(policy: Policy | None = None, *, size: int = 512, limit: int | None = None, **options: Any) -> Relief:
    options = {"precision": "32-true", "accumulate": 1, **options}
    return relief(Deep(), torch.empty(size, 64), policy=policy, blocks=["blocks.*"], limit=limit, **options)


def words(found: Relief) -> list[str]:
    return [change.words for change in found.changes]


def test_a_plain_run_is_advised_to_checkpoint() -> None:
    """With a limit that all keep to, the cheapest first; every peak is that of `estimate_memory`."""
    found = relief_of()
    estimate = estimate_memory(Deep(), torch.empty(512, 64), policy=("none", "selective", "full"), blocks="blocks.*")
    assert found.step == estimate.steps[0]
    peaks = {f'ActivationCheckpointing("{policy}")': estimate[policy].peak for policy in ("selective", "full")}
    assert {change.words: change.peak for change in found.changes[:2]} == peaks
    assert all(change.saves == found.step.peak - change.peak > 0 for change in found.changes)
    assert len(found.changes) == 3
    assert all(change.fits for change in found.changes)


def test_what_does_not_fit_comes_last() -> None:
    """Under a limit that full checkpointing alone keeps to, it is the first."""
    estimate = estimate_memory(Deep(), torch.empty(512, 64), policy=("selective", "full"), blocks="blocks.*")
    limit = round(estimate["full"].peak * 1.1)
    assert limit < estimate["selective"].peak
    found = relief_of(limit=limit)
    assert words(found)[0] == 'ActivationCheckpointing("full")'
    fits = [change.fits for change in found.changes]
    assert fits == sorted(fits, reverse=True)


def test_where_nothing_fits_the_most_saving_is_first() -> None:
    """A limit that the parameters alone exceed."""
    found = relief_of(limit=1000)
    assert not any(change.fits for change in found.changes)
    saves = [change.saves for change in found.changes]
    assert saves == sorted(saves, reverse=True)


@pytest.mark.parametrize("policy", [Full(), MemoryBudget("1GiB")])
def test_where_all_is_replayed_already_the_batch_is_left(policy: Policy) -> None:
    """A smaller one with gradients gathered over as many more, its peak as estimated."""
    found = relief_of(policy, accumulate=2, precision="bf16-mixed")
    assert words(found) == ["a batch of 256 instead of 512, with accumulate_grad_batches=4"]
    estimate = estimate_memory(
        Deep(), torch.empty(512, 64), policy=Full(), blocks="blocks.*", precision="bf16-mixed", accumulate=2
    )
    assert found.changes[0].peak == estimate.at(256).steps[0].peak


def test_a_selective_run_may_replay_all() -> None:
    """The policy that is there is not advised again."""
    assert words(relief_of(SelectiveOps()))[0] == 'ActivationCheckpointing("full")'


def test_a_batch_of_one_can_not_be_halved() -> None:
    """No smaller batch is advised than one sample."""
    assert not [line for line in words(relief_of(size=1)) if "a batch of" in line]
