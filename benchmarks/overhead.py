"""What the replaced forward costs against calling `torch.utils.checkpoint` by hand in the model's own code.

    python benchmarks/overhead.py                  # prints, and writes benchmarks/results/overhead_<device>_<yyyymm>.md
    python benchmarks/overhead.py --repeats 20 --no-write

Copies of the GPT example in its default configuration take the same training steps in one process: one with
`checkpoint_blocks(model, "full")`, one that also compares every replayed value, one whose forward calls
`checkpoint(block, x, use_reentrant=False)`, that one again, which shows how far two equal models differ here by chance,
and the plain model for scale. The steps are interleaved in an order that turns, and each round gives one ratio, so that
a machine that slows down slows all. The peak is exact: every byte of the CPU allocator over one step, or the
accelerator's own counter.
"""

import argparse
import datetime
import itertools
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

from train_gpt import GPT, training  # noqa: E402 - the example's folder is known only now

TIME_TARGET, PEAK_TARGET = 1.02, 1.00


class GPTByHand(GPT):
    """The example as its owner would edit it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one of the models took: seconds of each round's step, and the bytes of a step's peak."""

    seconds: list[float]
    peak: int


@dataclass(frozen=True, kw_only=True)
class Result:
    ours: Arm
    values: Arm
    by_hand: Arm
    by_hand_again: Arm
    plain: Arm

    @property
    def reached(self) -> bool:
        time, peak = statistics.median(ratios(self.ours, self.by_hand)), self.ours.peak / self.by_hand.peak
        return time <= TIME_TARGET and peak <= PEAK_TARGET


def ratios(arm: Arm, other: Arm) -> list[float]:
    """Return the ratio of step times, round by round."""
    return [one / two for one, two in zip(arm.seconds, other.seconds, strict=True)]


def make_step(arm: str, device: torch.device, batch_size: int) -> Callable[[], None]:
    """Return a function that takes one training step of a new model, seeded alike for every arm."""
    torch.manual_seed(0)
    model = (GPTByHand if arm.startswith("by_hand") else GPT)().to(device)
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign] - there is no trainer to log to
    if arm in ("ours", "values"):
        checkpoint_blocks(model, "full", determinism_check="values" if arm == "values" else "default")
    rows = training(context=model.hparams["context"])[1].dataset
    batch = {key: value.to(device) for key, value in default_collate(rows[:batch_size]).items()}
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
    """Warm all models up, then time them in rounds, each of them first in turn."""
    steps = {arm: make_step(arm, device, batch_size) for arm in Result.__annotations__}
    for step in list(steps.values()) * 3:
        step()
    seconds: dict[str, list[float]] = {arm: [] for arm in steps}
    orders = list(itertools.permutations(steps))
    for repeat in range(repeats):
        for arm in orders[repeat % len(orders)]:
            seconds[arm].append(timed(steps[arm], device))
    return Result(**{arm: Arm(seconds=seconds[arm], peak=peak(steps[arm], device)) for arm in steps})


def interval(values: list[float], *, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median by resampling (percentile bootstrap)."""
    resampled = random.Random(0)
    medians = sorted(statistics.median(resampled.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def row(name: str, arm: Arm, other: Arm) -> str:
    """Return a table row: an arm's step time and peak, and both against another arm's."""
    low, middle, high = (1000 * quartile for quartile in statistics.quantiles(arm.seconds, n=4))
    against = ratios(arm, other)
    least, most = interval(against)
    return (
        f"| {name} | {middle:.1f} ms ({low:.1f} to {high:.1f}) | {statistics.median(against):.4f} ({least:.4f} to "
        f"{most:.4f}) | {format_size(arm.peak)} ({arm.peak:,} bytes) | {arm.peak / other.peak:.4f} |"
    )


def report(result: Result, device: torch.device, batch_size: int) -> str:
    """Return the result as a Markdown page."""
    name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else platform.machine()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return f"""# The replaced forward against `torch.utils.checkpoint` by hand

The GPT example in its default configuration, batch size {batch_size}: {len(result.ours.seconds)} rounds of one step \
each, interleaved.

| | step time, median (quartiles) | ratio to by hand (95 % interval) | peak of a step | ratio to by hand |
| --- | --- | --- | --- | --- |
{row('`checkpoint_blocks(model, "full")`', result.ours, result.by_hand)}
{row('the same, `determinism_check="values"`', result.values, result.by_hand)}
{row("by hand", result.by_hand, result.by_hand)}
{row("by hand, a second copy", result.by_hand_again, result.by_hand)}
{row("plain, no checkpointing", result.plain, result.by_hand)}

Targets, for the first row: time ratio at most {TIME_TARGET}, peak ratio at most {PEAK_TARGET:.2f}: \
{"reached" if result.reached else "NOT reached"}.

Time ratios are medians over rounds, their intervals a percentile bootstrap over rounds. On a CPU the peak is what the
step allocates above parameters and optimizer state.

- Device: {device.type}, {name}, {torch.get_num_threads()} threads.
- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/overhead.py --batch-size {batch_size} --repeats {len(result.ours.seconds)}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="default 8, as the example starts")
    parser.add_argument("--repeats", type=int, default=96, help="rounds of steps, default 96")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
