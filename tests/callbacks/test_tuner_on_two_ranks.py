"""The batch size tuner on two processes: one size, the smaller one; no rank waits for one that has failed."""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ckpt import ActivationCheckpointing, BatchSizeTuner, MemoryBudget
from lightning_ckpt.memory import use_reader
from modules import trainer
from sample_meter import SampleMeter
from two_ranks import on_two_ranks

pytestmark = pytest.mark.slow


def needing(each: int) -> SampleMeter:
    """2000 MiB; a step needs 1000 and so many a sample."""
    return SampleMeter(lambda size: 1000 + each * size)


class Net(LightningModule):
    """BatchNorm, dropout and a loss that is logged over ranks; `fails_at` is a size that one rank can't take."""

    def __init__(
        self, rank: int, meter: SampleMeter, *, fails_at: int = 10**6, error: type[Exception] | None = None
    ) -> None:
        super().__init__()
        self.rank, self.meter, self.fails_at, self.error = rank, meter, fails_at, error
        self.batch_size = 4
        self.losses: list[float] = []
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        size = len(batch[0])
        self.meter.see(size)
        if self.rank == 1 and size >= self.fails_at:
            raise self.error(f"CUDA out of memory at {size}") if self.error else torch.OutOfMemoryError("CUDA")
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> Any:
        return loader(self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sharded(Net):
    def configure_model(self) -> None:
        if not hasattr(self, "done"):
            self.done = True
            fully_shard(self.net)


def loader(size: int, *, share_of: int | None = None) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(400, 6, generator=torch.Generator().manual_seed(1)))
    shared = None if share_of is None else DistributedSampler(data, num_replicas=2, rank=share_of, shuffle=False)
    return DataLoader(data, batch_size=size, sampler=shared)


def ddp(**options: Any) -> Strategy:
    return DDPStrategy(process_group_backend="gloo", **options)


def fsdp2() -> Strategy:
    return ModelParallelStrategy(process_group_backend="gloo", timeout=timedelta(seconds=30))


def fit(
    module: Net,
    strategy: Strategy,
    folder: Path,
    *,
    tune: bool = True,
    data: Any = None,
    steps: int = 3,
    tuner: BatchSizeTuner | None = None,
) -> BatchSizeTuner:
    tuner = tuner or BatchSizeTuner()
    options: dict[str, Any] = {"devices": 2, "strategy": strategy, "max_epochs": None, "max_steps": steps}
    with use_reader(module.meter):
        trainer([tuner] if tune else [], default_root_dir=folder, **options).fit(module, data)
    return tuner


def weights(module: nn.Module) -> list[Tensor]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return [weight.detach() for weight in whole]


def _unequal(rank: int, make: type[Net], strategy: Callable[[], Strategy], folder: Path) -> None:
    """The second rank needs twice the memory a sample: 20 samples fit there, and 40 on the first."""
    module = make(rank, needing(20 * (rank + 1)))
    tuner = fit(module, strategy(), folder)
    by_hand = make(rank, needing(20))
    by_hand.batch_size = tuner.batch_size or 0
    fit(by_hand, strategy(), folder, tune=False)
    told = tuner.batch_size, module.batch_size, [t.size for t in tuner.trials], [t.peak for t in tuner.trials]
    torch.save((told, module.losses[-3:], weights(module), by_hand.losses, weights(by_hand)), folder / f"{rank}.pt")


