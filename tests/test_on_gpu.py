"""What only a CUDA device can show: its random numbers, its memory, and that nobody waits for it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equality import twins
from lightning_ckpt import Full, MemoryBudget, checkpoint_blocks, verify_gradients
from lightning_ckpt.budget_loop import BudgetLoop
from zoo import GPT, ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]


class KeywordsOnly(nn.Module):
    """Its dropout runs on the device, and its tensors come as keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x)).tanh()


class Drawing(nn.Module):
    """Takes no tensor at all: random numbers of the device of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self) -> Tensor:
        return (torch.randn(64, device=self.scale.device) * self.scale).tanh()


@pytest.mark.parametrize("block", [KeywordsOnly, Drawing])
def test_random_numbers_of_the_device_are_replayed(block: type[nn.Module]) -> None:
    """Also where no tensor is passed by position, which leaves PyTorch's own checkpoint without the device's state."""
    ours, plain = twins(lambda: nn.ModuleList([block(), block()]).cuda())
    checkpoint_blocks(ours, blocks=block, determinism_check="values")
    results = []
    for model in (ours, plain):
        torch.manual_seed(1)
        x = torch.randn(8, 64, device="cuda")
        total: Any = sum(part(x=x).sum() if block is KeywordsOnly else part().sum() for part in model)
        total.backward()
        results.append([*[p.grad for p in model.parameters()], torch.cuda.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.supports(
    strategy="single device",
    precision=["32-true", "bf16-mixed", "16-mixed"],
    policy=["full", "selective", "segments"],
    compile="no",
)
@pytest.mark.parametrize("policy", ["full", "selective", Full(segment_size=2)], ids=["full", "selective", "segments"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_gradients_equal_plain_within_what_plain_runs_differ(policy: Any, dtype: torch.dtype | None) -> None:
    """A GPT on the device, in float32 and under autocast; float16 with its loss scaled, as a trainer does it."""
    model = GPT().cuda()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None):
            return ZOO["gpt"].loss(model, ids) * (2.0**12 if dtype is torch.float16 else 1.0)

    verify_gradients(model, ZOO["gpt"].batch().cuda(), loss, policy=policy).raise_if_different()


def test_the_peak_falls_to_a_third() -> None:
    """Allocated bytes of a step, of a GPT whose activations are most of its memory."""
    ids = torch.randint(0, 50, (16, 64), device="cuda")
    peaks = []
    for policy in (None, "full"):
        model = GPT(depth=16, width=256).cuda()
        handle = checkpoint_blocks(model, policy) if policy else None
        ZOO["gpt"].loss(model, ids).backward()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ZOO["gpt"].loss(model, ids).backward()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del model, handle
    assert peaks[1] <= peaks[0] / 3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")  # not of all kinds
def test_a_checkpointed_step_never_waits_for_the_device() -> None:
    """PyTorch raises on any synchronising call while this mode is on."""
    model = GPT().cuda()
    checkpoint_blocks(model)
    ids = ZOO["gpt"].batch().cuda()
    ZOO["gpt"].loss(model, ids).backward()  # the first step learns which buffers change, which it may wait for
    torch.cuda.set_sync_debug_mode("error")
    try:
        ZOO["gpt"].loss(model, ids).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_memory_budget_is_kept_on_the_device(fraction: float) -> None:
    """The allocator's peak of every step under a plan is at or under the budget, and most of the budget is used."""
    torch.manual_seed(0)
    model, ids = GPT(depth=12, width=256).cuda(), torch.randint(0, 50, (16, 64), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(loop: BudgetLoop | None = None) -> int:
        torch.cuda.reset_peak_memory_stats()
        if loop:
            loop.begin_batch()
        ZOO["gpt"].loss(model, ids).backward()
        if loop:
            loop.end_backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()  # of a settled loop: before that, it resets the counter itself
        if loop:
            loop.end_step()
        return peak

    plain = max(step() for _ in range(3))
    with checkpoint_blocks(model):
        full = max(step() for _ in range(3))
    budget = int(full + fraction * (plain - full))
    with (
        checkpoint_blocks(model, "auto") as handle,
        BudgetLoop(handle, model, MemoryBudget(budget), optimizers=[optimizer], device="cuda") as loop,
    ):
        for _ in range(8):
            step(loop)
        assert loop.plan is not None
        peak = step(loop)
    assert 0.9 * budget <= peak <= budget
    assert loop.plan.peak <= budget
