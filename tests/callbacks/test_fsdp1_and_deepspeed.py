"""Engines that wrap the module themselves: FSDP1, also with its own checkpointing, and DeepSpeed.

Lightning and FSDP1 each refuse a CPU in one line. With these out of the way all the rest of FSDP1 runs in two gloo
processes as it is: wrapping, gathering, freeing, its hooks.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning_utilities.core.imports import module_available
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel

from distributed_runs import POLICIES, SEGMENTS, Watched, equal_with_every_policy, trained
from equality import Replays
from lightning_ckpt import ActivationCheckpointing, MemoryBudget, checkpoint_blocks, find_blocks
from lightning_ckpt.callbacks._deepspeed import tell_of_deepspeed
from modules import Language, differences, fit, trainer
from two_ranks import on_ranks, on_two_ranks
from zoo import GPTBlock


class Fsdp1(FSDPStrategy):
    """Of another type than the one that the trainer refuses on a CPU."""


def _fsdp1(**options: Any) -> Fsdp1:
    return Fsdp1(process_group_backend="gloo", auto_wrap_policy={GPTBlock}, **options)


def _on_a_cpu() -> None:
    find_handle = fully_sharded_data_parallel._init_device_handle
    fully_sharded_data_parallel._init_device_handle = lambda state, module, ignored, _: find_handle(
        state, module, ignored, torch.device("cpu")
    )


def _fsdp1_on_two(rank: int, folder: Path) -> None:
    _on_a_cpu()
    equal_with_every_policy(Language, _fsdp1, POLICIES)
    equal_with_every_policy(Language, lambda: Fsdp1(process_group_backend="gloo"), [SEGMENTS])
    equal_with_every_policy(Language, lambda: _fsdp1(sharding_strategy="SHARD_GRAD_OP"), ["full"])
    # What is gathered early for the block before would be there for a replay that has no right to it.
    equal_with_every_policy(Language, lambda: _fsdp1(backward_prefetch=None), [SEGMENTS])
    equal_with_every_policy(Language, _fsdp1, ["full", "selective"], precision="bf16-mixed")
    _with_its_own(folder / f"{rank}.pt")


def _with_its_own(file: Path) -> None:
    """Training with the strategy's own checkpointing, and with ours beside it, of blocks and of parts of blocks."""
    torch.manual_seed(0)
    module, told = Language(), []
    for policy in ({GPTBlock}, {nn.Sequential}):
        left, replays = [], []
        for callbacks in ([], [ActivationCheckpointing(monitor=False)]):
            ours = copy.deepcopy(module)
            counted = Replays(ours.gpt.blocks[0])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                left.append(trained(ours, _fsdp1(activation_checkpointing_policy=policy), callbacks)[0])
            replays.append(counted.calls)
        told.append([str(warning.message) for warning in caught if "Left alone" in str(warning.message)])
        assert not differences(*left)
        assert replays[0] == replays[1]
    torch.save(told, file)


@pytest.mark.slow
@pytest.mark.supports(
    strategy="FSDP1", precision="32-true", policy=["full", "selective", "segments", "auto"], compile="no"
)
@pytest.mark.supports(strategy="FSDP1", precision="bf16-mixed", policy=["full", "selective"], compile="no")
def test_fsdp1_trains_as_without_checkpointing(tmp_path: Path) -> None:
    """Blocks wrapped or the whole, freed after forward or kept; where the strategy checkpoints, it alone does."""
    on_two_ranks(_fsdp1_on_two, tmp_path)
    for file in tmp_path.glob("*.pt"):
        blocks, parts = torch.load(file)
        assert len(blocks) == len(parts) == 1
        names = "gpt.blocks.0, gpt.blocks.1, gpt.blocks.2"
        assert blocks[0].startswith(f"Left alone: {names}: checkpointed by its owner: a CheckpointWrapper")
        assert parts[0].startswith(f"Left alone: {names}: checkpointed by its owner: a CheckpointWrapper")


