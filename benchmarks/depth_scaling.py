"""How the activation peak of a deep, thin chain grows with its depth: plain, block by block, and in segments.

    python benchmarks/depth_scaling.py       # prints, writes benchmarks/results/depth_scaling_cpu_<yyyymm>.md and .png
    python benchmarks/depth_scaling.py --no-write

Each block is a Linear and a Tanh. It keeps one tensor, tanh's result, which is also the next block's input: the
boundary is as large as what a block keeps inside, so that block-by-block checkpointing saves nothing, and segments
are all that helps. The peak is exact: the running sum of the CPU allocator's own events over one step, above
what is held before it, with parameter gradients held already. `theory.py` says what to expect.
"""

import argparse
import datetime
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_ckpt import Full, checkpoint_blocks
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.sizes import format_size
from lightning_ckpt.theory import Chain

ROOT = Path(__file__).resolve().parent.parent
DEPTHS = (16, 32, 64, 128, 256)
WIDTH, ROWS = 16, 8192
OF_PLAIN, OF_SINGLE, EXPONENT, AT_DEPTH = 0.30, 0.60, 0.60, 64


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Activation peaks of one depth, in bytes, and the blocks a segment of the square root spans."""

    depth: int
    span: int
    plain: int
    single: int
    root: int

    @property
    def expected(self) -> int:
        """Bytes that the textbook model gives for segments of the square root."""
        return Chain(
            layers=self.depth, segments=math.ceil(self.depth / self.span), activation_bytes=tensor_bytes()
        ).peak_bytes


def tensor_bytes() -> int:
    """Return the bytes of one block's result."""
    return ROWS * WIDTH * torch.float32.itemsize


def peak(depth: int, policy: Full | None) -> int:
    """Return the activation peak of one step, in bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)])
    if policy:
        checkpoint_blocks(model, policy)
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    with AllocatorReader() as reader:
        model(x).sum().backward()
    return reader.peak()


def measure(depth: int) -> Peaks:
    """Return the three peaks of a chain of `depth` blocks."""
    root = Full(segment_size="sqrt")
    return Peaks(
        depth=depth,
        span=root.span(depth),
        plain=peak(depth, None),
        single=peak(depth, Full()),
        root=peak(depth, root),
    )


def exponent(depths: Sequence[int], peaks: Sequence[int]) -> float:
    """Return b of the least-squares fit peak = a * depth ** b."""
    x, y = [math.log(depth) for depth in depths], [math.log(peak) for peak in peaks]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


@dataclass(frozen=True, kw_only=True)
class Result:
    rows: list[Peaks]

    def grows(self, arm: str) -> float:
        """Return the exponent by which an arm's peak grows with depth."""
        return exponent([row.depth for row in self.rows], [getattr(row, arm) for row in self.rows])

    @property
    def judged(self) -> Peaks:
        return next(row for row in self.rows if row.depth == AT_DEPTH)

    @property
    def reached(self) -> bool:
        at = self.judged
        return at.root <= OF_PLAIN * at.plain and at.root <= OF_SINGLE * at.single and self.grows("root") <= EXPONENT


def line(row: Peaks) -> str:
    return (
        f"| {row.depth} | {format_size(row.plain)} | {format_size(row.single)} | {row.span} | "
        f"{format_size(row.root)} ({row.root / tensor_bytes():.2f} tensors) | "
        f"{format_size(row.expected)} ({row.expected // tensor_bytes()} tensors) | "
        f"{row.root / row.plain:.1%} | {row.root / row.single:.1%} |"
    )


def report(result: Result, picture: str) -> str:
    """Return the result as a Markdown page."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    lines = "\n".join(map(line, result.rows))
    return f"""# Activation peak against depth: a deep, thin chain

Blocks of `Linear({WIDTH}, {WIDTH})` and `Tanh` on {ROWS} rows: one result is {format_size(tensor_bytes())}.

| blocks | plain | `Full()` | blocks a segment | `Full(segment_size="sqrt")` | expected of it | of plain | of `Full()` |
| --- | --- | --- | --- | --- | --- | --- | --- |
{lines}

The peak grows with depth to the power of {result.grows("plain"):.3f} plain, {result.grows("single"):.3f} with \
`Full()`, and {result.grows("root"):.3f} with segments (least-squares fit of log peak on log depth).

Targets: at {AT_DEPTH} blocks at most {OF_PLAIN:.0%} of plain and {OF_SINGLE:.0%} of `Full()`, and an exponent of at \
most {EXPONENT}: {"reached" if result.reached else "NOT reached"}.

![The three peaks against depth, on logarithmic axes]({picture})

Expected is the textbook model's n / s + 1 + s tensors (`lightning_ckpt/theory.py`; Chen et al. 2016, section 4.1).
It counts the chain's input, which is held before the step and so is no part of the measured peak. The peak of one step
is exact and does not vary: it is counted from the allocator's own events, above what is held before the step.

- Device: cpu, {platform.machine()}.
- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/depth_scaling.py`.
"""


def plot(result: Result, path: Path) -> None:
    """Draw the three peaks against depth, both axes logarithmic, with each fit's exponent."""
    from matplotlib.figure import Figure  # only here: a run that writes nothing needs no matplotlib

    depths = [row.depth for row in result.rows]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    # Plain and Full() coincide: the one is drawn thick under the other.
    for arm, label, style, width in (
        ("plain", "plain", "o-", 6),
        ("single", "Full()", "s--", 2),
        ("root", "sqrt", "^-", 2),
    ):
        mib = [getattr(row, arm) / 2**20 for row in result.rows]
        axes.loglog(depths, mib, style, linewidth=width, label=f"{label}: depth^{result.grows(arm):.2f}")
    axes.loglog(depths, [row.expected / 2**20 for row in result.rows], "k:", label="n/s + 1 + s tensors")
    axes.set(xlabel="blocks", ylabel="activation peak (MiB)", xticks=depths, xticklabels=list(map(str, depths)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()

    result = Result(rows=[measure(depth) for depth in DEPTHS])
    path = ROOT / f"benchmarks/results/depth_scaling_cpu_{datetime.date.today():%Y%m}.md"
    page = report(result, path.with_suffix(".png").name)
    print(page)
    if not args.no_write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")
        plot(result, path.with_suffix(".png"))
        print(f"written to {path.relative_to(ROOT)}")
    return 0 if result.reached else 1


if __name__ == "__main__":
    sys.exit(main())
