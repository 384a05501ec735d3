"""The value check: it names the block, the operator and the cause it can see, and passes what is clean."""

import gc
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

from equality import assert_equal, trace, twins
from lightning_ckpt import Full, SelectiveOps, checkpoint_blocks, is_recomputing
from lightning_ckpt.value_check import ValueCheck
from zoo import GPT, ZOO


class Block(nn.Module):
    """A layer, then whatever a test puts after it."""

    def __init__(self, after: Callable[["Block", Tensor], Tensor] = lambda self, y: y) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.after = after
        self.register_buffer("shift", torch.zeros(8))
        self.scale = 1.0

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.after(self, self.layer(x), *rest).tanh()


def chain(after: Callable[..., Tensor]) -> nn.ModuleList:
    """Three blocks, the second of which does what a test is about."""
    return nn.ModuleList([Block(), Block(after), Block()])


def run(model: nn.ModuleList, *rest: Any, **options: Any) -> Tensor:
    checkpoint_blocks(model, determinism_check="values", **options)
    x = torch.randn(4, 8)
    for block in model:
        x = block(x, *(rest if block is model[1] else ()))
    return x.sum()


def error_of(loss: Tensor) -> str:
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    return str(caught.value)


# --- what it catches ---


def test_random_numbers_that_are_not_preserved() -> None:
    """The first operator that differs is the dropout's own."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(2)])
    with pytest.warns(UserWarning, match="preserve_rng_state=False"):
        checkpoint_blocks(model, determinism_check="values", preserve_rng_state=False)
    said = error_of(model(torch.randn(4, 8)).sum())
    assert re.search(r"block '0' \(Sequential\).*aten\.(bernoulli_|native_dropout).*call 1 of it and operator 2", said)
    assert "Likely cause: random numbers are not preserved; leave preserve_rng_state on." in said


def test_an_attribute_that_changed() -> None:
    """A scale switched between forward and backward, as adapters and schedules do."""
    model = chain(lambda self, y: y * self.scale)
    loss = run(model)
    model[1].scale = 3.0
    said = error_of(loss)
    assert "block '1' (Block)" in said
    assert "aten.mul.Tensor" in said
    assert "an attribute changed between forward and replay: 'scale' from 1.0 to 3.0" in said


def test_a_training_mode_that_changed() -> None:
    """`eval()` between forward and backward replays without dropout: another list of operators."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(2)])
    checkpoint_blocks(model, determinism_check="values")
    loss = model(torch.randn(4, 8)).sum()
    model.eval()
    said = error_of(loss)
    assert "block '1' (Sequential) differs from its forward" in said
    assert "an attribute changed between forward and replay: '0.training' from True to False, '1.training' from" in said


def test_a_buffer_changed_behind_autograds_back() -> None:
    """Through `.data` no version is raised, and the block itself never changes it."""
    model = chain(lambda self, y: y + self.shift)
    loss = run(model)
    model[1].shift.data += 1
    said = error_of(loss)
    assert "aten.add.Tensor" in said
    assert "a buffer changed behind autograd's back: 'shift'" in said


def test_parameters_that_changed() -> None:
    """An optimizer's step between forward and backward, hidden from autograd."""
    model = chain(lambda self, y: y)
    loss = run(model)
    with torch.no_grad():
        model[1].layer.bias.add_(1)
    said = error_of(loss)
    assert said.startswith("Block '1' can't be replayed: parameters changed between forward and backward: bias.")


def test_an_input_changed_in_place() -> None:
    """Said by name with every check: a mask that the caller overwrites after the block ran."""
    for check in ("default", "values"):
        model = chain(lambda self, y, mask: y * mask)
        checkpoint_blocks(model, determinism_check=check)
        mask, x = torch.ones(8), torch.randn(4, 8)
        loss = model[1](x, mask).sum()
        mask.zero_()
        assert "An input of block '1' was changed in place after the block ran" in error_of(loss)