@pytest.mark.parametrize(("make", "strategy"), [(Net, ddp), (Sharded, fsdp2)], ids=["ddp", "fsdp2"])
def test_all_ranks_take_the_size_of_the_rank_with_the_least_room(
    make: type[Net], strategy: Callable[[], Strategy], tmp_path: Path
) -> None:
    """DDP and FSDP2: one size and the same trials on both, and training as with that size set by hand."""
    on_two_ranks(_unequal, make, strategy, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first[0] == second[0]
    size, set_on_module, sizes, _ = first[0]
    assert size == set_on_module == 20
    assert max(sizes) <= 20
    for _, losses, trained, expected, by_hand in (first, second):
        assert losses == expected
        assert all(map(torch.equal, trained, by_hand))


def _runs_out(rank: int, folder: Path) -> None:
    """Only the second rank runs out of memory, from 15 samples on, which its meter does not foretell."""
    module = Net(rank, needing(20), fails_at=15)
    tuner = fit(module, ddp(), folder)
    torch.save((tuner.batch_size, [trial.outcome for trial in tuner.trials]), folder / f"{rank}.pt")


def test_one_rank_that_runs_out_of_memory_bounds_all(tmp_path: Path) -> None:
    """Under DDP trials wait for nobody: the other rank hears of it, and both go on with what fits."""
    on_two_ranks(_runs_out, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert "out of memory" in first[1]
    assert 11 <= first[0] <= 14


def _fails(rank: int, make: type[Net], strategy: Callable[[], Strategy], error: Any, folder: Path) -> None:
    module = make(rank, needing(20), fails_at=1, error=error)
    try:
        fit(module, strategy(), folder)
    except Exception as raised:
        torch.save(f"{type(raised).__name__}: {raised}", folder / f"{rank}.pt")


def test_an_error_of_one_rank_ends_the_other(tmp_path: Path) -> None:
    """The other rank does not wait: it says which rank has failed."""
    on_two_ranks(_fails, Net, ddp, ValueError, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == (
        "RuntimeError: BatchSizeTuner: a trial with a batch size of 2 failed on rank 1, whose error says why"
    )
    assert second == "ValueError: CUDA out of memory at 2"


def test_an_error_where_ranks_wait_for_one_another_comes_through(tmp_path: Path) -> None:
    """The rank that fails waits for nobody, and the other ends with it."""
    on_two_ranks(_fails, Sharded, fsdp2, ValueError, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert second == "ValueError: CUDA out of memory at 2"
    assert first.startswith("RuntimeError")


def test_out_of_memory_where_ranks_wait_for_one_another_ends_the_run(tmp_path: Path) -> None:
    """Under FSDP2 there is no going back from it; the rank says so, and what to do."""
    on_two_ranks(_fails, Sharded, fsdp2, None, tmp_path)
    said = torch.load(tmp_path / "1.pt")
    assert "ranks share the model's parts and wait for one another" in said
    assert "Give max_val below 2, or more headroom" in said
    assert torch.load(tmp_path / "0.pt")  # the other one has ended too


def _handed(rank: int, sampler: bool, folder: Path) -> None:
    """200 samples a rank, and room for 400."""
    module = Net(rank, needing(2))
    tuner = fit(module, ddp(), folder, data=loader(4, share_of=rank if sampler else None))
    torch.save((tuner.batch_size, len(module.losses)), folder / f"{rank}.pt")


@pytest.mark.parametrize("sampler", [True, False])
def test_a_loader_handed_to_fit_is_shared_out(sampler: bool, tmp_path: Path) -> None:
    """With the user's own `DistributedSampler`, and with Lightning's: no batch is larger than a rank's share."""
    on_two_ranks(_handed, sampler, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert first[0] == 200


def _global(rank: int, folder: Path) -> None:
    """40 samples fit on a rank, and a step is to take 96 on both together."""
    module = Net(rank, needing(20))
    tuner = fit(module, ddp(), folder, tuner=BatchSizeTuner(global_batch_size=96))
    torch.save((tuner.batch_size, module.losses[-6:]), folder / f"{rank}.pt")


def test_a_global_batch_is_shared_out_among_ranks(tmp_path: Path) -> None:
    """Two ranks with two batches of 24 each: the largest size that fits and divides 48."""
    on_two_ranks(_global, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first[0] == second[0] == 24
    assert first[1] != second[1]  # each has batches of its own


class Said(logging.Handler):
    """Keeps what is logged in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning.pytorch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _with_a_plan(rank: int, folder: Path) -> None:
    said, module, tuner = Said(), Net(rank, needing(20)), BatchSizeTuner()
    planner = ActivationCheckpointing(MemoryBudget("1GiB"), blocks=nn.Linear, monitor=False)
    with use_reader(module.meter):
        trainer([planner, tuner], devices=2, strategy=ddp(), max_steps=3, default_root_dir=folder).fit(module)
    told = [line for line in said.lines if "chosen together" in line]
    torch.save((tuner.batch_size, [trial.outcome for trial in tuner.trials], told), folder / f"{rank}.pt")


def test_beside_a_planner_ranks_take_the_largest_size(tmp_path: Path) -> None:
    """It is tried under no plan, and one rank says so."""
    on_two_ranks(_with_a_plan, tmp_path)
    (size, outcomes, told), (other_size, other_outcomes, other_told) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    assert size == other_size == 40
    assert set(outcomes) == set(other_outcomes) == {"fits"}
    assert told == [
        "BatchSizeTuner: size and memory plan are chosen together in a single process only. Each of these 2 takes the "
        "largest size that fits with everything checkpointed"
    ]
    assert other_told == []


def _static(rank: int, folder: Path) -> None:
    ours = Net(rank, needing(20))
    tuner = fit(ours, ddp(static_graph=True), folder, steps=4)
    by_hand = Net(rank, needing(20))
    by_hand.batch_size = tuner.batch_size or 0
    fit(by_hand, ddp(static_graph=True), folder, tune=False, steps=4)
    torch.save((weights(ours), weights(by_hand)), folder / f"{rank}.pt")


def test_a_static_graph_is_learned_in_training_all_the_same(tmp_path: Path) -> None:
    """`static_graph=True` learns from the first backward pass it hears of, which must be none of a trial's."""
    on_two_ranks(_static, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for ours, by_hand in (first, second):
        assert all(map(torch.equal, ours, by_hand))
    assert all(map(torch.equal, first[0], second[0]))
