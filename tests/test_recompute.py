"""What a checkpointed block is to everybody else: the block it was, cheaper in memory."""

import collections
import contextlib
import copy
import dataclasses
import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from equality import Replays, assert_equal, trace, twins
from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks, is_recomputing
from zoo import GPT, mlp


def backward(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(5)
    model(x).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(ours: list[Tensor | None], plain: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(ours, plain, strict=True)
    )


# --- exact counts ---


class MatrixProducts(TorchDispatchMode):
    """Counts the matrix products that run while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def saved_activations(model: nn.Module, x: Tensor) -> int:
    """How many tensors, each counted once, autograd keeps after a forward; parameters and their views are none."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return len(kept)


def test_three_blocks_keep_three_activations_of_six() -> None:
    """Linear-ReLU-Linear saves its input and what ReLU returns; checkpointed, its input alone."""
    model, x = mlp(), torch.randn(64, 64, requires_grad=True)
    assert saved_activations(model, x) == 6
    checkpoint_blocks(model)
    assert saved_activations(model, x) == 3


@pytest.mark.parametrize(
    ("checkpointed", "early_stop", "products"), [(False, True, 12), (True, True, 15), (True, False, 18)]
)
def test_backward_runs_the_matrix_products_that_the_arithmetic_says(
    checkpointed: bool, early_stop: bool, products: int
) -> None:
    """Six layers cost 12 in backward; a replay adds one a block with early stop, two without."""
    model = mlp()
    if checkpointed:
        checkpoint_blocks(model)
    with set_checkpoint_early_stop(early_stop):
        loss = model(torch.randn(64, 64, requires_grad=True)).sum()
    with MatrixProducts() as counted:
        loss.backward()
    assert counted.count == products


# --- identity ---


def test_names_types_and_state_dict_are_those_of_the_plain_model() -> None:
    """Optimizers grouped by name, `isinstance`, indexing and checkpoint files see no difference."""
    ours, plain = twins(GPT)
    checkpoint_blocks(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [(n, type(m)) for n, m in ours.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert inspect.signature(ours.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    plain.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(plain.state_dict(), strict=True)


def test_each_block_runs_its_own_forward() -> None:
    """Layers patched in a loop are not all bound to the last one."""
    ours, plain = twins(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
    checkpoint_blocks(ours, blocks=nn.Linear)
    x = torch.randn(4, 8)
    assert torch.equal(ours(x), plain(x))
    assert same(backward(ours, x), backward(plain, x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("policy", ["full", SelectiveOps("every_other_matmul"), SelectiveOps([torch.ops.aten.addmm])])
def test_a_copy_runs_its_own_weights_and_is_checkpointed_too(duplicate: Any, policy: Any) -> None:
    """EMA copies and spawned processes: the copy computes with the copy's weights, and replays them."""
    model, x = mlp(), torch.randn(4, 64)
    checkpoint_blocks(model, policy)
    copied = duplicate(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    plain = mlp()
    plain.load_state_dict(copied.state_dict())
    counted = Replays(copied[0])
    assert same(backward(copied, x), backward(plain, x))
    assert counted.replays > 0
    assert not torch.equal(copied(x), model(x))


@pytest.mark.parametrize("went_backward", [True, False])
def test_freeing_a_model_needs_no_garbage_collection(went_backward: bool) -> None:
    """Device memory comes back when the last name goes, also where a graph never went backward."""
    model = mlp()
    handle = checkpoint_blocks(model)
    loss = model(torch.randn(4, 64)).sum()
    if went_backward:
        loss.backward()
    watched = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0][0].weight)]
    gc.collect()
    gc.disable()
    try:
        del model, loss
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()
    handle.remove()  # of a model that is gone: nothing to do, and no error


def test_a_graph_goes_backward_after_its_model_is_gone() -> None:
    """A loss may outlive the variable that held the model, as in plain PyTorch."""
    weight = None

    def loss() -> Tensor:
        nonlocal weight
        model = mlp()
        checkpoint_blocks(model)
        weight = model[0][0].weight
        return model(torch.randn(4, 64)).sum()

    loss().backward()
    assert weight is not None
    assert weight.grad is not None


def test_a_forward_that_outlives_its_block_says_so() -> None:
    """Whoever keeps it keeps no block: a call names the block that is gone."""
    model = mlp()
    checkpoint_blocks(model)
    forward = model[1].forward
    del model
    with pytest.raises(ReferenceError, match=r"^the block '1', whose forward this is, has been freed$"):
        forward(torch.randn(4, 64))


def test_recomputed_tensors_die_with_the_step() -> None:
    """No activation outlives its step: after each of three steps not one more tensor is alive."""
    model, x = mlp(), torch.randn(4, 64)
    checkpoint_blocks(model)
    alive = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model(x).sum().backward()
            alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    finally:
        gc.enable()
    assert alive[0] == alive[1] == alive[2]


# --- the handle ---


def test_the_handle_gives_every_forward_back() -> None:
    """`remove`, twice as well as once, and the end of a `with` block, also by an exception, undo everything."""
    model = mlp()
    handle = checkpoint_blocks(model)
    assert handle.blocks == ("0", "1", "2")
    handle.remove()
    handle.remove()
    assert handle.blocks == ()
    with pytest.raises(ZeroDivisionError), checkpoint_blocks(model):
        _ = ["forward" in block.__dict__ for block in model].index(True) / 0
    assert not any("forward" in block.__dict__ for block in model)


def test_another_librarys_forward_is_called_and_comes_back() -> None:
    """A forward that was on the instance before (accelerate puts one there) is what is checkpointed, and restored."""
    model, x = mlp(), torch.randn(4, 64)
    doubled = lambda x: nn.Sequential.forward(model[0], x) * 2  # noqa: E731
    model[0].forward = doubled
    expected = backward(model, x)
    handle = checkpoint_blocks(model)
    counted = Replays(model[0])
    assert same(backward(model, x), expected)
    assert counted.replays > 0
    handle.remove()
    assert model[0].forward is doubled


def test_a_forward_patched_over_ours_survives_remove() -> None:
    """`remove` does not tear out what another library put on top; ours then does nothing."""
    model = mlp()
    handle = checkpoint_blocks(model)
    ours = model[0].forward
    model[0].forward = lambda x: ours(x) + 1
    handle.remove()
    counted = Replays(model[0])
    backward(model, torch.randn(4, 64))
    assert model[0].forward is not ours
    assert counted.replays == 0


def test_a_second_application_changes_nothing_and_says_so() -> None:
    """Blocks are never wrapped twice: the first handle stays in charge."""
    model = mlp()
    first = checkpoint_blocks(model)
    with pytest.warns(UserWarning, match=r"Left alone: 0, 1, 2: checkpointed by an earlier call"):
        second = checkpoint_blocks(model, "selective")
    assert second.blocks == ()
    counted = Replays(model[0])
    backward(model, torch.randn(4, 64))
    assert (counted.calls, counted.replays) == (6, 3)
    second.remove()
    assert first.blocks == ("0", "1", "2")
    assert "forward" in model[0].__dict__


def test_the_report_says_which_portions_are_covered() -> None:
    """Blocks, parameters and share, as numbers and as one line."""
    model = nn.Sequential(mlp(), nn.Linear(64, 10))
    report = checkpoint_blocks(model, Full(every=2)).report()
    assert [portion.name for portion in report.checkpointed] == ["0.0", "0.2"]
    assert report.parameters == 3 * 8320 + 650
    assert report.share == pytest.approx(2 * 8320 / 25610)
    assert report.summary().startswith("2 of 3 blocks, 65.0% of 25,610 parameters, Full(every=2")


# --- when nothing is replayed ---


def test_nothing_is_replayed_without_gradients() -> None:
    """`no_grad` and `inference_mode` call the block's own forward once, in training mode too."""
    model, x = mlp(), torch.randn(4, 64)
    checkpoint_blocks(model)
    counted = Replays(model[0])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            model(x)
    assert (counted.calls, counted.replays) == (6, 0)


def test_a_frozen_block_without_gradients_upstream_costs_nothing() -> None:
    """A frozen trunk fed with data has nothing to save: it runs once. Behind a trainable block it is replayed."""
    model, x = mlp(), torch.randn(4, 64)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    checkpoint_blocks(model)
    counted = [Replays(block) for block in model]
    backward(model, x)
    assert counted[0].replays == 0
    assert counted[1].replays > 0
    assert counted[2].replays > 0


def test_the_flag_tells_code_that_must_run_once() -> None:
    """`is_recomputing` is true in a replay only, so a balance loss appended in forward is appended once."""
    losses: list[Tensor] = []

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            balance = y.square().mean()
            if not is_recomputing():
                losses.append(balance)
            return y * 2

    ours, plain = twins(lambda: nn.Sequential(Router(), Router()))
    checkpoint_blocks(ours)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        losses.clear()
        return model(x).sum() + sum(losses)

    data = [torch.randn(4, 8)]
    ours_trace, kept = trace(ours, data, step), len(losses)
    assert kept == 2
    assert_equal(ours_trace, trace(plain, data, step))
    assert not is_recomputing()


def test_hooks_on_the_block_fire_once() -> None:
    """Forward, pre-forward and backward hooks of a user's block see one call a step."""
    model, fired = mlp(), collections.Counter()
    model[0].register_forward_pre_hook(lambda *_: fired.update(["pre"]))
    model[0].register_forward_hook(lambda *_: fired.update(["post"]))
    model[0].register_full_backward_hook(lambda *_: fired.update(["backward"]))
    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.update(["gradient"]))
    checkpoint_blocks(model)
    model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert fired == {"pre": 1, "post": 1, "backward": 1, "gradient": 4}


# --- any call signature ---


class State(NamedTuple):
    h: Tensor
    c: Tensor | None


@dataclasses.dataclass
class Batch:
    values: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: Tensor


class Signature(nn.Module):
    """Takes tensors every way there is, with names that `torch.utils.checkpoint` uses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self,
        x: Any,
        size: int | None = None,
        *rest: Any,
        debug: Tensor | None = None,
        context_fn: Any = None,
        preserve_rng_state: bool = False,
        state: State | None = None,
        nested: Any = None,
    ) -> Any:
        y = self.dropout(self.layer(x.values if hasattr(x, "values") and not isinstance(x, Tensor) else x))
        for extra in rest:
            y = y + extra
        if debug is not None:
            y = y * debug
        if context_fn is not None:
            y = y + context_fn["deep"][0]["er"]
        if state is not None:
            y = y + state.h
        if nested is not None:
            y = y + nested.values
        return y.tanh() * (size or 1) * (2 if preserve_rng_state else 1)


def _calls(x: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    other = x.detach().clone().requires_grad_()
    return [
        ((x,), {}),
        ((x, 3), {}),
        ((x, 3, x * 2, other), {}),
        ((), {"x": x, "size": 2}),
        ((x,), {"debug": other, "preserve_rng_state": True}),
        ((x,), {"context_fn": {"deep": [{"er": x}, None, "text"]}}),
        ((x,), {"state": State(other, None)}),
        ((Batch(x, None, 2.0),), {"nested": Frozen(other)}),
        ((x,), {"nested": collections.OrderedDict(a=1) and Batch(other)}),
    ]


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_any_call_signature_gives_the_plain_results(index: int, policy: str) -> None:
    """Positional, keyword, defaults, nested containers, dataclasses, named tuples: outputs and gradients equal."""
    ours, plain = twins(lambda: nn.ModuleList([Signature()]))
    checkpoint_blocks(ours, policy, blocks=Signature)
    results = []
    for model in (ours, plain):
        torch.manual_seed(2)
        x = torch.randn(4, 8, requires_grad=True)
        args, kwargs = _calls(x)[index]
        torch.manual_seed(3)
        out = model[0](*args, **kwargs)
        out.sum().backward()
        results.append([out, x.grad, model[0].layer.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Outputs(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).tanh()
        return {
            "dict": {"y": y, "none": None, "count": 3},
            "ordered": collections.OrderedDict(y=y, z=y * 2),
            "dataclass": Batch(y),
            "named tuple": State(y, None),
            "nested": [[y], (y * 3, None)],
            "pair": (y, None),
        }[self.shape]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = (
        value.values() if isinstance(value, dict) else vars(value).values() if isinstance(value, Batch) else value or ()
    )
    return [t for part in parts if not isinstance(part, int | float | str) for t in _tensors(part)]


@pytest.mark.parametrize("shape", ["dict", "ordered", "dataclass", "named tuple", "nested", "pair"])
def test_any_output_keeps_its_type_and_its_gradients(shape: str) -> None:
    """Dicts, dataclasses, named tuples and nested lists come back as they are, every tensor differentiable."""
    ours, plain = twins(lambda: nn.ModuleList([Outputs(shape)]))
    checkpoint_blocks(ours, blocks=Outputs)
    x = torch.randn(4, 8)
    outputs = [model[0](x) for model in (ours, plain)]
    assert type(outputs[0]) is type(outputs[1])
    assert str(outputs[0]) == str(outputs[1])
    for output in outputs:
        sum(t.sum() for t in _tensors(output)).backward()
    assert torch.equal(ours[0].layer.weight.grad, plain[0].layer.weight.grad)


def test_packed_sequences_pass_through() -> None:
    """A recurrent block fed with a packed batch returns one, with the plain gradients."""
    ours, plain = twins(lambda: nn.ModuleList([nn.GRU(4, 4, batch_first=True)]))
    checkpoint_blocks(ours)
    results = []
    for model in (ours, plain):
        torch.manual_seed(2)
        x = torch.randn(3, 5, 4, requires_grad=True)
        out, _ = model[0](pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True))
        assert isinstance(out, PackedSequence)
        out.data.sum().backward()
        results.append([x.grad, *[p.grad for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_query_key_and_value_stay_one_tensor_in_the_replay() -> None:
    """Attention takes its packed path where `query is key is value`; a replay that lost that would save otherwise."""
    ours, plain = twins(lambda: nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True)]))
    checkpoint_blocks(ours)
    results = []
    for model in (ours, plain):
        torch.manual_seed(2)
        x = torch.randn(2, 5, 8, requires_grad=True)
        y = x * 1.0
        out, weights = model[0](y, y, y)
        (out.sum() + weights.square().sum()).backward()
        results.append([x.grad, *[p.grad for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_containers_that_callers_fill_between_blocks_are_replayed_as_they_were() -> None:
    """A key-value list that every block appends to keeps its length after backward, and each block sees its own."""

    class Appending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.layer(x))
            return torch.stack(cache).tanh().sum(0)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Appending() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            cache: list[Tensor] = []
            for block in self.blocks:
                x = block(x, cache)
            self.length = len(cache)
            self.cache = cache
            return x

    ours, plain = twins(Chain)
    checkpoint_blocks(ours)
    x = torch.randn(4, 8)
    assert same(backward(ours, x), backward(plain, x))
    assert len(ours.cache) == ours.length == 3


def test_an_input_changed_in_place_is_refused_by_name() -> None:
    """PyTorch finds out in backward, or with keywords never; here the forward says which block and what to do."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, x: Tensor) -> Tensor:
            x.add_(1)
            return self.layer(x).tanh()

    model = nn.ModuleList([InPlace(), InPlace()])
    checkpoint_blocks(model)
    with pytest.raises(
        RuntimeError, match=r"The block '0' \(InPlace\) changed one of its inputs in place .*shape \(4, 8\).*blocks"
    ):
        model[0](x=torch.randn(4, 8))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [lambda: torch.device("meta"), lambda: default_dtype(torch.float64)])
def test_the_defaults_of_the_forward_are_those_of_the_replay(default: Any) -> None:
    """What new tensors are in a block, by a context that is over when backward runs, and is over afterwards."""

    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            new = torch.empty(3)
            return (self.layer(x) * (new.element_size() + new.is_meta)).tanh()

    ours, plain = twins(lambda: nn.Sequential(Making(), Making()))
    checkpoint_blocks(ours)
    x = torch.randn(4, 8)
    with default():
        losses = [model(x).sum() for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    assert same(*([p.grad for p in model.parameters()] for model in (ours, plain)))
    assert (torch.empty(0).device.type, torch.empty(0).dtype) == ("cpu", torch.float32)


def test_rrelu_gets_right_gradients() -> None:
    """Early stop would replay it wrongly in silence, so it is off for that block alone."""
    ours, plain = twins(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.9)) for _ in range(2)]))
    checkpoint_blocks(ours)
    x = torch.randn(4, 8)
    assert same(backward(ours, x), backward(plain, x))


