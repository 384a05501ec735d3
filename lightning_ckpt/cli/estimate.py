"""`lightning-ckpt estimate`: will it fit, with which policy, and up to which batch size, before there is a device."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import (
    TRAINING_HELP,
    UsageError,
    add_blocks,
    check_precision,
    command_parser,
    in_options,
    print_json,
)
from lightning_ckpt.fitting import MOST
from lightning_ckpt.sizes import UNITS, format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from lightning_ckpt.cli._target import Target
    from lightning_ckpt.estimation import Estimate, StepMemory

_EXAMPLES = """\
  lightning-ckpt estimate examples/train_gpt.py:training --device-memory 8GiB
  lightning-ckpt estimate mypackage.training:make --device-memory 80GiB --precision bf16-mixed --ranks 8
  lightning-ckpt estimate mypackage.training:make --device-memory 80GiB --batch-sizes 1,2,4 --policies full --json
  lightning-ckpt estimate mypackage.training:make --device-memory 8GiB --device cpu --measure-kernels"""

_WHY_ALIKE = "the rows are equal, since no policy changes the blocks that are left alone: they run the same in each"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was estimated of a target; sizes in bytes.

    Attributes:
        target: as the user wrote it.
        memory: what the device has.
        usable: what of it a step may take.
        steps: those with each policy, by how it is written, and by rising batch size.
        largest: the largest batch size of each policy, by how it is written; empty where batches have no size.
        budgets: the bytes of each policy that is a memory budget, by how it is written.
        estimate: what was assumed, and what is not counted.
    """

    target: str
    memory: int
    usable: int
    steps: dict[str, list["StepMemory"]]
    largest: dict[str, int]
    budgets: dict[str, int]
    estimate: "Estimate"

    def fits(self, step: "StepMemory") -> bool:
        """Whether a step stays within what is usable."""
        return step.peak <= self.usable

    @property
    def anything_fits(self) -> bool:
        """Whether there is a policy and a batch size that fit."""
        return any(self.largest.values()) or any(self.fits(step) for steps in self.steps.values() for step in steps)

    def as_json(self) -> dict[str, Any]:
        """Everything, for JSON."""
        about = self.estimate.to_dict()
        del about["steps"]
        policies = [
            {
                "policy": written,
                "largest_batch_size": self.largest.get(written),
                "steps": [_step_as_json(step, self.fits(step)) for step in steps],
            }
            for written, steps in self.steps.items()
        ]
        known = {"target": self.target, "device_memory": self.memory, "usable_memory": self.usable}
        return {**known, **about, "policies": policies}


def _step_as_json(step: "StepMemory", fits: bool) -> dict[str, Any]:
    parts = asdict(step)
    del parts["policy"]
    return {**parts, "peak": step.peak, "fits": fits}


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("Estimate the memory of training steps, without a device and without memory.", _EXAMPLES)
    command.add_argument("target", metavar="TARGET", type=str, help=TRAINING_HELP)
    command.add_argument("--device-memory", type=str, required=True, metavar="SIZE", help="what there is, like 80GiB")
    command.add_argument(
        "--headroom", type=float, default=0.1, metavar="SHARE", help="share of the memory that is to stay free"
    )
    command.add_argument(
        "--policies",
        type=str,
        default="none,full,full:every=2,selective",
        metavar="LIST",
        help="by comma, each with its options after colons: full:segment_size=sqrt, selective:attention, auto:0.5",
    )
    command.add_argument(
        "--batch-sizes",
        type=str | None,
        default=None,
        metavar="LIST",
        help="by comma; left out: the batch's own, doubled",
    )
    add_blocks(command)
    command.add_argument(
        "--device", type=str, default="cuda", help="cuda or cpu: whose kernels and allocator to assume"
    )
    command.add_argument("--precision", type=str, default="32-true", help="of the Trainer, such as bf16-mixed")
    command.add_argument("--accumulate", type=int, default=1, metavar="N", help="the Trainer's accumulate_grad_batches")
    command.add_argument("--ranks", type=int, default=1, metavar="N", help="how many share parameters and their state")
    command.add_argument(
        "--measure-kernels",
        action="store_true",
        help="run each operator once for real on --device, to count what its kernel takes for itself",
    )
    return command


def run(options: Namespace) -> int:
    """Estimate and report; return 0, or 1 when nothing fits."""
    _check(options)
    answer = _answer(options)
    if options.json:
        print_json(answer.as_json())
    else:
        from rich.console import Console

        Console().print(table(answer))
    return 0 if answer.anything_fits else 1


