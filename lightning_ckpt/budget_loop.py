"""Plan, measure, correct, until a plan stands; then watch the peak.

Everything is checkpointed at first. The first batch profiles the blocks, and the second step, which has gradients and
optimizer state, tells the peak of each of its stretches. From then on every step runs a plan and teaches the next one
where the prediction was wrong, a few steps long; the fastest plan that kept to the budget stays. Later only the step's
peak is read, and a peak above the budget, of a longer batch, tightens the plan before the next step.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.causes import WHAT_ELSE_HELPS, MemoryByCause
from lightning_ckpt.held import bytes_held, local, tensors_of
from lightning_ckpt.memory import GIB, ExactHostReader, HostReader, Interval, MemoryReader, marks_of, reader_for
from lightning_ckpt.peak_model import PeakModel, Stretch
from lightning_ckpt.planning import Option, Plan, solve
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.processes import Alone, Ranks
from lightning_ckpt.profiles import Profile
from lightning_ckpt.profiling import Profiler
from lightning_ckpt.recompute import CheckpointedBlocks
from lightning_ckpt.timeline import Peaks, Timeline
from lightning_ckpt.treatments import Treatment, choices

# Steps under a plan before the best of them stays.
_ROUNDS = 4
# Batches of less than this share of the largest one tell nothing about the peak.
_SHORTER = 0.98
# Share of the budget that a plan leaves: a step's peak also depends on where tensors happen to lie in time. Predictions
# from measured steps were seen to be 0.4 % too low.
_MARGIN = 0.005
# Share of the budget that a resumed plan has to use, to stay without another being tried.
_USED = 0.9
# Steps passed by since an earlier one tells more about the peak.
_PATIENCE = 3
# Steps after a plan stands in which a host's resident size may still grow by itself: the C library keeps what a step
# frees in pieces that the next one can't all use.
_SETTLING = 3


@dataclass(frozen=True)
class _Tried:
    """A plan that has kept to the budget, by what it costs."""

    seconds: float
    choices: tuple[int, ...]
    peak: int
    causes: MemoryByCause


News = Profile | BudgetPlan | MemoryByCause | str


class BudgetLoop:
    """Chooses what blocks keep, from measured steps, so that a step's peak stays within a budget.

    Call `begin_batch` before the forward pass of each batch, `end_backward` after its backward pass, and `end_step`
    after the optimizer's step; `close`, or leaving it as a context manager, ends it and leaves the plan in place. What
    happens between a step's end and the next batch, such as validation, does not count.

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

    Examples:
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
        self._reader = reader_for(device)
        self.budget = policy.nbytes(self._reader.limit())
        self._watched = Interval(self._reader)
        self._resident = _Resident() if isinstance(self._reader, HostReader) else None
        self._parameters = list(model.parameters())
        self._timeline: Timeline | None = None
        self._in_step = self._told = False
        self._ways: list[list[tuple[Treatment, Option]]] = []
        self._peaks = PeakModel([])
        self.choices: tuple[int, ...] = ()
        self._fitting: list[_Tried] = []
        self._rounds, self._patience = 0, _PATIENCE
        self._profiled: dict[str, int] = {}  # the inputs of each block that what it keeps was measured for
        self._largest: dict[str, int] = {}  # the inputs of each block in the largest batch whose peaks are known
        self._most_gradients = 0  # that a step has begun with
        self.plan: BudgetPlan | None = None
        self.profile: Profile | None = None
        self._profiler = Profiler(model, len(self._names), progress=progress)
        self._resumed = self._start_with(known)
        if not self._resumed:
            self._open.enter_context(self._profiler)
            handle.observe(self._profiler)

    @property
    def predicted(self) -> int:
        """The peak that a step is predicted to have under the present choices, in bytes; 0 before any was measured."""
        return max(self._peaks.peaks(self.choices).values(), default=0)

    def begin_batch(self) -> None:
        """A batch's forward pass is about to begin."""
        self._profiler.begin_batch()
        if self._in_step and self._timeline:
            self._timeline.begin_batch()
        elif not self._in_step:
            self._in_step = True
            self._watched.reset_peak()
            if self._timeline:
                self._timeline.start()

    def end_backward(self) -> None:
        """A batch's backward pass has ended."""
        if self._timeline:
            self._timeline.end_backward()

    def end_step(self) -> list[News]:
        """The optimizer has stepped: learn, and choose what the next step runs.

        Returns:
            What there is to tell: a plan that stands, the memory by cause, words. Each prints.
        """
        self._in_step = False
        if self.plan is not None:
            return list(self._watch())
        if self._timeline is None:
            return list(self._begin())
        return list(self._learn(self._timeline.end()))

    def close(self) -> None:
        """Measure no longer."""
        self._timeline = None
        self._handle.observe()
        self._open.close()

    def __enter__(self) -> "BudgetLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._ranks.failed(error)
        self.close()

    # --- the first steps ---

    def _start_with(self, known: Mapping[str, Any] | None) -> bool:
        """Run an earlier run's plan, where all ranks can: it is for these blocks, and keeps to their budgets."""
        treatments, profile = _read(known)
        fits = known is not None and profile is not None and known["peak"] <= self.budget
        if self._ranks.most(int(not (fits and treatments.keys() <= set(self._names)))) or profile is None:
            return False
        try:
            self._handle.treat(treatments)
        except ValueError:
            self._handle.treat({})
        else:
            self._take(profile)
        if self._ranks.most(int(self.profile is None)):
            self._handle.treat({})
            self.profile = None
            return False
        self.choices = tuple(
            next((index for index, (way, _) in enumerate(ways) if way == treatments.get(name)), 0)
            for name, ways in zip(self._names, self._ways, strict=True)
        )
        return True

    def _begin(self) -> Iterable[News]:
        """The first step is over: from here on there are gradients and optimizer state, and peaks tell."""
        if self.profile is None:
            profile, self._profiled = self._ranks.from_first((self._profiler.profile(), self._profiler.inputs))
            if not profile.blocks:
                if not self._told:
                    self._told = True
                    yield f"{self._policy}: no block has anything to save yet, so there is nothing to plan."
                return
            self._take(profile)
            self.choices = (0,) * len(self._names)
            yield profile
        self._timeline = Timeline(self._names, marks_of(self._exact()), self._gradients)
        self._handle.observe(self._timeline)

    def _exact(self) -> MemoryReader:
        """What can tell the parts of a step apart."""
        if not isinstance(self._reader, HostReader):
            return self._reader
        try:
            return self._open.enter_context(ExactHostReader(self._reader))
        except RuntimeError:  # somebody profiles, and PyTorch has one profiler at a time
            return self._reader

    def _take(self, profile: Profile) -> None:
        measured = {block.name: choices(block) for block in profile.blocks}
        replayed = [(Treatment(), Option("replayed", 0, 0, 0.0))]
        self._ways = [measured.get(name, replayed) for name in self._names]
        self._peaks = PeakModel([[option for _, option in ways] for ways in self._ways])
        self.profile = profile

    # --- steps under a plan ---

    def _learn(self, mine: Peaks) -> Iterable[News]:
        """One step has run under a plan."""
        ours = self._over_ranks(mine)
        tells = self._tells(ours)
        if not tells and self._patience:
            self._patience -= 1
            return
        self._rounds += 1
        causes = self._causes(mine)
        if tells or not self._largest:
            self._note_size(ours)
            self._peaks.observe(ours.stretches, self.choices)
            if ours.peak <= self.budget:
                self._fitting.append(_Tried(self._seconds(self.choices), self.choices, ours.peak, causes))
        if self._rounds == 2:
            yield causes
        plan = self._solve()
        if self._rounds > _ROUNDS or plan.choices == self.choices or self._still_right(ours.peak):
            yield from self._settle(plan, causes)
        else:
            self._apply(plan.choices)

    def _still_right(self, peak: int) -> bool:
        """Whether the plan of an earlier run fits, and leaves little: nothing is tried then that may not fit.

        What is little depends on the budget, which differs between ranks, so that the first one's word counts.
        """
        return self._resumed and self._ranks.from_first(_USED * self.budget <= peak <= self.budget)

    def _tells(self, peaks: Peaks) -> bool:
        """Whether a step has all that makes a peak: a batch, and gradients of the step before, like the largest so far.

        Lightning drops the gradients before it validates.
        """
        growth = _growth(peaks.inputs, self._largest or self._profiled)
        return growth >= _SHORTER and peaks.gradients_found >= self._most_gradients

    def _note_size(self, peaks: Peaks) -> None:
        """Forget what smaller steps have shown."""
        growth = _growth(peaks.inputs, self._profiled)
        if growth > 1:
            self._peaks.scale(growth)
            self._profiled = {name: round(size * growth) for name, size in self._profiled.items()}
        if _growth(peaks.inputs, self._largest) > 1 or peaks.gradients_found > self._most_gradients:
            self._fitting.clear()
        names = {*peaks.inputs, *self._largest}
        self._largest = {name: max(peaks.inputs.get(name, 0), self._largest.get(name, 0)) for name in names}
        self._most_gradients = max(self._most_gradients, peaks.gradients_found)

    def _settle(self, plan: Plan, causes: MemoryByCause) -> Iterable[News]:
        """Of the plans that have kept to the budget the fastest stays."""
        ours = min(self._fitting, key=lambda tried: tried.seconds, default=_Tried(0, plan.choices, plan.peak, causes))
        best = self._ranks.from_first(ours)
        self._apply(best.choices)
        self.plan = self._described(best.choices, best.peak, plan.solver, best.causes)
        self.close()
        if self._rounds < 2:
            yield causes
        yield self.plan
        if best.peak > self.budget:
            self._told = True
            yield self._shortfall(best.peak, causes)

    # --- afterwards ---

    def _watch(self) -> Iterable[News]:
        assert self.plan is not None
        peak = self._watched.peak()
        if self._resident:
            peak = self._resident.as_planned(peak, self.plan.peak)
        over = self._ranks.most(peak - self.budget)
        if over <= 0:
            return
        peak = self.budget + over
        self._peaks.lift(max(0, peak - self.predicted))
        plan = self._solve()
        if plan.choices == self.choices:  # nothing is left to replay
            if not self._told:
                self._told = True
                yield self._shortfall(peak, self.plan.causes)
            return
        before = self._seconds(self.choices)
        self._apply(plan.choices)
        self.plan = self._described(plan.choices, plan.peak, plan.solver, self.plan.causes)
        yield (
            f"{self._policy}: a step peaked at {peak / GIB:.3g} GiB, above the budget of {self.budget / GIB:.3g} GiB. "
            f"From the next step on more is replayed: {plan.seconds * 1e3:.3g} ms a batch instead of {before * 1e3:.3g}"
        )

    def _over_ranks(self, mine: Peaks) -> Peaks:
        """The peaks of the rank with the least slack, as if its budget were this one's, and the largest inputs."""
        stretches: dict[Stretch, int] = {}
        inputs: dict[str, int] = {}
        gradients_found = 0
        for budget, theirs in self._ranks.gather((self.budget, mine)):
            for stretch, peak in theirs.stretches.items():
                stretches[stretch] = max(stretches.get(stretch, 0), peak - budget + self.budget)
            for name, size in theirs.inputs.items():
                inputs[name] = max(inputs.get(name, 0), size)
            gradients_found = max(gradients_found, theirs.gradients_found)
        return replace(mine, stretches=stretches, inputs=inputs, gradients_found=gradients_found)

    def _solve(self) -> Plan:
        limit = int((1 - _MARGIN) * self.budget)
        return self._ranks.from_first(solve(self._peaks.options, self._peaks.phases(), limit))

    def _apply(self, chosen: tuple[int, ...]) -> None:
        self.choices = chosen
        self._handle.treat(self._treatments(chosen))

    def _treatments(self, chosen: Sequence[int]) -> dict[str, Treatment]:
        each = zip(self._names, self._ways, chosen, strict=True)
        return {name: ways[choice][0] for name, ways, choice in each if choice}

    def _seconds(self, chosen: Sequence[int]) -> float:
        return sum(ways[choice][1].seconds for ways, choice in zip(self._ways, chosen, strict=True))

    def _described(self, chosen: tuple[int, ...], peak: int, solver: str, causes: MemoryByCause | None) -> BudgetPlan:
        assert self.profile is not None
        measured = {block.name for block in self.profile.blocks}
        return BudgetPlan(
            self._treatments(chosen),
            self.profile,
            tuple(name for name in self._names if name not in measured),
            self.budget,
            peak,
            self._seconds(chosen),
            solver,
            causes,
        )

    def _causes(self, peaks: Peaks) -> MemoryByCause:
        assert self.profile is not None
        params = bytes_held([*self._model.parameters(), *self._model.buffers()])
        optimizer = bytes_held(tensors_of([optimizer.state for optimizer in self._optimizers]))
        boundary = {block.name: block.boundary_bytes for block in self.profile.blocks}
        held = [
            (live, ways[choice][1].kept, boundary.get(name, 0))
            for live, ways, choice, name in zip(peaks.highest.live, self._ways, self.choices, self._names, strict=True)
        ]
        activations = max(0, sum(live * kept for live, kept, _ in held))
        boundaries = sum(size for live, _, size in held if live)
        other = max(0, peaks.found - params - optimizer - peaks.gradients_found)
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
        return sum(local(parameter.grad).nbytes for parameter in self._parameters if parameter.grad is not None)

    def _shortfall(self, peak: int, causes: MemoryByCause | None) -> str:
        advice = causes.advice() if causes else None
        return (
            f"{self._policy}: with everything checkpointed a step needs {peak / GIB:.3g} GiB, "
            f"{(peak - self.budget) / GIB:.3g} GiB above the budget of {self.budget / GIB:.3g} GiB. Training goes on "
            f"with everything checkpointed. {advice or WHAT_ELSE_HELPS}"
        )


class _Resident:
    """A host's resident size against the allocator's bytes that plans are made in: only its growth tells."""

    def __init__(self) -> None:
        self._usual = self._steps = 0

    def as_planned(self, peak: int, planned: int) -> int:
        """What a step peaked at, counted as plans are; the first steps under a plan set what is usual."""
        self._steps += 1
        if self._steps <= _SETTLING:
            self._usual = max(self._usual, peak)
        return planned + max(0, peak - self._usual)


def _read(known: Mapping[str, Any] | None) -> tuple[dict[str, Treatment], Profile | None]:
    """The treatments and the profile of a saved plan; none where it can't be read."""
    try:
        if known is None:
            return {}, None
        treatments = {name: Treatment.from_json(found) for name, found in known["treatments"].items()}
        return treatments, Profile.from_json(known["profile"])
    except (KeyError, TypeError):
        return {}, None


def _growth(inputs: Mapping[str, int], known: Mapping[str, int]) -> float:
    """How many times the known inputs these are, by the block that grew most; 1 where no block is in both."""
    return max((size / known[name] for name, size in inputs.items() if known.get(name)), default=1.0)