# --- what can't be done ---


def test_dropout_without_its_random_numbers_is_warned_of_by_name() -> None:
    """`preserve_rng_state=False` over an active dropout would train on wrong gradients."""
    model = GPT(depth=2)
    with pytest.warns(UserWarning, match=r"preserve_rng_state=False, and 'blocks\.0\.mlp\.3' \(Dropout\)"):
        checkpoint_blocks(model, preserve_rng_state=False)
    checkpoint_blocks(GPT(depth=2, dropout=0.0), preserve_rng_state=False)  # nothing random: no warning


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_block_is_left_alone_and_the_model_trains() -> None:
    """TorchScript can't be replayed from outside: one warning, the other blocks covered."""
    model, plain = twins(mlp)
    model[1] = torch.jit.script(model[1])
    with pytest.warns(UserWarning, match=r"Left alone: 1: compiled by TorchScript"):
        handle = checkpoint_blocks(model, blocks=lambda name, _: name in "012")
    assert handle.blocks == ("0", "2")
    x = torch.randn(4, 64)
    for chain in (model, plain):
        chain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model[0].parameters(), plain[0].parameters(), strict=True))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"policy": "half"}, ValueError, r'policy=\'half\': accepted are "full", "selective"'),
        (
            {"determinism_check": "bits"},
            ValueError,
            r"determinism_check='bits': accepted are 'default', 'values', 'none'",
        ),
        ({"existing": "refuse"}, ValueError, r"existing='refuse': accepted are 'keep', 'replace'"),
        ({"preserve_rng_state": "yes"}, TypeError, r"preserve_rng_state='yes': accepted are True and False"),
        ({"blocks": 3}, TypeError, r"blocks=3: accepted are None, a module class"),
        ({"policy": Full(select="last-9")}, ValueError, r"the model has 3 blocks, counted from 0 to 2"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_applied(wrong: Any, error: Any, text: str) -> None:
    """The message names the argument, its value and what is accepted; the model is as it was."""
    model = mlp()
    with pytest.raises(error, match=text):
        checkpoint_blocks(model, **wrong)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_values_are_compared_where_pytorch_can_digest_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without the function for it is named, and the model is as it was."""
    monkeypatch.delattr(torch, "hash_tensor", raising=False)
    model = mlp()
    text = rf'determinism_check="values" needs torch.hash_tensor, which PyTorch {re.escape(torch.__version__)} lacks'
    with pytest.raises(ValueError, match=text):
        checkpoint_blocks(model, determinism_check="values")
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_something_that_is_no_module_is_refused() -> None:
    """A list of blocks is not a model."""
    with pytest.raises(TypeError, match=r"accepted is a torch\.nn\.Module"):
        checkpoint_blocks([nn.Linear(2, 2)])  # type: ignore[arg-type]
