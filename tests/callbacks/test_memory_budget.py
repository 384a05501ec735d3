"""`ActivationCheckpointing(policy="auto")`: planned while `fit` runs, told to loggers, kept in checkpoints."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_ckpt import ActivationCheckpointing, MemoryBudget, StepMonitor
from lightning_ckpt.memory import AllocatorReader, HostReader, use_reader
from modules import Adversaries, Images, Language, differences, fit, trainer
from recording import Peaks, Rowed
from two_ranks import on_two_ranks


@contextmanager
def counted() -> Iterator[AllocatorReader]:
    """Every byte of the allocator, from before the model is made."""
    with AllocatorReader(limit=2**40) as reader, use_reader(reader):
        yield reader


def peaks_of(policy: Any, make: type = Language, **options: Any) -> list[int]:
    with counted() as reader:
        peaks = Peaks(reader)
        torch.manual_seed(0)
        callbacks = [] if policy is None else [ActivationCheckpointing(policy)]
        fit(make(), [*callbacks, peaks], max_epochs=3, **options)
    return peaks.seen


def budget_of(make: type, share: float, **options: Any) -> int:
    full, plain = (max(peaks_of(policy, make, **options)[4:]) for policy in ("full", None))
    return int(full + share * (plain - full))


@pytest.mark.supports(strategy="single device", precision="32-true", policy="auto", compile="no")
@pytest.mark.parametrize("make", [Language, Images, Adversaries])
def test_training_under_a_budget_leaves_what_plain_training_leaves(make: type) -> None:
    """Weights, buffers, optimizer state, metrics, random numbers, bit for bit, while plans come and go."""
    budget = budget_of(make, 0.5)
    torch.manual_seed(0)
    ours = make()
    plain = copy.deepcopy(ours)
    with counted():
        callback = ActivationCheckpointing(MemoryBudget(budget))
        left = fit(ours, [callback], max_epochs=3)
    assert not differences(left, fit(plain, max_epochs=3))
    assert callback.plan is not None


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_steps_keep_to_the_budget(options: dict[str, Any]) -> None:
    """From the first step on, gathered gradients and mixed precision included; more is kept in time.

    Steps of different plans on so small a model differ by single tensors of the allocator's: a plan that is tried may
    exceed the budget by these, one that stands does not.
    """
    budget = budget_of(Language, 0.5, **options)
    peaks = peaks_of(MemoryBudget(budget), **options)
    full = peaks_of("full", **options)
    assert max(peaks) <= 1.005 * budget
    assert full[-1] < peaks[-1] <= budget


class Kept(Callback):
    """Keeps the callback's plan of the end of training, and the state it would save."""

    def __init__(self, callback: ActivationCheckpointing) -> None:
        self.callback = callback
        self.plan: Any = None
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.plan, self.state = self.callback.plan, self.callback.state_dict()


def test_the_plan_is_printed_and_goes_to_the_loggers(capsys: Any, tmp_path: Path) -> None:
    """The profile, the memory by cause and the plan as tables; the causes as figures, the plan in the config."""
    budget = budget_of(Language, 0.5)
    rows, csv = Rowed(), CSVLogger(tmp_path)
    with counted() as reader:
        callback, peaks = ActivationCheckpointing(MemoryBudget(budget), monitor=False), Peaks(reader)
        fit(Language(), [callback, peaks], max_epochs=3, logger=[rows, csv])
    printed = capsys.readouterr().out
    for part in ("kept plain beside", "Memory at the peak of a step", "Memory plan:"):
        assert part in printed
    causes = [figures for _, figures in rows.calls if "memory/params_gib" in figures]
    assert len(causes) == 1
    assert causes[0].keys() == {
        f"memory/{cause}_gib"
        for cause in ("params", "gradients", "optimizer", "activations", "boundaries", "temporaries", "other")
    }
    # The third step is the first that runs a plan.
    assert sum(causes[0].values()) * 2**30 == pytest.approx(peaks.seen[2])
    config = Path(csv.log_dir, "hparams.yaml").read_text()
    assert "activation_checkpointing" in config
    assert "replay_ms_of_full" in config


def test_a_checkpoint_file_carries_the_plan(tmp_path: Path) -> None:
    """A resumed run starts with it: no profile is taken, and its first step has the plan's peak."""
    budget = budget_of(Language, 0.5)

    def run(callback: ActivationCheckpointing, epochs: int, ckpt: str | None = None) -> tuple[Kept, list[int]]:
        torch.manual_seed(0)
        with counted() as reader:
            kept, peaks = Kept(callback), Peaks(reader)
            running = trainer([callback, kept, peaks], max_epochs=epochs)
            running.fit(Language(), ckpt_path=ckpt)
            running.save_checkpoint(tmp_path / "run.ckpt")
        return kept, peaks.seen

    first, _ = run(ActivationCheckpointing(MemoryBudget(budget), monitor=False), 3)
    assert first.plan.treatments
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    (state,) = [value for key, value in saved["callbacks"].items() if key.startswith("ActivationCheckpointing")]
    assert state == first.state
    second, peaks = run(ActivationCheckpointing(MemoryBudget(budget), monitor=False), 6, str(tmp_path / "run.ckpt"))
    assert second.plan.profile == first.plan.profile
    assert max(peaks) <= budget
    assert second.plan.seconds <= first.plan.seconds


def test_other_policies_save_nothing() -> None:
    """There is no state without a plan, so checkpoint files of other runs are as they were."""
    assert ActivationCheckpointing("full").state_dict() == {}
    assert ActivationCheckpointing("auto").state_dict() == {}


