"""The work of a step, from the FLOPs of one batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt.callbacks._trainer import is_compiled_whole
from lightning_ckpt.flops import FlopCounter, Flops, uncountable
from lightning_ckpt.hardware import peak_flops
from lightning_ckpt.replay_state import is_recomputing
from lightning_ckpt.throughput import Work, ideal_seconds


class WorkCount:
    """Counts one batch, and scales it to every step; counts again when another plan of what is replayed stands.

    Args:
        flops, peak_flops: as `StepMonitor` takes them.
        plan: tells a number that changes with what is replayed; None while that is being looked for, and measured.
    """

    def __init__(
        self,
        flops: Literal["auto"] | float | None,
        trainer: Trainer,
        pl_module: LightningModule,
        peak_flops: float | None = None,
        plan: Callable[[], int | None] = lambda: 0,
    ) -> None:
        wanted = flops is not None and peak_flops is None
        self._peaks: dict[str, float] | float = _peaks(trainer.strategy.root_device) if wanted else peak_flops or {}
        self._fixed = None
        if isinstance(flops, int | float):
            work = _work(Flops({_format(trainer): int(flops)}, {}), self._peaks)
            self._fixed = replace(work, total_seconds=None)  # nobody has said what is replayed
        self._module: LightningModule | None = pl_module if flops == "auto" else None
        self._counter: FlopCounter | None = None
        self._of_a_unit: Work | None = None
        self._plan = plan
        self._counted: int | None = None  # under this plan
        self._latest: tuple[int, int | None, Work] | None = None  # of so many units, under this plan

    def begin(self) -> bool:
        """Start counting if this is the first batch of a plan, and tell whether it is."""
        module, plan = self._module, self._plan()
        if module is None or plan is None or plan == self._counted:
            return False
        self._counted = plan
        problem = "the model is compiled" if is_compiled_whole(module) else uncountable(module)
        if problem:
            self._give_up(problem)
            return False
        self._counter = FlopCounter(is_recomputing)
        self._counter.__enter__()
        return True

    def pause(self) -> None:
        """Leave out what follows in this batch: what an optimizer computes is not the model's work."""
        if self._counter:
            self._counter.counting = False

    def end(self, units: int) -> None:
        """End the count that `begin` started, of a batch of so many units."""
        counter = self._stop()
        if counter is None:
            return
        flops = counter.result()
        if flops is None:
            self._give_up(str(counter.problem))
        else:
            self._of_a_unit, self._latest = _work(flops, self._peaks).times(1 / units), None

    def of(self, units: int) -> Work | None:
        """Return the work of a step of so many units, None when it is not known."""
        if self._fixed is not None:
            return self._fixed
        if self._of_a_unit is None:
            return None
        plan = self._plan()
        if self._latest is None or self._latest[:2] != (units, plan):
            work = self._of_a_unit.times(units)
            self._latest = units, plan, work if plan == self._counted else replace(work, total_seconds=None)
        return self._latest[2]

    def close(self) -> None:
        """Stop counting, also in the middle of a batch."""
        self._stop()

    def _give_up(self, problem: str) -> None:
        _tell(problem)
        self._module = self._of_a_unit = None

    def _stop(self) -> FlopCounter | None:
        counter, self._counter = self._counter, None
        if counter:
            counter.__exit__(None, None, None)
        return counter


def _work(flops: Flops, known: dict[str, float] | float) -> Work:
    every = {kind: flops.model.get(kind, 0) + flops.replay.get(kind, 0) for kind in {*flops.model, *flops.replay}}
    peaks = known if isinstance(known, dict) else dict.fromkeys(every, known)
    model_seconds = ideal_seconds(flops.model, peaks) if peaks else None
    total_seconds = ideal_seconds(every, peaks) if peaks else None
    return Work(sum(flops.model.values()), model_seconds, total_seconds)


def _peaks(device: torch.device) -> dict[str, float]:
    """Return the device's peaks; says so where it has a name that nobody knows them of."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "get_device_name"):
        return {}
    name = module.get_device_name(device)
    peaks = peak_flops(name)
    if not peaks:
        rank_zero_info(f"StepMonitor: mfu and hfu are left out: the peak FLOP/s of {name!r} are not known for certain.")
    return peaks


def _format(trainer: Trainer) -> str:
    """Return the format matrix products run in at the trainer's precision."""
    precision = str(trainer.precision)
    if precision.startswith("bf16"):
        return "bf16"
    if precision.startswith("16"):
        return "fp16"
    if not precision.startswith("32"):
        return precision
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def _tell(problem: str) -> None:
    rank_zero_info(
        f"StepMonitor: tflops_per_sec, mfu and hfu are left out: {problem}. "
        "Give the model FLOPs of a step as StepMonitor(flops=...) to have them."
    )
