"""The callback that turns checkpointing on while `fit` runs."""

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.utils.checkpoint import CheckpointError

from equality import Replays
from lightning_ckpt import ActivationCheckpointing, Full, StepMonitor
from lightning_ckpt.checkpointed_forward import CheckpointedForward
from modules import Adversaries, Images, Language, differences, fit, trainer
from zoo import GPTBlock


def patched(module: nn.Module) -> list[str]:
    return [
        name for name, part in module.named_modules() if isinstance(part.__dict__.get("forward"), CheckpointedForward)
    ]


class Spy(Callback):
    """Notes, on each training batch, which blocks are checkpointed."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append(patched(pl_module))


def a_block_of(module: LightningModule) -> nn.Module:
    """One that repeats, and has parts to count the calls of."""
    return next(m for m in module.modules() if isinstance(m, GPTBlock) or len(list(m.children())) > 2)


# --- the same training ---


@pytest.mark.supports(strategy="single device", precision="32-true", policy=["full", "selective"], compile="no")
@pytest.mark.parametrize("policy", ["full", "selective", Full(every=2)])
@pytest.mark.parametrize("kind", [Language, Images, Adversaries])
def test_training_leaves_what_plain_training_leaves(kind: type, policy: Any) -> None:
    """Weights, buffers, optimizer state, metrics, random numbers, bit for bit, automatic and manual optimization."""
    torch.manual_seed(0)
    ours = kind()
    plain = copy.deepcopy(ours)
    counted = Replays(a_block_of(ours))
    left = fit(ours, [ActivationCheckpointing(policy)])
    assert not differences(left, fit(plain))
    assert counted.replays > 0


@pytest.mark.supports(
    strategy="single device", precision=["32-true", "bf16-mixed", "bf16-true"], policy="full", compile="no"
)
@pytest.mark.parametrize(
    "options", [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}]
)
def test_training_options_change_nothing_of_that(options: dict[str, Any]) -> None:
    """Mixed and true bfloat16, and gradient accumulation."""
    torch.manual_seed(0)
    ours = Images()
    plain = copy.deepcopy(ours)
    counted = Replays(a_block_of(ours))
    assert not differences(fit(ours, [ActivationCheckpointing()], **options), fit(plain, **options))
    assert counted.replays > 0


# --- where the blocks come from ---


class MadeInSetup(Language):
    def __init__(self) -> None:
        super().__init__()
        del self.gpt

    def setup(self, stage: str) -> None:
        if not hasattr(self, "gpt"):
            self.gpt = Language().gpt


class MadeInConfigureModel(Language):
    def __init__(self) -> None:
        super().__init__()
        del self.gpt

    def configure_model(self) -> None:
        if not hasattr(self, "gpt"):
            self.gpt = Language().gpt


@pytest.mark.parametrize("kind", [Language, MadeInSetup, MadeInConfigureModel])
def test_blocks_are_found_wherever_the_module_makes_them(kind: type) -> None:
    """In `__init__`, in `setup` or in `configure_model`: checkpointed before the first step."""
    spy = Spy()
    fit(kind(), [ActivationCheckpointing(), spy])
    assert spy.seen == [[f"gpt.blocks.{i}" for i in range(3)]] * 4


@pytest.mark.parametrize("given", [lambda module: module, from_compiled], ids=["compiled", "from_compiled"])
def test_a_compiled_module_is_seen_through(given: Any) -> None:
    """`torch.compile(module)` handed to the trainer, or unwrapped by Lightning before: the blocks are checkpointed."""

    class Silent(Language):  # `self.log` itself does not compile
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.gpt(batch["input_ids"]).square().mean()

    spy = Spy()
    running = trainer([ActivationCheckpointing(), spy], limit_train_batches=1, limit_val_batches=0)
    running.fit(given(torch.compile(Silent(), backend="eager")))
    assert spy.seen == [[f"gpt.blocks.{i}" for i in range(3)]]


def test_no_block_found_is_an_error_at_the_start_of_training() -> None:
    """Only then is the module complete; nothing has been trained, and nothing is left in the trainer."""
    callback = ActivationCheckpointing(blocks="Blok")
    running = trainer([callback])
    with pytest.raises(ValueError, match=r"blocks='Blok' matches no module of Language"):
        running.fit(Language())
    assert running.global_step == 0
    assert running.callbacks == [callback]


# --- in place for `fit`, and only then ---


def test_validation_inside_fit_and_everything_outside_is_not_replayed() -> None:
    """Validation runs each block once; `validate`, `test` and `predict` see no trace of the callback."""
    module, spy = Language(), Spy()
    counted = Replays(module.gpt.blocks[0])
    running = trainer([ActivationCheckpointing(), spy], limit_train_batches=1)
    running.fit(module)
    parts = len(list(module.gpt.blocks[0].modules())) - 2  # the container of the MLP is called through its block
    validations = 4 + 2  # its batches, and those of the sanity check
    assert counted.calls - counted.replays == (1 + validations) * (parts + 1)
    assert patched(module) == []
    for run in (running.validate, running.test, running.predict):
        before = counted.replays
        run(module, **({"verbose": False} if run != running.predict else {}))
        assert counted.replays == before
        assert patched(module) == []


def test_an_exception_gives_every_block_its_forward_back() -> None:
    """Lightning calls no teardown then; a second fit with the same trainer is checkpointed again, one level deep."""

    class Fails(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.trainer.current_epoch == 0 and not self.failed:
                self.failed = True
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    module, spy = Fails(), Spy()
    module.failed = False
    callback = ActivationCheckpointing()
    running = trainer([callback, spy])
    with pytest.raises(ZeroDivisionError):
        running.fit(module)
    assert patched(module) == []
    assert running.callbacks == [callback, spy]
    counted = Replays(module.gpt.blocks[2])
    running.fit(module)
    assert counted.calls > 0
    assert set(map(len, spy.seen)) == {3}
    assert patched(module) == []


def test_checkpoint_files_move_between_runs_with_and_without(tmp_path: Path) -> None:
    """Saved with the callback and loaded strictly without it, and the other way round, optimizer state included."""
    for first, second in (([ActivationCheckpointing()], []), ([], [ActivationCheckpointing()])):
        path = tmp_path / f"{len(first)}.ckpt"
        running = trainer(first)
        running.fit(Language())
        running.save_checkpoint(path)
        Language.load_from_checkpoint(path, strict=True)
        resumed = trainer(second, max_epochs=2)
        resumed.fit(Language(), ckpt_path=path, weights_only=False)
        assert resumed.global_step == 8


@pytest.mark.parametrize("first", [True, False])
def test_an_averaged_copy_has_its_own_weights(first: bool) -> None:
    """`WeightAveraging` copies the model in its setup, before or after ours: the same average as without us."""

    class EMA(WeightAveraging):
        def __init__(self) -> None:
            super().__init__(avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)

    torch.manual_seed(0)
    ours, plain = Images(), Images()
    plain.load_state_dict(ours.state_dict())
    callbacks = [ActivationCheckpointing(), EMA()]
    left = fit(ours, callbacks if first else callbacks[::-1])
    assert not differences(left, fit(plain, [EMA()]))


def test_the_learning_rate_search_keeps_one_level(tmp_path: Path) -> None:
    """Lightning's finder runs in `on_fit_start` and restores the weights: blocks are patched once, before and after."""
    spy = Spy()
    module = Language()
    module.lr = 1e-3
    running = trainer(
        [ActivationCheckpointing(), LearningRateFinder(num_training_steps=3, max_lr=1e-2), spy],
        default_root_dir=tmp_path,
        limit_val_batches=0,
    )
    running.fit(module)
    assert spy.seen
    assert set(map(len, spy.seen)) == {3}


