"""What a memory budget costs in time, against every rule set by hand that meets it, and how near the peak comes to it.

    python benchmarks/planner.py                  # prints, and writes benchmarks/results/planner_<device>_<yyyymm>.md
    python benchmarks/planner.py --models U-Net --processes 2 --no-write

Each model of `benchmarks/models.py` trains under `MemoryBudget` at 25, 50 and 75 % of the way from the peak of full
checkpointing to that of none, until its plan stands. Copies of the model then take the same steps, interleaved in an
order that turns: with the plan, with `Full()`, with the largest `Full(every=k)` whose peak meets the budget, with
PyTorch's own selective checkpointing and its default list of operators where that meets it, and plain. The extra time
of a step is its time less that of the plain one of the same round. All of that is done in several processes, since
where a process happens to have its memory makes one copy faster than another for as long as it lives. Peaks are exact:
the CPU allocator's every byte.
"""

import argparse
import copy
import datetime
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import WORKLOADS, Workload
from torch import nn
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_ckpt import Full, MemoryBudget, checkpoint_blocks, find_blocks
from lightning_ckpt.budget_loop import BudgetLoop
from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.memory import AllocatorReader, Interval, MemoryReader, use_reader
from lightning_ckpt.recompute import CheckpointedBlocks

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = (0.25, 0.5, 0.75)
MIB = 2**20


@dataclass
class Arm:
    """One way to treat a copy of the model: what it takes."""

    name: str
    step: Callable[[], None]
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Settled:
    """How the loop came to its plan."""

    plan: BudgetPlan
    predicted: int
    measured: int
    steps: int


def trained(model: nn.Module, workload: Workload, batch: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_of(step: Callable[[], None], reader: AllocatorReader, warm: int = 2) -> int:
    """The peak of a step, after some that learn buffers and make optimizer state."""
    for _ in range(warm):
        step()
    interval = Interval(reader)
    interval.reset_peak()
    step()
    return interval.peak()


def settle(
    handle: CheckpointedBlocks,
    model: nn.Module,
    workload: Workload,
    batch: Any,
    budget: int,
    reader: MemoryReader,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str = "cpu",
) -> Settled:
    """Train under a budget until the plan stands, and leave it in place."""
    predicted: int | None = None
    with BudgetLoop(handle, model, MemoryBudget(budget), optimizers=[optimizer], device=device) as loop:
        for steps in range(8):  # noqa: B007 - told below
            interval = Interval(reader)
            interval.reset_peak()
            loop.begin_batch()
            workload.loss(model, batch).backward()
            loop.end_backward()
            optimizer.step()
            optimizer.zero_grad()
            measured = interval.peak()
            if predicted is None and any(loop.choices):
                predicted, first = loop.predicted, measured
            loop.end_step()
            if loop.plan:
                break
        assert loop.plan is not None
        return Settled(loop.plan, predicted or measured, first if predicted else measured, steps)


def selective(model: nn.Module, workload: Workload) -> nn.Module:
    """PyTorch's selective checkpointing by hand, with its default list of operators to keep."""
    listed = get_default_op_list().compute_intensive_ops
    overloads = [getattr(packet, name) for packet in listed for name in packet.overloads()]
    contexts = partial(create_selective_checkpoint_contexts, overloads)
    for _, block in find_blocks(model, workload.blocks):
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )
    return model


