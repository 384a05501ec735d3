"""The loop that plans, measures and corrects: soon settled, under the budget, training equal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from models import WORKLOADS, Workload
from torch import Tensor, nn
from torch.profiler import profile

from equality import assert_equal
from lightning_ckpt.budget_loop import BudgetLoop, _Resident
from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.causes import MemoryByCause
from lightning_ckpt.memory import AllocatorReader, Interval, use_reader
from lightning_ckpt.policies import MemoryBudget
from lightning_ckpt.profiles import BlockProfile, Profile
from lightning_ckpt.recompute import checkpoint_blocks
from zoo import GPT, mlp


@dataclass
class Ran:
    """What some steps under a budget have told."""

    budget: int
    peaks: list[int] = field(default_factory=list)
    news: list[list[Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def plan(self) -> BudgetPlan:
        plans = [news for step in self.news for news in step if isinstance(news, BudgetPlan)]
        return plans[-1]

    @property
    def settled_after(self) -> int:
        """The index of the step that ended with a plan that stands."""
        return next(i for i, step in enumerate(self.news) if any(isinstance(news, BudgetPlan) for news in step))


class Training:
    """A model, its optimizer, and an allocator whose every byte since the model was made is counted."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.reader = AllocatorReader(limit=2**40)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer

    @contextmanager
    def counted(self) -> Iterator["Training"]:
        torch.manual_seed(0)
        with self.reader, use_reader(self.reader):
            self.model, self.batch = self.workload.make(), self.workload.batch()
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            yield self

    def step(self, loop: BudgetLoop | None = None, batch: Any = None, *, keep_gradients: bool = False) -> None:
        if loop:
            loop.begin_batch()
        loss = self.workload.loss(self.model, self.batch if batch is None else batch)
        self.optimizer.zero_grad()  # as Lightning does it: those of the step before are there in the forward pass
        loss.backward()
        if loop:
            loop.end_backward()
        self.optimizer.step()
        if not keep_gradients:
            self.optimizer.zero_grad()

    def peak(self, run: Callable[[], None]) -> int:
        interval = Interval(self.reader)
        interval.reset_peak()
        run()
        return interval.peak()

    def extremes(self) -> tuple[int, int]:
        """The peaks of a step with everything checkpointed, and with nothing."""
        for _ in range(2):
            plain = self.peak(self.step)
        with checkpoint_blocks(self.model, blocks=self.workload.blocks):
            for _ in range(4):
                full = self.peak(self.step)
        return full, plain

    def under(self, budget: int, *, steps: int = 8, known: Any = None, ranks: Any = None) -> Ran:
        ran = Ran(budget)
        with (
            checkpoint_blocks(self.model, "auto", blocks=self.workload.blocks) as handle,
            BudgetLoop(
                handle,
                self.model,
                MemoryBudget(budget),
                optimizers=[self.optimizer],
                device="cpu",
                known=known,
                ranks=ranks,
            ) as loop,
        ):
            for _ in range(steps):
                ran.peaks.append(self.peak(lambda: self.step(loop)))
                ran.news.append(loop.end_step())
                ran.seconds.append(loop.plan.seconds if loop.plan else -1.0)
        return ran


@pytest.mark.slow
@pytest.mark.parametrize(  # the benchmark has all eighteen
    ("name", "fraction"), [*((name, 0.5) for name in WORKLOADS), ("U-Net", 0.25), ("MoE", 0.75)]
)
def test_the_peak_stays_under_the_budget_and_uses_it(name: str, fraction: float) -> None:
    """Every step's peak keeps to the budget, from the first on, and the plan stands within five steps of the first."""
    with Training(WORKLOADS[name]).counted() as training:
        full, plain = training.extremes()
        ran = training.under(int(full + fraction * (plain - full)))
    assert ran.settled_after <= 5
    assert max(ran.peaks) <= ran.budget
    assert ran.peaks[-1] == pytest.approx(ran.plan.peak, rel=1e-4)  # experts are chosen anew in each step
    assert 0 < ran.plan.seconds < ran.plan.profile.replay_seconds or ran.plan.seconds == 0


def test_equal_blocks_use_the_budget_to_one_option() -> None:
    """On 24 equal blocks the measured peak is within 2 % of the budget, or within one block's step of it."""
    workload = Workload(lambda: GPT(depth=24, width=64), lambda: torch.randint(0, 50, (8, 64)), _next_token)
    with Training(workload).counted() as training:
        full, plain = training.extremes()
        for fraction in (0.3, 0.6):
            ran = training.under(int(full + fraction * (plain - full)))
            step = ran.plan.profile.blocks[0].kept_bytes
            assert ran.budget - max(0.02 * ran.budget, step) <= ran.peaks[-1] <= ran.budget


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


