"""StepMonitor: exact figures from injected time and memory, one row an optimizer step, on the loss's axis."""

import copy
import math
from collections import UserDict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.callbacks._step_rows import KEYS
from lightning_ckpt.memory import GIB, AllocatorReader, use_reader
from recording import SAVING, STEP, VALIDATION, Clock, Meter, Module, Rowed, Samples, fit, trainer

# --- the figures ---


def test_a_row_a_step_and_nothing_else(clock: Clock) -> None:
    """The whole list of rows of three batches, the last one smaller: every key, every figure, in order."""
    meter = Meter(limit=16 * GIB)
    logger = fit(StepMonitor(flops=3e9), samples=5, clock=clock, meter=meter)
    full, last = (
        {
            "memory/peak_allocated_gib": float(size),
            "memory/peak_forward_gib": float(size),
            "memory/peak_backward_gib": 0.0,
            "memory/peak_optimizer_gib": 0.0,
            "memory/headroom_gib": 16.0 - size,
            "memory/peak_fraction": size / 16,
            "throughput/step_time_ms": 750.0,
            "throughput/data_wait_ms": 250.0,
            "throughput/samples_per_sec": size / 0.75,
            "throughput/batches_per_sec": 1 / 0.75,
            "throughput/tflops_per_sec": 0.003 / 0.75,
            "batch_size/per_device": float(size),
            "batch_size/global": float(size),
        }
        for size in (2, 1)
    )
    assert logger.rows() == [(0, full), (1, full), (2, last)]


def test_accumulation_is_one_row(clock: Clock) -> None:
    """Three micro-batches are one step: the highest peak, the summed samples, times and waits; the rest is a step too.

    Of five batches of 2, 2, 2, 2 and 1 samples, the last two are the epoch's second step.
    """
    meter = Meter()
    logger = fit(samples=9, clock=clock, meter=meter, accumulate_grad_batches=3)
    assert [step for step, _ in logger.rows()] == [0, 1]
    assert logger.loss_steps() == [0, 1]
    assert logger.column("batch_size/global") == [6.0, 3.0]
    assert logger.column("batch_size/per_device") == [2.0, 2.0]
    assert logger.column("memory/peak_allocated_gib") == [2.0, 2.0]
    assert logger.column("throughput/step_time_ms") == [2250.0, 1500.0]
    assert logger.column("throughput/data_wait_ms") == [750.0, 500.0]
    assert logger.column("throughput/samples_per_sec") == [6 / 2.25, 3 / 1.5]
    assert logger.column("throughput/batches_per_sec") == [3 / 2.25, 2 / 1.5]


