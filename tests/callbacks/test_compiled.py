"""The callback on compiled modules: whole and by block, with no graph break allowed, under every policy."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, Full, MemoryBudget
from lightning_ckpt.memory import AllocatorReader, use_reader
from modules import Language, fit, is_estimated
from zoo import GPT

# The compiler's own, on its way through PyTorch.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Silent(Language):
    """Without `self.log`, which does not compile, and without dropout, whose masks the compiler draws otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(depth=3, width=16, dropout=0.0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.gpt(batch["input_ids"][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled in one test serves another."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(module: Silent, how: str) -> Any:
    if how == "whole":
        return torch.compile(module, backend="aot_eager", fullgraph=True)
    for block in module.gpt.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return module


class Noting(Callback):
    """Notes what is checkpointed while a batch is trained: how many blocks, and what share the compiler may keep."""

    def __init__(self, checkpointing: ActivationCheckpointing) -> None:
        self.checkpointing, self.blocks, self.share = checkpointing, 0, 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        report = self.checkpointing.report()
        self.blocks = len(report.checkpointed) if report else 0
        self.share = torch._functorch.config.activation_memory_budget


@pytest.mark.supports(
    strategy="single device",
    precision="32-true",
    policy=["full", "selective", "segments", "auto"],
    compile=["whole", "by block"],
)
@pytest.mark.parametrize("how", ["whole", "by block"])
@pytest.mark.parametrize("policy", ["full", "selective", Full(segment_size=2), MemoryBudget("100KiB")], ids=str)
def test_compiled_training_is_the_plain_compiled_training(policy: Any, how: str) -> None:
    """Weights and optimizer state within 1e-6: the compiler reorders sums."""
    torch.manual_seed(0)
    ours = Silent()
    plain = copy.deepcopy(ours)
    checkpointing = ActivationCheckpointing(policy, monitor=False)
    noting = Noting(checkpointing)
    left, expected = (
        fit(compiled(module, how), callbacks, limit_val_batches=0)
        for module, callbacks in ((ours, [checkpointing, noting]), (plain, []))
    )
    budget = isinstance(policy, MemoryBudget)
    assert (noting.share < 1, noting.blocks) == (budget, 0 if budget else 3)
    assert left.keys() == expected.keys()
    for name in left.keys() - {"random state"}:
        torch.testing.assert_close(left[name], expected[name], rtol=0, atol=1e-6)


def test_the_compilers_share_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To every logger, with the policy; of replayed values nothing is said, since none was compared."""
    logger = CSVLogger(tmp_path)
    policy = MemoryBudget("100KiB")
    checkpointing = ActivationCheckpointing(policy, determinism_check="values", check_steps=2, monitor=False)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(compiled(Silent(), "by block"), [checkpointing], limit_val_batches=0, logger=logger)
    written = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())["activation_checkpointing"]
    assert written["policy"] == str(policy)
    assert 0 <= written["activation_memory_budget"] < 1
    assert f"activation_memory_budget={written['activation_memory_budget']:.3f} while training" in caplog.text
    assert "Every replayed value" not in caplog.text


def test_a_run_that_ends_before_its_first_batch_leaves_the_compiler_alone() -> None:
    """Nothing was told to it yet, so there is nothing to take back."""

    class Fails(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise ZeroDivisionError

    torch._functorch.config.activation_memory_budget = 0.75
    try:
        with pytest.raises(ZeroDivisionError):
            fit(
                compiled(Silent(), "by block"),
                [ActivationCheckpointing(MemoryBudget("100KiB"), monitor=False), Fails()],
            )
        assert torch._functorch.config.activation_memory_budget == 0.75
    finally:
        torch._functorch.config.activation_memory_budget = 1.0


def test_a_batch_size_is_found_without_a_plan() -> None:
    """Of a compiled model the compiler chooses: a first step and a trial, and no further ones to make a plan."""
    taken: list[int] = []

    class Counting(Silent):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if not is_estimated(batch["input_ids"]):
                taken.append(len(batch["input_ids"]))
            return super().training_step(batch, batch_idx)

    checkpointing = ActivationCheckpointing(MemoryBudget(0.9), monitor=False)
    noting, tuner = Noting(checkpointing), BatchSizeTuner(init_val=8, max_val=8)
    with AllocatorReader(limit=2**30) as reader, use_reader(reader):
        fit(compiled(Counting(), "by block"), [checkpointing, tuner, noting], limit_val_batches=0, max_steps=1)
    assert [(trial.size, trial.outcome) for trial in tuner.trials] == [(8, "fits")]
    assert taken == [8] * 3
    assert noting.blocks == 0
