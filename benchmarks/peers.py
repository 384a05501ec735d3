"""Side by side with the peers: memory, time, and whether training and the model stay what they were.

    python benchmarks/peers.py                     # prints, and writes benchmarks/results/peers_cpu_<yyyymm>.*
    python benchmarks/peers.py --models GPT U-Net --rounds 10 --no-write
    python benchmarks/peers.py --draw benchmarks/results/peers_cpu_202611.json    # page and pictures again

Each way to treat a model has a fresh process of its own, with the same seed, batch and blocks. The processes take one
step each, in an order that turns, and each round gives one ratio to the plain model's step, so that a machine that
slows down slows all. Peaks are exact: the CPU allocator's every byte. `peer_setups.py` says how each is set up. Two
peers are in the extra `peers`; what is not installed is named below the table.
"""

import argparse
import copy
import datetime
import gc
import json
import multiprocessing
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import distributions
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from models import Workload
from peer_report import FULL, PLAIN, Arm, Results, Side, page, plot
from peer_setups import BUDGETS, SETUPS, SUBJECTS, NotHereError, Subject, tiny
from planner import timed, trained
from torch import Tensor, nn

from lightning_ckpt.memory import AllocatorReader, use_reader

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
# What every process needs, imported once in the one that all are forked from.
PRELOADED = ["torch._functorch.partitioners", "torch.distributed.fsdp", "scipy.optimize", "rich.table"]


def prepare(workload: Workload, name: str, budget: int) -> tuple[Arm, Callable[[], None]]:
    """Set a model up, measure its memory and what it computes, and return that with a function that trains a step."""
    torch.manual_seed(0)
    reader = AllocatorReader(limit=2**40)
    with reader, use_reader(reader):
        batch, model = workload.batch(), workload.make()
        subject = Subject(model, workload, batch, reader, budget)
        blocks = len(subject.blocks)
        SETUPS[name](subject)
        step = trained(model, workload, batch)
        for _ in range(3):  # buffers are learnt, optimizer state is made
            step()
        reader.reset_peak()
        step()
        peak = reader.peak()
        before = reader.current()
        loss = workload.loss(model, batch)
        kept = reader.current() - before
        loss.backward()
    del loss
    plain = like(model, workload)
    ours, theirs = observed(model, workload, batch), observed(plain, workload, batch)
    arm = Arm(
        name=name,
        blocks=blocks,
        budget=budget,
        peak=peak,
        kept=kept,
        gradients=(unequal(ours[0], theirs[0]), len(theirs[0])),
        buffers=(unequal(ours[1], theirs[1]), len(theirs[1])),
        keys=list(model.state_dict()) == list(plain.state_dict()),
        names=[one for one, _ in model.named_parameters()] == [one for one, _ in plain.named_parameters()],
        copies=copies(model, workload, batch),
    )
    model.zero_grad()
    return arm, step


def like(model: nn.Module, workload: Workload) -> nn.Module:
    """A plain model with the same weights and buffers."""
    plain = workload.make()
    pairs = zip(chain(plain.parameters(), plain.buffers()), chain(model.parameters(), model.buffers()), strict=True)
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs)
    return plain