class Growing(Module):
    """Each step uses more memory and takes longer than the one before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.clock is not None
        assert self.meter is not None
        self.clock.sleep(batch_idx)
        self.meter.use((8 - batch_idx) * GIB)
        return super().training_step(batch, batch_idx)


def test_every_n_steps(clock: Clock) -> None:
    """A row every three steps: the median step, warm-up left out, and the highest peak since the row before."""
    meter = Meter()
    logger = fit(StepMonitor(3), Growing(clock, meter), samples=16, clock=clock, meter=meter)
    assert [step for step, _ in logger.rows()] == [2, 5]
    # Steps take 0.75 + 0, 1, 2, ... seconds: of the first three only the third is not warm-up.
    assert logger.column("throughput/step_time_ms") == [2750.0, 4750.0]
    assert logger.column("memory/peak_allocated_gib") == [8.0, 5.0]


@pytest.mark.parametrize("epochs", [1, 3])
def test_validation_and_saving_are_no_part_of_a_step(clock: Clock, tmp_path: Path, epochs: int) -> None:
    """Validation twice an epoch, a checkpoint after every step, after validation and after the epoch change no row."""

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            clock.sleep(SAVING)
            super().save_checkpoint(*args, **kwargs)

    saving = [
        ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}"),
        ModelCheckpoint(tmp_path / "epochs", save_on_train_epoch_end=True, save_last=True),
    ]
    logger = fit(
        clock=clock,
        callbacks=tuple(saving),
        plugins=[Slow()],
        enable_checkpointing=True,
        limit_val_batches=1,
        val_check_interval=2,
        max_epochs=epochs,
    )
    assert clock.now > epochs * (4 * SAVING + 2 * VALIDATION)
    assert set(logger.column("throughput/step_time_ms")) == {750.0}
    assert set(logger.column("throughput/data_wait_ms")) == {250.0}
    assert [step for step, _ in logger.rows()] == list(range(4 * epochs))


def test_host_memory() -> None:
    """Without an accelerator or a reader of the user's: the process's resident size, and what it may still take."""
    logger = Rowed()
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    trainer([StepMonitor()], logger).fit(Module(), loader)
    for _, row in logger.rows():
        assert {key for key in row if key.startswith("memory/")} == {
            "memory/peak_rss_gib",
            "memory/headroom_gib",
            "memory/peak_fraction",
        }
        assert 0.05 < row["memory/peak_rss_gib"] < 64
        assert 0 < row["memory/peak_fraction"] <= 1
        limit = row["memory/peak_rss_gib"] / row["memory/peak_fraction"]
        assert row["memory/headroom_gib"] == pytest.approx(limit - row["memory/peak_rss_gib"])


def test_an_unknown_limit_has_no_headroom() -> None:
    """A reader that knows no limit gives a peak alone, and no zero."""
    logger = fit(meter=Meter(limit=None))
    assert set(logger.rows("memory")[0][1]) == {
        "memory/peak_allocated_gib",
        *(f"memory/peak_{phase}_gib" for phase in ("forward", "backward", "optimizer")),
    }


def test_exact_bytes() -> None:
    """With the exact reader, four times the batch has a higher peak by exactly that much in each step."""

    class Wide(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.empty(len(batch) * 2**20)
            return super().training_step(batch, batch_idx)

    peaks = []
    for size in (2, 8):
        logger = Rowed()
        loader = DataLoader(Samples(4 * size), batch_size=size, collate_fn=torch.stack)
        with AllocatorReader() as reader, use_reader(reader):
            trainer([StepMonitor(flops=None)], logger).fit(Wide(), loader)
        peaks.append(logger.column("memory/peak_allocated_gib")[-1])
    assert peaks[1] - peaks[0] == pytest.approx(6 * 4 * 2**20 / GIB, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"accumulate_grad_batches": 4}])
def test_there_are_rates_from_the_first_step(options: dict[str, Any]) -> None:
    """No window has to fill: the first row already has all the keys of the last."""
    rows = fit(**options).rows()
    assert rows[0][1].keys() == rows[-1][1].keys()
    assert rows[0][1]["throughput/samples_per_sec"] > 0


def test_at_most_a_dozen_keys() -> None:
    """On a CPU the default writes at most twelve keys, all documented, and none called `step`."""
    logger = Rowed()
    trainer([StepMonitor()], logger).fit(Module(), DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack))
    keys = logger.rows()[0][1].keys()
    assert len(keys) <= 12
    assert keys <= KEYS.keys()
    assert all(key in str(StepMonitor.__doc__) for key in KEYS)


# --- samples and tokens ---


class Encoding(UserDict[str, Any]):
    """Like the batches of Hugging Face tokenizers: a mapping that is no dict, with attributes too."""


@dataclass
class Batch:
    input_ids: Tensor
    name: str = "text"


class Endless:
    """An object that gives itself as its element."""

    def __iter__(self) -> Any:
        yield self


def ids(rows: list[Tensor]) -> Tensor:
    return torch.zeros(len(rows), 7, dtype=torch.long)


class Anything(Module):
    """Trains on any batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.clock is not None
        self.clock.sleep(STEP)
        loss = self(torch.ones(2, 4)).sum()
        self.log("loss", loss, batch_size=1)
        return loss

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("collate", "samples", "tokens"),
    [
        pytest.param(torch.stack, 2, None, id="tensor"),
        pytest.param(lambda rows: {"input_ids": ids(rows)}, 2, 14, id="dict"),
        pytest.param(lambda rows: Encoding(input_ids=ids(rows)), 2, 14, id="mapping"),
        pytest.param(lambda rows: Batch(ids(rows)), 2, 14, id="attribute"),
        pytest.param(lambda rows: {"input_ids": [[1, 2]], "x": ids(rows)}, 2, None, id="lists-of-ids"),
        pytest.param(lambda rows: ("text", torch.zeros(5, 1), torch.zeros(3)), 5, None, id="ambiguous"),
        pytest.param(lambda rows: torch.tensor(1.0), 1, None, id="scalar"),
        pytest.param(lambda rows: ["a", "b"], None, None, id="no-tensor"),
        pytest.param(lambda rows: Endless(), None, None, id="its-own-element"),
    ],
)
def test_samples_and_tokens_of_a_batch(clock: Clock, collate: Any, samples: int | None, tokens: int | None) -> None:
    """Samples as Lightning's logging takes them, tokens where there are `input_ids`; the rest is left out."""
    logger = fit(StepMonitor(flops=None), Anything(clock), clock=clock, collate=collate)
    row = logger.rows()[0][1]
    assert row.get("batch_size/per_device") == row.get("batch_size/global") == samples
    assert row.get("throughput/samples_per_sec") == (samples and samples / 0.75)
    assert row.get("throughput/tokens_per_sec") == (tokens and tokens / 0.75)


