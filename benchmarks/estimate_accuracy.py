"""How far the estimated peak of a training step is from the real one, on a CPU, where the real one is exact.

    python benchmarks/estimate_accuracy.py    # prints, and writes benchmarks/results/estimate_accuracy_cpu_<yyyymm>.md
    python benchmarks/estimate_accuracy.py --no-write

Every model of the tests' collection, with its batch made 128 times as large, and larger Transformers; each with every
policy, in float32 and in bf16-mixed. Estimated: `estimate_memory`, on fake tensors alone and with kernels measured.
Real: the highest running sum of the CPU allocator's own events, from before the model is built, over the third of three
steps with AdamW.
"""

import argparse
import datetime
import logging
import platform
import statistics
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_ckpt import Full, checkpoint_blocks, estimate_memory
from lightning_ckpt.estimation import Estimate
from lightning_ckpt.fake_copy import CannotEstimate
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Policy
from lightning_ckpt.sizes import format_size

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from zoo import GPT, ZOO, Specimen  # noqa: E402 - the tests' folder is known only now

POLICIES: tuple[str | Policy, ...] = ("none", "full", Full(every=2), Full(segment_size="sqrt"), "selective")
LARGER, STEPS = 128, 3
PRECISIONS = ("32-true", "bf16-mixed")
MEDIAN_TARGET, WORST_TARGET = 0.01, 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one policy; peaks in bytes."""

    model: str
    precision: str
    policy: str
    fake: int
    measured: int
    real: int
    uncounted: tuple[str, ...]

    @property
    def error(self) -> float:
        """How far the estimate with measured kernels is off, as a share of the real peak."""
        return abs(self.measured - self.real) / self.real

    @property
    def error_of_fake(self) -> float:
        """How far the estimate on fake tensors alone is off, as a share of the real peak."""
        return abs(self.fake - self.real) / self.real


def enlarged(specimen: Specimen) -> Specimen:
    """Return a specimen with a larger batch, so that activations are more than a rounding error."""

    def batch() -> Tensor:
        one = specimen.batch()
        return one.repeat(LARGER, *[1] * (one.dim() - 1))

    return replace(specimen, batch=batch)


def specimens() -> dict[str, Specimen]:
    """Return every model that is measured, by name."""
    large = {
        f"gpt, {width} wide, {depth} deep": replace(
            ZOO["gpt"],
            build=lambda width=width, depth=depth: GPT(depth=depth, width=width),
            batch=lambda: torch.randint(0, 50, (16, 64)),
        )
        for width, depth in ((128, 8), (256, 16))
    }
    return {name: enlarged(specimen) for name, specimen in ZOO.items()} | large


def real_peak(specimen: Specimen, policy: str | Policy, precision: str) -> int:
    """Return the highest bytes of the CPU allocator in the last of some steps, all that the run has allocated."""
    mixed = precision == "bf16-mixed"
    torch.manual_seed(0)
    with AllocatorReader() as reader:
        model, batch = specimen.build().train(), specimen.batch()
        optimizer = torch.optim.AdamW(model.parameters())
        if policy != "none":
            checkpoint_blocks(model, policy, blocks=specimen.blocks)
        for number in range(STEPS):
            if number == STEPS - 1:
                reader.reset_peak()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = specimen.loss(model, batch)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return reader.peak()


def measure(name: str, specimen: Specimen, precision: str) -> list[Case]:
    """Return a model's cases, none where it can't be estimated."""
    try:
        fake, measured = (_estimate(specimen, precision, how) for how in ("uncounted", "measure"))
    except CannotEstimate as why:
        print(f"{name}: {why}", file=sys.stderr)
        return []
    return [
        Case(
            model=name,
            precision=precision,
            policy=one.policy,
            fake=one.peak,
            measured=other.peak,
            real=real_peak(specimen, policy, precision),
            uncounted=fake.uncounted,
        )
        for one, other, policy in zip(fake.steps, measured.steps, POLICIES, strict=True)
    ]


def _estimate(specimen: Specimen, precision: str, workspaces: Literal["uncounted", "measure"]) -> Estimate:
    torch.manual_seed(0)
    return estimate_memory(
        specimen.build(),
        specimen.batch(),
        specimen.loss,
        policy=POLICIES,
        optimizer=torch.optim.AdamW,
        blocks=specimen.blocks,
        precision=precision,
        workspaces=workspaces,
    )


def row(case: Case) -> str:
    """Return a table row."""
    shares = f"{case.fake / case.real:.4f} | {case.measured / case.real:.4f}"
    about = f"{case.model} | {case.precision} | `{case.policy}` | {format_size(case.real)}"
    return f"| {about} | {shares} | {', '.join(case.uncounted)} |"


def summary(errors: list[float]) -> str:
    """Return the median and the worst error in words."""
    return f"median {statistics.median(errors):.2%}, worst {max(errors):.2%}, of {len(errors)} cases"


def reached(cases: list[Case]) -> bool:
    """Tell whether estimates with measured kernels are as close as they are to be."""
    errors = [case.error for case in cases]
    return statistics.median(errors) <= MEDIAN_TARGET and max(errors) <= WORST_TARGET


def report(cases: list[Case], left_out: list[str]) -> str:
    """Return the result as a Markdown page."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return f"""# Estimated peaks against the CPU allocator's

One training step and one step of AdamW: `estimate_memory` against the highest running sum of the allocator's events.

- Error with measured kernels (`workspaces="measure"`): {summary([case.error for case in cases])}. Targets, median \
{MEDIAN_TARGET:.0%} and worst {WORST_TARGET:.0%}: {"reached" if reached(cases) else "NOT reached"}.
- Error on fake tensors alone, where no kernel is named that takes memory of its own: \
{summary([case.error_of_fake for case in cases if not case.uncounted])}.
- Error on fake tensors alone, where one is named: \
{summary([case.error_of_fake for case in cases if case.uncounted])}.
- Left out, since what they run depends on values: {", ".join(left_out) or "none"}.

| model | precision | policy | real | fake / real | measured / real | kernels with memory of their own |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(map(row, cases))}

Batches of the small models are {LARGER} times those of the tests. What is missing from checkpointed models' estimates
with measured kernels is the random state of each block's call, {torch.get_rng_state().nbytes:,} bytes of host memory \
that its replay starts from.

- Device: cpu, {platform.machine()}, {torch.get_num_threads()} thread(s).
- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `OMP_NUM_THREADS=1 python benchmarks/estimate_accuracy.py`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries that a model is built with
    logging.getLogger("lightning_ckpt").setLevel(logging.ERROR)

    models = specimens()
    measured = {
        name: [case for precision in PRECISIONS for case in measure(name, specimen, precision)]
        for name, specimen in models.items()
    }
    cases = [case for of_one in measured.values() for case in of_one]
    page = report(cases, [name for name, of_one in measured.items() if not of_one])
    print(page)
    if not args.no_write:
        path = ROOT / f"benchmarks/results/estimate_accuracy_cpu_{datetime.date.today():%Y%m}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")
        print(f"written to {path.relative_to(ROOT)}")
    return 0 if reached(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