SMALL = Workload(lambda: GPT(depth=4, width=64), lambda: torch.randint(0, 50, (8, 48)), _next_token)


@pytest.mark.supports(strategy="single device", precision="32-true", policy="auto", compile="no")
@pytest.mark.parametrize("fraction", [0.2, 0.6])
def test_training_under_a_plan_is_plain_training(fraction: float) -> None:
    """Weights, optimizer state and random numbers after some steps are those of plain training, bit for bit."""

    def state(training: Training) -> dict[str, Tensor]:
        left = {name: value.clone() for name, value in training.model.state_dict().items()}
        for index, entry in enumerate(training.optimizer.state.values()):
            left |= {f"optimizer {index} {name}": value.clone() for name, value in entry.items()}
        return left | {"random": torch.get_rng_state()}

    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
    with Training(SMALL).counted() as training:
        ran = training.under(int(full + fraction * (plain - full)), steps=10)
        ours = state(training)
    with Training(SMALL).counted() as training:
        for _ in range(10):
            training.step()
        assert_equal([ours], [state(training)])
    assert {treatment.kept for treatment in ran.plan.treatments.values()} & {"calls", "rest", "everything"}


def test_a_budget_that_holds_everything_replays_nothing() -> None:
    """With room for plain training blocks run plain."""
    with Training(SMALL).counted() as training:
        _, plain = training.extremes()
        ran = training.under(2 * plain)
    assert ran.plan.seconds == 0
    assert {str(treatment) for treatment in ran.plan.treatments.values()} == {"kept"}
    assert ran.peaks[-1] == plain


