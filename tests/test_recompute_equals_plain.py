"""A checkpointed step is the plain step: loss, gradients, buffers, random numbers, bit for bit on the CPU."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from equality import assert_equal, trace, twins
from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks
from lightning_ckpt.checkpointed_forward import Call
from zoo import GPT, ZOO, Specimen

POLICIES = {"full": "full", "every-2": Full(every=2), "selective": "selective", "attention": SelectiveOps("attention")}


def batches(specimen: Specimen) -> list:
    torch.manual_seed(1)
    return [specimen.batch() for _ in range(3)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that were replayed, in order."""
    names: list[str] = []
    replay = Call.replay
    monkeypatch.setattr(Call, "replay", lambda call, tensors: names.append(call.name) or replay(call, tensors))
    return names


@pytest.mark.supports(strategy="single device", precision="32-true", policy=["full", "selective"], compile="no")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ZOO)
def test_three_steps_equal_those_of_the_plain_model(kind: str, policy: str, replays: list[str]) -> None:
    """Whatever the model and the policy, training sees no difference, and blocks are replayed in each step."""
    specimen = ZOO[kind]
    ours, plain = twins(specimen.build)
    handle = checkpoint_blocks(ours, POLICIES[policy], blocks=specimen.blocks)
    data = batches(specimen)
    assert_equal(trace(ours, data, specimen.loss), trace(plain, data, specimen.loss))
    trained = [name for name in handle.blocks if not name.startswith("backbone")]  # a frozen trunk keeps nothing
    backwards = 6 if kind == "gradient-penalty" else 3
    assert {name: replays.count(name) for name in trained} == dict.fromkeys(trained, backwards)


@pytest.mark.supports(strategy="single device", precision="bf16-mixed", policy=["full", "selective"], compile="no")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["gpt", "resnet", "llama"])
def test_autocast_in_bfloat16_equals_plain(kind: str, policy: str) -> None:
    """A backward outside the autocast block still replays in the precision of the forward."""
    specimen = ZOO[kind]

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return specimen.loss(model, batch)

    ours, plain = twins(specimen.build)
    checkpoint_blocks(ours, POLICIES[policy])
    data = batches(specimen)
    assert_equal(trace(ours, data, step), trace(plain, data, step))


@pytest.mark.supports(strategy="single device", precision="16-mixed", policy=["full", "selective"], compile="no")
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_float16_with_a_loss_scaler_equals_plain(policy: str) -> None:
    """Scaled gradients, the scale and the weights after the optimizer's steps are those of the plain run."""
    specimen = ZOO["gpt"]
    data = batches(specimen)
    results = []
    ours, plain = twins(specimen.build)
    checkpoint_blocks(ours, policy)
    for model in (ours, plain):
        torch.manual_seed(3)
        seen = []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in data:
            with torch.autocast("cpu", torch.float16):
                loss = specimen.loss(model, batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            seen += [loss.detach(), *[p.grad.clone() for p in model.parameters()], torch.get_rng_state()]
            scaler.step(optimizer)
            scaler.update()
        results.append([torch.tensor(scaler.get_scale()), *seen, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0] > 2.0**12  # steps were taken, not skipped as overflows


def test_gradient_accumulation_equals_plain() -> None:
    """Gradients summed over two micro-batches before one step are those of the plain run."""
    specimen = ZOO["resnet"]

    def step(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        (specimen.loss(model, pair[0]) / 2).backward()
        return specimen.loss(model, pair[1]) / 2

    ours, plain = twins(specimen.build)
    checkpoint_blocks(ours)
    data = batches(specimen)
    pairs = list(pairwise(data))
    assert_equal(trace(ours, pairs, step), trace(plain, pairs, step))


@pytest.mark.supports(strategy="single device", precision="32-true", policy=["full", "selective"], compile="whole")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor's own
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(("kind", "backend"), [("gpt", "inductor"), ("resnet", "aot_eager")])
def test_compiled_steps_equal_the_compiled_plain_model(kind: str, backend: str, policy: str) -> None:
    """Under `torch.compile` with no graph break allowed, within 1e-6 of the plain model compiled alike."""
    specimen = ZOO[kind]
    ours, plain = twins((lambda: GPT(dropout=0.0)) if kind == "gpt" else specimen.build)
    checkpoint_blocks(ours, policy)
    data = batches(specimen)
    compiled = [torch.compile(model, fullgraph=True, backend=backend) for model in (ours, plain)]
    traces = [trace(model, data, specimen.loss) for model in compiled]
    for mine, theirs in zip(*traces, strict=True):
        for key in mine.keys() - {"random state"}:
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-6)


def test_several_forwards_before_one_backward_equal_plain() -> None:
    """Siamese branches replay each from its own inputs, buffers and random numbers."""

    def step(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(pair[0]) - model(pair[1])).square().mean()

    for kind in ("resnet", "vit"):
        specimen = ZOO[kind]
        ours, plain = twins(specimen.build)
        checkpoint_blocks(ours)
        data = batches(specimen)
        pairs = list(pairwise(data))
        assert_equal(trace(ours, pairs, step), trace(plain, pairs, step))


def test_two_backward_passes_over_one_graph_equal_plain() -> None:
    """`retain_graph=True` replays twice, from the same state both times."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        out.mean().backward(retain_graph=True)
        return out.square().mean()

    specimen = ZOO["resnet"]
    ours, plain = twins(specimen.build)
    checkpoint_blocks(ours)
    data = batches(specimen)
    assert_equal(trace(ours, data, step), trace(plain, data, step))
