"""What the replaced forward costs against calling `torch.utils.checkpoint` by hand in the model's own code.

    python benchmarks/overhead.py                  # prints, and writes benchmarks/results/overhead_<device>_<yyyymm>.md
    python benchmarks/overhead.py --repeats 20 --no-write

Two copies of the GPT example in its default configuration take the same training steps in one process: one with
`checkpoint_blocks(model, "full")`, one whose forward calls `checkpoint(block, x, use_reentrant=False)`. The steps are
interleaved, who goes first alternates, and each pair gives one ratio, so that a machine that slows down slows both.
The peak is exact: every byte of the CPU allocator over one step, or the accelerator's own counter.
"""

import argparse
import datetime
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from lightning_ckpt import checkpoint_blocks
from lightning_ckpt.memory import AcceleratorReader, AllocatorReader
from lightning_ckpt.sizes import format_size

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from train_gpt import GPT, Sources  # noqa: E402 - the example's folder is known only now

TIME_TARGET, PEAK_TARGET = 1.02, 1.00


class GPTByHand(GPT):
    """The example as its owner would edit it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times in seconds, pair by pair; peaks in bytes."""

    ours: list[float]
    by_hand: list[float]
    our_peak: int
    peak_by_hand: int

    @property
    def ratios(self) -> list[float]:
        return [ours / by_hand for ours, by_hand in zip(self.ours, self.by_hand, strict=True)]

    @property
    def time_ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def peak_ratio(self) -> float:
        return self.our_peak / self.peak_by_hand

    @property
    def reached(self) -> bool:
        return self.time_ratio <= TIME_TARGET and self.peak_ratio <= PEAK_TARGET


def make_step(kind: type[GPT], device: torch.device, batch_size: int) -> Callable[[], None]:
    """Return a function that takes one training step of a new model, seeded alike for every kind."""
    torch.manual_seed(0)
    model = kind().to(device)
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign] - there is no trainer to log to
    if kind is GPT:
        checkpoint_blocks(model, "full")
    sources = Sources(model.hparams["context"])
    batch = {key: value.to(device) for key, value in default_collate([sources[i] for i in range(batch_size)]).items()}
    optimizer = model.configure_optimizers()

    def step() -> None:
        model.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.losses.clear()

    return step


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step, the device's work included."""
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def peak(step: Callable[[], None], device: torch.device) -> int:
    """Return the highest bytes during one step; on the CPU, above what was there before."""
    if device.type != "cpu":
        reader = AcceleratorReader(device)
        before = torch.accelerator.memory_allocated(device)
        reader.reset_peak()
        step()
        return reader.peak() - before
    with AllocatorReader() as exact:
        step()
    return exact.peak()


def measure(device: torch.device, batch_size: int, repeats: int) -> Result:
    """Warm both models up, then time them in pairs, each first in every second pair."""
    pair = [make_step(kind, device, batch_size) for kind in (GPT, GPTByHand)]
    for step in pair * 3:
        step()
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            times[which].append(timed(pair[which], device))
    our_peak, peak_by_hand = (peak(step, device) for step in pair)
    return Result(ours=times[0], by_hand=times[1], our_peak=our_peak, peak_by_hand=peak_by_hand)


def interval(ratios: list[float], *, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median by resampling (percentile bootstrap)."""
    resampled = random.Random(0)
    medians = sorted(statistics.median(resampled.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{1000 * middle:.1f} ms (quartiles {1000 * low:.1f} to {1000 * high:.1f})"


def report(result: Result, device: torch.device, batch_size: int) -> str:
    """Return the result as a Markdown page."""
    low, high = interval(result.ratios)
    name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else platform.machine()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return f"""# The replaced forward against `torch.utils.checkpoint` by hand

The GPT example in its default configuration, batch size {batch_size}: {len(result.ours)} pairs of training steps, \
interleaved.

| | `checkpoint_blocks(model, "full")` | by hand | ratio | target |
| --- | --- | --- | --- | --- |
| step time, median | {spread(result.ours)} | {spread(result.by_hand)} | {result.time_ratio:.4f} \
(95 % interval {low:.4f} to {high:.4f}) | at most {TIME_TARGET} |
| peak of a step | {format_size(result.our_peak)} ({result.our_peak:,} bytes) | {format_size(result.peak_by_hand)} \
({result.peak_by_hand:,} bytes) | {result.peak_ratio:.4f} | at most {PEAK_TARGET:.2f} |

The time ratio is the median of the pairs' ratios; its interval is a percentile bootstrap over pairs.

- Targets {"reached" if result.reached else "NOT reached"}.
- Device: {device.type}, {name}, {torch.get_num_threads()} threads.
- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/overhead.py --batch-size {batch_size} --repeats {len(result.ours)}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="default 8, as the example starts")
    parser.add_argument("--repeats", type=int, default=60, help="pairs of steps, default 60")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    result = measure(device, args.batch_size, args.repeats)
    page = report(result, device, args.batch_size)
    print(page)
    if not args.no_write:
        path = ROOT / f"benchmarks/results/overhead_{device.type}_{datetime.date.today():%Y%m}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")
        print(f"written to {path.relative_to(ROOT)}")
    return 0 if result.reached else 1


if __name__ == "__main__":
    sys.exit(main())
