"""Policies: which blocks, and which operators."""

import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ckpt import Full, MemoryBudget, SelectiveOps, checkpoint_blocks
from lightning_ckpt.policies import keeping_calls
from lightning_ckpt.policy_names import resolve_policy
from zoo import mlp


@pytest.mark.parametrize(
    ("policy", "count", "chosen"),
    [
        (Full(), 4, [0, 1, 2, 3]),
        (Full(every=2), 6, [0, 2, 4]),
        (Full(every=3), 7, [0, 3, 6]),
        (Full(select="first-2"), 6, [0, 1]),
        (Full(select="last-2"), 6, [4, 5]),
        (Full(select="middle-2"), 6, [2, 3]),
        (Full(select="range-1-3"), 6, [1, 2, 3]),
        (Full(select=[4, 0, -1]), 6, [0, 4, 5]),
        (Full(select=3), 6, [0, 2, 4]),
        (Full(select=5), 6, [0, 1, 2, 3, 4]),
        (Full(select=6), 6, [0, 1, 2, 3, 4, 5]),
        (Full(select=1), 6, [0]),
        (SelectiveOps(), 3, [0, 1, 2]),
    ],
)
def test_the_blocks_a_policy_chooses(policy: Any, count: int, chosen: list[int]) -> None:
    """One in every k, ranges, indices, an even spread that leaves the last block out first."""
    assert policy.choose(count) == chosen


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 0}, r"every=0.*whole number of at least 1"),
        ({"every": True}, r"every=True.*whole number"),
        ({"every": 1.5}, r"every=1\.5.*whole number"),
        ({"segment_size": 0}, r"segment_size=0\): accepted are a whole number of at least 1, and \"sqrt\""),
        ({"segment_size": "root"}, r"segment_size='root'\): accepted are"),
        (
            {"every": 2, "segment_size": 3},
            r"every=2, segment_size=3\): blocks left alone .* no neighbours to join; give",
        ),
        ({"every": 2, "select": 3}, r"every=2, select=3.*both choose blocks; give one"),
        ({"select": "first4"}, r"select='first4'.*accepted are \"first-4\""),
        ({"select": "first-0"}, r"chooses no block"),
        ({"select": "range-5-2"}, r"chooses no block"),
        ({"select": "range-5"}, r"accepted are"),
        ({"select": []}, r"select=\[\].*at least one"),
        ({"select": ["a"]}, r"list of block indices"),
        ({"select": 0}, r"select=0.*a count of blocks to spread"),
    ],
)
def test_full_refuses_what_it_cannot_do(arguments: dict[str, Any], text: str) -> None:
    """At once, naming the argument, the value and what is accepted."""
    with pytest.raises(ValueError, match=text):
        Full(**arguments)


@pytest.mark.parametrize("policy", [Full(select="last-9"), Full(select=7), Full(select=[6]), Full(select=[-7])])
def test_a_choice_the_model_does_not_have_is_refused_when_applied(policy: Full) -> None:
    """The message counts the model's blocks."""
    with pytest.raises(ValueError, match="the model has 6 blocks, counted from 0 to 5"):
        policy.choose(6)


@pytest.mark.parametrize(
    ("save", "text"),
    [
        ("compte", r"save='compte'.*presets 'compute', 'attention', 'every_other_matmul'"),
        ("aten.adm", r"no such operator; the nearest name is aten\.\w+"),
        ("nowhere.mm", r"no such operator"),
        ([], r"a list of at least one"),
        (3, r"save=3\): accepted are a preset, an operator"),
        ([3], r"names such as \"aten\.mm\" and operators such as torch\.ops\.aten\.mm"),
    ],
)
def test_selective_refuses_operators_that_do_not_exist(save: Any, text: str) -> None:
    """With the presets and the nearest name."""
    with pytest.raises(ValueError, match=text):
        SelectiveOps(save)


def test_policies_are_values() -> None:
    """They compare, hash and pickle, operators by their names."""
    assert SelectiveOps([torch.ops.aten.mm]) == SelectiveOps(["aten.mm"])
    assert SelectiveOps(torch.ops.aten.mm) == SelectiveOps("aten.mm")
    for policy in (Full(select=[1, 2]), SelectiveOps([torch.ops.aten.mm.default])):
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert hash(policy)