def test_a_budget_that_nothing_meets_is_said() -> None:
    """The shortfall comes in GiB with what else would help, and everything stays checkpointed."""
    with Training(SMALL).counted() as training:
        full, _ = training.extremes()
        ran = training.under(full // 2)
    words = [news for step in ran.news for news in step if isinstance(news, str)]
    assert len(words) == 1
    assert f"with everything checkpointed a step needs {full / 2**30:.3g} GiB" in words[0]
    assert "above the budget of" in words[0]
    assert "Training goes on with everything checkpointed" in words[0]
    assert "accumulate_grad_batches" in words[0]
    assert not ran.plan.treatments


def test_a_longer_batch_tightens_the_plan_for_the_next_step() -> None:
    """A peak above the budget is answered once, in one line, and the same batch fits from then on."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        with (
            checkpoint_blocks(training.model, "auto") as handle,
            BudgetLoop(
                handle, training.model, MemoryBudget(budget), optimizers=[training.optimizer], device="cpu"
            ) as loop,
        ):
            for _ in range(7):
                training.step(loop)
                loop.end_step()
            assert loop.plan is not None
            before = loop.plan.seconds
            longer = torch.randint(0, 50, (10, 48))
            first = training.peak(lambda: training.step(loop, longer))
            said = loop.end_step()
            second = training.peak(lambda: training.step(loop, longer))
            quiet = loop.end_step()
    assert first > budget >= second
    assert len(said) == 1
    assert "From the next step on more is replayed" in said[0]
    assert not quiet
    assert loop.plan.seconds > before


def test_a_longer_batch_that_no_plan_makes_room_for_is_said_once() -> None:
    """Where nothing is left to replay the shortfall is told, with what else would help, and not again."""
    with Training(SMALL).counted() as training:
        full, _ = training.extremes()
        with looping(training, int(1.01 * full)) as loop:
            for _ in range(7):
                training.step(loop)
                loop.end_step()
            assert loop.plan is not None
            told = []
            for _ in range(4):
                training.step(loop, torch.randint(0, 50, (32, 48)))
                told += loop.end_step()
    assert not loop.plan.treatments
    *tightened, shortfall = told
    assert all("From the next step on more is replayed" in words for words in tightened)
    assert "with everything checkpointed a step needs" in shortfall
    assert "Training goes on with everything checkpointed" in shortfall


def test_a_resumed_run_starts_with_the_plan() -> None:
    """What was saved is run from the first step on, without another profile, and keeps to the budget."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        first = training.under(budget)
        second = training.under(budget, known=first.plan.to_json())
    assert not any(type(news).__name__ == "Profile" for step in second.news for news in step)
    assert second.peaks[0] == first.peaks[-1]
    assert max(second.peaks) <= budget
    assert second.plan.seconds <= first.plan.seconds
    assert second.plan.profile == first.plan.profile


@pytest.mark.parametrize(("room", "stays"), [(1.08, True), (1.3, False)])
def test_a_resumed_plan_stays_where_it_leaves_little(room: float, stays: bool) -> None:
    """A faster one would fit, and might not: it is tried only where a tenth of the budget or more lies idle."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        first = training.under(int(full + 0.3 * (plain - full)))
        second = training.under(int(room * first.plan.peak), known=first.plan.to_json())
    assert (second.plan.treatments == first.plan.treatments) is stays
    assert (len(set(second.peaks)) == 1) is stays
    assert (second.plan.seconds < first.plan.seconds) is not stays


def test_a_plan_for_other_blocks_or_more_memory_is_not_taken() -> None:
    """A saved plan that names other blocks or parts, or needs more than the budget, gives way to a new one."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        known = training.under(budget).plan.to_json()
        larger = training.under(budget, known={**known, "peak": budget + 1})  # whatever was the fastest plan just now
        other = {**known, "treatments": {"elsewhere.0": {"kept": "everything", "calls": [], "part": ""}}}
        renamed = training.under(budget, known=other)
        other = {**known, "treatments": {"blocks.0": {"kept": "rest", "calls": [], "part": "elsewhere"}}}
        rebuilt = training.under(budget, known=other)
    for ran in (larger, renamed, rebuilt):
        assert any(type(news).__name__ == "Profile" for news in ran.news[0])
        assert max(ran.peaks) <= ran.budget


def test_causes_add_up_to_the_peak() -> None:
    """Parameters, gradients, optimizer state, activations, boundaries and the rest are the measured peak."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        ran = training.under(int(full + 0.5 * (plain - full)))
        parameters = sum(parameter.nbytes for parameter in training.model.parameters())
    causes = [news for step in ran.news for news in step if isinstance(news, MemoryByCause)]
    assert len(causes) == 1
    assert causes[0].peak == ran.peaks[2]  # of the first step under a plan
    assert ran.plan.causes is not None
    assert ran.plan.causes.peak == ran.plan.peak == ran.peaks[-1]
    assert causes[0].params == parameters
    assert causes[0].optimizer == pytest.approx(2 * parameters, rel=0.01)
    assert causes[0].activations > 0


def test_a_plan_of_the_greedy_rule_says_so() -> None:
    """Where the solver ran out of time the table's caption tells that it is not its word."""
    profile = Profile((BlockProfile("blocks.0", "Block", 1, 3 * 2**20, 2**20, 0.004),))
    plan = BudgetPlan({}, profile, (), 2**30, 2**29, 0.004, "milp")
    said = "Replay takes 4 ms a batch, of 4 ms with everything checkpointed"
    assert plan.__rich__().caption == said
    greedy = f"{said}; chosen by the greedy rule, since the solver ran out of time"
    assert replace(plan, solver="greedy").__rich__().caption == greedy


def test_without_a_known_limit_a_fraction_is_refused() -> None:
    """A fraction of nothing is no budget: a size is asked for."""
    model = mlp(2)
    with (
        use_reader(AllocatorReader()),
        checkpoint_blocks(model, "auto") as handle,
        pytest.raises(ValueError, match=r"a fraction of a memory that this device does not tell; give a size"),
    ):
        BudgetLoop(handle, model, MemoryBudget(0.5), optimizers=[], device="cpu")


def four_steps(loop: BudgetLoop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = SMALL.batch()
    for _ in range(4):
        loop.begin_batch()
        SMALL.loss(model, batch).backward()
        loop.end_backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.end_step()


def test_on_the_host_exact_bytes_come_on_top_of_the_resident_size() -> None:
    """Without a reader of one's own the peaks of the stretches are read from the allocator while plans are made."""
    torch.manual_seed(0)
    model = SMALL.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        checkpoint_blocks(model, "auto") as handle,
        BudgetLoop(handle, model, MemoryBudget("64GiB"), optimizers=[optimizer], device="cpu") as loop,
    ):
        four_steps(loop, model, optimizer)
    assert loop.plan is not None
    assert loop.plan.seconds == 0
    assert loop.plan.causes is not None
    assert loop.plan.causes.other > 100 * 2**20  # Python and its libraries


def test_where_somebody_profiles_already_the_resident_size_has_to_do() -> None:
    """PyTorch has one profiler at a time: theirs goes on, and a plan is made from the host's own figures."""
    torch.manual_seed(0)
    model = SMALL.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        profile() as profiled,
        checkpoint_blocks(model, "auto") as handle,
        BudgetLoop(handle, model, MemoryBudget("64GiB"), optimizers=[optimizer], device="cpu") as loop,
    ):
        four_steps(loop, model, optimizer)
    assert loop.plan is not None
    assert loop.plan.seconds == 0
    steps = [event for event in profiled.events() if event.name.startswith("Optimizer.step")]
    assert len(steps) == 4