def test_functions_of_the_users_come_first(clock: Clock) -> None:
    """`batch_size_fn` and `tokens_fn` are asked for each micro-batch, whatever the batch looks like."""
    monitor = StepMonitor(batch_size_fn=lambda batch: 10, tokens_fn=lambda batch: len(batch) * 100)
    logger = fit(monitor, clock=clock, accumulate_grad_batches=2)
    assert logger.column("batch_size/global") == [20.0, 20.0]
    assert logger.column("throughput/tokens_per_sec") == [400 / 1.5] * 2


@pytest.mark.parametrize("value", ["eight", 2.5, -1, None])
def test_a_function_that_returns_no_count(value: Any) -> None:
    """The error names the function, what it returned, and what it has to return."""
    with pytest.raises(ValueError, match=r"tokens_fn returned .*; it has to return a whole number, 0 or more"):
        fit(StepMonitor(tokens_fn=lambda batch: value))


def test_a_batch_that_can_be_read_once_is_left_to_the_step(clock: Clock) -> None:
    """An iterator as batch reaches `training_step` with all its elements."""
    seen: list[int] = []

    class Reads(Anything):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(len(list(batch)))
            return super().training_step(batch, batch_idx)

    fit(StepMonitor(), Reads(clock), clock=clock, collate=iter)
    assert seen == [2, 2, 2, 2]


def test_a_batch_changed_by_the_step(clock: Clock) -> None:
    """What a step takes out of its batch was counted before."""

    class Pops(Anything):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.pop("input_ids")
            return super().training_step(batch, batch_idx)

    logger = fit(StepMonitor(), Pops(clock), clock=clock, collate=lambda rows: {"input_ids": ids(rows)})
    assert logger.column("throughput/tokens_per_sec") == [14 / 0.75] * 4


# --- the step axis ---


class TwoOptimizers(Module):
    """Manual optimization; both optimizers step in each batch."""

    every = 1

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.automatic_optimization = False
        self.other = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) + self.other(batch).sum()
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.layer, self.other)]


def test_two_optimizers_share_a_row(clock: Clock) -> None:
    """Two optimizer steps a batch are one row, on the axis of the loss and not on `global_step`."""
    logger = fit(module=TwoOptimizers(clock), clock=clock)
    assert [step for step, _ in logger.rows()] == logger.loss_steps() == [0, 1, 2, 3]
    assert logger.column("throughput/step_time_ms") == [750.0] * 4