class FullyShardedDataParallel(nn.Module):
    """The shape of FSDP1's wrapper, with its name: what it wraps, under the name it has there, and its attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._fsdp_wrapped_module, name)


@pytest.mark.parametrize(
    "blocks", [None, GPTBlock, "GPTBlock", "gpt.blocks.*", lambda name, _: name[:-1] == "gpt.blocks."]
)
def test_blocks_are_found_inside_the_wrapper_under_their_plain_names(blocks: Any) -> None:
    """However they are asked for, so that a replay gathers no parameters once more; every room finds them by name."""
    module = Language()
    plain = find_blocks(module, blocks)
    for index, block in enumerate(module.gpt.blocks):
        module.gpt.blocks[index] = FullyShardedDataParallel(block)
    module.gpt = FullyShardedDataParallel(module.gpt)
    assert find_blocks(module, blocks) == plain
    assert find_blocks(FullyShardedDataParallel(module), blocks) == plain
    with checkpoint_blocks(module, blocks=blocks) as handle:
        assert handle.blocks == ("gpt.blocks.0", "gpt.blocks.1", "gpt.blocks.2")
        assert all("forward" in vars(block) for _, block in plain)


class TurnsOnLate(Callback):
    """Wraps blocks as strategies do, when `setup` is over."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.gpt.blocks[0].gradient_checkpointing = True


def test_checkpointing_that_is_turned_on_after_setup_is_found() -> None:
    """The callback looks again when training starts."""
    module = Language()
    callback = ActivationCheckpointing(monitor=False)
    with pytest.warns(UserWarning, match="Left alone: gpt.blocks.0: checkpointed by its owner"):
        fit(module, [TurnsOnLate(), callback])


class Stub(DeepSpeedStrategy):
    """Its configuration and nothing else: the class itself can't be made without DeepSpeed."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        self.config = config


@pytest.mark.parametrize("config", [None, {}, {"activation_checkpointing": {"partition_activations": False}}])
def test_deepspeeds_defaults_say_nothing(config: Any) -> None:
    """Lightning writes all its settings into every configuration, off."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_deepspeed(type("Run", (), {"strategy": Stub(config)})())


def test_deepspeeds_settings_are_told_in_a_line() -> None:
    """Which are on, what they act on, and what to do."""
    on = {"partition_activations": True, "cpu_checkpointing": True, "profile": False}
    with pytest.warns(UserWarning, match="activation_checkpointing settings") as caught:
        tell_of_deepspeed(type("Run", (), {"strategy": Stub({"activation_checkpointing": on})})())
    assert [str(warning.message) for warning in caught] == [
        "DeepSpeed's activation_checkpointing settings (partition_activations, cpu_checkpointing) act on code that "
        "calls deepspeed.checkpointing.checkpoint, and on nothing else; ActivationCheckpointing does not use them. A "
        "block that is called that way is replayed twice: leave it out of `blocks`, or leave ActivationCheckpointing "
        "out"
    ]


GPUS = torch.cuda.device_count()


def _losses(strategy: Strategy, policy: Any, precision: str) -> torch.Tensor:
    torch.manual_seed(0)
    module, watched = Language(), Watched()
    callbacks = [] if policy is None else [ActivationCheckpointing(policy, monitor=False)]
    replays = Replays(module.gpt.blocks[0])
    options = {"accelerator": "gpu", "devices": min(GPUS, 2), "max_epochs": 3}
    trainer([*callbacks, watched], strategy=strategy, precision=precision, **options).fit(module)
    assert bool(replays.replays) == bool(callbacks)
    return torch.stack([value.float().cpu() for name, value in watched.seen.items() if name.startswith("loss")])


def _on_gpus(rank: int, engine: str) -> None:
    def strategy() -> Strategy:
        return FSDPStrategy(auto_wrap_policy={GPTBlock}) if engine == "fsdp" else DeepSpeedStrategy(stage=3)

    for precision in ("32-true", "bf16-mixed"):
        plain = _losses(strategy(), None, precision)
        for policy in ("full", "selective", SEGMENTS, MemoryBudget("1GiB")):
            ours = _losses(strategy(), policy, precision)
            # Kernels of the device add up in another order from run to run.
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3, msg=f"{policy}, {precision}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not GPUS, reason="needs a CUDA device: torch.cuda.is_available() is False")
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            "fsdp",
            marks=pytest.mark.supports(
                strategy="FSDP1",
                precision=["32-true", "bf16-mixed"],
                policy=["full", "selective", "segments", "auto"],
                compile="no",
            ),
        ),
        pytest.param(
            "deepspeed",
            marks=[
                pytest.mark.supports(
                    strategy="DeepSpeed",
                    precision=["32-true", "bf16-mixed"],
                    policy=["full", "selective", "segments", "auto"],
                    compile="no",
                ),
                pytest.mark.skipif(not module_available("deepspeed"), reason="DeepSpeed is not installed"),
            ],
        ),
    ],
)
def test_losses_on_the_device_are_those_of_the_plain_run(engine: str) -> None:
    """Through Lightning's own strategy, on two devices where there are two."""
    on_ranks(min(GPUS, 2), _on_gpus, engine)
