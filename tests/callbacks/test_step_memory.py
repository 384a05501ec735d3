"""In which part of a step the peak fell, and the warning when little is left."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import StepMonitor
from lightning_ckpt.memory import GIB, AcceleratorReader, AllocatorReader, HostReader, use_reader
from recording import Meter, Module, Rowed, Samples, fit, trainer

PHASES = ("forward", "backward", "optimizer")


def phases(logger: Rowed) -> list[dict[str, float]]:
    return [{phase: row[f"memory/peak_{phase}_gib"] for phase in PHASES} for _, row in logger.rows()]


class Phased(Module):
    """Uses as many GiB in each part of its step as it is told, and more in validation."""

    sizes = dict.fromkeys(PHASES, 0.0)

    def use(self, phase: str) -> None:
        assert self.meter is not None
        self.meter.use(int(self.sizes[phase] * GIB))

    def loss(self, batch: Any) -> Tensor:
        self.use("forward")
        loss = self(batch).square().mean()
        loss.register_hook(lambda gradient: self.use("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.use("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.use(9 * GIB)


@pytest.mark.parametrize("highest", PHASES)
def test_the_phase_of_the_peak(highest: str) -> None:
    """Each part of a step has its own peak, and the step's is the highest of them."""
    meter = Meter()
    module = Phased(meter=meter)
    module.sizes = {"forward": 1.0, "backward": 2.0, "optimizer": 3.0, highest: 5.0}
    logger = fit(module=module, meter=meter)
    assert phases(logger) == [module.sizes] * 4
    assert logger.column("memory/peak_allocated_gib") == [5.0] * 4


def test_the_phases_of_micro_batches_are_one_steps() -> None:
    """With gradients gathered over batches, the highest of each."""
    meter = Meter()
    module = Phased(meter=meter)
    module.sizes = {"forward": 1.0, "backward": 2.0, "optimizer": 3.0}
    assert phases(fit(module=module, meter=meter, accumulate_grad_batches=2)) == [module.sizes] * 2


def test_validation_is_no_phase() -> None:
    """What it takes belongs to the peak since the last row, and to no part of a step."""
    meter = Meter()
    module = Phased(meter=meter)
    module.sizes = {"forward": 1.0, "backward": 2.0, "optimizer": 3.0}
    logger = fit(module=module, meter=meter, limit_val_batches=1, val_check_interval=2)
    assert phases(logger) == [module.sizes] * 4
    assert logger.column("memory/peak_allocated_gib") == [3.0, 3.0, 9.0, 3.0]


def test_by_hand() -> None:
    """With manual optimization and two steps in a batch, what follows a step is the next one's forward."""

    class ByHand(Phased):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                self.manual_backward(self.loss(batch))
                self.use("optimizer")
                self.optimizers().step()

    meter = Meter()
    module = ByHand(meter=meter)
    module.sizes = {"forward": 1.0, "backward": 2.0, "optimizer": 3.0}
    assert phases(fit(module=module, meter=meter)) == [module.sizes] * 4


def test_an_allocator_is_asked_once_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch collects all its statistics for each that is asked: a row of eight figures takes three answers."""
    asked = []

    def stats(device: torch.device) -> dict[str, int]:
        asked.append(device)
        peaks = {"allocated_bytes.all.peak": len(asked) * GIB, "reserved_bytes.all.peak": 50 * GIB - len(asked) * GIB}
        return {**peaks, "num_alloc_retries": 7, "num_ooms": 2}

    class Card(AcceleratorReader):
        def limit(self) -> int:
            return 64 * GIB

    monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    logger = Rowed()
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    with use_reader(Card("cuda:0")):
        trainer([StepMonitor(flops=None)], logger).fit(Module(), loader)
    assert [{key: figure for key, figure in row.items() if "memory" in key} for _, row in logger.rows()] == [
        {
            "memory/peak_allocated_gib": last,
            "memory/peak_reserved_gib": 50 - (last - 2),
            "memory/alloc_retries": 7,
            "memory/ooms": 2,
            "memory/peak_forward_gib": last - 2,
            "memory/peak_backward_gib": last - 1,
            "memory/peak_optimizer_gib": last,
            "memory/headroom_gib": 64 - last,
            "memory/peak_fraction": last / 64,
        }
        for last in (4, 7)  # the first answer was asked for at the start
    ]


def test_a_profiler_has_no_phases() -> None:
    """What records every allocation is not read within an optimizer's step, which it would not survive."""
    logger = Rowed()
    loader = DataLoader(Samples(8), batch_size=2, collate_fn=torch.stack)
    with AllocatorReader() as reader, use_reader(reader):
        trainer([StepMonitor(flops=None)], logger).fit(Module(), loader)
    assert not any("backward" in key for _, row in logger.rows() for key in row)


