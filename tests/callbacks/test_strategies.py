"""Lightning's strategies on two processes: a checkpointed run leaves on each rank what the plain run leaves there.

Each test trains many times in one pair of processes, since to start them takes longest.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed_runs import POLICIES, SEGMENTS, equal_with_every_policy, trained
from equality import Replays
from lightning_ckpt import ActivationCheckpointing, MemoryBudget, checkpoint_blocks
from lightning_ckpt.held import local
from lightning_ckpt.memory import AllocatorReader, use_reader
from modules import Language, differences, trainer
from two_ranks import on_two_ranks

pytestmark = pytest.mark.slow


class Unused(Language):
    """With a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def _ddp(**options: Any) -> Callable[[], Strategy]:
    return lambda: DDPStrategy(process_group_backend="gloo", **options)


def _ddp_in_all_ways(rank: int, folder: Path) -> None:
    torch.save(_decided(rank), folder / f"{rank}.pt")
    equal_with_every_policy(Language, _ddp(), POLICIES)
    equal_with_every_policy(Language, _ddp(), ["full"], accumulate_grad_batches=2)
    equal_with_every_policy(Language, _ddp(gradient_as_bucket_view=True, static_graph=True), ["full", "auto"])
    equal_with_every_policy(Unused, _ddp(find_unused_parameters=True), ["selective"])
    equal_with_every_policy(Language, _ddp(), POLICIES, precision="bf16-mixed")


