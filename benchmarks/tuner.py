"""What it takes to find a batch size that fits: `BatchSizeTuner` beside the two modes of Lightning's `BatchSizeFinder`.

    python benchmarks/tuner.py               # prints, and writes benchmarks/results/tuner_<device>_<yyyymm>.md
    python benchmarks/tuner.py --models GPT --no-write

Each search runs in a process of its own whose address space is limited, so that memory really does run out, in
PyTorch's allocator as on a device. All processes of a model may take equally much. The largest size that fits is found
by real training steps under that limit, each size in a process of its own.

A trial step is an optimizer step taken before training starts. An error is an out-of-memory error raised in one. The
settled size is then trained with, under the same limit.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from models import GPT, WORKLOADS, UNet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import BatchSizeTuner
from lightning_ckpt.memory import AllocatorReader, release_unused, use_reader
from lightning_ckpt.oom import is_out_of_memory
from lightning_ckpt.sizes import UNITS

ROOT = Path(__file__).resolve().parent.parent
MIB = UNITS["MiB"]
ROOM = 500 * MIB  # beyond what the process holds with the model and its optimizer's state
SAMPLES = 4096
Kind = tuple[str, Callable[[], torch.nn.Module], Callable[[], Any]]  # whose loss, the model, a sample
MODELS: dict[str, Kind] = {
    "GPT, 8 layers": ("GPT", lambda: GPT(depth=8, width=64), lambda: torch.randint(0, 256, (129,))),
    "U-Net": ("U-Net", lambda: UNet(width=8), lambda: torch.randn(3, 64, 64)),
}
BY_ALLOCATOR = "BatchSizeTuner(), by the allocator"
FINDERS: dict[str, Callable[[], Callback]] = {
    "BatchSizeTuner()": lambda: BatchSizeTuner(memory_limit=_limit()),
    BY_ALLOCATOR: BatchSizeTuner,
    'BatchSizeFinder("power")': lambda: BatchSizeFinder("power"),
    'BatchSizeFinder("binsearch")': lambda: BatchSizeFinder("binsearch"),
}


@dataclass(frozen=True)
class Result:
    """How one search went.

    Attributes:
        settled: the size settled on; 0 where the search failed.
        steps: optimizer steps taken before training.
        errors: out-of-memory errors met.
        seconds: of the search.
        trained: whether training with the settled size went through.
    """

    settled: int
    steps: int
    errors: int
    seconds: float
    trained: bool


class Samples(Dataset[Any]):
    """As many samples as the search may want, made when they are asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._sample = make()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._sample


class Task(LightningModule):
    """A model in training, which counts what a search does with it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        workload, build, sample = kind
        self.net, self.loss, self.data = build(), WORKLOADS[workload].loss, Samples(sample)
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        STEPS.append(self.batch_size)
        try:
            super().optimizer_step(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                ERRORS.append(self.batch_size)
            raise


STEPS: list[int] = []
ERRORS: list[int] = []
LIMITS: list[int] = []


def _limit() -> int:
    return LIMITS[-1]


class Searched(Callback):
    """Notes when the search is over and training starts."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.callbacks or self not in trainer.callbacks:  # type: ignore[attr-defined]
            return
        self.at = time.perf_counter()
        self.steps, self.errors = len(STEPS), len(ERRORS)