@dataclass
class TwoRanks:
    """This process, and another one whose peaks lie so much higher."""

    more: int

    def gather(self, value: Any) -> list[Any]:
        budget, peaks = value
        higher = {stretch: peak + self.more for stretch, peak in peaks.stretches.items()}
        return [value, (budget, replace(peaks, stretches=higher))]

    def from_first(self, value: Any) -> Any:
        return value

    def most(self, number: int) -> int:
        return number + self.more if abs(number) > 1 else number  # yes and no are asked for too

    def failed(self, error: BaseException) -> None:
        self.told = error


class SecondOfTwo(TwoRanks):
    """The first one says no, where yes and no are asked for; what this one would say is kept."""

    def __init__(self, more: int) -> None:
        super().__init__(more)
        self.asked: list[bool] = []

    def from_first(self, value: Any) -> Any:
        if not isinstance(value, bool):
            return value
        self.asked.append(value)
        return False


def test_whether_a_resumed_plan_stays_is_the_first_ranks_word() -> None:
    """What is little of a budget differs where budgets do, and a rank that goes its own way waits for ever."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        first = training.under(int(full + 0.1 * (plain - full)))
        budget, known = int(1.09 * first.plan.peak), first.plan.to_json()
        ranks = SecondOfTwo(0)
        alone, second = (training.under(budget, known=known, ranks=each) for each in (None, ranks))
    assert len(set(alone.peaks)) == 1
    assert ranks.asked[:1] == [True]  # its own word would have been to stay
    assert second.plan.peak <= budget


class AnotherCanNot(TwoRanks):
    """The other one has found nothing against a saved plan, and yet can't run it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked = 0

    def most(self, number: int) -> int:
        self.asked += 1
        return 1 if self.asked == 2 else number


def test_a_saved_plan_that_another_rank_can_not_run_is_not_run_here() -> None:
    """It is undone where it was taken already, and both make a new one."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        known = training.under(budget).plan.to_json()
        ran = training.under(budget, known=known, ranks=AnotherCanNot())
    assert any(type(news).__name__ == "Profile" for news in ran.news[0])
    assert ran.peaks[1] == pytest.approx(full, rel=0.02)
    assert max(ran.peaks) <= budget


def test_a_loop_that_ends_in_an_error_tells_the_other_ranks() -> None:
    """They would wait for it at the end of the step."""
    ranks, error = TwoRanks(0), ValueError("in the loop")
    with Training(SMALL).counted() as training, checkpoint_blocks(training.model) as handle:
        policy, update = MemoryBudget("1GiB"), [training.optimizer]
        loop = BudgetLoop(handle, training.model, policy, optimizers=update, device="cpu", ranks=ranks)
        with pytest.raises(ValueError, match="in the loop"), loop:
            raise error
    assert ranks.told is error


def test_the_plan_is_made_for_the_rank_with_the_least_slack() -> None:
    """With another rank that needs more, this one leaves as much of its budget unused."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget, more = int(full + 0.7 * (plain - full)), (plain - full) // 4
        with (
            checkpoint_blocks(training.model, "auto") as handle,
            BudgetLoop(
                handle,
                training.model,
                MemoryBudget(budget),
                optimizers=[training.optimizer],
                device="cpu",
                ranks=TwoRanks(more),
            ) as loop,
        ):
            for _ in range(7):
                peak = training.peak(lambda: training.step(loop))
                loop.end_step()
    assert loop.plan is not None
    assert loop.plan.treatments
    assert peak <= budget - more
    assert loop.plan.peak == peak + more


@contextmanager
def looping(training: Training, budget: int) -> Iterator[BudgetLoop]:
    with (
        checkpoint_blocks(training.model, "auto", blocks=training.workload.blocks) as handle,
        BudgetLoop(handle, training.model, MemoryBudget(budget), optimizers=[training.optimizer], device="cpu") as loop,
    ):
        yield loop