def test_accumulation_by_hand_is_one_row(clock: Clock) -> None:
    """With manual optimization a step ends where an optimizer steps, at the loss of that batch."""

    class Every(TwoOptimizers):
        every = 2

    logger = fit(module=Every(clock), clock=clock)
    assert [step for step, _ in logger.rows()] == [1, 3]
    assert logger.column("batch_size/global") == [4.0, 4.0]


def test_a_row_is_due_at_the_first_step_that_reaches_it(clock: Clock) -> None:
    """Steps that end at every second batch still give a row for each three batches, and none twice."""

    class Every(TwoOptimizers):
        every = 2

    logger = fit(StepMonitor(3), module=Every(clock), samples=24, clock=clock)
    assert [step for step, _ in logger.rows()] == [3, 5, 9, 11]


def test_optimizers_behind_lightnings_back(clock: Clock) -> None:
    """Optimizers that the module steps without Lightning's wrapper end steps too."""

    class Raw(TwoOptimizers):
        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return super().optimizers(use_pl_optimizer=False)

    logger = fit(module=Raw(clock), clock=clock)
    assert [step for step, _ in logger.rows()] == [0, 1, 2, 3]


def test_a_second_fit_goes_on(clock: Clock) -> None:
    """The axis goes on where the loss's does, and the time between two fits belongs to none of them."""
    logger, module = Rowed(), Module(clock)
    loader = DataLoader(Samples(4, clock), batch_size=2, collate_fn=torch.stack)
    running = trainer([StepMonitor()], logger, max_epochs=1)
    running.fit(module, loader)
    clock.sleep(5000)
    running.fit_loop.max_epochs = 2
    running.fit(module, loader)
    assert [step for step, _ in logger.rows()] == logger.loss_steps() == [0, 1, 2, 3]
    assert set(logger.column("throughput/step_time_ms")) == {750.0}


@pytest.mark.parametrize("steps", [2, 3])
def test_resume(clock: Clock, tmp_path: Path, steps: int) -> None:
    """From a checkpoint in the middle or at the end of an epoch: the loss's axis, no negative and no idle time."""
    module = Module(clock)
    loader = DataLoader(Samples(6, clock), batch_size=2, collate_fn=torch.stack)
    first = trainer([StepMonitor()], Rowed(), max_steps=steps, max_epochs=9)
    first.fit(module, loader)
    first.save_checkpoint(tmp_path / "at.ckpt")
    clock.sleep(5000)
    logger = Rowed()
    second = trainer([StepMonitor()], logger, max_steps=steps + 3, max_epochs=9)
    with (
        pytest.warns(UserWarning, match="resuming from a checkpoint that ended before") if steps == 2 else nullcontext()
    ):
        second.fit(Module(clock), loader, ckpt_path=str(tmp_path / "at.ckpt"), weights_only=False)
    assert [step for step, _ in logger.rows()] == logger.loss_steps()
    assert len(logger.rows()) >= 3
    assert set(logger.column("throughput/step_time_ms")) == {750.0}


