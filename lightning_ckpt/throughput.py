"""From times and counts to rates: a stopwatch that can be held, the typical step of an interval, MFU and HFU.

No torch and no clock of its own: times come in, so that every figure can be tested exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Generic, NamedTuple, TypeVar

Mark = TypeVar("Mark")

WARMUP_STEPS = 2
"""Steps at the start of training that set things up: lazy buffers, chosen kernels, counted FLOPs."""


@dataclass(frozen=True)
class Work:
    """What a step computes on one device.

    Args:
        model_flops: floating point operations of the model itself, forward and backward, each once.
        model_seconds: the shortest time those can take at the device's peak; None when the peak is unknown.
        total_seconds: the same with everything that is computed a second time; None when unknown.
    """

    model_flops: float
    model_seconds: float | None = None
    total_seconds: float | None = None

    def times(self, factor: float) -> "Work":
        """Return the work of `factor` times as much data."""
        model, total = self.model_seconds, self.total_seconds
        return replace(
            self,
            model_flops=self.model_flops * factor,
            model_seconds=None if model is None else model * factor,
            total_seconds=None if total is None else total * factor,
        )


class Step(NamedTuple):
    """One optimizer step on one rank.

    Args:
        seconds: from the end of the step before to its own, less validation and checkpoint saving.
        wait_seconds: the part of it between batches, waiting for data.
        replay_seconds: the part of it in which checkpointed blocks were replayed; None when unknown.
        samples, tokens, work: summed over its micro-batches; None when unknown.
        batches: its micro-batches.
        warmup: whether it tells nothing of the others: the first steps of a run, or one in which something is measured.
    """

    seconds: float
    wait_seconds: float
    replay_seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    work: Work | None = None
    warmup: bool = False
    batches: int = 1


def ideal_seconds(flops: Mapping[str, float], peaks: Mapping[str, float]) -> float | None:
    """Return the shortest time `flops` (by format) can take on a device of these `peaks` (FLOP/s, by format).

    Each format's operations run at their own peak, one after the other. None when a peak is missing.
    """
    if any(kind not in peaks for kind, count in flops.items() if count):
        return None
    return sum(count / peaks[kind] for kind, count in flops.items() if count)


def throughput(steps: Sequence[Step]) -> dict[str, float]:
    """Return the figures of an interval: the median over its steps, warm-up left out where there is anything else.

    `mfu` and `hfu` are the shortest possible time over the time taken: model FLOPs utilization as in the PaLM paper
    (arXiv 2204.02311, appendix B), which counts the model's operations once, and hardware FLOPs utilization, which
    counts the recomputed ones too. `overhead_fraction` is the share of the step in which blocks were replayed. A figure
    that any of the steps lacks is left out.

    >>> throughput([Step(seconds=0.5, wait_seconds=0.1, samples=8)])
    {'step_time_ms': 500.0, 'data_wait_ms': 100.0, 'samples_per_sec': 16.0, 'batches_per_sec': 2.0}
    """
    figures = [_figures(step) for step in steps if not step.warmup] or [_figures(step) for step in steps]
    if len(figures) <= 1:  # a row a step, where nothing may cost much
        return figures[0] if figures else {}
    known = [name for name in figures[0] if all(name in others for others in figures)]
    return {name: median(each[name] for each in figures) for name in known}


def _figures(step: Step) -> dict[str, float]:
    """Return what is known of one step."""
    figures = {"step_time_ms": step.seconds * 1e3, "data_wait_ms": step.wait_seconds * 1e3}
    amounts: dict[str, float | None] = {
        "samples_per_sec": step.samples,
        "tokens_per_sec": step.tokens,
        "batches_per_sec": step.batches,
    }
    if step.work:
        amounts["tflops_per_sec"] = step.work.model_flops / 1e12
        amounts["mfu"], amounts["hfu"] = step.work.model_seconds, step.work.total_seconds
    if step.replay_seconds is not None:
        figures["recompute_ms"] = step.replay_seconds * 1e3
        amounts["overhead_fraction"] = step.replay_seconds
    for name, amount in amounts.items():
        if amount is not None and step.seconds > 0:
            figures[name] = amount / step.seconds
    return figures


class Stopwatch(Generic[Mark]):
    """Time from lap to lap, less the time it is held.

    Args:
        mark: takes the time: a number of seconds, or an event that a device will reach later.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._held: set[str] = set()
        self._spans: list[tuple[Mark, Mark]] = []
        self._since: Mark | None = None

    def restart(self) -> None:
        """Begin a lap now, not held by anything, and forget the one before."""
        self._held, self._spans, self._since = set(), [], self._mark()

    def hold(self, reason: str) -> None:
        """Stop counting until every reason to hold is released."""
        if self._since is not None:
            self._spans.append((self._since, self._mark()))
            self._since = None
        self._held.add(reason)

    def release(self, reason: str) -> None:
        """Take a reason to hold away; count on when it was the last one."""
        if reason in self._held:
            self._held.remove(reason)
            if not self._held:
                self._since = self._mark()

    def lap(self) -> list[tuple[Mark, Mark]]:
        """Return the spans counted since the last lap, and begin the next lap at the same instant."""
        spans, self._spans = self._spans, []
        if self._since is not None:
            now = self._mark()
            spans.append((self._since, now))
            self._since = now
        return spans