def test_shorthands_stand_for_policies() -> None:
    """A word, with options after colons; a value alone is that of the first option. A policy stands for itself."""
    assert resolve_policy("full") == Full()
    assert resolve_policy("selective") == SelectiveOps("compute")
    assert resolve_policy(Full(every=2)) == resolve_policy("full:every=2") == resolve_policy("full:2") == Full(every=2)
    assert resolve_policy("full:segment_size=sqrt:select=first-2") == Full(segment_size="sqrt", select="first-2")
    assert resolve_policy("auto:0.5") == MemoryBudget(0.5)
    assert resolve_policy("auto:40GiB") == MemoryBudget("40GiB")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("half", 'accepted are "full", "selective", "auto", with options as in "full:every=2"'),
        (None, "policy=None: accepted are"),
        ("none", "and MemoryBudget(...); for plain training leave checkpointing out"),
        ("full:evry=2", "policy='full:evry=2': has no option 'evry=2'; it has every, segment_size, select"),
        ("full:every=", "has no option 'every='"),
        ("full:every=0", "policy='full:every=0': Full(every=0): accepted is a whole number of at least 1"),
        ("auto:2.5", "policy='auto:2.5': MemoryBudget("),
    ],
)
def test_a_word_that_is_none_is_told_what_there_is(wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        resolve_policy(wrong)


def _products_in_backward(policy: Any, compiled: Callable[[nn.Module], Any] = lambda model: model) -> int:
    from test_recompute import MatrixProducts

    model = mlp()
    checkpoint_blocks(model, policy)
    loss = compiled(model)(torch.randn(64, 64, requires_grad=True)).sum()
    with MatrixProducts() as counted:
        loss.backward()
    return counted.count


def test_kept_operators_are_not_run_again() -> None:
    """Twelve products in a plain backward: none more if kept, one more a block if every second or none is kept."""
    assert _products_in_backward("selective") == 12
    assert _products_in_backward(SelectiveOps(["aten.addmm"])) == 12
    assert _products_in_backward(SelectiveOps("attention")) == 15
    assert _products_in_backward("full") == 15


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at every tensor
@pytest.mark.parametrize(("policy", "products"), [("full", 15), ("selective", 12)])
def test_kept_operators_are_not_run_again_where_the_model_is_compiled(policy: str, products: int) -> None:
    """The compiler is told of the same choice, and its backward has as many products."""
    torch.compiler.reset()
    assert _products_in_backward(policy, torch.compile(backend="aot_eager", fullgraph=True)) == products
    torch.compiler.reset()


def test_every_other_product_counts_forward_and_replay_apart() -> None:
    """Of three products in a block the second is replayed, and gradients stay those of the plain model."""
    from test_recompute import MatrixProducts

    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Tanh()) for _ in range(2)])
    checkpoint_blocks(model, SelectiveOps("every_other_matmul"))
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    with MatrixProducts() as counted:
        loss.backward()
    assert counted.count == 2 * 2 * 3 + 2


def test_the_attention_kernel_that_runs_here_is_kept() -> None:
    """Whichever backend `scaled_dot_product_attention` takes, it runs once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from zoo import GPT

    class Attention(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "scaled_dot_product" in str(func) and "backward" not in str(func)
            return func(*args, **(kwargs or {}))

    runs = {}
    for policy in ("full", SelectiveOps("attention")):
        model = GPT(depth=2)
        checkpoint_blocks(model, policy)
        with Attention() as counted:
            model(torch.randint(0, 50, (2, 8))).sum().backward()
        runs[policy] = counted.count
    assert list(runs.values()) == [4, 2]


def test_a_listed_operator_that_never_ran_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A list that misses the operator a model really runs saves nothing, in silence elsewhere."""
    model = mlp()
    checkpoint_blocks(model, SelectiveOps(["aten.mm", "aten.addmm", "aten.bmm"]))
    with caplog.at_level(logging.WARNING, logger="lightning_ckpt"):
        for _ in range(2):
            model(torch.randn(4, 64)).sum().backward()
    assert len(caplog.records) == 1
    assert "keeps the results of aten.mm, aten.bmm, which never ran" in caplog.text
    assert "did run: aten.addmm.default" in caplog.text
    caplog.clear()
    model = mlp()
    checkpoint_blocks(model, "selective")
    model(torch.randn(4, 64)).sum().backward()
    assert not caplog.records  # a preset lists what other machines have