class Skips(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class EndsEarly(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


@pytest.mark.parametrize(("kind", "steps"), [(Skips, [0, 1, 2, 3]), (EndsEarly, [0, 1, 2, 3])])
def test_skipped_steps_and_ended_epochs(clock: Clock, kind: type[Module], steps: list[int]) -> None:
    """A step without a loss has a row, a batch that is never run leaves nothing in the next row."""
    skipped = pytest.warns(UserWarning, match="`training_step` returned `None`")
    with skipped if kind is Skips else nullcontext():
        logger = fit(module=kind(clock), clock=clock, max_epochs=1 if kind is Skips else 2)
    assert [step for step, _ in logger.rows()] == steps
    assert set(logger.column("batch_size/global")) == {2.0}


# --- leaving things as found ---


def test_training_is_bit_for_bit_the_same() -> None:
    """Weights, buffers, optimizer state, random numbers, metrics and counters equal those of a run without it."""

    class Dropping(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop, self.rnn = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.drop(self.rnn(self.norm(x))[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    start = Dropping()
    left = []
    for callbacks in ([], [StepMonitor()]):
        torch.manual_seed(1)
        module, logger = copy.deepcopy(start), Rowed()
        loader = DataLoader(Samples(10), batch_size=2, shuffle=True, collate_fn=torch.stack)
        running = trainer(list(callbacks), logger, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=1)
        running.fit(module, loader)
        state = running.optimizers[0].state_dict()["state"]
        left.append(
            {
                "tensors": [*module.state_dict().values(), torch.get_rng_state()],
                "optimizer": [tensor for each in state.values() for tensor in each.values()],
                "losses": [row for row in logger.calls if "loss" in row[1]],
                "counts": (running.global_step, running.current_epoch, dict(running.callback_metrics).keys()),
            }
        )
    plain, ours = left
    assert ours["losses"] == plain["losses"]
    assert ours["counts"] == plain["counts"]
    for part in ("tensors", "optimizer"):
        assert all(torch.equal(a, b) for a, b in zip(ours[part], plain[part], strict=True))


class Fails(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            raise RuntimeError("as planned")
        return super().training_step(batch, batch_idx)

    def __init__(self, clock: Clock | None = None, at: int = 0) -> None:
        super().__init__(clock)
        self.at = at


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("at", [0, 2])
def test_after_an_exception(clock: Clock, at: int) -> None:
    """In the counted batch or later: no mode, no method and no hook is left, and the next fit has right rows."""
    logger = Rowed()
    loader = DataLoader(Samples(6, clock), batch_size=2, collate_fn=torch.stack)
    running = trainer([StepMonitor()], logger)
    before = set(vars(running))
    with pytest.raises(RuntimeError, match="as planned"):
        running.fit(Fails(clock, at), loader)
    assert modes() == 0
    assert set(vars(running)) == before
    assert len(logger.rows()) == at
    clock.sleep(5000)
    second = trainer(running.callbacks[:1], logger)  # type: ignore[attr-defined]
    second.fit(Module(clock), loader)
    assert logger.column("throughput/step_time_ms") == [750.0] * (at + 3)


def test_trainer_and_optimizers_are_left_as_found(clock: Clock) -> None:
    """After a fit the trainer saves by its own method, and the optimizers carry no hook."""
    module = TwoOptimizers(clock)
    running = trainer([StepMonitor()], Rowed())
    before = set(vars(running))
    running.fit(module, DataLoader(Samples(4, clock), batch_size=2, collate_fn=torch.stack))
    assert set(vars(running)) == before
    assert all(not optimizer._optimizer_step_post_hooks for optimizer in running.optimizers)


@pytest.mark.parametrize("hook", ["setup", "on_train_epoch_start"])
def test_a_method_replaced_by_somebody_else_stays(hook: str, clock: Clock) -> None:
    """A `save_checkpoint` that the user put on the trainer, before the monitor or after, is there afterwards."""

    def mine(*args: Any, **kwargs: Any) -> None:
        """Save nothing."""

    replaces = Callback()
    setattr(replaces, hook, lambda trainer, *args, **kwargs: setattr(trainer, "save_checkpoint", mine))
    running = trainer([StepMonitor(), replaces], Rowed())
    running.fit(Module(clock), DataLoader(Samples(4, clock), batch_size=2, collate_fn=torch.stack))
    assert running.save_checkpoint is mine


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_log_nothing(stage: str) -> None:
    """The monitor belongs to training."""

    class All(Module):
        test_step = Module.validation_step

    logger = Rowed()
    running = trainer([StepMonitor()], logger, limit_val_batches=1)
    getattr(running, stage)(All(), DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack))
    assert logger.calls == []


class Blocks(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_is_read_from_the_device_in_the_loop(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    """As many calls that read a tensor with the monitor as without it, and no call to synchronize."""

    def reads(callbacks: list[Callback]) -> int:
        calls: list[None] = []
        with monkeypatch.context() as patch:
            for name in ("item", "cpu", "tolist", "numpy", "__bool__"):
                original = getattr(Tensor, name)
                counted = lambda self, *args, _original=original: calls.append(None) or _original(self, *args)  # noqa: E731
                patch.setattr(Tensor, name, counted)
            for module in (torch.cuda, torch.accelerator, torch.cpu):
                patch.setattr(module, "synchronize", lambda *args: pytest.fail("synchronized"))
            loader = DataLoader(Samples(8), batch_size=2, collate_fn=torch.stack)
            also = [ActivationCheckpointing(blocks="blocks.*", monitor=False)] if checkpointed else []
            with use_reader(Meter()):
                trainer([*also, *callbacks], Rowed()).fit(Blocks(), loader)
        return len(calls)

    assert reads([StepMonitor()]) == reads([])


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0: accepted are whole numbers from 1"),
        ({"every_n_steps": 2.5}, r"every_n_steps=2\.5: accepted are whole numbers from 1"),
        ({"every_n_steps": True}, r"every_n_steps=True: accepted are whole numbers from 1"),
        ({"batch_size_fn": 8}, r"batch_size_fn=8: accepted are None and a function"),
        ({"tokens_fn": "input_ids"}, r"tokens_fn='input_ids': accepted are None and a function"),
        ({"flops": "count"}, r"flops='count': accepted are \"auto\".*a number above 0, and None"),
        ({"flops": 0}, r"flops=0: accepted"),
        ({"flops": -1e9}, r"flops=-1000000000\.0: accepted"),
        ({"flops": math.inf}, r"flops=inf: accepted"),
        ({"flops": True}, r"flops=True: accepted"),
        ({"peak_flops": 0}, r"peak_flops=0: accepted are the FLOP/s of one device as .*, and None"),
        ({"peak_flops": "H200"}, r"peak_flops='H200': accepted"),
        ({"memory_snapshot": True}, r"memory_snapshot=True: accepted are a file, such as \"oom.pickle\", and None"),
        ({"headroom": 5}, r"headroom=5: accepted are a share of the memory from 0 to below 1.*, and None"),
        ({"headroom": True}, r"headroom=True: accepted"),
        ({"headroom": "5%"}, r"headroom='5%': accepted"),
        ({"prefix": None}, r"prefix=None: accepted is text"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], text: str) -> None:
    """A wrong argument is named with its value and what is accepted, when the callback is made."""
    with pytest.raises((ValueError, TypeError), match=text.replace("a number above", "number above")):
        StepMonitor(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All accelerator keys in each step, times near the host's, nothing synchronized within the loop."""

    class Heavy(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4096, 4096)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = torch.ones(4096, 4096, device=self.device)
            for _ in range(10):
                x = self.layer(x)
            return x.mean()

    logger = Rowed()
    loader = DataLoader(Samples(40), batch_size=2, collate_fn=torch.stack)
    running = Trainer(
        accelerator="cuda",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[StepMonitor()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("synchronized"))
    running.fit(Heavy(), loader)
    rows = logger.rows()
    assert [step for step, _ in rows] == list(range(20))
    absent = (
        "rss_gib",
        "tokens_per_sec",
        "per_sec_per_device",
        "mfu",
        "hfu",
        "saved_gib",
        "recompute_ms",
        "overhead_fraction",
    )
    expected = {key for key in KEYS if not key.endswith(absent)}
    work = 20 * 3 * 2 * 4096**3 / 2  # ten layers: forward, input and weight gradients
    for _, row in rows[3:]:
        assert expected <= row.keys()
        assert row["memory/peak_reserved_gib"] >= row["memory/peak_allocated_gib"] > 0
        rate = row["throughput/tflops_per_sec"] * row["throughput/step_time_ms"] * 1e9
        assert rate == pytest.approx(work, rel=0.1)
        assert row.get("throughput/mfu", 0.5) < 1