def test_a_cache_that_grew() -> None:
    """A list on the module that every forward appends to: the shape tells."""

    def attend(self: Block, y: Tensor) -> Tensor:
        keys.append(y)
        return torch.cat(keys).mean(0) + y

    keys: list[Tensor] = []
    said = error_of(run(chain(attend)))
    assert "aten.cat.default" in said
    assert "gave torch.float32 of shape (4, 8), and gives torch.float32 of shape (8, 8) now" in said
    assert "something grew that the block keeps or was given, such as a key-value cache" in said


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda later: torch.ones(8, dtype=torch.float64 if later else torch.float32), "autocast, or a dtype that the"),
        (lambda later: torch.ones(1 if later else 8), "random numbers of Python or NumPy, or a global or an object"),
    ],
    ids=["dtype", "shape"],
)
def test_a_result_of_another_kind(make: Callable[[bool], Tensor], text: str) -> None:
    """A table made by a global: in another dtype, or smaller, which is no cache that grew."""
    later = [False]
    loss = run(chain(lambda self, y: y * make(later[0])))
    then, now = ((made.dtype, tuple(made.shape)) for made in (make(False), make(True)))
    later[0] = True
    said = error_of(loss)
    assert "gave {} of shape {}, and gives {} of shape {} now. ".format(*then, *now) in said
    assert f"Likely cause: {text}" in said


