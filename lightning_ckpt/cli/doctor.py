"""`lightning-ckpt doctor`: the field's common mistakes, each as a check with its evidence and its cure."""

from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import TRAINING_HELP, UsageError, add_blocks, command_parser, print_json
from lightning_ckpt.cli._findings import Finding
from lightning_ckpt.sizes import parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_ckpt.cli._patient import Conditions

_EXAMPLES = """\
  lightning-ckpt doctor examples/train_gpt.py:training
  lightning-ckpt doctor mypackage.training:make --policy selective --max-slowdown 1.2
  lightning-ckpt doctor mypackage.training:make --memory-limit 24GiB --json"""

_STYLES = {"pass": "green", "warn": "yellow", "fail": "red bold", "skip": "dim"}


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("Check a module for what goes wrong with activation checkpointing.", _EXAMPLES)
    command.add_argument("target", metavar="TARGET", type=str, help=TRAINING_HELP)
    command.add_argument("--policy", type=str, default="full", help="the policy to train with, as compare writes it")
    add_blocks(command)
    command.add_argument("--preserve-rng-state", type=bool, default=True, help="as you give it to the callback")
    command.add_argument("--max-slowdown", type=float, default=1.5, metavar="RATIO", help="of step times, accepted")
    command.add_argument(
        "--memory-limit", type=str | None, default=None, metavar="SIZE", help="like 24GiB; left out: the device's own"
    )
    command.add_argument("--steps", type=int, default=10, metavar="N", help="steps to time")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout")
    return command


def run(options: Namespace) -> int:
    """Print the findings; return 0, or 1 when a check failed."""
    findings = _examine(options, _conditions(options))
    if options.json:
        rows = [{"check": name, **asdict(finding)} for name, finding in findings.items()]
        print_json({"target": options.target, "policy": options.policy, "findings": rows})
    else:
        from rich.console import Console

        Console().print(table(options.target, findings))
    return 1 if any(finding.status == "fail" for finding in findings.values()) else 0


def _conditions(options: Namespace) -> "Conditions":
    from lightning_ckpt.cli._patient import Conditions
    from lightning_ckpt.cli._policies import parse_policy

    if not options.max_slowdown > 0:
        raise UsageError(f"--max-slowdown {options.max_slowdown:g}: accepted is a ratio above 0, like 1.5")
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: accepted is a whole number of at least 1")
    policy = parse_policy(options.policy)
    if policy is None:
        raise UsageError(f"--policy {options.policy}: there is nothing to check in plain training")
    try:
        limit = parse_size(options.memory_limit, name="--memory-limit") if options.memory_limit else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Conditions(
        policy=policy,
        blocks=options.blocks,
        preserve_rng_state=options.preserve_rng_state,
        max_slowdown=options.max_slowdown,
        memory_limit=limit,
    )


def _examine(options: Namespace, conditions: "Conditions") -> dict[str, Finding]:
    """Measure in processes of their own first, while nothing of this one is on the device, then look closer here."""
    import lightning as L
    from rich.console import Console

    from lightning_ckpt.cli._checks import examine, quiet
    from lightning_ckpt.cli._findings import NotApplicable
    from lightning_ckpt.cli._fresh import measure_fresh
    from lightning_ckpt.cli._measurement import Measurement, Request
    from lightning_ckpt.cli._patient import Patient
    from lightning_ckpt.cli._target import load_target

    asked = {"target": options.target, "steps": options.steps, "seed": options.seed, "blocks": options.blocks}

    @cache
    def outcome(checkpointed: bool) -> Measurement | NotApplicable:
        try:
            return measure_fresh(Request(policy=options.policy if checkpointed else "none", **asked))
        except NotApplicable as reason:
            return reason
        except UsageError as error:
            if "No repeated block was found" not in str(error):
                raise
            return NotApplicable("there are no blocks")  # which is a finding of its own

    def measure(checkpointed: bool) -> Measurement:
        found = outcome(checkpointed)
        if isinstance(found, NotApplicable):
            raise found
        return found

    console = Console(stderr=True)
    for checkpointed in (False, True):
        with (
            console.status(f"Training {f'with {options.policy}' if checkpointed else 'plain'}"),
            suppress(NotApplicable),
        ):
            measure(checkpointed)
    L.seed_everything(options.seed, verbose=False)
    with console.status("Looking closer"), quiet():
        return examine(Patient(load_target(options.target), conditions, measure))


def table(target: str, findings: dict[str, Finding]) -> "Table":
    """Return the findings for a person: evidence, and under it what to type."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    from lightning_ckpt.printed import as_it_is

    counts = {status: sum(f.status == status for f in findings.values()) for status in _STYLES}
    caption = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    printed = Table(
        "check",
        "",
        Column("evidence", overflow="fold"),
        title=as_it_is(target),
        caption=caption,
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    for name, finding in _folded(findings):
        said = Text(finding.evidence)
        if finding.cure:
            said.append(f"\n→ {finding.cure}", style="bold")
        printed.add_row(name, Text(finding.status, style=_STYLES[finding.status]), said)
    return printed


def _folded(findings: dict[str, Finding]) -> list[tuple[str, Finding]]:
    """The findings with those in one row that are skipped for one reason, where the first of them stands."""
    alike: dict[str, list[str]] = {}
    for name, finding in findings.items():
        alike.setdefault(finding.evidence if finding.status == "skip" else name, []).append(name)
    return [_row(names, findings[names[0]]) for names in alike.values()]


def _row(names: list[str], finding: Finding) -> tuple[str, Finding]:
    if len(names) == 1:
        return names[0], finding
    return f"{len(names)} checks", Finding("skip", f"{finding.evidence}: {', '.join(names)}")