@pytest.mark.parametrize("kept", ["aten.bernoulli_", "aten.rand_like", "every_other_matmul"])
def test_a_kept_random_operator_leaves_the_random_numbers_of_the_forward(kept: str) -> None:
    """It does not draw again in the replay, and what draws after it must not take its numbers."""
    from equality import assert_equal, trace, twins

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.dropout(self.one(x))
            return self.dropout(self.two(x * torch.rand_like(x))).tanh()

    ours, plain = twins(lambda: nn.Sequential(Noisy(), Noisy()))
    checkpoint_blocks(ours, SelectiveOps(kept))
    data = [torch.randn(4, 8) for _ in range(3)]
    step = lambda model, x: model(x).square().mean()  # noqa: E731
    assert_equal(trace(ours, data, step), trace(plain, data, step))


def test_a_second_backward_replays_what_the_first_has_used() -> None:
    """`retain_graph` works with kept results: twelve products in the first pass, six more in the second."""
    from test_recompute import MatrixProducts

    model = mlp()
    checkpoint_blocks(model, "selective")
    loss = model(torch.randn(64, 64, requires_grad=True)).sum()
    counts = []
    for _ in range(2):
        with MatrixProducts() as counted:
            loss.backward(retain_graph=True)
        counts.append(counted.count)
    assert counts == [12, 15]


@pytest.mark.parametrize("policy", ["selective", SelectiveOps("every_other_matmul")])
def test_a_weight_that_autocast_cast_before_is_no_mismatch(policy: Any) -> None:
    """Used outside of the block first, its cast is cached: the forward skips the cast that the replay needs."""
    from equality import assert_equal, trace, twins

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([nn.Sequential(self.layer, nn.Tanh()), nn.Sequential(self.layer, nn.Tanh())])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layer(x)
                for block in self.blocks:
                    x = block(x)
            return x.float()

    ours, plain = twins(Shared)
    checkpoint_blocks(ours, policy)
    data = [torch.randn(4, 8) for _ in range(3)]
    step = lambda model, x: model(x).square().mean()  # noqa: E731
    assert_equal(trace(ours, data, step), trace(plain, data, step))


# --- MemoryBudget ---


@pytest.mark.parametrize(
    ("budget", "limit", "nbytes"),
    [(0.9, 1000, 900), (1.0, 1000, 1000), ("40GiB", None, 40 * 2**30), (2**30, 10, 2**30)],
)
def test_a_budget_is_a_share_or_a_size(budget: Any, limit: int | None, nbytes: int) -> None:
    """A fraction of what the process can hold, a size in words, or bytes."""
    assert MemoryBudget(budget).nbytes(limit) == nbytes


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan"), "40GB", "", 0, -1, 1, 40, True, None, [1]])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    """The message names the argument, the value and what is accepted."""
    with pytest.raises(ValueError, match=re.escape(f"MemoryBudget(budget={budget!r}): accepted are a fraction")):
        MemoryBudget(budget)


def test_a_share_of_nothing_known_is_refused() -> None:
    """Where a device does not tell its memory a size is asked for."""
    with pytest.raises(ValueError, match=r"give a size, MemoryBudget\('40GiB'\)"):
        MemoryBudget(0.5).nbytes(None)


def test_auto_is_nine_tenths() -> None:
    """The shorthand, and how it prints."""
    assert resolve_policy("auto") == MemoryBudget(0.9)
    assert str(MemoryBudget()) == "MemoryBudget()"
    assert str(MemoryBudget("40GiB")) == "MemoryBudget(budget='40GiB')"


def test_single_calls_are_kept_by_their_place() -> None:
    """Of two products the second is kept and the first replayed: it runs twice, the second once."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    ran: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    forward, replay = keeping_calls(["aten.mm.default#1"]).make()
    for context in (forward, replay()):
        with Count(), context:
            (x @ weight).exp() @ weight
    assert ran.count("aten.mm.default") == 3


def test_a_size_in_other_units_is_answered_with_the_right_ones() -> None:
    """Cards and error messages say GB: the unit that is meant is offered."""
    with pytest.raises(ValueError, match=r'did you mean "40GiB"\?'):
        MemoryBudget("40GB")