def observed(model: nn.Module, workload: Workload, batch: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Losses and gradients of two forward and backward passes, and the buffers after them."""
    torch.manual_seed(1)
    seen: list[Tensor | None] = []
    for _ in range(2):  # the second pass draws its random numbers where the first one has left them
        model.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        seen += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    return seen, [buffer.clone() for buffer in model.buffers()]


def unequal(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> int:
    """How many are not equal bit for bit."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a is not b and (a is None or b is None or not torch.equal(a, b)) for a, b in pairs)


def copies(model: nn.Module, workload: Workload, batch: Any) -> str:
    """What is wrong with a deep copy; nothing if it trains its own weights and leaves the original alone.

    The copy must do what the model did when both had the same weights. The model's are smaller afterwards.
    """
    model.zero_grad()
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # whatever a peer's object says to being copied
        return type(error).__name__
    expected, before = observed(model, workload, batch)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    if unequal(observed(twin, workload, batch)[0], expected):
        return "runs the original's weights"
    if any(parameter.grad is not None for parameter in model.parameters()) or unequal(model.buffers(), before):
        return "changes the original"
    return ""


def work(connection: Connection, model: str, name: str, budget: int, small: bool) -> None:
    """Prepare one way to treat a model, then take a step whenever asked to, and tell its time."""
    torch.set_num_threads(1)
    try:
        arm, step = prepare(tiny(model) if small else SUBJECTS[model], name, budget)
    except NotHereError as error:
        connection.send(str(error))
    except ModuleNotFoundError as error:
        connection.send(f"not installed: no module {error.name}")
    except Exception as error:  # whatever a peer says to a model that it can't treat
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
    else:
        gc.collect()
        connection.send(arm)
        while connection.recv():
            connection.send(timed(step))


class Worker:
    """One way to treat a model, in a process of its own; `arm` is why it does not run, where it does not."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.seconds: list[float] = []

    def prepared(self) -> "Arm | str":
        self.arm: Arm | str = self.connection.recv()
        return self.arm

    def step(self) -> float:
        self.connection.send(True)
        return self.connection.recv()

    def close(self) -> None:
        if isinstance(self.arm, Arm):
            self.connection.send(False)
        self.process.join()


def measure(model: str, rounds: int, small: bool) -> Side:
    """All ways to treat one model."""
    workers = {name: Worker(model, name, 0, small) for name in SETUPS if name not in BUDGETS}
    peaks = {name: arm.peak for name, one in workers.items() if isinstance(arm := one.prepared(), Arm)}
    for name, share in BUDGETS.items():  # one by one: a plan is made by measured times
        budget = int(peaks[FULL] + share * (peaks[PLAIN] - peaks[FULL]))
        workers[name] = Worker(model, name, budget, small)
        workers[name].prepared()
    running = [name for name, one in workers.items() if isinstance(one.arm, Arm)]
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(running, len(running)):
            seconds = workers[name].step()
            if number:  # the first one warms up
                workers[name].seconds.append(round(seconds, 6))
    for one in workers.values():
        one.close()
    left_out = {name: one.arm for name, one in workers.items() if isinstance(one.arm, str)}
    arms = [Arm(**(asdict(workers[name].arm) | {"seconds": workers[name].seconds})) for name in running]
    return Side(model=model, arms=arms, left_out=left_out)


def environment(arguments: list[str]) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    here = {one.metadata["Name"].replace("-", "_"): one.version for one in distributions()}
    peers = "".join(f"{name} {here[name]}, " for name in ("transformers", "torch_remat", "ckptplan") if name in here)
    return {
        "device": f"cpu, {platform.machine()}, each process on one thread",
        "versions": f"torch {torch.__version__}, {peers}Python {platform.python_version()}, {platform.system()}",
        "commit": f"{commit.stdout.strip() or 'unknown'}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "command": " ".join(["python benchmarks/peers.py", *arguments]),
    }


def write(results: Results, path: Path) -> None:
    """Write the page and the pictures beside the numbers."""
    path.with_suffix(".md").write_text(page(results, path.stem), encoding="utf-8")
    for side in results.sides:
        plot(side, path.with_name(side.picture(path.stem)))
    print(f"written to {path.with_suffix('.md')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=SUBJECTS, default=list(SUBJECTS), help="which, default all")
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds of steps, default 12")
    parser.add_argument("--tiny", action="store_true", help="small models, for a try")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="write page and pictures of these numbers again")
    args = parser.parse_args()
    if args.draw:
        write(Results.from_json(json.loads(args.draw.read_text(encoding="utf-8"))), args.draw)
        return 0

    llama = ["transformers.models.llama.modeling_llama"] if "Llama" in args.models else []
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *llama])
    sides = []
    for model in args.models:
        sides.append(measure(model, args.rounds, args.tiny))
        print(sides[-1].table(), flush=True)
    results = Results(rounds=args.rounds, environment=environment(sys.argv[1:]), sides=sides)
    path = RESULTS / f"peers_cpu_{datetime.date.today():%Y%m}.json"
    if not args.no_write:
        path.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
        write(results, path)
    print(results.judged())
    return 0 if results.reached else 1


if __name__ == "__main__":
    sys.exit(main())
