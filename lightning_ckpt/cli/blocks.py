"""`lightning-ckpt blocks`: what would be checkpointed."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import command_parser, print_json

if TYPE_CHECKING:
    from torch import nn

_EXAMPLES = """\
  lightning-ckpt blocks examples/train_gpt.py:GPT
  lightning-ckpt blocks mypackage.models:make_model --blocks 'encoder.layers.*'
  lightning-ckpt blocks mypackage.models:make_model --blocks Attention --blocks MLP --json"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One block: where it is in the model, its class, and the parameters it holds (shared ones counted once)."""

    name: str
    type: str
    parameters: int
    share: float


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("List the blocks of a model that would be checkpointed.", _EXAMPLES)
    command.add_argument(
        "target",
        metavar="TARGET",
        type=str,
        help="module:factory or path/file.py:factory; the factory takes no arguments and returns a model",
    )
    command.add_argument(
        "--blocks",
        action="append",
        metavar="CLASS|GLOB",
        help="a class name or a glob on qualified names, again for more; left out: the repeated blocks are found",
    )
    return command


def run(options: Namespace) -> int:
    """Print the blocks; return 0, or 1 when there is none."""
    # PyTorch takes seconds to import, which --help and a mistyped option need not wait for.
    from lightning_ckpt.blocks import find_blocks
    from lightning_ckpt.cli._target import load_model

    model = load_model(options.target)
    try:
        found = find_blocks(model, options.blocks)
    except ValueError as nothing:
        print(f"lightning-ckpt: {nothing}", file=sys.stderr)
        found = []
    total = _parameters(model)
    rows = [_row(name, block, total) for name, block in found]
    if options.json:
        print_json({"target": options.target, "parameters": total, "blocks": [asdict(row) for row in rows]})
    elif rows:
        _print_table(options.target, rows, total)
    return 0 if rows else 1


def _parameters(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _row(name: str, block: "nn.Module", total: int) -> Row:
    count = _parameters(block)
    return Row(name=name, type=type(block).__name__, parameters=count, share=count / total if total else 0.0)


def _print_table(target: str, rows: list[Row], total: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("block", "class", title=f"{target}: {len(rows)} blocks")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    for row in rows:
        table.add_row(row.name, row.type, f"{row.parameters:,}", f"{row.share:.1%}")
    table.add_section()
    covered = sum(row.parameters for row in rows)
    table.add_row("covered", "", f"{covered:,} of {total:,}", f"{covered / total if total else 0:.1%}")
    Console().print(table)