def timed(step: Callable[[], None]) -> float:
    """The time of one step: of this thread alone, which does all the work, so that other processes do not count."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


@dataclass(frozen=True)
class Measured:
    """One model at one budget, in one process.

    Attributes:
        extra: for each arm but the plain one, its extra seconds in each round.
        peaks: for each arm, the bytes of a step's peak.
    """

    budget: int
    settled: Settled
    extra: dict[str, list[float]]
    peaks: dict[str, int]


@dataclass(frozen=True)
class Result:
    """One model at one budget, in several processes."""

    model: str
    fraction: float
    runs: list[Measured]

    @property
    def budget(self) -> int:
        return self.runs[0].budget

    @property
    def worst(self) -> Measured:
        """The process whose plan took most of its budget."""
        return max(self.runs, key=lambda run: run.peaks["auto"] / run.budget)

    @property
    def off(self) -> float:
        """How far the first prediction of the peak was off, where it was farthest."""
        return max((run.settled.predicted / run.settled.measured - 1 for run in self.runs), key=abs)

    @property
    def rivals(self) -> list[str]:
        """The arms that meet the budget in every process, ours left out."""
        return [name for name in self.runs[0].extra if name != "auto" and all(name in run.extra for run in self.runs)]

    def median(self, arm: str) -> float:
        return statistics.median(seconds for run in self.runs for seconds in run.extra[arm])

    @property
    def best_rival(self) -> str:
        return min(self.rivals, key=self.median)

    @property
    def difference(self) -> tuple[float, float]:
        """Seconds by which ours is slower than the best rival: the 95 % interval of the median of all rounds."""
        rival = self.best_rival
        return interval_of(
            [[a - b for a, b in zip(run.extra["auto"], run.extra[rival], strict=True)] for run in self.runs]
        )


def interval_of(groups: list[list[float]], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median over groups of values, by the bootstrap of groups and of values within each.

    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    """
    chance = random.Random(0)
    medians = sorted(
        statistics.median(
            value for group in chance.choices(groups, k=len(groups)) for value in chance.choices(group, k=len(group))
        )
        for _ in range(draws)
    )
    return medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]


def measured(name: str, fraction: float, rounds: int) -> Measured:
    """Measure a model at a budget in this process."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    reader = AllocatorReader(limit=2**40)
    with reader, use_reader(reader):
        batch = workload.batch()
        model = workload.make()
        base = reader.current()

        def arm(label: str, apply: Callable[[nn.Module], Any]) -> Arm:
            before = reader.current()
            twin = copy.deepcopy(model)
            apply(twin)
            made = Arm(label, trained(twin, workload, batch))
            made.peak = peak_of(made.step, reader) - before + base
            return made

        arms = {"plain": arm("plain", lambda twin: None)}
        arms["full"] = arm("full", lambda twin: checkpoint_blocks(twin, Full(), blocks=workload.blocks))
        budget = int(arms["full"].peak + fraction * (arms["plain"].peak - arms["full"].peak))
        for k in range(len(find_blocks(model, workload.blocks)), 1, -1):
            every = arm(f"every={k}", lambda twin, k=k: checkpoint_blocks(twin, Full(every=k), blocks=workload.blocks))
            if every.peak <= budget:
                arms["every"] = every
                break
        arms["selective"] = arm("selective", lambda twin: selective(twin, workload))
        before = reader.current()
        twin = copy.deepcopy(model)
        handle = checkpoint_blocks(twin, "auto", blocks=workload.blocks)
        optimizer = torch.optim.AdamW(twin.parameters())
        settled = settle(handle, twin, workload, batch, budget + before - base, reader, optimizer)
        del optimizer
        ours = Arm("auto", trained(twin, workload, batch))
        ours.peak = peak_of(ours.step, reader) - before + base
        arms["auto"] = ours
        settled = Settled(
            settled.plan, settled.predicted - before + base, settled.measured - before + base, settled.steps
        )
    names = [label for label, one in arms.items() if one.peak <= budget or label in ("plain", "auto")]
    order = random.Random(0)
    for label in names * 2:
        arms[label].step()
    for _ in range(rounds):
        order.shuffle(names)
        for label in names:
            arms[label].seconds.append(timed(arms[label].step))
    plain = arms["plain"].seconds
    extra = {
        label: [mine - theirs for mine, theirs in zip(arms[label].seconds, plain, strict=True)]
        for label in names
        if label != "plain"
    }
    peaks = {arms[label].name: arms[label].peak for label in arms}
    return Measured(budget, settled, {arms[k].name: v for k, v in extra.items()}, peaks)


def measure(name: str, fraction: float, processes: int, rounds: int) -> Result:
    """Measure a model at a budget in so many fresh processes, one after the other."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return Result(name, fraction, pool.starmap(measured, [(name, fraction, rounds)] * processes, chunksize=1))


