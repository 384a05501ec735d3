"""`lightning-ckpt blocks`: what would be checkpointed."""

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import add_blocks, command_parser, in_options, print_json
from lightning_ckpt.printed import as_it_is, whole
from lightning_ckpt.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from lightning_ckpt.cli._target import Target
    from lightning_ckpt.profiles import BlockProfile

_EXAMPLES = """\
  lightning-ckpt blocks examples/train_gpt.py:GPT
  lightning-ckpt blocks examples/train_gpt.py:training             (measured on a batch)
  lightning-ckpt blocks mypackage.models:make_model --blocks 'encoder.layers.*'
  lightning-ckpt blocks mypackage.models:make_model --blocks Attention --blocks MLP --json"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One block: where it is in the model, its class, and the parameters it holds (shared ones counted once).

    What it keeps for backward without checkpointing, the inputs that are kept with it, in bytes, and the seconds of its
    replay are there where the factory gave a LightningModule and a batch.
    """

    name: str
    type: str
    parameters: int
    share: float
    kept_bytes: int | None = None
    boundary_bytes: int | None = None
    replay_seconds: float | None = None


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("List the blocks of a model that would be checkpointed.", _EXAMPLES)
    command.add_argument(
        "target",
        metavar="TARGET",
        type=str,
        help="module:factory or path/file.py:factory; the factory takes no arguments and returns a model, or a "
        "LightningModule and its data, to measure what each block keeps and how long its replay takes",
    )
    add_blocks(command)
    return command


def run(options: Namespace) -> int:
    """Print the blocks; return 0, or 1 when there is none."""
    # PyTorch takes seconds to import, which --help and a mistyped option need not wait for.
    from lightning_ckpt.blocks import find_blocks
    from lightning_ckpt.cli._target import load_target

    target = load_target(options.target)
    model = target.model
    try:
        found = find_blocks(model, options.blocks)
    except ValueError as nothing:
        print(f"lightning-ckpt: {in_options(str(nothing))}", file=sys.stderr)
        found = []
    total = _parameters(model)
    profiles = _profiles(target, options.blocks) if found else {}
    rows = [_row(name, block, total, profiles.get(name)) for name, block in found]
    if options.json:
        print_json({"target": options.target, "parameters": total, "blocks": [asdict(row) for row in rows]})
    elif rows:
        from rich.console import Console

        Console().print(table(options.target, rows, total))
    return 0 if rows else 1


def _parameters(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _profiles(target: "Target", blocks: list[str] | None) -> dict[str, "BlockProfile"]:
    """What was measured of blocks, by name; nothing without a batch or without a training step to run."""
    from lightning import LightningModule

    from lightning_ckpt.callbacks._distributions import is_a
    from lightning_ckpt.cli._checks import quiet
    from lightning_ckpt.cli._findings import NotApplicable
    from lightning_ckpt.cli._patient import Conditions, Patient
    from lightning_ckpt.policies import Full

    if target.data is None or not is_a(target.model, LightningModule):
        return {}
    try:
        with quiet():
            profile = Patient(target, Conditions(policy=Full(), blocks=blocks)).profile
    except NotApplicable as reason:
        print(f"lightning-ckpt: blocks are not measured: {reason}", file=sys.stderr)
        return {}
    return {block.name: block for block in profile.blocks}


def _row(name: str, block: "nn.Module", total: int, profile: "BlockProfile | None") -> Row:
    count = _parameters(block)
    row = Row(name=name, type=type(block).__name__, parameters=count, share=count / total if total else 0.0)
    if profile is None:
        return row
    return replace(
        row,
        kept_bytes=profile.kept_bytes,
        boundary_bytes=profile.boundary_bytes,
        replay_seconds=profile.replay_seconds,
    )


def table(target: str, rows: list[Row], total: int) -> "Table":
    """The blocks for a person.

    Args:
        target: as the user wrote it.
        rows: one for each block.
        total: parameters of the model.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    measured = any(row.kept_bytes is not None for row in rows)
    count = f"{len(rows)} block{'s' if len(rows) > 1 else ''}"
    shown = Table(whole("block"), whole("class"), title=as_it_is(f"{target}: {count}"), box=SIMPLE_HEAD)
    for name in ("parameters", "share", *(("kept", "boundary", "replay") if measured else ())):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(row.name, row.type, f"{row.parameters:,}", f"{row.share:.1%}", *_figures(row))
    shown.add_section()
    covered = sum(row.parameters for row in rows)
    shown.add_row("covered", "", f"{covered:,} of {total:,}", f"{covered / total if total else 0:.1%}", *_sums(rows))
    return shown


def _figures(row: Row) -> list[str]:
    if row.kept_bytes is None or row.boundary_bytes is None or row.replay_seconds is None:
        return []
    return [format_size(row.kept_bytes), format_size(row.boundary_bytes), f"{1000 * row.replay_seconds:.3g} ms"]


def _sums(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if row.kept_bytes is not None]
    kept, boundary = (sum(getattr(row, name) for row in measured) for name in ("kept_bytes", "boundary_bytes"))
    seconds = sum(row.replay_seconds or 0.0 for row in measured)
    return [format_size(kept), format_size(boundary), f"{1000 * seconds:.3g} ms"] if measured else []
