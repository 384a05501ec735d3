"""`verify_gradients`: a step plain and checkpointed, compared tensor by tensor, and nothing left behind."""

import io
import random
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from rich.console import Console
from torch import Tensor, nn

from lightning_ckpt import Full, checkpoint_blocks, verify_gradients
from lightning_ckpt.verification import Comparison, Verification, _spread
from modules import Adversaries, Images, Language
from zoo import ZOO, mlp


class Noisy(nn.Module):
    """Draws from Python's generator, which no replay restores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * random.random()).tanh()


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.supports(
    strategy="single device", precision="32-true", policy=["full", "selective", "segments"], compile="no"
)
@pytest.mark.parametrize("kind", ["gpt", "resnet", "llama", "lora-llama", "moe"])
@pytest.mark.parametrize("policy", ["full", "selective", Full(segment_size=2)], ids=["full", "selective", "segments"])
def test_good_models_are_equal_in_every_tensor(kind: str, policy: Any) -> None:
    """Loss, every gradient and every buffer; no difference is allowed on the CPU."""
    torch.manual_seed(0)
    model = ZOO[kind].build()
    result = verify_gradients(model, ZOO[kind].batch(), ZOO[kind].loss, policy=policy)
    result.raise_if_different()
    trainable = {f"gradient of {n}" for n, p in model.named_parameters() if p.requires_grad}
    buffers = {f"buffer {n}" for n, _ in model.named_buffers()}
    assert {"loss", *trainable, *buffers} == {c.name for c in result.comparisons}
    assert {c.allowed for c in result.comparisons} == {0.0}
    assert len(result.blocks) >= 3


@pytest.mark.parametrize("kind", [Language, Images])
def test_a_lightning_module_brings_its_own_step(kind: type) -> None:
    """Its `training_step`, which logs, runs without a trainer and without a warning."""
    module = kind()
    assert verify_gradients(module, next(iter(module.train_dataloader()))).equal


def test_a_module_that_has_trained_logs_to_nobody() -> None:
    """Its trainer, which it keeps after `fit`, is not asked to log; its own `log` is what it was."""
    module = Language()
    Trainer(fast_dev_run=1, enable_progress_bar=False, enable_model_summary=False).fit(module)
    assert verify_gradients(module, next(iter(module.train_dataloader()))).equal
    assert "log" not in vars(module)
    module.log = kept = print
    assert verify_gradients(module, next(iter(module.train_dataloader()))).equal
    assert module.log is kept


def test_the_batch_index_goes_by_position() -> None:
    """As Lightning passes it, whatever its name; a step without one gets none."""

    class Unnamed(Images):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(batch[0]).square().mean() + _

    class Without(Images):
        def training_step(self, batch: Any) -> Tensor:
            return self.net(batch[0]).square().mean()

    batch = next(iter(Images().train_dataloader()))
    assert verify_gradients(Unnamed(), batch).equal
    assert verify_gradients(Without(), batch).equal


def test_a_replay_that_differs_is_shown_by_tensor() -> None:
    """The worst comes first, the error names what differs and where to look."""
    torch.manual_seed(0)
    result = verify_gradients(nn.Sequential(Noisy(), Noisy(), nn.Linear(8, 8)), torch.randn(4, 8), total)
    assert not result.equal
    assert result.worst.largest > 0
    assert "gradient of" in result.worst.name or result.worst.name == "loss"
    with pytest.raises(AssertionError, match=r"differs from the plain one in \d of 7 tensors: .*determinism_check="):
        result.raise_if_different()


def test_blocks_that_are_checkpointed_already_are_the_ones_compared() -> None:
    """A handle in place stays in place, and is what is proven."""
    model = mlp()
    handle = checkpoint_blocks(model, Full(every=2))
    result = verify_gradients(model, torch.randn(4, 64), total)
    assert result.equal
    assert result.blocks == handle.blocks == ("0", "2")
    assert [block.__dict__["forward"].active for block in (model[0], model[2])] == [True, True]


def test_everything_is_left_as_found() -> None:
    """Weights, gradients that were there, buffers, modes, hooks and random numbers, also after an error."""
    torch.manual_seed(0)
    module = Images().eval()
    module.net.layer1.train()
    first = next(module.parameters())
    first.grad = torch.full_like(first, 3.0)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    random_state, python_state = torch.get_rng_state(), random.getstate()
    batch = next(iter(module.train_dataloader()))
    torch.set_rng_state(random_state)

    def fails(module: nn.Module, batch: Any) -> Tensor:
        module.net(batch[0]).sum().backward()
        raise ZeroDivisionError

    assert verify_gradients(module, batch).equal
    with pytest.raises(ZeroDivisionError):
        verify_gradients(module, batch, fails)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert all(p.grad is None for p in list(module.parameters())[1:])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state
    assert not any("forward" in part.__dict__ for part in module.modules())


def test_a_model_of_which_nothing_is_checkpointed_proves_nothing() -> None:
    """Its owner checkpoints it already: an error, and no "equal"."""
    model = mlp()
    model.gradient_checkpointing = True
    with (
        pytest.warns(UserWarning, match="checkpointed by its owner"),
        pytest.raises(ValueError, match="no block is checkpointed, so there is nothing to verify"),
    ):
        verify_gradients(model, torch.randn(4, 64), total)


def test_a_tolerance_is_a_choice() -> None:
    """What is allowed decides, tensor by tensor; less than nothing can't be."""
    with pytest.raises(ValueError, match=r"tolerance=-1: accepted are None and a difference of at least 0"):
        verify_gradients(mlp(), torch.randn(4, 64), total, tolerance=-1)
    result = verify_gradients(nn.Sequential(Noisy(), Noisy()), torch.randn(4, 8), total, tolerance=1e9)
    assert result.equal
    assert not Verification((Comparison("loss", 0.2, 0.1),), ()).equal


