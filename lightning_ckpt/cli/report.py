"""`lightning-ckpt report`: an offline W&B run as a page of its own."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import UsageError, command_parser, print_json

_EXAMPLES = """\
  lightning-ckpt report wandb/offline-run-20260101_120000-abc123
  lightning-ckpt report . --html run.html
  lightning-ckpt report wandb --json"""


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("Make a page with plots from the files of an offline W&B run.", _EXAMPLES)
    command.add_argument(
        "path", metavar="PATH", type=Path, help="the run's folder, or one that holds runs: the latest is taken"
    )
    command.add_argument(
        "--html", type=Path, default=Path("run.html"), metavar="PATH", help="where the page is written: run.html"
    )
    return command


def run(options: Namespace) -> int:
    """Write the page, or print the run's figures as JSON; return 0."""
    from lightning_ckpt.cli._offline_run import read
    from lightning_ckpt.cli._run_page import page

    if not options.html.parent.is_dir():
        raise UsageError(f"--html {options.html}: there is no folder {options.html.parent}")
    found = read(options.path)
    if options.json:
        print_json({"run": found.name, "config": dict(found.config), "figures": dict(found.figures)})
        return 0
    options.html.write_text(page(found), encoding="utf-8")
    print(f"written to {options.html}")
    return 0