def row(result: Result) -> str:
    ours, theirs = result.median("auto"), result.median(result.best_rival)
    worst = result.worst
    peak = worst.peaks["auto"]
    others = ", ".join(f"{name} {1e3 * result.median(name):.1f}" for name in result.rivals)
    low, high = (1e3 * end for end in result.difference)
    steps = max(run.settled.steps for run in result.runs)
    return (
        f"| {result.model} | {result.fraction:.0%} | {result.budget / MIB:.1f} | {peak / MIB:.1f} "
        f"({peak / worst.budget:.1%}) | {result.off:+.1%} | {steps} | {1e3 * ours:.1f} | {others} "
        f"| {ours / theirs:.2f} | {low:+.1f} to {high:+.1f} |"
    )


def report(results: list[Result], processes: int, rounds: int) -> str:
    errors = [abs(one.off) for one in results]
    within = all(run.peaks["auto"] <= run.budget for one in results for run in one.runs)
    ratios = [(WORKLOADS[one.model].uneven, one.median("auto") / one.median(one.best_rival)) for one in results]
    uneven = [ratio for is_uneven, ratio in ratios if is_uneven]
    even = [ratio for is_uneven, ratio in ratios if not is_uneven]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    rows = "\n".join(map(row, results))
    slower = [f"{one.model} {one.fraction:.0%}" for one in results if one.difference[0] > 0]
    faster = sum(one.difference[1] < 0 for one in results)
    return f"""# What a memory budget costs in time

Six models at budgets of 25, 50 and 75 % of the way from the peak of full checkpointing to that of none. `extra` is the
time of a step beyond the plain one, the median of {rounds} interleaved rounds in each of {processes} processes, in
ms. The ratio is ours over the best rule set by hand that meets the budget, and the last column the difference of the
two, in ms: the 95 % interval of its median, by the bootstrap of processes and of the rounds of each. Peaks,
predictions and steps are those of the process where they were worst.

| model | budget | MiB | peak, MiB (of budget) | first prediction | settled in step | extra | by hand | ratio | slower |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

- Peaks at or under the budget in every one: {"yes" if within else "NO"}.
- First prediction of the peak against the measured one: {statistics.median(errors):.1%} off (median), \
{max(errors):.1%} (worst).
- Extra time against the best by hand, uneven models: {statistics.median(uneven):.2f} (median), {max(uneven):.2f} \
(worst); even models: {statistics.median(even) if even else float("nan"):.2f} (median), \
{max(even) if even else float("nan"):.2f} (worst).

- Beyond noise, of {len(results)}: faster than the best by hand in {faster}, slower in {", ".join(slower) or "none"}.

- Device: cpu, {platform.machine()}, 1 thread.
- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}.
- Commit {commit.stdout.strip() or "unknown"}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.
- Made by `python benchmarks/planner.py --processes {processes} --rounds {rounds}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(WORKLOADS), help="which models, default all")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for each budget, default 5")
    parser.add_argument("--rounds", type=int, default=8, help="interleaved rounds of steps in each, default 8")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    results = []
    for name in args.models:
        for fraction in FRACTIONS:
            results.append(measure(name, fraction, args.processes, args.rounds))
            print(row(results[-1]), flush=True)
    page = report(results, args.processes, args.rounds)
    print(page)
    if not args.no_write:
        path = ROOT / f"benchmarks/results/planner_cpu_{datetime.date.today():%Y%m}.md"
        path.write_text(page, encoding="utf-8")
        print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
