"""`lightning-ckpt compare`: what each policy takes in memory and time, on the user's own training steps."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import (
    TRAINING_HELP,
    UsageError,
    add_blocks,
    check_precision,
    command_parser,
    print_json,
)
from lightning_ckpt.cli._measurement import Comparison, Request
from lightning_ckpt.cli._words import COLUMNS, described, finding, row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_EXAMPLES = """\
  lightning-ckpt compare examples/train_gpt.py:training
  lightning-ckpt compare mypackage.training:make --policies none,full,full:segment_size=sqrt,selective:attention
  lightning-ckpt compare mypackage.training:make --precision bf16-mixed --html report.html --output report.json"""


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("Compare policies: memory, time and gradients of real training steps.", _EXAMPLES)
    command.add_argument("target", metavar="TARGET", type=str, help=TRAINING_HELP)
    command.add_argument(
        "--policies",
        type=str,
        default="none,full,full:every=2,selective",
        metavar="LIST",
        help="by comma, each with its options after colons, as in full:segment_size=sqrt, full:select=first-4, "
        "selective:attention, auto:0.5; plain training, none, is always among them",
    )
    command.add_argument("--steps", type=int, default=20, metavar="N", help="steps to time, after a warm-up")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, data and dropout")
    add_blocks(command)
    command.add_argument("--precision", type=str | None, default=None, help="of the Trainer, such as bf16-mixed")
    command.add_argument("--html", type=Path | None, default=None, metavar="PATH", help="write a page with plots")
    command.add_argument("--output", type=Path | None, default=None, metavar="PATH", help="write every number as JSON")
    command.add_argument("--wandb", action="store_true", help="log a W&B run: tables, plots, the page")
    return command


def run(options: Namespace) -> int:
    """Measure and report; return 0, or 1 when a policy failed or gave other gradients on a CPU."""
    _check(options)
    comparison = _measure(options)
    if options.output:
        options.output.write_text(json.dumps(comparison.as_json(), indent=2), encoding="utf-8")
    if options.html:
        from lightning_ckpt.cli._page import page

        options.html.write_text(page(comparison), encoding="utf-8")
    if options.json:
        print_json(comparison.as_json())
    else:
        from rich.console import Console

        show(comparison, Console())
    if options.wandb and comparison.measured:
        from lightning_ckpt.cli._to_wandb import log

        log(comparison)
    return 1 if comparison.failed or _different_on_host(comparison) else 0


def _check(options: Namespace) -> None:
    """Refuse what can be refused before minutes of measuring."""
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: accepted is a whole number of at least 1")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed {options.seed}: accepted is a whole number from 0 to 4294967295")
    if options.precision and not options.precision.startswith("transformer-engine"):  # which runs on some devices only
        check_precision(options.precision)
    for option in ("html", "output"):
        path = options[option]
        if path and not path.parent.is_dir():
            raise UsageError(f"--{option} {path}: there is no folder {path.parent}")


def _measure(options: Namespace) -> Comparison:
    """Measure one policy after the other, so that none disturbs another; plain training first, which must work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from lightning_ckpt.cli._findings import OutOfMemory
    from lightning_ckpt.cli._fresh import measure_fresh
    from lightning_ckpt.cli._policies import PLAIN, parse_policies

    asked = {"steps": options.steps, "seed": options.seed, "blocks": options.blocks, "precision": options.precision}
    policies = list(dict.fromkeys([PLAIN, *parse_policies(options.policies)]))
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
    )
    measured, failed = [], {}
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        waiting = {name: progress.add_task(name, total=options.steps, doing="", start=False) for name in policies}
        for name, task in waiting.items():
            progress.start_task(task)
            if not console.is_terminal:
                print(f"lightning-ckpt: measuring {name}", file=sys.stderr, flush=True)
            progress.update(task, doing="warming up")
            try:
                request = Request(target=options.target, policy=name, needs_blocks=len(policies) > 1, **asked)
                measured.append(measure_fresh(request, partial(progress.update, task, advance=1, doing="")))
            except OutOfMemory as error:
                failed[name] = f"out of memory: {error}"
            except UsageError as error:
                if name == PLAIN:
                    raise
                failed[name] = str(error).removeprefix(f"{name}: ")
            progress.stop_task(task)
    return Comparison(target=options.target, seed=options.seed, measured=tuple(measured), failed=failed)


def _different_on_host(comparison: Comparison) -> list[str]:
    """The policies whose gradients are not the plain ones where that means a fault."""
    plain = comparison.plain
    if plain is None or not plain.on_host:
        return []
    return [one.policy for one in comparison.measured if one.differences(plain)]


def show(comparison: Comparison, console: "Console") -> None:
    """Print what came of it for a person: the table, what could not be measured, and a sentence."""
    if comparison.measured:
        console.print(_table(comparison))
    for name, reason in comparison.failed.items():
        console.print(f"{name}: {reason}", markup=False, highlight=False)
    console.print(finding(comparison), markup=False, highlight=False)
    if different := _different_on_host(comparison):
        command = f"lightning-ckpt doctor {comparison.target} --policy {different[0]}"
        console.print(f"What differs, where and why: {command}", markup=False, emoji=False, highlight=False)


def _table(comparison: Comparison) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lightning_ckpt.printed import as_it_is

    caption = described(comparison.measured[0])
    table = Table(
        title=as_it_is(comparison.target), caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.pad_edge = False
    for number, name in enumerate(COLUMNS):
        # Broken by hand, so that a table of short names fits into 80 columns.
        broken = name.replace("activations", "activa-\ntions").replace(" ", "\n").replace("/", "\n/")
        table.add_column(broken, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    for one in comparison.measured:
        table.add_row(*row(one, comparison.plain))
    return table
