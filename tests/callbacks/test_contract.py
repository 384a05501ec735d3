"""One contract for every callback: it constructs, fits, fits again, recovers, resumes, and leaves things as found."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, Full, SelectiveOps, StepMonitor
from modules import Adversaries, Images, Language, differences, fit, trainer
from zoo import GPTBlock

CALLBACKS: dict[str, Callable[[], Callback]] = {
    "checkpointing": ActivationCheckpointing,
    "selective": lambda: ActivationCheckpointing(SelectiveOps(), monitor=False),
    "every second": lambda: ActivationCheckpointing(Full(every=2)),
    "monitor": StepMonitor,
    "tuner": lambda: BatchSizeTuner(max_val=4, init_val=4),
}
each = pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)


def footprint(module: nn.Module) -> dict[str, Any]:
    """What a callback must not leave on a module: instance attributes, hooks, modes, gradients."""
    return {
        name: (
            sorted(part.__dict__.keys() - {"_trainer", "_current_fx_name"}),
            {key: len(value) for key, value in part.__dict__.items() if key.endswith("_hooks")},
            part.training,
        )
        for name, part in module.named_modules()
    }


@each
def test_it_constructs_and_prints(make: Callable[[], Callback]) -> None:
    """With defaults, any number of times, and nothing is shared between two of them."""
    assert type(make()) is type(make())
    assert make() is not make()
    assert repr(make())


@each
@pytest.mark.parametrize("kind", [Language, Images, Adversaries])
def test_training_with_it_leaves_what_plain_training_leaves(make: Callable[[], Callback], kind: type) -> None:
    """Weights, buffers, optimizer state, metrics, step count and random numbers, bit for bit."""
    torch.manual_seed(0)
    ours = kind()
    plain = copy.deepcopy(ours)
    assert not differences(fit(ours, [make()]), fit(plain))


@each
def test_it_fits_twice_and_leaves_model_and_trainer_as_found(make: Callable[[], Callback]) -> None:
    """Two fits with one trainer equal two plain ones; afterwards no attribute, hook or callback is left."""
    results = []
    for callbacks in ([make()], []):
        torch.manual_seed(0)
        module = Language()
        running = trainer(callbacks)
        before = list(running.callbacks)
        running.fit(module)
        running.fit_loop.max_epochs = 2
        running.fit(module)
        assert running.callbacks == before
        results.append((footprint(module), module.state_dict(), running.global_step, running.current_epoch))
    (ours, our_state, *our_counts), (plain, plain_state, *plain_counts) = results
    assert ours == plain
    assert our_counts == plain_counts == [8, 2]
    assert all(torch.equal(our_state[name], plain_state[name]) for name in plain_state)


@each
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_it_fits_after_an_exception(make: Callable[[], Callback], error: type[BaseException]) -> None:
    """The user's error comes through as it is; the model is as a plain trainer leaves it, and the next fit works."""
    failed: list[nn.Module] = []  # not on the module, where a search would put it back

    class Fails(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self not in failed:
                failed.append(self)
                raise error("in the user's code")
            return super().training_step(batch, batch_idx)

    left = []
    for callbacks in ([make()], []):
        torch.manual_seed(0)
        module, running = Fails(), trainer(callbacks)
        before = list(running.callbacks)
        with pytest.raises(error, match="in the user's code"):
            running.fit(module)
        assert running.callbacks == before
        left.append(footprint(module))
        running.fit(module)
        assert running.global_step >= 4
    assert left[0] == left[1]


@each
def test_it_resumes_from_a_checkpoint(make: Callable[[], Callback], tmp_path: Path) -> None:
    """Two epochs in two runs equal two epochs in one: weights, optimizer, counters and logged rows."""

    class Plain(Language):  # without dropout: Lightning's files hold no random state
        def __init__(self) -> None:
            super().__init__()
            for part in self.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0

    torch.manual_seed(0)
    whole = Plain()
    halves = copy.deepcopy(whole)
    expected = fit(whole, max_epochs=2)
    running = trainer([make()])
    running.fit(halves)
    running.save_checkpoint(tmp_path / "half.ckpt")
    resumed = trainer([make()], max_epochs=2)
    resumed.fit(Plain(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert resumed.global_step == 8
    state = resumed.lightning_module.state_dict()
    assert not [name for name in state if not torch.equal(state[name], expected[name])]


@each
def test_validate_test_and_predict_are_untouched(make: Callable[[], Callback]) -> None:
    """Outside of `fit` it does nothing: same numbers, same logged keys."""
    results, left = [], []
    for callbacks in ([make()], []):
        torch.manual_seed(0)
        module = Language().eval()
        running = trainer(callbacks)
        results.append(
            [
                *running.validate(module, verbose=False),
                *running.test(module, verbose=False),
                {str(i): t for i, t in enumerate(running.predict(module) or [])},
            ]
        )
        left.append(footprint(module))
    assert left[0] == left[1]
    for ours, plain in zip(*results, strict=True):
        assert ours.keys() == plain.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(plain[key])) for key in ours)


@each
def test_it_runs_with_several_loggers_and_with_fast_dev_run(make: Callable[[], Callback], tmp_path: Path) -> None:
    """Two loggers, and Lightning's one-batch mode, which swaps loggers and disables checkpoints."""
    fit(Language(), [make()], logger=[CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")])
    fit(Language(), [make()], fast_dev_run=True)


YAML = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_ckpt.ActivationCheckpointing
      init_args:
        policy: {class_path: lightning_ckpt.Full, init_args: {every: 2}}
        blocks: "gpt.blocks.*"
        monitor: {class_path: lightning_ckpt.StepMonitor, init_args: {every_n_steps: 2}}
    - class_path: lightning_ckpt.ActivationCheckpointing
      init_args: {policy: selective, blocks: [zoo.GPTBlock, "*.mlp"], monitor: false}
    - class_path: lightning_ckpt.StepMonitor
    - class_path: lightning_ckpt.BatchSizeTuner
      init_args: {headroom: 0.2, max_val: 4, memory_limit: 40GiB}
"""


@pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)  # of how Lightning calls it
def test_a_lightning_cli_file_sets_every_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From plain YAML to objects, and through `--print_config` and back to the same."""
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def parse(config: str) -> LightningCLI:
        return LightningCLI(
            Language, run=False, args=["--config", config], save_config_callback=None, seed_everything_default=3
        )

    cli = parse(str(path))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(yaml.safe_dump(yaml.safe_load(cli.parser.dump(cli.config))))
    for again in (cli, parse(str(dumped))):
        first, second, monitor, tuner = again.trainer.callbacks[:4]
        assert first.policy == Full(every=2)
        assert first.blocks == "gpt.blocks.*"
        assert isinstance(first.monitor, StepMonitor)
        assert second.policy == "selective"
        assert list(second.blocks) == [GPTBlock, "*.mlp"]
        assert isinstance(monitor, StepMonitor)
        assert isinstance(tuner, BatchSizeTuner)
        assert tuner.options.headroom == 0.2
    del cli.trainer.callbacks[1]  # a second plan for the same model, for the sake of parsing
    cli.trainer.fit(cli.model)
    assert cli.trainer.global_step == 4
