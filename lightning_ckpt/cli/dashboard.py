"""`lightning-ckpt dashboard`: a W&B workspace and a report for a project's runs."""

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import UsageError, command_parser, print_json

_EXAMPLES = """\
  lightning-ckpt dashboard --entity my-team --project my-project
  lightning-ckpt dashboard --entity my-team --project my-project --print > dashboard.json"""


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser(
        "Save a W&B workspace with the monitor's figures, and a report that compares runs by policy.", _EXAMPLES
    )
    command.add_argument("--entity", type=str, required=True, help="the W&B user or team")
    command.add_argument("--project", type=str, required=True, help="the W&B project")
    command.add_argument("--prefix", type=str, default="", help="as StepMonitor(prefix=...) was given")
    command.add_argument("--print", action="store_true", help="print what would be saved as JSON; needs no account")
    return command


def run(options: Namespace) -> int:
    """Save and print the addresses, or print what would be saved; return 0."""
    from lightning_ckpt import dashboard

    given = {"entity": options.entity, "project": options.project, "prefix": options.prefix}
    try:
        if options.print:
            print_json(dashboard.spec(**given))
            return 0
        view, page = dashboard.save(**given)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"dashboard needs {error.name}: pip install 'lightning-ckpt[dashboard]', or wandb-workspaces itself"
        ) from error
    except dashboard.CannotSave as error:
        raise UsageError(str(error)) from error
    if options.json:
        print_json({"workspace": view, "report": page})
    else:
        print(f"workspace  {view}\nreport     {page}")
    return 0
