"""A memory budget under `torch.compile`: one setting, from the same budget, put back at the end."""

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ckpt import ActivationCheckpointing, MemoryBudget, estimate_memory
from lightning_ckpt.compiled_budget import all_compiled, compiled_budget
from lightning_ckpt.memory import AllocatorReader
from modules import Language, fit
from zoo import GPT, ZOO

# The compiler's own, on its way through PyTorch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

config: Any = import_module("torch._functorch.config")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled in one test serves another."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_share_is_what_the_budget_leaves_for_activations() -> None:
    """All of them in a budget of the plain peak, none below the rest, and in between in proportion."""
    model, ids = GPT(width=64), torch.randint(0, 50, (8, 33))
    loss = ZOO["gpt"].loss
    step = estimate_memory(model, ids, loss, policy="none")["none"]
    rest = step.peak - step.activations
    shares = [
        compiled_budget(model, ids, budget, loss_fn=loss).share
        for budget in (2 * step.peak, step.peak, rest + step.activations // 4, rest // 2)
    ]
    assert shares == [1.0, 1.0, pytest.approx(0.25, abs=1e-5), 0.0]


def test_it_is_set_and_put_back() -> None:
    """PyTorch's setting has the value in between, and the one that was there before afterwards."""
    found = config.activation_memory_budget
    model, ids = GPT(), torch.randint(0, 50, (4, 17))
    undo = compiled_budget(model, ids, 1, loss_fn=ZOO["gpt"].loss).apply()
    assert config.activation_memory_budget == 0.0
    undo()
    assert config.activation_memory_budget == found


def test_a_step_that_can_not_be_estimated_gets_half() -> None:
    """Where a step needs a value the share is a middle one, and the words say why."""

    def loss(model: Any, ids: Any) -> Any:
        value = ZOO["gpt"].loss(model, ids)
        return value if value.item() > 0 else value * 2

    budget = compiled_budget(GPT(), torch.randint(0, 50, (4, 17)), 2**20, loss_fn=loss)
    assert budget.share == 0.5
    assert "can't be estimated" in budget.why


@pytest.mark.slow
def test_the_compiler_keeps_to_it() -> None:
    """A compiled step under a small share keeps less for backward than under the whole."""
    kept = []
    for share in (1.0, 0.2):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, ids = GPT(width=64, dropout=0.0), torch.randint(0, 50, (8, 33))
        step = estimate_memory(model, ids, ZOO["gpt"].loss, policy="none")["none"]
        budget = int(step.peak - (1 - share) * step.activations)
        undo = compiled_budget(model, ids, budget, loss_fn=ZOO["gpt"].loss).apply()
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        ZOO["gpt"].loss(compiled, ids).backward()
        model.zero_grad()
        with AllocatorReader() as reader:
            loss = ZOO["gpt"].loss(compiled, ids)
            kept.append(reader.current())
        del loss
        undo()
    assert kept[1] < 0.6 * kept[0]


class Silent(Language):
    """`self.log` itself does not compile."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Sees(Callback):
    """Notes the setting while training runs, and whether blocks are checkpointed."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.checkpointed = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.shares.append(config.activation_memory_budget)
        self.checkpointed |= any("forward" in vars(module) for module in pl_module.gpt.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_the_callback_leaves_the_choice_to_the_compiler(whole: bool, caplog: Any) -> None:
    """Compiled whole or by block, no block is checkpointed, the setting holds while fit runs, and a line says so."""
    found = config.activation_memory_budget
    module = Silent()
    if not whole:
        for block in module.gpt.blocks:
            block.compile(backend="aot_eager")
    sees = Sees()
    callback = ActivationCheckpointing(MemoryBudget("100KiB"), monitor=False)
    with caplog.at_level(logging.INFO):
        given = torch.compile(module, backend="aot_eager") if whole else module
        fit(given, [callback, sees])
    assert sees.shares == [sees.shares[0]] * 4
    assert 0 <= sees.shares[0] < 1
    assert not sees.checkpointed
    assert config.activation_memory_budget == found
    assert any("the compiler chooses what to recompute" in record.message for record in caplog.records)


def test_compiled_blocks_are_told() -> None:
    """All of them, in part, or within something compiled; a compiled head beside eager blocks does not count."""
    blocks = ["blocks.0", "blocks.1"]
    model = GPT(depth=2)
    model.head.compile(backend="eager")
    assert not all_compiled(model, blocks)
    model.blocks[0].compile(backend="eager")
    assert not all_compiled(model, blocks)
    model.blocks[1].mlp.compile(backend="eager")
    assert all_compiled(model, blocks)
    whole = GPT(depth=2)
    whole.blocks.compile(backend="eager")
    assert all_compiled(whole, blocks)