def _decided(rank: int) -> tuple[Any, ...]:
    """What a rank decides that has less room than the other, and another block that is slow."""

    def slow(*_: Any) -> None:
        time.sleep(0.02)

    _, most = trained(Language(), _ddp()(), [])
    _, least = trained(Language(), _ddp()(), [ActivationCheckpointing(monitor=False)])
    decided = []
    for policy in (MemoryBudget(least + (most - least) // (2 + rank)), SEGMENTS):
        module, callback = Language(), ActivationCheckpointing(policy, monitor=False)
        module.gpt.blocks[2 * rank].mlp.register_forward_pre_hook(slow)
        reported = Reported(callback)
        trained(module, _ddp()(), [callback, reported])
        decided.append(reported.segments if policy is SEGMENTS else callback.plan.treatments)
    return tuple(decided)


class Reported(Callback):
    """The segments that the last step ran."""

    segments: Any = None

    def __init__(self, callback: ActivationCheckpointing) -> None:
        self.callback = callback

    def on_train_end(self, *args: Any) -> None:
        self.segments = self.callback.report().segments


@pytest.mark.supports(
    strategy="DDP",
    precision=["32-true", "bf16-mixed"],
    policy=["full", "selective", "segments", "auto"],
    compile="no",
)
def test_ddp_trains_as_without_checkpointing_and_ranks_decide_alike(tmp_path: Path) -> None:
    """Plain, with gathered gradients (`no_sync`), with a static graph, with unused parameters, in mixed precision.

    Of two ranks of unequal room and speed both run one plan, by the first one's times, and one segmentation.
    """
    on_two_ranks(_ddp_in_all_ways, tmp_path)
    (plan, segments), other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert (plan, segments) == other
    assert "gpt.blocks.0" in plan
    assert segments == (("gpt.blocks.0", "gpt.blocks.1"), ("gpt.blocks.2",))


class Sharded(Language):
    """The GPT, sharded in `configure_model` in some way, perhaps with checkpointing before or after."""

    def __init__(self, shard: Callable[[nn.Module, Any], None]) -> None:
        super().__init__()
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard:
            self.shard(self.gpt, self.device_mesh["data_parallel"])
        self.shard = None  # configured once, as Lightning asks


def blocks(gpt: nn.Module, mesh: Any, **options: Any) -> None:
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(gpt, mesh=mesh, **options)


def kept(gpt: nn.Module, mesh: Any) -> None:
    blocks(gpt, mesh, reshard_after_forward=False)


def freed(gpt: nn.Module, mesh: Any) -> None:
    fully_shard(gpt, mesh=mesh, reshard_after_forward=True)


def mixed(gpt: nn.Module, mesh: Any) -> None:
    blocks(gpt, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def parts(gpt: nn.Module, mesh: Any) -> None:
    """The half of each block alone, and the rest with the root."""
    for block in gpt.blocks:
        fully_shard(block.mlp, mesh=mesh)
    fully_shard(gpt, mesh=mesh)


def pairs(gpt: nn.Module, mesh: Any) -> None:
    """Two blocks share one group of parameters."""
    fully_shard([gpt.blocks[0], gpt.blocks[1]], mesh=mesh)
    fully_shard(gpt, mesh=mesh)


def checkpointed_before(gpt: nn.Module, mesh: Any) -> None:
    checkpoint_blocks(gpt)
    blocks(gpt, mesh)


def checkpointed_after(gpt: nn.Module, mesh: Any) -> None:
    blocks(gpt, mesh)
    checkpoint_blocks(gpt)


def _fsdp2(**options: Any) -> Strategy:
    return ModelParallelStrategy(2, 1, process_group_backend="gloo", **options)


def _fsdp2_in_all_ways(rank: int) -> None:
    for shard, policies in (
        (blocks, POLICIES),
        (kept, ["full"]),
        (freed, [SEGMENTS]),
        (parts, ["full", "auto"]),
        (pairs, [SEGMENTS]),
        (mixed, POLICIES),
    ):
        equal_with_every_policy(lambda shard=shard: Sharded(shard), _fsdp2, policies)


@pytest.mark.supports(
    strategy="FSDP2",
    precision=["32-true", "FSDP2 mixed precision policy"],
    policy=["full", "selective", "segments", "auto"],
    compile="no",
)
def test_fsdp2_trains_as_without_checkpointing() -> None:
    """Blocks, the whole, parts of blocks, or pairs of them sharded; freed after forward or kept; in mixed precision."""
    on_two_ranks(_fsdp2_in_all_ways)


def _by_hand(rank: int) -> None:
    plain, _ = trained(_seeded(blocks), _fsdp2(), [])
    for shard in (checkpointed_before, checkpointed_after):
        module = _seeded(shard)
        replays = Replays(module.gpt.blocks[0])
        left, _ = trained(module, _fsdp2(), [])
        assert replays.replays > 0
        found = differences(left, plain)
        assert not found, f"{shard.__name__}: {found[:5]} differ from the plain run"


def _seeded(shard: Callable[[nn.Module, Any], None] = blocks) -> Sharded:
    torch.manual_seed(0)
    return Sharded(shard)


def _files(rank: int, folder: Path) -> None:
    """Train one epoch and a resumed one, with checkpointing on in one of them, or in none."""

    def run(epochs: int, callbacks: Iterable[Callback], ckpt: str | None = None, save: str = "") -> dict[str, Tensor]:
        module = _seeded()
        with AllocatorReader(limit=2**40) as reader, use_reader(reader):
            running = trainer(callbacks, devices=2, strategy=_fsdp2(), max_epochs=epochs, limit_val_batches=0)
            running.fit(module, ckpt_path=ckpt)
            if save:
                running.save_checkpoint(save)
        return {name: local(value).clone() for name, value in module.state_dict().items()}

    def on(policy: Any) -> list[Callback]:
        return [ActivationCheckpointing(policy, monitor=False)]

    run(1, [], save=str(folder / "plain"))
    plain = run(2, [], ckpt=str(folder / "plain"))
    for name, first, then in (
        ("full to plain", on("full"), []),
        ("plain to full", [], on("full")),
        ("auto to plain", on(MemoryBudget(2**30)), []),
        ("auto to auto", on(MemoryBudget(2**30)), on(MemoryBudget(2**30))),
    ):
        file = str(folder / name)
        run(1, first, save=file)
        assert Path(file).is_dir()
        resumed = run(2, then, ckpt=file)
        assert not differences(resumed, plain), name
    for ours in (True, False):
        _round_trip(_seeded(), _seeded(), ours, folder / f"by hand {ours}")


def _round_trip(saved: Sharded, loaded: Sharded, ours: bool, folder: Path) -> None:
    """Through PyTorch's own functions, checkpointing on in the one that is saved, or in the one that is loaded."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in (saved, loaded):
        blocks(module.gpt, mesh)
    checkpoint_blocks((saved if ours else loaded).gpt)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    dcp.save(get_model_state_dict(saved), checkpoint_id=folder)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state)
    pairs = zip(saved.named_parameters(), loaded.named_parameters(), strict=True)
    assert all(mine == theirs and torch.equal(local(a), local(b)) for (mine, a), (theirs, b) in pairs)


def _by_hand_and_files(rank: int, folder: Path) -> None:
    _by_hand(rank)
    _files(rank, folder)


@pytest.mark.supports(strategy="FSDP2", precision="32-true", policy=["full", "auto"], compile="no")
def test_fsdp2_by_hand_and_its_checkpoint_files(tmp_path: Path) -> None:
    """`checkpoint_blocks` before and after `fully_shard`; distributed files move between runs with and without."""
    on_two_ranks(_by_hand_and_files, tmp_path)