def test_a_replay_that_goes_on_after_the_forwards_last_operator() -> None:
    """Seen where it does not stop early: what the forward did last, and what comes then."""
    later = [False]

    class Longer(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.exp() if later[0] else y

    with set_checkpoint_early_stop(False):
        loss = run(nn.ModuleList([Block(), Longer()]), blocks=Block)
    later[0] = True
    assert error_of(loss).startswith(
        "The replay of block '1' (Longer) differs from its forward: a tensor saved for backward, number 3, was the "
        "forward's last, and the replay goes on with aten.exp.default. Likely cause: "
    )


@pytest.mark.parametrize("seen", [True, False])
def test_a_replay_that_ends_before_the_forward_did(seen: bool) -> None:
    """It has run nothing that differs, and not all that backward needs; an attribute that changed is told of."""
    short = [False]
    model = chain(lambda self, y: y if short[0] or self.scale > 1 else self.layer(y.tanh()))
    loss = run(model)
    if seen:
        model[1].scale = 3.0
    short[0] = True
    said = error_of(loss)
    assert said.startswith("The replay of block '1' differs from its forward: it saved 3 tensors for backward instead ")
    expected = "an attribute changed between forward and replay: 'scale' from 1.0 to 3.0." if seen else "something the"
    assert f"Likely cause: {expected}" in said


@pytest.mark.parametrize("mode", ["gradients", "autocast"])
def test_a_mode_that_the_block_decides_on(mode: str) -> None:
    """Gradients or autocast switched by something outside: said before values are looked at."""
    on = [True]

    def after(self: Block, y: Tensor) -> Tensor:
        cast = torch.autocast("cpu", torch.bfloat16, enabled=on[0] or mode == "gradients")
        with torch.set_grad_enabled(on[0] or mode == "autocast"), cast:
            return self.layer(y) + y

    loss = run(chain(after))
    on[0] = False
    said = error_of(loss)
    assert "block '1'" in said
    expected = {
        "gradients": r"gradients on, and its replay with gradients off. Likely cause: the block turns gradients on or",
        "autocast": r"_to_copy\.default, .* is a tensor saved for backward in the replay. Likely cause: autocast, or a",
    }
    assert re.search(expected[mode], said)


def test_a_function_mode_that_is_not_there_in_backward() -> None:
    """Entered around the forward alone, it doubles `tanh` there; seen in what autograd saves next."""

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    model = chain(lambda self, y: self.layer(torch.tanh(y)))
    with Doubling():
        loss = run(model)
    said = error_of(loss)
    assert "a tensor saved for backward, number" in said or "is a tensor saved for backward" in said
    assert "TorchFunctionMode" in said or "aten.mul" in said


def test_python_random_numbers() -> None:
    """A router's noise from Python's own generator: no state of the block differs, so the rest is named."""
    random.seed(0)
    said = error_of(run(chain(lambda self, y: y + random.random())))
    assert "aten.add.Tensor" in said
    assert "random numbers of Python or NumPy, or a global or an object that the block reads" in said


def test_a_generator_of_its_own() -> None:
    """PyTorch's global state is preserved; a private generator goes on."""
    generator = torch.Generator().manual_seed(0)
    said = error_of(run(chain(lambda self, y: y * torch.rand(8, generator=generator))))
    assert "aten.rand.generator" in said
    assert "it draws from a generator of its own" in said


def test_an_operator_without_a_deterministic_implementation() -> None:
    """One that is marked as such, and gives what it likes."""
    library = torch.library.Library("value_check_test", "DEF")
    library.define("unsure(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_bitwise,))
    calls: list[int] = []

    def unsure(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    library.impl("unsure", unsure, "CompositeExplicitAutograd")
    said = error_of(run(chain(lambda self, y: y + torch.ops.value_check_test.unsure(y.detach()))))
    assert "value_check_test.unsure.default" in said
    assert "the operator has no deterministic implementation" in said


def test_values_in_another_order_are_seen() -> None:
    """A permutation, and equal values that cancel in a plain XOR."""
    orders = iter([torch.arange(8), torch.arange(8).flip(0)])
    assert "gave other values" in error_of(run(chain(lambda self, y: y[:, next(orders)])))
    constants = iter([torch.zeros(2, 64), torch.ones(2, 64)])
    assert "gave other values" in error_of(run(chain(lambda self, y: y + next(constants).mul(1.0).mean())))


def test_the_earliest_block_that_differs_is_named() -> None:
    """Backward replays the last block first; the report is by the order of the forward."""
    model = GPT(depth=3)
    with pytest.warns(UserWarning, match="preserve_rng_state=False"):
        checkpoint_blocks(model, determinism_check="values", preserve_rng_state=False)
    assert "block 'blocks.0'" in error_of(ZOO["gpt"].loss(model, ZOO["gpt"].batch()))


def test_a_second_backward_pass_is_checked_after_one_that_failed() -> None:
    """An error in one pass neither hides the next nor is said again."""
    model = chain(lambda self, y: y * self.scale)
    loss = run(model)
    model[1].scale = 2.0
    error_of(loss)
    x = torch.randn(4, 8)
    model[1](x).sum().backward()
    loss = model[1](x).sum()
    model[1].scale = 3.0
    assert "'scale' from 2.0 to 3.0" in error_of(loss)


def test_a_backward_pass_inside_another_leaves_its_checks_alone() -> None:
    """A hook that runs a pass of its own on the way: what was replayed before it is compared all the same."""
    model = chain(lambda self, y: y * self.scale)
    checkpoint_blocks(model, determinism_check="values")
    x = torch.randn(4, 8)
    inner, hidden = model[0](x).sum(), model[0](x)
    hidden.register_hook(lambda slope: inner.backward())
    loss = model[1](hidden).sum()
    model[1].scale = 3.0
    assert "'scale' from 1.0 to 3.0" in error_of(loss)


def test_a_pass_that_fails_leaves_no_checks_behind() -> None:
    """Those that waited for its end, with digests of every operator, go with its graph."""

    def checks() -> int:
        gc.collect()
        return sum(type(thing) is ValueCheck for thing in gc.get_objects())

    def fails(slope: Tensor) -> None:
        raise ArithmeticError("on the way")

    before = checks()
    model = chain(lambda self, y: y)
    checkpoint_blocks(model, determinism_check="values")
    hidden = model[0](torch.randn(4, 8))
    hidden.register_hook(fails)
    with pytest.raises(ArithmeticError, match="on the way"):
        model[1](hidden).sum().backward()
    del hidden
    assert checks() == before


# --- what it passes ---


@pytest.mark.parametrize("policy", ["full", "selective", Full(segment_size=2)], ids=["full", "selective", "segments"])
@pytest.mark.parametrize("kind", ZOO)
def test_clean_models_pass_and_train_as_ever(kind: str, policy: Any) -> None:
    """Dropout, attention, BatchNorm, routing, double backward: no false alarm, and no difference."""
    specimen = ZOO[kind]
    ours, plain = twins(specimen.build)
    checkpoint_blocks(ours, policy, determinism_check="values")
    torch.manual_seed(1)
    data = [specimen.batch() for _ in range(2)]
    assert_equal(trace(ours, data, specimen.loss), trace(plain, data, specimen.loss))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_passes(dtype: torch.dtype) -> None:
    """The replay's precision is the forward's."""
    model = GPT()
    checkpoint_blocks(model, determinism_check="values")
    with torch.autocast("cpu", dtype):
        loss = ZOO["gpt"].loss(model, ZOO["gpt"].batch())
    loss.backward()


def test_complex_and_tiny_and_empty_results_pass() -> None:
    """Digests of every dtype and size."""

    def after(self: Block, y: Tensor) -> Tensor:
        spectrum = torch.fft.fft(y)
        empty = y[:0].mul(2).sum()
        return torch.fft.ifft(spectrum).real + empty + y.argmax() + (y > 0).any()

    model = chain(after)
    run(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_flag_keeps_working() -> None:
    """Side effects guarded by `is_recomputing` are no difference."""
    seen: list[int] = []

    def after(self: Block, y: Tensor) -> Tensor:
        if not is_recomputing():
            seen.append(1)
        return y * 2

    run(chain(after)).backward()
    assert seen == [1]


def test_a_saved_tensor_may_be_looked_at_outside_of_backward() -> None:
    """It is replayed as ever, nothing waits for an end that does not come, and the pass that follows is checked."""
    model = chain(lambda self, y: y * self.scale)
    checkpoint_blocks(model, determinism_check="values")
    y = model[1](torch.randn(4, 8))
    assert torch.equal(y.grad_fn._saved_result, y)
    model[1].scale = 3.0
    assert "'scale' from 1.0 to 3.0" in error_of(y.sum())


def test_selective_results_are_compared_too() -> None:
    """Kept operators give what they gave; what is replayed between them is compared."""
    model = chain(lambda self, y: y * self.scale)
    loss = run(model, policy=SelectiveOps("compute"))
    model[1].scale = 3.0
    assert "'scale' from 1.0 to 3.0" in error_of(loss)


# --- attributes that a forward changes ---


def test_an_attribute_that_a_replay_changes_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Counters and tensors on the module: which block, which attribute, and what to do; once for all blocks."""

    def after(self: Block, y: Tensor) -> Tensor:
        self.scale += 1
        self.latest = y.detach()
        return y

    model = nn.ModuleList([Block(after) for _ in range(3)])
    checkpoint_blocks(model)
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, logger="lightning_ckpt"):
        for _ in range(2):
            y = x
            for block in model:
                y = block(y)
            y.sum().backward()
    told = sorted(record.getMessage() for record in caplog.records)
    assert len(told) == 2
    assert "The attribute '2.latest' of a checkpointed Block changed, from nothing to a tensor" in told[0]
    assert "The attribute '2.scale' of a checkpointed Block changed, from 1.0 to 2.0" in told[1]
    assert "`if not is_recomputing():`" in told[1]


@pytest.mark.parametrize("late", [False, True])
def test_an_attribute_that_only_the_forward_changes_is_told_too(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A first-time flag, or a count that starts in the second step: the replay sees it as the forward left it."""

    def after(self: Block, y: Tensor) -> Tensor:
        steps.append(1)
        if self.scale == 1.0 and (not late or len(steps) > 2):
            self.scale = 2.0
            return y
        return y * 2

    steps: list[int] = []
    model = nn.ModuleList([Block(after)])
    checkpoint_blocks(model, blocks=Block)
    with caplog.at_level(logging.WARNING, logger="lightning_ckpt"):
        for _ in range(3):
            model[0](torch.randn(4, 8)).sum().backward()
    assert "The attribute '0.scale' of a checkpointed Block changed, from 1.0 to 2.0" in caplog.text


def test_attributes_that_stay_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    """Clean models are silent."""
    model = GPT()
    checkpoint_blocks(model)
    with caplog.at_level(logging.WARNING, logger="lightning_ckpt"):
        ZOO["gpt"].loss(model, ZOO["gpt"].batch()).backward()
    assert not caplog.records