@pytest.mark.parametrize(
    ("module", "batch", "loss", "text"),
    [
        (
            mlp(),
            torch.randn(2, 64),
            None,
            r"Sequential has no training_step: give verify_gradients\(module, batch, loss",
        ),
        (Adversaries(), [torch.randn(2, 64)], None, r"Adversaries optimizes by hand.*give verify_gradients"),
        (mlp(), torch.randn(2, 64), lambda m, x: m(x), r"gave a tensor of shape \(2, 64\): accepted is a loss"),
        (
            mlp(),
            torch.randn(2, 64),
            lambda m, x: {"loss": 1},
            r"gave a dict: accepted is a loss, .* such as output\.loss",
        ),
        (
            mlp(),
            torch.randn(2, 64),
            lambda m, x: 1,
            r"the step gave 1, a plain number .* without \.item\(\) or float\(\)",
        ),
        (mlp(), torch.randn(2, 64), lambda m, x: x.sum(), r"depends on no parameter that trains: there is no gradient"),
        (nn.Linear(2, 2), torch.randn(2, 2), total, r"No repeated block was found in Linear"),
    ],
)
def test_what_can_not_be_verified_is_said(module: Any, batch: Any, loss: Any, text: str) -> None:
    """No step, manual optimization, no scalar, no block: each with what to do."""
    with pytest.raises(ValueError, match=text):
        verify_gradients(module, batch, loss)


def test_something_that_is_no_module_is_refused() -> None:
    """The argument, the value, what is accepted."""
    with pytest.raises(TypeError, match=r"^module=3: accepted is a torch\.nn\.Module$"):
        verify_gradients(3, None)  # type: ignore[arg-type]


def test_the_result_prints_as_a_table() -> None:
    """Worst first, at most ten rows, and how many there were."""
    result = verify_gradients(mlp(), torch.randn(2, 64), total)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(result)
    text = console.export_text()
    assert "13 tensors of 3 checkpointed blocks and the rest: equal" in text
    assert "The worst 10 of 13" in text
    assert "gradient of 0.0.weight" in text


def test_a_result_of_few_tensors_is_printed_whole() -> None:
    """Nothing is left out, and nothing said of it."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(Verification((Comparison("loss", 0.2, 0.1),), ("0",)))
    text = console.export_text()
    assert "different, loss by up to 0.2" in text
    assert "The worst" not in text


def test_a_gradient_that_only_one_of_the_steps_has_is_infinitely_different() -> None:
    """No tolerance is large enough for it; the error names it."""
    steps = []

    def forgetful(model: nn.Module, x: Tensor) -> Tensor:
        steps.append(1)
        return model(x).square().sum() + (model[0][0].scale.sum() if len(steps) == 1 else 0)

    model = mlp()
    model[0][0].scale = nn.Parameter(torch.ones(2))
    result = verify_gradients(model, torch.randn(2, 64), forgetful, tolerance=1e9)
    assert [c.name for c in result.comparisons if not c.equal] == ["gradient of 0.0.scale"]
    with pytest.raises(AssertionError, match=r"1 of 14 tensors: gradient of 0\.0\.scale by up to inf"):
        result.raise_if_different()


def test_what_plain_runs_differ_by_is_allowed_four_times() -> None:
    """The largest of a few runs, for each tensor; nothing where they agree."""

    def run(bias: float) -> dict[str, Tensor]:
        return {"weight": torch.ones(2), "bias": torch.tensor([1.0, bias])}

    repeats = [run(1.25), run(1.5)]
    assert [_spread(name, repeats, run(1.0)) for name in ("weight", "bias")] == [0.0, 2.0]
