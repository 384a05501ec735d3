"""A comparison as a W&B run: two tables, three plots, the page, and the figures of each policy in the summary."""

from typing import Any

from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._measurement import CAUSES, Comparison, Measurement
from lightning_ckpt.cli._page import page

_GIB = 2**30


def log(comparison: Comparison) -> None:
    """Log a run where W&B's own settings say: `WANDB_MODE=offline` needs no account.

    Raises:
        UsageError: W&B does not begin a run.
    """
    import wandb

    config = {"target": comparison.target, "seed": comparison.seed}
    try:
        run = wandb.init(project="lightning-ckpt", job_type="compare", name=comparison.target, config=config)
    except wandb.Error as error:
        raise UsageError(f"--wandb: {error}; WANDB_MODE=offline needs no account") from error
    with run:
        run.log(_logged(wandb, comparison) | {"page": wandb.Html(page(comparison), inject=False)})
        run.summary.update(_figures(comparison))


def _logged(wandb: Any, comparison: Comparison) -> dict[str, Any]:
    columns = ["policy", "step_time_ms", "samples_per_sec", "peak_gib", *(f"{_key(cause)}_gib" for cause in CAUSES)]
    columns += ["step_time_ratio", "peak_ratio", "different"]
    policies = wandb.Table(columns=columns, data=[_row(one, comparison.plain) for one in comparison.measured])
    curves = wandb.Table(
        columns=["policy", "time_ms", "gib"],
        data=[[one.policy, *point] for one in comparison.measured for point in _curve(one)],
    )
    drawn = [(one.policy, _curve(one)) for one in comparison.measured if one.memory.curve]
    return {
        "policies": policies,
        "memory_over_a_step": curves,
        "memory_against_time": wandb.plot.scatter(policies, "step_time_ms", "peak_gib", title="Memory against time"),
        "activations": wandb.plot.bar(policies, "policy", "activations_gib", title="Activations at the peak"),
        "timeline": wandb.plot.line_series(
            xs=[[at for at, _ in curve] for _, curve in drawn],
            ys=[[held for _, held in curve] for _, curve in drawn],
            keys=[policy for policy, _ in drawn],
            title="Memory over one step, GiB",
            xname="ms",
        ),
    }


def _row(one: Measurement, plain: Measurement | None) -> list[Any]:
    causes = [one.memory.causes[cause] / _GIB for cause in CAUSES]
    against: list[Any] = [None, None, None]
    if plain is not None:
        against = [one.step_time / plain.step_time, one.memory.peak / plain.memory.peak, len(one.differences(plain))]
    return [one.policy, 1000 * one.step_time, one.samples_per_second, one.memory.peak / _GIB, *causes, *against]


def _curve(one: Measurement) -> list[tuple[float, float]]:
    return [(1000 * place * one.step_time, held / _GIB) for place, held in one.memory.curve]


def _figures(comparison: Comparison) -> dict[str, float]:
    """Plain numbers, which the list of runs can show and sort by."""
    figures: dict[str, float] = {}
    for one in comparison.measured:
        figures[f"peak_gib/{one.policy}"] = one.memory.peak / _GIB
        figures[f"step_time_ms/{one.policy}"] = 1000 * one.step_time
    return figures


def _key(cause: str) -> str:
    return cause.replace(" ", "_")
