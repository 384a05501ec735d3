"""`lightning-ckpt estimate`: will it fit, with which policy, and up to which batch size, before there is a device."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import TRAINING_HELP, UsageError, command_parser, print_json
from lightning_ckpt.fitting import MOST
from lightning_ckpt.sizes import UNITS, format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from lightning_ckpt.estimation import Estimate, StepMemory

_EXAMPLES = """\
  lightning-ckpt estimate examples/train_gpt.py:training --device-memory 8GiB
  lightning-ckpt estimate mypackage.training:make --device-memory 80GiB --precision bf16-mixed --ranks 8
  lightning-ckpt estimate mypackage.training:make --device-memory 80GiB --batch-sizes 1,2,4 --policies full --json"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was estimated of a target; sizes in bytes.

    Attributes:
        target: as the user wrote it.
        memory: what the device has.
        usable: what of it a step may take.
        policies: how each policy is written, and its name in the estimates.
        estimates: one for each batch size.
        largest: the largest batch size of each policy, by how it is written; empty where batches have no size.
    """

    target: str
    memory: int
    usable: int
    policies: dict[str, str]
    estimates: tuple["Estimate", ...]
    largest: dict[str, int]

    def steps(self, written: str) -> list["StepMemory"]:
        """The steps with a policy, by rising batch size."""
        return [estimate[self.policies[written]] for estimate in self.estimates]

    def fits(self, step: "StepMemory") -> bool:
        """Whether a step stays within what is usable."""
        return step.peak <= self.usable

    @property
    def anything_fits(self) -> bool:
        """Whether there is a policy and a batch size that fit."""
        return any(self.largest.values()) or any(self.fits(step) for name in self.policies for step in self.steps(name))

    def as_json(self) -> dict[str, Any]:
        """Everything, for JSON."""
        about = self.estimates[0].to_dict()
        del about["steps"]
        policies = [
            {
                "policy": written,
                "largest_batch_size": self.largest.get(written),
                "steps": [_step_as_json(step, self.fits(step)) for step in self.steps(written)],
            }
            for written in self.policies
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
        help="by comma, each with its options after colons, as in full:segment_size=sqrt, selective:attention",
    )
    command.add_argument(
        "--batch-sizes",
        type=str | None,
        default=None,
        metavar="LIST",
        help="by comma; left out: the batch's own, doubled",
    )
    command.add_argument(
        "--blocks",
        action="append",
        metavar="CLASS|GLOB",
        help="a class name or a glob on qualified names, again for more; left out: the repeated blocks are found",
    )
    command.add_argument(
        "--device", type=str, default="cuda", help="cuda or cpu: whose kernels and allocator to assume"
    )
    command.add_argument("--precision", type=str, default="32-true", help="of the Trainer, such as bf16-mixed")
    command.add_argument("--accumulate", type=int, default=1, metavar="N", help="the Trainer's accumulate_grad_batches")
    command.add_argument("--ranks", type=int, default=1, metavar="N", help="how many share parameters and their state")
    return command


def run(options: Namespace) -> int:
    """Estimate and report; return 0, or 1 when nothing fits."""
    answer = _answer(options)
    if options.json:
        print_json(answer.as_json())
    else:
        from rich.console import Console

        Console().print(table(answer))
    return 0 if answer.anything_fits else 1


def _answer(options: Namespace) -> Answer:
    from lightning_ckpt.cli._policies import PLAIN, parse_policies
    from lightning_ckpt.cli._target import load_target

    memory, sizes = _memory(options.device_memory), _batch_sizes(options.batch_sizes)
    if not 0 <= options.headroom < 1:
        raise UsageError(f"--headroom {options.headroom}: accepted is a share from 0 to below 1")
    usable = int(memory * (1 - options.headroom))
    policies = {written: policy or PLAIN for written, policy in parse_policies(options.policies).items()}
    target = load_target(options.target, configure=False)
    batch = target.batch()
    try:
        estimates = _estimates(options, target.model, batch, list(policies.values()), sizes)
        largest = estimates[0].max_batch_size(usable) if estimates[0].steps[0].batch_size else {}
    except Exception as error:  # whatever goes wrong in the user's code is theirs to read in one line
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UsageError(f"{options.target}: {kind}{error}") from error
    return Answer(
        target=options.target,
        memory=memory,
        usable=usable,
        policies={written: str(policy) for written, policy in policies.items()},
        estimates=estimates,
        largest={written: largest[str(policy)] for written, policy in policies.items()} if largest else {},
    )


def _estimates(
    options: Namespace, model: "nn.Module", batch: Any, policies: list[Any], sizes: list[int]
) -> tuple["Estimate", ...]:
    """One estimate for each batch size; the model is copied once."""
    from rich.console import Console

    from lightning_ckpt.estimation import estimate_memory

    how = {name: options[name] for name in ("blocks", "precision", "accumulate", "ranks", "device")}
    with Console(stderr=True).status("running steps on fake tensors"):
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

    first = answer.estimates[0]
    peaks = [step.peak for name in answer.policies for step in answer.steps(name)]
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if UNITS[unit] <= max(peaks))
    ranks = f", each of {first.ranks} ranks" if first.ranks > 1 else ""
    shown = Table(title=f"{answer.target}: peak of a step in {unit}, {first.precision}{ranks}", box=SIMPLE_HEAD)
    shown.add_column("policy")
    for estimate in answer.estimates:
        size = estimate.steps[0].batch_size
        shown.add_column(f"batch {size}" if size else "the batch", justify="right", no_wrap=True)
    if answer.largest:
        shown.add_column("largest batch", justify="right")
    for written in answer.policies:
        cells = [f"{step.peak / UNITS[unit]:.4g} {'✓' if answer.fits(step) else '✗'}" for step in answer.steps(written)]
        shown.add_row(written, *cells, *([_largest(answer.largest[written])] if answer.largest else []))
    shown.caption = f"✓ stays within {format_size(answer.usable)} of {format_size(answer.memory)}"
    if first.uncounted:
        shown.caption += f"\nnot counted: what the kernels of {', '.join(first.uncounted)} take for themselves"
    return shown


def _largest(size: int) -> str:
    return "any" if size == MOST else str(size) if size else "none"
