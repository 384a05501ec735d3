"""What every command has: options, an error for people, JSON."""

import argparse
import json
import re
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

TRAINING_HELP = (
    "module:factory or path/file.py:factory; the factory takes no arguments and returns a LightningModule, and with it "
    "a batch, a DataLoader or a LightningDataModule where the module has no train_dataloader"
)


class UsageError(Exception):
    """The command can't be carried out as written; its text is the one line a person reads."""


class NoBlocks(UsageError):
    """There is nothing to checkpoint, or a name that `--blocks` gives matches nothing."""


def in_options(text: str) -> str:
    """Say the package's own words on `blocks` as they are typed on the command line."""
    text = text.replace(", or a list of such", ", again for more")
    return re.sub(r"\bblocks=(?=[\w'\"])", "--blocks ", text)


def check_precision(name: str) -> None:
    """Refuse what is no precision of a Trainer.

    Raises:
        UsageError: no such precision.
    """
    from lightning_ckpt.precision import resolve_precision

    try:
        resolve_precision(name)
    except ValueError as error:
        raise UsageError(re.sub(r"^precision='(.*?)'", r"--precision \1", str(error))) from error


class ExamplesAsWritten(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a parser's epilog as they are written."""


def command_parser(description: str, examples: str) -> ArgumentParser:
    """Return a command's parser with the options that all commands share."""
    parser = ArgumentParser(
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=ExamplesAsWritten,
        exit_on_error=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--traceback", action="store_true", help="on an error, print where it came from too")
    return parser


def add_blocks(parser: ArgumentParser) -> None:
    """Add the option that says what is checkpointed."""
    parser.add_argument(
        "--blocks",
        action="append",
        metavar="CLASS|GLOB",
        help="a class name or a glob on qualified names, again for more; left out: the repeated blocks are found",
    )


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; sizes in it are bytes."""
    print(json.dumps(value, indent=2))