def _answer(options: Namespace) -> Answer:
    from lightning_ckpt.cli._budgeted import largest_of, step_of, to_estimate
    from lightning_ckpt.cli._policies import PLAIN, parse_policies
    from lightning_ckpt.cli._said import LEFT_ALONE, doing, warnings_once
    from lightning_ckpt.cli._target import load_target
    from lightning_ckpt.policies import MemoryBudget

    memory, sizes = _memory(options.device_memory), _batch_sizes(options.batch_sizes)
    usable = int(memory * (1 - options.headroom))
    policies = {written: policy or PLAIN for written, policy in parse_policies(options.policies).items()}
    check_precision(options.precision)
    target = load_target(options.target, configure=False)
    _check_model(target)
    batch = target.batch()
    try:
        with doing("running steps on fake tensors"), warnings_once() as said:
            estimates = _estimates(options, target.model, batch, to_estimate(policies.values()), sizes)
            largest = estimates[0].max_batch_size(usable) if estimates[0].steps[0].batch_size else {}
    except Exception as error:  # whatever goes wrong in the user's code is theirs to read in one line
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UsageError(f"{options.target}: {kind}{in_options(str(error))}") from error
    if len(policies) > 1 and any(text.startswith(LEFT_ALONE) for text in said) and _alike(estimates[0]):
        print(f"lightning-ckpt: {_WHY_ALIKE}", file=sys.stderr)
    sized = policies if largest else {}
    return Answer(
        target=options.target,
        memory=memory,
        usable=usable,
        steps={written: [step_of(policy, one, memory) for one in estimates] for written, policy in policies.items()},
        largest={name: largest_of(policy, largest, memory=memory, usable=usable) for name, policy in sized.items()},
        budgets={name: policy.nbytes(memory) for name, policy in policies.items() if isinstance(policy, MemoryBudget)},
        estimate=estimates[-1],
    )


def _check(options: Namespace) -> None:
    """Refuse what can be refused before PyTorch is imported and a model is made."""
    if not 0 <= options.headroom < 1:
        raise UsageError(f"--headroom {options.headroom}: accepted is a share from 0 to below 1")
    if options.device not in ("cuda", "cpu"):
        raise UsageError(f"--device {options.device}: accepted are cuda and cpu")
    for name in ("accumulate", "ranks"):
        if options[name] < 1:
            raise UsageError(f"--{name} {options[name]}: accepted is a whole number of at least 1")


def _check_model(target: "Target") -> None:
    if getattr(target.model, "automatic_optimization", True) is False:
        raise UsageError(
            f"{target.name}: {type(target.model).__name__} optimizes by hand, so its training_step gives no one loss "
            f"to estimate: measure it instead: lightning-ckpt compare {target.name}"
        )


def _alike(estimate: "Estimate") -> bool:
    """Whether every policy has the same peak."""
    return len({step.peak for step in estimate.steps}) == 1


def _estimates(
    options: Namespace, model: "nn.Module", batch: Any, policies: list[Any], sizes: list[int]
) -> tuple["Estimate", ...]:
    """One estimate for each batch size; the model is copied once."""
    from lightning_ckpt.estimation import estimate_memory

    how = {name: options[name] for name in ("blocks", "precision", "accumulate", "ranks", "device")}
    how["workspaces"] = "measure" if options.measure_kernels else "uncounted"
    first = estimate_memory(model, batch, policy=policies, batch_size=sizes[0] if sizes else None, **how)
    own = first.steps[0].batch_size
    further = sizes[1:] or ([own * times for times in (2, 4, 8)] if own and not sizes else [])
    return first, *(first.at(size) for size in further)


def _memory(text: str) -> int:
    try:
        return parse_size(text, name="--device-memory")
    except ValueError as error:
        raise UsageError(str(error)) from error


def _batch_sizes(text: str | None) -> list[int]:
    """The sizes of a list by comma, rising; none where there is no list."""
    words = [word.strip() for word in text.split(",")] if text is not None else []
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--batch-sizes {text}: give whole numbers of at least 1 by comma, like 1,2,4")
    return sorted({int(word) for word in words})


def table(answer: Answer) -> "Table":
    """Policies by batch sizes, for a person."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lightning_ckpt.printed import as_it_is

    about = answer.estimate
    peaks = [step.peak for steps in answer.steps.values() for step in steps]
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if UNITS[unit] <= max(peaks))
    ranks = f", each of {about.ranks} ranks" if about.ranks > 1 else ""
    title = as_it_is(f"{answer.target}: peak of a step in {unit}, {about.precision}{ranks}")
    shown = Table(title=title, box=SIMPLE_HEAD)
    shown.add_column("policy")
    for step in next(iter(answer.steps.values())):
        size = step.batch_size
        shown.add_column(f"batch {size}" if size else "the batch", justify="right", no_wrap=True)
    if answer.largest:
        shown.add_column("largest batch", justify="right")
    for written, steps in answer.steps.items():
        cells = [f"{step.peak / UNITS[unit]:.4g} {'✓' if answer.fits(step) else '✗'}" for step in steps]
        shown.add_row(written, *cells, *([_largest(answer.largest[written])] if answer.largest else []))
    shown.caption = f"✓ stays within {format_size(answer.usable)} of {format_size(answer.memory)}"
    for written, budget in answer.budgets.items():
        shown.caption += f"\n{written}: up to its budget of {format_size(budget)} where full fits in it"
    if about.uncounted:
        shown.caption += f"\nnot counted: what the kernels of {', '.join(about.uncounted)} take for themselves"
    return shown


def _largest(size: int) -> str:
    return "any" if size == MOST else str(size) if size else "none"
