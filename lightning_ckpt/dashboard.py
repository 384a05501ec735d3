"""A W&B workspace and a report for the figures of `StepMonitor`; needs the extra `dashboard`.

What is drawn is data, `SECTIONS`, so that it can be shown without an account; `save` needs one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

AXIS = "trainer/global_step"
NAME = "Activation checkpointing"
POLICY = "config.activation_checkpointing.policy"


@dataclass(frozen=True)
class Plot:
    """Curves that belong into one picture, since they have one unit.

    Attributes:
        title: what it shows, with its unit.
        keys: as `StepMonitor` logs them; a run without one of them has no curve for it.
    """

    title: str
    keys: tuple[str, ...]


def _of(group: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{group}/{name}" for name in names)


SECTIONS: Mapping[str, Sequence[Plot]] = {
    "Memory": (
        Plot("Peak of a step, GiB", _of("memory", "peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib")),
        Plot(
            "Peak by part of the step, GiB",
            _of("memory", *(f"peak_{p}_gib" for p in ("forward", "backward", "optimizer"))),
        ),
        Plot("Headroom, GiB", _of("memory", "headroom_gib")),
        Plot("Share of the memory", _of("memory", "peak_fraction")),
        Plot("Allocator in trouble, count", _of("memory", "alloc_retries", "ooms")),
    ),
    "Throughput": (
        Plot("Step, and waiting for data, ms", _of("throughput", "step_time_ms", "data_wait_ms")),
        Plot("Samples per second", _of("throughput", "samples_per_sec", "samples_per_sec_per_device")),
        Plot("Tokens per second", _of("throughput", "tokens_per_sec", "tokens_per_sec_per_device")),
        Plot("Batches per second", _of("throughput", "batches_per_sec", "batches_per_sec_per_device")),
        Plot("TFLOP/s of the model's own work, a device", _of("throughput", "tflops_per_sec")),
        Plot("Utilization: model and hardware", _of("throughput", "mfu", "hfu")),
    ),
    "Checkpointing": (
        Plot("Activations not kept, GiB", _of("checkpointing", "saved_gib")),
        Plot("Replay, ms a step", _of("checkpointing", "recompute_ms")),
        Plot("Replay, share of a step", _of("checkpointing", "overhead_fraction")),
    ),
    "Batch size": (Plot("Samples", _of("batch_size", "per_device", "global")),),
}

# What a report compares policies by: one bar a policy, of the summary over the run.
COMPARED: Sequence[Plot] = tuple(
    Plot(plot.title, plot.keys[:1])
    for section in ("Memory", "Throughput", "Checkpointing")
    for plot in SECTIONS[section][:3]
)


class CannotSave(RuntimeError):
    """W&B did not take it; the text says why, and what to do."""


def workspace(entity: str, project: str, *, prefix: str = "") -> "ws.Workspace":
    """Return a saved view of a project's runs, with a section for each group of keys.

    Args:
        entity: the W&B user or team.
        project: the W&B project.
        prefix: as `StepMonitor` was given.
    """
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(
            name=name,
            is_open=True,
            panels=[wr.LinePlot(title=plot.title, x=AXIS, y=[prefix + key for key in plot.keys]) for plot in plots],
        )
        for name, plots in SECTIONS.items()
    ]
    return ws.Workspace(
        entity=entity, project=project, name=NAME, sections=sections, settings=ws.WorkspaceSettings(x_axis=AXIS)
    )


def report(entity: str, project: str, *, prefix: str = "") -> "wr.Report":
    """Return a report that compares a project's runs by their policy.

    Args:
        entity: the W&B user or team.
        project: the W&B project.
        prefix: as `StepMonitor` was given.
    """
    import wandb_workspaces.reports.v2 as wr

    runs = wr.Runset(entity=entity, project=project, name="Runs by policy", groupby=[POLICY])
    grid = wr.PanelGrid(runsets=[runs], panels=_panels(prefix))
    blocks = [wr.P(text=_TEXT), grid]
    return wr.Report(entity=entity, project=project, title=f"{NAME}: policies compared", blocks=blocks)


def spec(entity: str, project: str, *, prefix: str = "") -> dict[str, Any]:
    """Return what would be saved, as plain values, without asking W&B anything.

    Args:
        entity: the W&B user or team.
        project: the W&B project.
        prefix: as `StepMonitor` was given.
    """
    # There is no public way to see what is saved before it is; the report's list of runs asks for an account first.
    view: Any = workspace(entity, project, prefix=prefix)
    panels: list[Any] = _panels(prefix)
    return {
        "workspace": view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True),
        "report": {
            "title": f"{NAME}: policies compared",
            "text": _TEXT,
            "grouped_by": POLICY,
            "panels": [panel._to_model().model_dump(mode="json", by_alias=True, exclude_none=True) for panel in panels],
        },
    }


def save(entity: str, project: str, *, prefix: str = "") -> tuple[str, str]:
    """Save both, and return their addresses.

    Args:
        entity: the W&B user or team.
        project: the W&B project.
        prefix: as `StepMonitor` was given.

    Raises:
        CannotSave: no account, no network, or W&B refuses.
    """
    try:
        view = workspace(entity, project, prefix=prefix).save()
        page = report(entity, project, prefix=prefix)
        page.save()
        return view.url, page.url  # both ask W&B again
    except Exception as error:  # the library raises plain exceptions, of its own and of what it stands on
        reason = str(error).rstrip(".")
        raise CannotSave(
            f"W&B did not save the dashboard of {entity}/{project}: {reason}. Log in with `wandb login` or set "
            "WANDB_API_KEY, on a machine that reaches W&B; `--print` shows what would be saved"
        ) from error


_TEXT = "Each bar is the summary over the runs of one policy: the highest of memory, the mean of time."


def _panels(prefix: str) -> "list[wr.BarPlot]":
    import wandb_workspaces.reports.v2 as wr

    return [wr.BarPlot(title=plot.title, metrics=[prefix + key for key in plot.keys]) for plot in COMPARED]