def trainer_of(callbacks: list[Callback], folder: str, **options: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(default_root_dir=folder, callbacks=callbacks, **(quiet | options))


def limited(model: str, folder: str) -> Task:
    """A model whose process holds what training at size 2 left, and may take `ROOM` more."""
    seed_everything(0, verbose=False)
    trainer_of([], folder, max_steps=1).fit(Task(MODELS[model]))
    release_unused("cpu")
    size = resource.getpagesize()
    if "ALLOCATED" in os.environ:
        return Task(MODELS[model])
    virtual, resident = (int(pages) * size for pages in Path("/proc/self/statm").read_text().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (virtual + ROOM, virtual + ROOM))
    LIMITS.append(resident + ROOM)
    return Task(MODELS[model])


def search(model: str, finder: str) -> Result:
    """Run one search, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        task, searched = limited(model, folder), Searched()
        tuner: Any = FINDERS[finder]()
        allocator = AllocatorReader(limit=int(os.environ["ALLOCATED"])) if finder == BY_ALLOCATOR else None
        STEPS.clear()
        started = time.perf_counter()
        trained = True
        try:
            with allocator or nullcontext(), use_reader(allocator) if allocator else nullcontext():
                trainer_of([tuner, searched], folder, max_steps=3).fit(task)
        except Exception as error:
            if not is_out_of_memory(error) and not isinstance(error, RuntimeError | ValueError):
                raise
            print(f"{finder}: {type(error).__name__}: {error}", file=sys.stderr)
            trained = False
        if allocator is not None:
            ERRORS.extend(trial.size for trial in tuner.trials if trial.peak > allocator.limit())
    ended = getattr(searched, "at", time.perf_counter())
    steps, errors = getattr(searched, "steps", len(STEPS)), getattr(searched, "errors", 0) or len(ERRORS)
    return Result(task.batch_size if hasattr(searched, "at") else 0, steps, errors, ended - started, trained)


def goes_through(model: str, size: int) -> Result:
    """Whether three steps at a size go through, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        task = limited(model, folder)
        task.batch_size = size
        try:
            trainer_of([], folder, max_steps=3).fit(task)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return Result(0, 0, 1, 0, trained=False)
    return Result(size, 0, 0, 0, trained=True)


def largest_of(goes: Callable[[int], bool]) -> int:
    """The largest size at which steps go through, to a fiftieth."""
    fits, fails = 0, SAMPLES
    while fails - fits > max(1, fits // 50):
        size = max(2 * fits, 16) if fails == SAMPLES else (fits + fails) // 2
        fits, fails = (size, fails) if goes(size) else (fits, size)
    return fits


def allocated(model: str, size: int) -> int:
    """What the allocator holds at most in training with a size, in bytes."""
    with tempfile.TemporaryDirectory() as folder, AllocatorReader() as reader:
        task = Task(MODELS[model])
        task.batch_size = size
        trainer_of([], folder, max_steps=2).fit(task)
        return reader.peak()


def in_a_process(model: str, finder: str, allocated: int = 0) -> Result:
    """Run a search or a size in a new process, so that what one leaves behind is not the next one's."""
    command = [sys.executable, __file__, "--one", model, finder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    if finder == BY_ALLOCATOR:
        environment["ALLOCATED"] = f"{allocated}"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{model}, {finder}: {done.stderr[-2000:]}")
    return Result(**json.loads(lines[-1]))


def row(model: str, finder: str, result: Result, best: int) -> str:
    settled = f"{result.settled} ({result.settled / best:.0%})" if result.settled else "none"
    trained = "yes" if result.trained else "no"
    return f"| {model} | `{finder}` | {result.steps} | {result.errors} | {result.seconds:.1f} | {settled} | {trained} |"


def report(rows: list[str], largest: dict[str, int]) -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    bests = ", ".join(f"{model} {size}" for model, size in largest.items())
    table = "\n".join(rows)
    return f"""# Finding a batch size that fits

Each search in a process that may take {ROOM // MIB} MiB of address space beyond the model in training, so that memory
really runs out. Trial steps are optimizer steps before training, errors are out-of-memory errors met in them. Shares
are of the largest size at which three steps went through under that limit: {bests}.

`BatchSizeTuner` leaves a tenth free of what it is told there is, the other modes nothing. By the resident size, which
is what it reads on a machine without an accelerator, that is a tenth of the whole process, PyTorch's libraries
included, and 4 % for what such a size can't tell. By the allocator, as on an accelerator, it is a tenth of what
training with the largest size allocates; that search runs without the limit, which counts more than what is allocated,
and an error is a trial that allocated more.

| model | search | trial steps | errors | seconds | settled (of the largest) | then trained |
| --- | --- | --- | --- | --- | --- | --- |
{table}

By the resident size, a size that may be settled on takes steps until its peak no longer grows. By the allocator, each
size takes one.

Settled "none": the search was ended by an error it does not take for lack of memory, such as oneDNN's "could not create
a primitive", which is what a kernel says that gets none. One run of each; errors and sizes of searches that run out of
memory differ a little from run to run.

- Device: cpu, {platform.machine()}, 1 thread.
- torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/tuner.py`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="default all")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SEARCH"), help="one search in this very process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.one:
        model, finder = args.one
        result = search(model, finder) if finder in FINDERS else goes_through(model, int(finder))
        print(json.dumps(asdict(result)))
        return 0
    largest, rows = {}, []
    for model in args.models:
        largest[model] = largest_of(lambda size, model=model: in_a_process(model, f"{size}").trained)
        most = allocated(model, largest[model])
        for finder in FINDERS:
            rows.append(row(model, finder, in_a_process(model, finder, most), largest[model]))
            print(rows[-1], flush=True)
    page = report(rows, largest)
    print(page)
    if not args.no_write:
        path = ROOT / f"benchmarks/results/tuner_cpu_{datetime.date.today():%Y%m}.md"
        path.write_text(page, encoding="utf-8")
        print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
