"""The report of `gpu_check.py` as a Markdown page."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_ckpt.sizes import format_size

Said = Mapping[str, Any]


def page(report: Said) -> str:
    """Everything that was found so far: one chapter for each section."""
    chapters = [f"## {name}\n\n{_chapter(name, said)}\n" for name, said in report["sections"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    size = f", {format_size(report['bytes_of_device'])}" if report["bytes_of_device"] else ""
    tiny = "\nTiny models: these figures show that the script runs, and nothing else.\n" if report["tiny"] else ""
    return f"""# What checkpointing takes on {report["device"]}
{tiny}
Peaks are what a step allocates, all that was there before the model was made left out; reserved is all that the
allocator held from the device in that step, what was there before with it. Times are medians over interleaved
rounds. MFU counts the model's operations once, HFU the replayed ones too.

{chr(10).join(chapters)}
- Device: {report["device"]}{size}.
- {versions}, {report["system"]}.
- Commit {report["commit"]}, {report["date"]}.
- Made by `{report["command"]}`.
"""


def _chapter(name: str, said: Said) -> str:
    if "left out" in said:
        return f"Left out: {said['left out']}."
    if "error" in said:
        return f"FAILED: {said['error']}"
    body = _CHAPTERS.get(name, _model)(said)
    return f"{body}\n\nTook {said['seconds']:.0f} s." if "seconds" in said else body


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _tests(said: Said) -> str:
    lines = [f"- FAILED: `{name}`" for name in said["failed"]]
    lines += [f"- Skipped: `{name}`: {reason}" for name, reason in said["skipped"].items()]
    counts = f"{said['passed']} passed, {len(said['failed'])} failed, {len(said['skipped'])} skipped."
    return "\n".join([counts, *([""] if lines else []), *lines])


def _model(said: Said) -> str:
    cases = said["cases"]
    plain = cases["none"].get("step_seconds")
    tokens = "" if said["tokens"] is None else f" ({said['tokens']:,} tokens)"
    head = ("", "peak", "reserved", "budget", "step, ms (quartiles)", "of none", "samples/s", "tokens/s", "MFU", "HFU")
    table = _table(head, (_case(name, case, plain) for name, case in cases.items()))
    return f"{said['parameters'] / 1e6:.1f} million parameters, batches of {said['samples']}{tokens}, bf16.\n\n{table}"


def _case(name: str, case: Said, plain: float | None) -> list[str]:
    if "error" in case:
        return [name, f"FAILED: {case['error'].replace('|', '/')}", *[""] * 8]
    low, high = (f"{1e3 * seconds:.1f}" for seconds in case["step_seconds_quartiles"])
    return [
        name,
        format_size(case["peak_allocated"]),
        _known(case["peak_reserved"], format_size),
        _known(case["budget"], lambda budget: f"{format_size(budget)} ({case['peak_allocated'] / budget:.1%} used)"),
        f"{1e3 * case['step_seconds']:.1f} ({low} to {high})",
        _known(plain, lambda seconds: f"{case['step_seconds'] / seconds:.2f}"),
        f"{case['samples_per_second']:.1f}",
        _known(case["tokens_per_second"], "{:,.0f}".format),
        _known(case["mfu"], "{:.1%}".format),
        _known(case["hfu"], "{:.1%}".format),
    ]


def _estimates(said: Said) -> str:
    head = ("model", "policy", "kernels' own memory", "estimated", "real", "error")
    rows = (
        [
            *(row[column] for column in ("model", "policy", "workspaces")),
            *(format_size(row[column]) for column in ("estimated", "real")),
            f"{row['error']:+.2%}",
        ]
        for row in said["rows"]
    )
    return _table(head, rows)


def _batch_size(said: Said) -> str:
    peak = "memory ran out" if said["peak"] is None else f"{format_size(said['peak'])} at its peak"
    return (
        f"Of {format_size(said['limit'])}, `BatchSizeTuner()` leaves {said['headroom']:.0%} free. It settled on "
        f"{said['settled']} samples, {said['share']:.0%} of the largest batch with which steps go through "
        f"({said['largest']}, found to 2 %); {peak}. It took {said['steps']} trial steps and "
        f"{said['seconds_of_search']:.1f} s, and met {said['out_of_memory_errors']} out-of-memory errors."
    )


def _monitor(said: Said) -> str:
    head = ("callbacks", "step", "added", "beside")
    rows = (
        [arm, f"{1e6 * found['step_seconds']:.0f} us"]
        + ([f"{1e6 * found['added_seconds']:.0f} us", found["beside"]] if arm != found["beside"] else ["", ""])
        for arm, found in said["arms"].items()
    )
    return f"{said['rounds']} rounds of {said['steps']} steps of four small layers.\n\n{_table(head, rows)}"


_CHAPTERS = {"tests": _tests, "estimates": _estimates, "batch size": _batch_size, "monitor": _monitor}