def test_a_resident_size_has_no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what a phase has freed: the keys are absent, and it is not read in every phase."""
    peaks = []
    found = HostReader.peak
    monkeypatch.setattr(HostReader, "peak", lambda self: peaks.append(1) or found(self))
    logger = Rowed()
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=torch.stack)
    trainer([StepMonitor()], logger).fit(Module(), loader)
    assert not any("backward" in key for _, row in logger.rows() for key in row)
    assert len(peaks) <= 2 * len(logger.rows()) + 1


def test_a_system_that_does_not_tell_its_memory(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It is said once, rows have the rest, and a report of what held memory knows no rest of a peak."""

    class Fails(Module):
        def on_after_backward(self) -> None:
            if self.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    logger, loader = Rowed(), DataLoader(Samples(8), batch_size=2, collate_fn=torch.stack)
    untold = HostReader(proc=tmp_path / "none", cgroup=tmp_path / "none")
    with use_reader(untold), caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        trainer([StepMonitor()], logger).fit(Fails(), loader)
    said = [record.message for record in caplog.records if "memory is left out" in record.message]
    assert len(said) == 1
    assert "this system does not tell the peak memory of a process; measure with a reader of your own" in said[0]
    assert len(logger.rows("throughput")) == 2
    assert logger.rows("memory") == [(0, {}), (1, {})]
    report = capsys.readouterr().err
    assert "optimizer state" in report
    assert "activations, temporaries and the rest" not in report


# --- little memory left ---


class Growing(Module):
    """Each step takes a GiB more of sixteen than the one before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.meter is not None
        self.meter.use((12 + batch_idx) * GIB)
        return super().training_step(batch, batch_idx)


class Alerted(WandbLogger):
    """A W&B logger whose run is this object."""

    def __init__(self) -> None:
        super().__init__(offline=True)
        self.alerts: list[tuple[int, str, str]] = []
        self.rows: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(step)

    def alert(self, *, title: str, text: str, level: str) -> None:
        self.alerts.append((len(self.rows), title, level, text))


def test_little_headroom_is_told_once() -> None:
    """The first step that leaves less than asked for, with figures and the phase; W&B's logger alone has an alert."""
    meter, logger = Meter(), Alerted()
    loader = DataLoader(Samples(8), batch_size=2, collate_fn=torch.stack)
    expected = (
        "StepMonitor: by step 2 the peak of memory has left 2.00 GiB, 12.5% of what there is and less than "
        "headroom=0.15; it fell in forward. A longer batch may not fit any more: take a smaller batch, or replay more "
        '(policy="full", or a MemoryBudget).'
    )
    with use_reader(meter), pytest.warns(UserWarning, match="headroom") as caught:
        trainer([StepMonitor(headroom=0.15)], [Rowed(), logger]).fit(Growing(meter=meter), loader)
    assert [str(warning.message) for warning in caught if "headroom" in str(warning.message)] == [expected]
    ((_, title, level, text),) = logger.alerts
    assert (title, level, text) == ("Little memory left", "WARN", expected)


@pytest.mark.parametrize(("headroom", "limit"), [(None, 16 * GIB), (0.05, None), (0.0, 16 * GIB)])
def test_no_headroom_asked_for_or_no_limit_known(headroom: float | None, limit: int | None) -> None:
    """No warning where nobody wants one, and none where nobody knows the limit: warnings are errors here."""
    meter = Meter(limit)
    fit(StepMonitor(headroom=headroom), Growing(meter=meter), meter=meter)
