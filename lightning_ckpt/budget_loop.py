"""Plan, measure, correct, until a plan stands; then watch the peak.

Everything is checkpointed at first. The first step profiles the blocks and measures the peak of each of its stretches.
From then on every step runs a plan and teaches the next one where the prediction was wrong, a few steps long; the
fastest plan that kept to the budget stays. Later only the step's peak is read, and a peak above the budget, of a longer
batch, tightens the plan before the next step.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt._compat import storage_id
from lightning_ckpt.causes import WHAT_ELSE_HELPS, MemoryByCause, unique_bytes
from lightning_ckpt.memory import ExactHostReader, HostReader, Interval, MemoryReader, marks_of, reader_for
from lightning_ckpt.peak_model import PeakModel, Stretch
from lightning_ckpt.planning import Option, Plan, solve
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.profiles import Profile, names_of
from lightning_ckpt.profiling import Profiler
from lightning_ckpt.recompute import CheckpointedBlocks
from lightning_ckpt.sizes import format_size
from lightning_ckpt.timeline import Peaks, Timeline
from lightning_ckpt.treatments import Treatment, choices

_T = TypeVar("_T")

# Steps under a plan before the best of them stays.
_ROUNDS = 4
# Batches of less than this share of the largest one tell nothing about the peak.
_SHORTER = 0.98


class Ranks(Protocol):
    """The processes that must run one plan."""

    def gather(self, value: _T) -> list[_T]:
        """The value of every rank, in order."""

    def from_first(self, value: _T) -> _T:
        """The first rank's value."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, without waiting for a device."""


class Alone:
    """One process."""

    def gather(self, value: _T) -> list[_T]:
        """This process's value alone."""
        return [value]

    def from_first(self, value: _T) -> _T:
        """This process's value."""
        return value

    def most(self, number: int) -> int:
        """This process's number."""
        return number


@dataclass(frozen=True)
class BudgetPlan:
    """A plan that stands: what is done with each block, and what it was chosen by.

    Attributes:
        treatments: by the block's qualified name; blocks left out are replayed whole.
        profile: the blocks as they were measured.
        budget: bytes.
        peak: the predicted or measured peak of a step, in bytes.
        seconds: time that replaying adds to a step, as predicted.
        solver: how the plan was found; see `planning.Plan`.
        causes: what the peak is made of; `None` before a step has run under a plan.
    """

    treatments: Mapping[str, Treatment]
    profile: Profile
    budget: int
    peak: int
    seconds: float
    solver: str
    causes: MemoryByCause | None = None

    def to_json(self) -> dict[str, Any]:
        """What a later run needs to start with this plan, as plain values."""
        return {
            "peak": self.peak,
            "treatments": {name: treatment.to_json() for name, treatment in self.treatments.items()},
            "profile": self.profile.to_json(),
        }

    def summary(self) -> dict[str, Any]:
        """What belongs into a run's config."""
        return {
            "budget_bytes": self.budget,
            "peak_bytes": self.peak,
            "replay_ms": self.seconds * 1e3,
            "replay_ms_of_full": self.profile.replay_seconds * 1e3,
            "solver": self.solver,
            "blocks": {name: str(treatment) for name, treatment in self.treatments.items()},
        }

    def __rich__(self) -> Table:
        caption = (
            f"Replay takes {self.seconds * 1e3:.3g} ms a step, of {self.profile.replay_seconds * 1e3:.3g} ms with "
            "everything checkpointed"
        )
        if self.solver == "greedy":
            caption += "; chosen by the greedy rule, since the solver ran out of time"
        title = f"Memory plan: {format_size(self.peak)} of {format_size(self.budget)}"
        table = Table("Blocks", "Treatment", title=title, caption=caption)
        rows = ((block.name, str(self.treatments.get(block.name, Treatment()))) for block in self.profile.blocks)
        for treatment, group in groupby(rows, itemgetter(1)):
            table.add_row(names_of([name for name, _ in group]), treatment)
        return table


News = Profile | BudgetPlan | MemoryByCause | str


