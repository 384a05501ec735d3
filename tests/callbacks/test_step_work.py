"""The work of a step: counted once, replays apart, or left out with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.callbacks import _step_work
from lightning_ckpt.hardware import peak_flops
from recording import Clock, Module, Rowed, fit

LAYER = 2 * 4 * 3
"""FLOPs of the module's layer for one sample, forward; backward has one more product, since the input has no grad."""


def tflops(logger: Rowed) -> list[float]:
    return [row.get("throughput/tflops_per_sec", 0.0) * 1e12 * 0.75 for _, row in logger.rows()]


def test_flops_are_counted_once_and_scaled(clock: Clock) -> None:
    """Forward and weight gradient of each sample, the smaller last batch less."""
    assert tflops(fit(samples=5, clock=clock)) == pytest.approx([2 * 2 * LAYER, 2 * 2 * LAYER, 2 * LAYER])


def test_flops_follow_accumulation(clock: Clock) -> None:
    """Four micro-batches are four times the work, although only the first one was counted."""
    logger = fit(clock=clock, accumulate_grad_batches=4)
    (row,) = (row for _, row in logger.rows())
    assert row["throughput/tflops_per_sec"] * 1e12 == pytest.approx(8 * 2 * LAYER / 3.0)


class Deep(Module):
    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer(x)


def test_replays_are_no_model_work(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointed or not, model FLOPs and MFU are the same, and HFU exceeds MFU by what is replayed."""
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"fp32": 1e6})
    plain = fit(module=Deep(clock), clock=clock)
    ours = fit(module=Deep(clock), clock=clock, callbacks=(ActivationCheckpointing(blocks="blocks.*"),))
    for key in ("throughput/tflops_per_sec", "throughput/mfu"):
        assert ours.column(key) == plain.column(key)
    assert plain.column("throughput/hfu") == plain.column("throughput/mfu")
    # Early stop: of each block's two products one is replayed, 2 samples wide.
    replayed = 3 * 2 * (2 * 4 * 4) / 1e6 / 0.75
    assert ours.column("throughput/hfu")[0] - ours.column("throughput/mfu")[0] == pytest.approx(replayed)


def test_a_number_of_flops_is_taken_as_it_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given number is the work of each step; what is replayed then stays unknown, so there is no HFU."""
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"bf16": 8e12, "fp32": 4e12})
    row = fit(StepMonitor(flops=1.5e12), clock=clock).rows("throughput")[-1][1]
    assert row["throughput/tflops_per_sec"] == 2.0
    assert row["throughput/mfu"] == 0.5
    assert "throughput/hfu" not in row


@pytest.mark.parametrize(
    ("precision", "mfu"),
    [("bf16-mixed", 0.25), ("bf16-true", 0.25), ("16-true", 0.5), ("32-true", 1.0), ("64-true", None)],
)
def test_a_number_of_flops_is_of_the_trainers_format(
    precision: Any, mfu: float | None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each format has a peak of its own; where nobody knows it the rate is logged alone."""
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"bf16": 8e12, "fp16": 4e12, "fp32": 2e12})
    row = fit(StepMonitor(flops=1.5e12), clock=clock, precision=precision).rows("throughput")[-1][1]
    assert row["throughput/tflops_per_sec"] == 2.0
    assert row.get("throughput/mfu") == mfu


@pytest.mark.parametrize("flops", ["auto", 4e12])
def test_a_given_peak_is_any_formats(clock: Clock, flops: Any) -> None:
    """On a device whose peak nobody knows, such as this one, the given one makes MFU of the rate that is logged."""
    row = fit(StepMonitor(flops=flops, peak_flops=8e12), clock=clock).rows("throughput")[-1][1]
    assert row["throughput/mfu"] == pytest.approx(row["throughput/tflops_per_sec"] / 8)


def test_without_flops(clock: Clock) -> None:
    """`flops=None` counts nothing and leaves three keys out."""
    row = fit(StepMonitor(flops=None), clock=clock).rows("throughput")[0][1]
    assert not {"throughput/tflops_per_sec", "throughput/mfu", "throughput/hfu"} & row.keys()


def test_a_utilization_above_one_is_told_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impossible MFU is not logged in silence, and the warning comes once in a run."""
    monkeypatch.setattr(_step_work, "_peaks", lambda device: {"fp32": 1e12})
    with pytest.warns(UserWarning, match=r"a utilization of 2\.00 can't be.*StepMonitor\(flops=") as caught:
        fit(StepMonitor(flops=1.5e12), clock=clock)
    assert len([w for w in caught if "utilization" in str(w.message)]) == 1


class Muon(torch.optim.SGD):
    """An optimizer that multiplies matrices itself."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        torch.ones(50, 50) @ torch.ones(50, 50)
        return loss


def test_an_optimizers_products_are_not_the_models(clock: Clock) -> None:
    """What the optimizer computes in its step is left out of the model's FLOPs."""

    class WithMuon(Module):
        def configure_optimizers(self) -> Any:
            return Muon(self.parameters(), lr=0.01)

    assert tflops(fit(module=WithMuon(clock), clock=clock))[0] == pytest.approx(2 * 2 * LAYER)


class Compiled(Module):
    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.layer.compile(backend="eager")


class CompiledInside(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(self.layer.forward, backend="eager")(x)


class Recurrent(Module):
    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rnn(x)[0])


class NoProducts(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer.bias[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Compiled, "layer is compiled"),
        (CompiledInside, "a part of the model is compiled"),
        (Recurrent, "no FLOP formula for the operator mkldnn_rnn_layer"),
        (NoProducts, "no operator with a formula ran"),
    ],
)
def test_off_when_it_cant_be(clock: Clock, kind: type[Module], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """FLOPs that can't be counted leave their keys out, say why and what to do, once; everything else is there."""
    with caplog.at_level("INFO"):
        logger = fit(module=kind(clock), clock=clock)
    told = [record.message for record in caplog.records if "tflops_per_sec, mfu and hfu are left out" in record.message]
    assert len(told) == 1
    assert reason in told[0]
    assert "StepMonitor(flops=...)" in told[0]
    row = logger.rows("throughput")[-1][1]
    assert set(row) == {
        *("throughput/step_time_ms", "throughput/data_wait_ms"),
        *("throughput/samples_per_sec", "throughput/batches_per_sec"),
    }


class Quiet(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()


def test_a_module_compiled_whole(caplog: pytest.LogCaptureFixture) -> None:
    """`torch.compile(module)` given to the trainer is known as compiled before it runs."""
    with caplog.at_level("INFO"):
        fit(module=torch.compile(Quiet(), backend="eager"))  # type: ignore[arg-type]
    assert any("left out: the model is compiled" in record.message for record in caplog.records)


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", True), ("NVIDIA Something 9000", False)])
def test_only_an_unknown_device_is_told_of(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device nobody knows the peak of has no MFU, and that is said once with its name."""

    class Backend:
        @staticmethod
        def get_device_name(device: Any) -> str:
            return name

    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    with caplog.at_level("INFO"):
        assert _step_work._peaks(torch.device("cuda", 0)) == (peak_flops("H200") if known else {})
    said = f"StepMonitor: mfu and hfu are left out: the peak FLOP/s of {name!r} are not known for certain."
    assert [record.message for record in caplog.records] == ([] if known else [said])