@pytest.mark.parametrize(
    "lengths", [[48, 20, 20, 20, 20, 20, 20, 20], [48, 20, 40, 30, 48, 10, 44, 48], [12, 48, 48, 48, 48, 48, 48, 48]]
)
def test_batches_of_several_lengths_are_planned(lengths: list[int]) -> None:
    """Also where the first batch is the longest, or the shortest: a plan comes, and no step exceeds the budget."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        with looping(training, budget) as loop:
            for length in lengths:
                batch = torch.randint(0, 50, (8, length))
                assert training.peak(lambda batch=batch: training.step(loop, batch)) <= budget
                loop.end_step()
    assert loop.plan is not None


def test_what_blocks_keep_grows_once_with_longer_batches() -> None:
    """Measured on a short first batch, it is what a long one would have told, however many of those follow."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        kept = []
        for first in (48, 12):
            with looping(training, int(full + 0.5 * (plain - full))) as loop:
                for length in (first, 48, 48):
                    training.step(loop, torch.randint(0, 50, (8, length)))
                    loop.end_step()
                kept.append([ways[-1].kept for ways in loop._peaks.options])
    assert kept[0] == pytest.approx(kept[1], rel=0.01)


def test_what_happens_between_steps_does_not_count() -> None:
    """A validation pass that needs more than any step neither spoils the plan nor tightens it."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        undisturbed = training.under(budget)
        with looping(training, budget) as loop:
            told = []
            for _ in range(9):
                training.step(loop)
                told += loop.end_step()
                with torch.no_grad():
                    training.model(torch.randint(0, 50, (200, 48)))
    assert loop.plan is not None
    assert not [news for news in told if isinstance(news, str)]
    assert loop.plan.peak == pytest.approx(undisturbed.plan.peak, rel=0.1)


def test_a_step_without_gradients_of_before_tells_nothing() -> None:
    """Validation drops them, and the next step's peak is lower: no plan rests on that, and none is tightened by it."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        with looping(training, budget) as loop:
            predicted, told = [], []
            for step in range(9):
                if step in (2, 4):
                    training.optimizer.zero_grad()
                peak = training.peak(lambda: training.step(loop, keep_gradients=True))
                told += loop.end_step()
                assert peak <= 1.005 * budget
                predicted.append(loop.predicted)
    assert predicted[2] == predicted[1]
    assert loop.plan is not None
    assert not [news for news in told if isinstance(news, str)]
    assert predicted[-1] == pytest.approx(peak, rel=0.01)


def test_blocks_that_are_frozen_wait() -> None:
    """Nothing is planned while no block has anything to save, which is said once; frozen ones are told."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        training.model.requires_grad_(False)
        training.model.head.requires_grad_(True)
        with looping(training, int(full + 0.5 * (plain - full))) as loop:
            told = []
            for step in range(10):
                if step == 3:
                    for block in (*training.model.blocks[1:], training.model.norm):
                        block.requires_grad_(True)
                training.step(loop)
                told += loop.end_step()
    words = [news for news in told if isinstance(news, str)]
    assert len(words) == 1
    assert "no block has anything to save yet" in words[0]
    assert loop.plan is not None
    assert loop.plan.unmeasured == ("blocks.0",)
    assert loop.plan.treatments


def test_a_saved_plan_that_can_not_be_read_is_none() -> None:
    """Half a state, or another version's, gives way to a new plan, and nothing of it holds."""
    with Training(SMALL).counted() as training:
        full, plain = training.extremes()
        budget = int(full + 0.5 * (plain - full))
        for known in ({"peak": 0}, {"peak": 0, "treatments": {"blocks.0": {}}, "profile": {}}):
            ran = training.under(budget, steps=2, known=known)
            assert ran.peaks[1] == pytest.approx(full, rel=0.02)


def test_sparse_inputs_are_passed_by() -> None:
    """A graph's adjacency, which has no memory of one piece, is no obstacle."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, self.linear(x)).relu()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Graph() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, torch.eye(6).to_sparse())
            return x

    with Training(Workload(Net, lambda: torch.randn(6, 8), lambda m, x: m(x).square().mean())).counted() as training:
        ran = training.under(2**30)
    assert ran.plan.seconds == 0


def test_the_resident_size_counts_by_its_growth() -> None:
    """What a host's process holds anyway is no reason to replay more; what a longer batch adds to it is."""
    resident = _Resident()
    seen = [resident.as_planned(peak, planned=100) for peak in (700, 730, 720, 715, 760)]
    assert seen == [100, 100, 100, 100, 130]