# --- the monitor ---


def test_a_monitor_comes_with_it_and_goes_with_it() -> None:
    """By default one is added while `fit` runs; one of the user's takes its place; `False` adds none."""

    class Count(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.monitors = [c for c in trainer.callbacks if isinstance(c, StepMonitor)]

    own, count = StepMonitor(), Count()
    for callbacks, expected in (
        ([ActivationCheckpointing()], 1),
        ([ActivationCheckpointing(monitor=False)], 0),
        ([ActivationCheckpointing(monitor=own)], 1),
        ([ActivationCheckpointing(), own], 1),
    ):
        running = trainer([*callbacks, count])
        running.fit(Language())
        assert len(count.monitors) == expected
        assert running.callbacks == [*callbacks, count]
    assert count.monitors == [own]


def test_the_plan_is_printed_and_goes_into_the_hyperparameters(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Rank zero's table names the blocks and the share covered; every logger gets policy and blocks."""
    logger = CSVLogger(tmp_path)
    fit(Language(), [ActivationCheckpointing(Full(every=2))], logger=logger)
    printed = capsys.readouterr().out
    assert "2 of 3 blocks" in printed
    assert "gpt.blocks.0" in printed
    hparams = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert "gpt.blocks.2" in hparams
    assert "Full(every=2" in hparams


@pytest.mark.parametrize(("check_steps", "checked"), [(2, 2), (None, 4)])
def test_the_value_check_covers_the_first_batches_and_says_when_it_ends(
    check_steps: int | None, checked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches of four, then PyTorch's own check of shapes; `None` checks to the end."""

    class Count(Callback):
        seen = 0

        def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
            handle = trainer.callbacks[0]._handle
            self.seen += handle.determinism_check == "values"

    count = Count()
    with caplog.at_level(logging.INFO):
        fit(Language(), [ActivationCheckpointing(determinism_check="values", check_steps=check_steps), count])
    assert count.seen == checked
    assert ("Every replayed value of 2 batches was that of its forward" in caplog.text) == (check_steps == 2)


def test_the_value_check_stops_training_on_wrong_gradients() -> None:
    """A block that draws from Python's generator: an error in the first backward, and the model as it was."""

    class Noisy(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for block in self.gpt.blocks:
                block.dropout.forward = lambda x: x * random.random()
            return super().training_step(batch, batch_idx)

    module = Noisy()
    with pytest.raises(
        CheckpointError, match=r"block 'gpt\.blocks\.0' \(GPTBlock\).*Likely cause: random numbers of Pyth"
    ):
        fit(module, [ActivationCheckpointing(determinism_check="values")])
    assert patched(module) == []


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"policy": "ful"}, ValueError, r"policy='ful': accepted are"),
        ({"blocks": 3}, TypeError, r"blocks=3: accepted are"),
        ({"monitor": "yes"}, TypeError, r"monitor='yes': accepted are True, False and a StepMonitor"),
        ({"determinism_check": "all"}, ValueError, r"determinism_check='all'"),
        ({"check_steps": 0}, ValueError, r"check_steps=0: accepted are a whole number of at least 1, and None"),
    ],
)
def test_wrong_arguments_are_refused_at_once(wrong: Any, error: Any, text: str) -> None:
    """Before there is a trainer, with the argument, its value and what is accepted."""
    with pytest.raises(error, match=text):
        ActivationCheckpointing(**wrong)