class BudgetLoop:
    """Chooses what blocks keep, from measured steps, so that a step's peak stays within a budget.

    Call `begin_batch` before the forward pass of each batch, `end_backward` after its backward pass, and `end_step`
    after the optimizer's step; `close`, or leaving it as a context manager, ends it and leaves the plan in place.

    Args:
        handle: the checkpointed blocks.
        model: the module they are part of.
        policy: the budget.
        optimizers: whose state counts.
        device: whose memory the budget is of.
        ranks: the processes that must run one plan; it is made for the one with the least slack.
        known: an earlier run's `BudgetPlan.to_json`, to start with.
        progress: show a progress bar while blocks are measured.

    Attributes:
        choices: for each block the index of its option, as the next step runs.
        plan: the plan that stands; `None` before there is one.
        profile: the blocks as measured; `None` before the first step is over.
        budget: bytes.

    Raises:
        ValueError: a fraction of a memory that the device does not tell.

    Example:
        A training loop of one's own::

            with checkpoint_blocks(model, "auto") as handle, BudgetLoop(
                handle, model, MemoryBudget("10GiB"), optimizers=[optimizer], device="cuda"
            ) as loop:
                for batch in loader:
                    loop.begin_batch()
                    loss_function(model(batch)).backward()
                    loop.end_backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    for news in loop.end_step():
                        rich.print(news)
    """

    def __init__(
        self,
        handle: CheckpointedBlocks,
        model: nn.Module,
        policy: MemoryBudget,
        *,
        optimizers: Sequence[Optimizer],
        device: torch.device | str,
        ranks: Ranks | None = None,
        known: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> None:
        self._handle, self._model, self._policy = handle, model, policy
        self._optimizers = optimizers
        self._ranks = ranks or Alone()
        self._names = handle.blocks
        self._open = contextlib.ExitStack()
        reader = reader_for(device)
        self.budget = policy.nbytes(reader.limit())
        self._watched = Interval(reader)
        self._timeline: Timeline | None = Timeline(self._names, marks_of(self._exact(reader)), self._gradients)
        self._profiler: Profiler | None = None
        self._ways: list[list[tuple[Treatment, Option]]] = []
        self.choices: tuple[int, ...] = ()
        self._fitting: list[tuple[float, tuple[int, ...], int]] = []
        self._rounds = 0
        self._inputs = 0
        self._told = False
        self.plan: BudgetPlan | None = None
        self.profile: Profile | None = None
        if known is None or not self._start_with(known):
            self._profiler = Profiler(model, len(self._names), progress=progress, measured=self._timeline.skip)
            self._open.enter_context(self._profiler)
            handle.observe(self._timeline, self._profiler)

    def _exact(self, reader: MemoryReader) -> MemoryReader:
        """What can tell the parts of a step apart."""
        if not isinstance(reader, HostReader):
            return reader
        try:
            return self._open.enter_context(ExactHostReader(reader))
        except RuntimeError:  # somebody profiles, and PyTorch has one profiler at a time
            return reader

    @property
    def predicted(self) -> int:
        """The peak that a step is predicted to have under the present choices, in bytes; 0 before any was measured."""
        return max(self._peaks.peaks(self.choices).values(), default=0) if self._ways else 0

    def begin_batch(self) -> None:
        """A batch's forward pass is about to begin."""
        if self._timeline:
            self._timeline.begin_batch()

    def end_backward(self) -> None:
        """A batch's backward pass has ended."""
        if self._timeline:
            self._timeline.end_backward()

    def end_step(self) -> list[News]:
        """The optimizer has stepped: learn, and choose what the next step runs.

        Returns:
            What there is to tell: a plan that stands, the memory by cause, words. Each prints.
        """
        if self._timeline is None:
            return list(self._watch())
        peaks = self._timeline.end()
        news = list(self._learn(peaks) if self._inputs else self._begin())
        self._inputs = max(self._inputs, peaks.inputs)
        if self._timeline:
            self._timeline.start()
        return news

    def close(self) -> None:
        """Measure no longer."""
        self._timeline = self._profiler = None
        self._handle.observe()
        self._open.close()

    def __enter__(self) -> "BudgetLoop":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_with(self, known: Mapping[str, Any]) -> bool:
        """Run an earlier run's plan, where it is one for these blocks and keeps to this budget."""
        if known["peak"] > self.budget:
            return False
        treatments = {name: Treatment.from_json(found) for name, found in known["treatments"].items()}
        try:
            self._handle.treat(treatments)
        except ValueError:
            return False
        self._take(Profile.from_json(known["profile"]))
        self.choices = tuple(
            next((index for index, (way, _) in enumerate(ways) if way == treatments.get(name)), 0)
            for name, ways in zip(self._names, self._ways, strict=True)
        )
        self._handle.observe(*filter(None, [self._timeline]))
        return True

    def _begin(self) -> Iterable[News]:
        """The first step is over: from here on there are gradients and optimizer state, and peaks tell."""
        if self._profiler is None:
            return
        profile = self._ranks.from_first(self._profiler.profile())
        self._take(profile)
        self.choices = (0,) * len(self._names)
        self._profiler = None
        self._handle.observe(*filter(None, [self._timeline]))
        yield profile

    def _take(self, profile: Profile) -> None:
        self.profile = profile
        measured = {block.name: choices(block) for block in profile.blocks}
        nothing = [(Treatment(), Option("never ran with anything to save", 0, 0, 0.0))]
        self._ways = [measured.get(name, nothing) for name in self._names]
        self._peaks = PeakModel([[option for _, option in ways] for ways in self._ways])

    def _learn(self, peaks: Peaks) -> Iterable[News]:
        """One step has run under a plan."""
        self._rounds += 1
        stretches = self._over_ranks(peaks.stretches)
        if peaks.inputs > self._inputs:
            self._peaks.scale(peaks.inputs / self._inputs)
        if peaks.inputs >= _SHORTER * self._inputs:
            self._peaks.observe(stretches, self.choices)
            if max(stretches.values()) <= self.budget:
                self._fitting.append((self._seconds(self.choices), self.choices, max(stretches.values())))
        causes = self._causes(peaks)
        if self._rounds == 2:
            yield causes
        plan = self._solve()
        if self._rounds > _ROUNDS or plan.choices == self.choices:
            yield from self._settle(plan, causes)
        else:
            self._apply(plan.choices)

    def _settle(self, plan: Plan, causes: MemoryByCause) -> Iterable[News]:
        """Of the plans that have kept to the budget the fastest stays."""
        _, best, peak = min(self._fitting, default=(0.0, plan.choices, plan.peak))
        self._apply(best)
        self.plan = self._described(best, peak, plan.solver, causes)
        self.close()
        self._watched.reset_peak()
        if self._rounds < 2:
            yield causes
        yield self.plan
        if not self._fitting and not plan.fits:
            self._told = True
            yield self._shortfall(plan.peak, causes)

    def _watch(self) -> Iterable[News]:
        over = self._ranks.most(self._watched.peak() - self.budget)
        self._watched.reset_peak()
        if over <= 0 or self.plan is None:
            return
        peak = self.budget + over
        self._peaks.lift(max(0, peak - self.predicted))
        plan = self._solve()
        if plan.choices == self.choices:  # nothing is left to replay
            if not self._told:
                self._told = True
                yield self._shortfall(peak, None)
            return
        before = self._seconds(self.choices)
        self._apply(plan.choices)
        self.plan = self._described(plan.choices, plan.peak, plan.solver, self.plan.causes)
        yield (
            f"{self._policy}: a step peaked at {format_size(peak)}, above the budget of {format_size(self.budget)}. "
            f"From the next step on more is replayed: {plan.seconds * 1e3:.3g} ms a step instead of {before * 1e3:.3g}"
        )

    def _over_ranks(self, peaks: dict[Stretch, int]) -> dict[Stretch, int]:
        """The peaks of the rank with the least slack, stretch by stretch, as if its budget were this one's."""
        merged: dict[Stretch, int] = {}
        for budget, theirs in self._ranks.gather((self.budget, peaks)):
            for stretch, peak in theirs.items():
                merged[stretch] = max(merged.get(stretch, 0), peak - budget + self.budget)
        return merged

    def _solve(self) -> Plan:
        return self._ranks.from_first(solve(self._peaks.options, self._peaks.phases(), self.budget))

    def _apply(self, chosen: tuple[int, ...]) -> None:
        self.choices = chosen
        self._handle.treat(self._treatments(chosen))

    def _treatments(self, chosen: Sequence[int]) -> dict[str, Treatment]:
        return {
            name: ways[choice][0] for name, ways, choice in zip(self._names, self._ways, chosen, strict=True) if choice
        }

    def _seconds(self, chosen: Sequence[int]) -> float:
        return sum(ways[choice][1].seconds for ways, choice in zip(self._ways, chosen, strict=True))

    def _described(self, chosen: tuple[int, ...], peak: int, solver: str, causes: MemoryByCause | None) -> BudgetPlan:
        assert self.profile is not None
        treatments, seconds = self._treatments(chosen), self._seconds(chosen)
        return BudgetPlan(treatments, self.profile, self.budget, peak, seconds, solver, causes)

    def _causes(self, peaks: Peaks) -> MemoryByCause:
        assert self.profile is not None
        params = _nbytes([*self._model.parameters(), *self._model.buffers()])
        optimizer = _nbytes(_tensors([optimizer.state for optimizer in self._optimizers]))
        boundary = {block.name: block.boundary_bytes for block in self.profile.blocks}
        held = [
            (live, ways[choice][1].kept, boundary.get(name, 0))
            for live, ways, choice, name in zip(peaks.highest.live, self._ways, self.choices, self._names, strict=True)
        ]
        activations = max(0, sum(live * kept for live, kept, _ in held))
        boundaries = sum(size for live, _, size in held if live)
        other = max(0, peaks.found - params - optimizer - self._gradients())
        known = params + peaks.gradients + optimizer + activations + boundaries + other
        return MemoryByCause(
            params=params,
            gradients=peaks.gradients,
            optimizer=optimizer,
            activations=activations,
            boundaries=boundaries,
            temporaries=max(0, peaks.peak - known),
            other=other,
            plain=self.profile.kept_bytes + self.profile.boundary_bytes,
        )

    def _gradients(self) -> int:
        return _nbytes(parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)

    def _shortfall(self, peak: int, causes: MemoryByCause | None) -> str:
        short = peak - self.budget
        advice = causes.advice() if causes else None
        return (
            f"{self._policy}: with everything checkpointed a step needs {peak / 2**30:.3g} GiB, "
            f"{short / 2**30:.3g} GiB above the budget of {self.budget / 2**30:.3g} GiB. Training goes on with "
            f"everything checkpointed. {advice or WHAT_ELSE_HELPS}"
        )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of unique memory, of sharded tensors the shard that is here."""
    local = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors)
    return unique_bytes((storage_id(t), t.untyped_storage().nbytes()) for t in local if t.layout is torch.strided)
