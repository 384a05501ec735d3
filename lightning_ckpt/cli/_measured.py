"""Real training steps under one policy, measured: what runs in a fresh process of its own."""

import hashlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.blocks import find_blocks
from lightning_ckpt.callbacks._distributions import of
from lightning_ckpt.callbacks._trainer import samples_in
from lightning_ckpt.cli._command import NoBlocks, UsageError, in_options
from lightning_ckpt.cli._measurement import STEP, Measurement, Request, StepMemory
from lightning_ckpt.cli._policies import parse_policy
from lightning_ckpt.cli._recording import StepRecording
from lightning_ckpt.cli._target import Target, elements_in, has_train_loader, load_target
from lightning_ckpt.oom import is_out_of_memory

# Checkpointed blocks learn in their first three forwards which buffers change, and a memory budget takes a few steps to
# settle on a plan.
WARM_UP = 8
# The last of them counts, see `StepRecording`.
RECORDED = 2


def measure(request: Request) -> Measurement:
    """Train the request's target for its steps, with warm-up before them and one recorded step after them.

    Raises:
        UsageError: the target or the policy can't be found, or the user's code fails.
    """
    L.seed_everything(request.seed, verbose=False)
    return measure_target(load_target(request.target, configure=False), request)


def measure_target(target: Target, request: Request) -> Measurement:
    """Train a target that is loaded already, as the request says.

    Raises:
        UsageError: it can't be trained, or the user's code fails.
    """
    policy = parse_policy(request.policy)
    watch = _Watch(request.steps)
    callbacks: list[L.Callback] = [watch]
    if policy is not None:
        callbacks.insert(0, ActivationCheckpointing(policy, blocks=request.blocks, monitor=False))
    elif request.needs_blocks:
        callbacks.insert(0, _LookForBlocks(request))
    trainer = _trainer(target.module, callbacks, request.precision)
    _fit(trainer, target, steps := WARM_UP + request.steps + RECORDED)
    if watch.memory is None:
        raise UsageError(
            f"{target.name}: training ended by itself after {watch.steps} of {steps} steps: take out what ends it early"
        )
    return Measurement(
        policy=request.policy,
        blocks=watch.blocks,
        seconds=watch.seconds,
        samples=watch.samples,
        elements=watch.elements,
        memory=watch.memory,
        loss=watch.loss,
        digests=watch.digests,
        device=_device(trainer.strategy.root_device),
        on_host=trainer.strategy.root_device.type == "cpu",
        versions={"torch": torch.__version__, "lightning": L.__version__, "Python": platform.python_version()},
    )


def _trainer(module: L.LightningModule, callbacks: list[L.Callback], precision: str | None) -> L.Trainer:
    return of(module, L.Trainer)(
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        callbacks=callbacks,
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _fit(trainer: L.Trainer, target: Target, steps: int) -> None:
    """Train on the first batch, again and again; transfers and hooks are those of the user's own data module."""
    module, data = target.module, target.data
    if data is None and has_train_loader(module):
        owner: Any = module
    else:
        owner = data if hasattr(data, "train_dataloader") else None
    if owner is None:
        trainer.fit(module, train_dataloaders=_Again(target.loader(), steps))
        return
    loader = owner.train_dataloader
    owner.train_dataloader = lambda: _Again(loader(), steps)
    try:
        trainer.fit(module, datamodule=data)
    finally:
        del owner.train_dataloader


class _Again:
    """The first batch of a loader, so many times."""

    def __init__(self, loader: Iterable[Any], times: int) -> None:
        self._loader, self._times = loader, times

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[Any]:
        nothing = object()
        batch = next(iter(self._loader), nothing)
        if batch is nothing:
            raise UsageError("the loader gives no batch")
        for _ in range(self._times):
            yield batch


class _LookForBlocks(L.Callback):
    """Looks for blocks as soon as all layers are made, before any step."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            find_blocks(pl_module, self._request.blocks)
        except ValueError as error:
            raise NoBlocks(f"{self._request.target}: {in_options(str(error))}") from error


class _Watch(L.Callback):
    """Times the steps after warm-up, digests what the first one computed, and records the memory of the last one."""

    def __init__(self, steps: int) -> None:
        self.seconds: list[float] = []
        self.digests: dict[str, str] = {}
        self.loss = float("nan")
        self.samples: int | None = None
        self.elements = 0
        self.memory: StepMemory | None = None
        self.blocks = 0
        self.steps = 0
        self._last = WARM_UP + steps + RECORDED - 1
        self._recording: StepRecording | None = None
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.samples, self.elements = samples_in(batch), elements_in(batch)
        device = trainer.strategy.root_device
        _wait(device)
        if self.steps == self._last - 1:
            self._recording = StepRecording(pl_module, device)
        if self.steps == self._last and self._recording:
            self._recording.start(trainer.optimizers)
        self._started = time.perf_counter()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self.steps == 0:
            self.loss = float(loss.detach()) if not self.digests else self.loss
            self._digest("loss", loss)
        if self._recording and self._recording.started:
            self._recording.before_backward()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._recording and self._recording.started:
            self._recording.after_backward()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self.steps == 0:
            for name, parameter in pl_module.named_parameters():
                if parameter.grad is not None:
                    self._digest(f"gradient of {name}", parameter.grad)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        _wait(trainer.strategy.root_device)
        if WARM_UP <= self.steps <= self._last - RECORDED:
            self.seconds.append(time.perf_counter() - self._started)
            print(STEP, flush=True)
        if self._recording and self._recording.started:
            self.memory, self._recording = self._recording.stop(), None
            self.blocks = _checkpointed(trainer)
        self.steps += 1

    def _digest(self, name: str, tensor: Tensor) -> None:
        """Of a module that steps several optimizers, what each of them saw."""
        times = sum(known == name or known.startswith(f"{name}, time ") for known in self.digests)
        values = tensor.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.digests[f"{name}, time {times + 1}" if times else name] = hashlib.sha256(values.numpy().data).hexdigest()[
            :16
        ]


def _checkpointed(trainer: L.Trainer) -> int:
    ours = [c for c in trainer.callbacks if isinstance(c, ActivationCheckpointing)]  # type: ignore[attr-defined]
    reports = [callback.report() for callback in ours]
    return sum(len(report.checkpointed) for report in reports if report)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
    backend = torch.get_device_module(device)
    return str(backend.get_device_name(device)) if hasattr(backend, "get_device_name") else device.type


def main(asked: Path, answer: Path) -> None:
    """Measure what a JSON file asks for, and write what came of it into another one."""
    said: dict[str, Any]
    try:
        said = {"measurement": measure(Request(**json.loads(asked.read_text()))).as_json()}
    except (Exception, SystemExit) as error:
        line = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        kinds = {"out_of_memory": is_out_of_memory(error), "no_blocks": isinstance(error, NoBlocks)}
        said = {"error": line, "traceback": traceback.format_exc(), **kinds}
    answer.write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
