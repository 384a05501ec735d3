"""The command line `lightning-ckpt`: one module a command, each with `parser()` and `run(options) -> exit code`."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_ckpt.cli import blocks, compare, dashboard, doctor, estimate, explain, report
from lightning_ckpt.cli._command import ExamplesAsWritten, UsageError

COMMANDS = {
    "explain": explain,
    "blocks": blocks,
    "estimate": estimate,
    "compare": compare,
    "doctor": doctor,
    "report": report,
    "dashboard": dashboard,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: what follows the program's name; None for those of this process.

    Returns:
        0 when all is well, or there is no argument and the help is printed; 1 when what was asked about is not so;
        2 when the command can't be carried out as written; 141 when nobody reads the output any longer.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Threads that wait sleep instead of spinning: on a shared core a step would take ten times as long. It counts for
    # this process until PyTorch is imported, and for those that it starts.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not words:
        _parser().print_help()
        return 0
    try:
        options = _parser().parse_args(words)
        run: Callable[[Namespace], int] = COMMANDS[options.subcommand].run
        code = run(options[options.subcommand])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads the output has read enough, as `head` does: the rest is let go, with the code of that signal.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (ArgumentError, UsageError) as error:
        if "--traceback" in words:
            traceback.print_exception(error)
        print(f"lightning-ckpt: {_one_line(str(error))}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-ckpt",
        description="Activation checkpointing for PyTorch Lightning: understand it, and see what it would do.",
        epilog="Each command has its own --help with examples: lightning-ckpt explain --help",
        formatter_class=ExamplesAsWritten,
        exit_on_error=False,
        allow_abbrev=False,  # or a command's --print is taken for one of the parser's own options
    )
    parser.add_argument(
        "--version",
        action="version",
        help="Show the version and exit.",
        version=f"lightning-ckpt {version('lightning-ckpt')}",
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = module.parser()
        commands.add_subcommand(name, command, help=command.description)
    return parser


def _one_line(message: str) -> str:
    """The parser's own messages span lines, and name options and types as Python does."""
    message = re.sub(r'Parser key "([\w.]+)":', r"--\1:", message)
    message = re.sub(rf"\b(?:{'|'.join(COMMANDS)})\.(\w+)(?=,|$)", lambda found: _written(found[1]), message)
    message = message.replace("a <class 'int'>", "a whole number")
    return re.sub(r"\s+", " ", message).strip()


def _written(argument: str) -> str:
    """An argument as it is typed: `TARGET`, `--device-memory`."""
    return argument.upper() if argument in ("target", "path") else f"--{argument.replace('_', '-')}"
