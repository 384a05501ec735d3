"""A run of the monitor with injected time and memory, and the list of what it logged."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import StepMonitor
from lightning_ckpt.memory import GIB, AllocatorReader, Interval, use_reader

FETCH, STEP, VALIDATION, SAVING = 0.25, 0.5, 100.0, 1000.0
"""Seconds on the injected clock: binary fractions, so that sums are exact."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Meter:
    """A memory reader whose peak is what the module below last used."""

    def __init__(self, limit: int | None = 16 * GIB) -> None:
        self._limit = limit
        self._peak = 0

    def use(self, size: int) -> None:
        self._peak = max(self._peak, size)

    def reset_peak(self) -> None:
        self._peak = 0

    def peak(self) -> int:
        return self._peak

    def limit(self) -> int | None:
        return self._limit


class Rowed(Logger):
    """Keeps what it is told to log."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.calls.append((step, dict(metrics)))

    def rows(self, group: str = "") -> list[tuple[int | None, dict[str, float]]]:
        """The monitor's rows, and of them the keys of one group."""
        own = [(step, row) for step, row in self.calls if "throughput/step_time_ms" in row]
        return [(step, {key: figure for key, figure in row.items() if key.startswith(group)}) for step, row in own]

    def column(self, key: str) -> list[float]:
        return [row[key] for _, row in self.rows()]

    def loss_steps(self) -> list[int | None]:
        return [step for step, row in self.calls if "loss" in row]


class Samples(Dataset[Any]):
    """`count` samples; each batch takes FETCH seconds to make, whatever its size."""

    def __init__(self, count: int, clock: Clock | None = None) -> None:
        self.count, self.clock = count, clock

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self.clock:
            self.clock.sleep(FETCH)
        return [torch.full((4,), float(index)) for index in indices]


class Module(LightningModule):
    """One layer; a step takes STEP seconds, uses a GiB a sample of the given meter, and logs a loss."""

    def __init__(self, clock: Clock | None = None, meter: Meter | None = None) -> None:
        super().__init__()
        self.layer, self.clock, self.meter = nn.Linear(4, 3), clock, meter

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> Tensor:
        if self.clock:
            self.clock.sleep(STEP)
        if self.meter:
            self.meter.use(len(batch) * GIB)
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.clock:
            self.clock.sleep(VALIDATION)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(2), collate_fn=torch.stack)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(callbacks: list[Callback], logger: Any, **options: Any) -> Trainer:
    options = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        **options,
    }
    return Trainer(
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(
    monitor: StepMonitor | None = None,
    module: LightningModule | None = None,
    *,
    samples: int = 8,
    size: int = 2,
    clock: Clock | None = None,
    meter: Meter | None = None,
    callbacks: tuple[Callback, ...] = (),
    collate: Any = torch.stack,
    **options: Any,
) -> Rowed:
    """Train `samples` in batches of `size` and return what was logged."""
    logger = Rowed()
    loader = DataLoader(Samples(samples, clock), batch_size=size, collate_fn=collate)
    with use_reader(meter or Meter()):
        module = Module(clock, meter) if module is None else module
        trainer([monitor or StepMonitor(), *callbacks], logger, **options).fit(module, loader, loader)
    return logger


class Peaks(Callback):
    """Notes the peak of each training step, as the reader of the test tells it."""

    def __init__(self, reader: AllocatorReader) -> None:
        self.interval = Interval(reader)
        self.seen: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.interval.reset_peak()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.interval.peak())