def test_a_budget_too_small_is_said_and_training_goes_on(caplog: Any) -> None:
    """The shortfall is logged once with what else would help."""
    with counted(), caplog.at_level(logging.INFO):
        fit(Language(), [ActivationCheckpointing(MemoryBudget("1KiB"), monitor=False)], max_epochs=3)
    said = [
        record.message for record in caplog.records if "with everything checkpointed a step needs" in record.message
    ]
    assert len(said) == 1
    assert "optimizer state" in said[0]


def test_a_fraction_needs_a_limit() -> None:
    """Where the memory of the device is not known the error comes before the first step, and blocks are given back."""
    module = Language()
    with use_reader(AllocatorReader()), pytest.raises(ValueError, match="give a size, MemoryBudget"):
        fit(module, [ActivationCheckpointing("auto")])
    assert not any("forward" in vars(part) for part in module.modules())


def test_everything_is_given_back_after_fit() -> None:
    """Blocks and their parts have their own forward again, also after an error in a planned step."""

    class Fails(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 5:
                raise KeyboardInterrupt

    for callbacks in ([], [Fails()]):
        module = Language()
        with counted():
            try:
                fit(module, [ActivationCheckpointing(MemoryBudget(2**40)), *callbacks], max_epochs=2)
            except SystemExit:
                assert callbacks
        assert not any("forward" in vars(part) for part in module.modules())


def test_the_monitor_beside_it_sees_the_peaks_of_whole_steps() -> None:
    """The planner reads parts of steps; the monitor's peak is the whole step's all the same."""
    rows = Rowed()
    with counted() as reader:
        peaks = Peaks(reader)
        monitor = StepMonitor()
        fit(
            Language(),
            [ActivationCheckpointing(MemoryBudget(2**40), monitor=monitor), peaks],
            max_epochs=2,
            logger=rows,
        )
    logged = [
        figures["memory/peak_allocated_gib"] * 2**30
        for _, figures in rows.calls
        if "memory/peak_allocated_gib" in figures
    ]
    assert len(logged) == len(peaks.seen) == 8
    assert all(mine >= theirs for mine, theirs in zip(logged, peaks.seen, strict=True))


def test_on_the_host_it_runs_without_a_reader_of_ones_own() -> None:
    """The default on a CPU is nine tenths of what the process can have."""
    callback = ActivationCheckpointing("auto", monitor=False)
    kept = Kept(callback)
    fit(Language(), [callback, kept], max_epochs=2)
    limit = HostReader().limit()
    assert limit is not None
    assert kept.plan.budget == pytest.approx(0.9 * limit, rel=0.1)
    assert kept.plan.seconds == 0


def test_a_plan_waits_until_the_values_were_checked(caplog: pytest.LogCaptureFixture) -> None:
    """The check takes memory of its own: two batches are checked, then blocks are measured and a plan is made."""
    planning: list[bool] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            planning.append(callback._budget_run is not None)

    torch.manual_seed(0)
    module = Language()
    plain = copy.deepcopy(module)
    callback = ActivationCheckpointing(MemoryBudget(2**40), determinism_check="values", check_steps=2, monitor=False)
    with counted(), caplog.at_level(logging.INFO):
        left = fit(module, [callback, Notes()], max_epochs=2)
    assert planning == [False] + [True] * 7
    assert "Every replayed value of 2 batches was that of its forward" in caplog.text
    assert callback.plan is not None
    assert not differences(left, fit(plain, max_epochs=2))


class Sharded(Language):
    """The GPT with blocks sharded over two ranks."""

    def configure_model(self) -> None:
        for block in self.gpt.blocks:
            fully_shard(block)
        fully_shard(self.gpt)


def _train(rank: int, kind: str, budget: int | None, folder: Path) -> None:
    make, strategy = {
        "ddp": (Language, DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)),
        "fsdp2": (Sharded, ModelParallelStrategy(process_group_backend="gloo")),
    }[kind]
    torch.manual_seed(0)
    module = make()
    callback = ActivationCheckpointing(MemoryBudget(budget) if budget else "full", monitor=False)
    with counted() as reader:
        # The second rank has less room: as much as these bytes take.
        ballast = torch.zeros(rank * BALLAST, dtype=torch.uint8)
        kept, peaks = Kept(callback), Peaks(reader)
        trainer([callback, kept, peaks], devices=2, strategy=strategy, max_epochs=4).fit(module)
        del ballast
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    treatments = {name: str(way) for name, way in kept.plan.treatments.items()} if budget else {}
    torch.save(([weight.detach() for weight in weights], treatments, max(peaks.seen[2:])), folder / f"{rank}.pt")


BALLAST = 30_000


def _on_two_ranks(kind: str, budget: int | None, folder: Path) -> list[Any]:
    folder.mkdir()
    on_two_ranks(_train, kind, budget, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_run_one_plan_for_the_one_with_less_room(kind: str, tmp_path: Path) -> None:
    """DDP and FSDP2 on gloo: equal plans, peaks under the budget on both, weights those of full checkpointing."""
    plain = _on_two_ranks(kind, None, tmp_path / "full")
    budget = plain[1][2] + 70_000
    ours = _on_two_ranks(kind, budget, tmp_path / "auto")
    (first, plan, peak), (second, other_plan, other_peak) = ours
    assert plan == other_plan
    if kind == "ddp":  # sharding frees memory on threads of gloo's own, which the allocator's events leave out
        assert plan
        assert peak < other_peak <= budget
    for mine, theirs, full in zip(first, second, plain[0][0], strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, full)
