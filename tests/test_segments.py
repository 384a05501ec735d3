"""Segments of several blocks: one replay for all of them, and the training of the plain model."""

import copy
import gc
import logging
import math
import pickle
import weakref
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from equality import Replays, assert_equal, trace, twins
from lightning_ckpt import Full, checkpoint_blocks
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.theory import Chain
from zoo import GPT, ZOO, LSTMStack, UNet

WIDTH = 8


class Loop(nn.Module):
    """Blocks that the model calls in a loop of its own; `between` is what it does to a block's result."""

    def __init__(self, blocks: list[nn.Module], between: Callable[[int, Tensor], Tensor] = lambda index, x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.between(index, block(x))
        return x


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.3))


def chain(depth: int = 6) -> list[nn.Module]:
    return [block() for _ in range(depth)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def rows(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, WIDTH) for _ in range(count)]


def spans(segments: tuple[tuple[str, ...], ...]) -> list[int]:
    return [len(segment) for segment in segments]


def equal_steps(
    build: Callable[[], nn.Module],
    size: Any = 2,
    *,
    step: Any = mean_square,
    data: list[Any] | None = None,
    **options: Any,
) -> list[int]:
    """Assert three equal steps, and give back how many blocks each segment of the last forward pass spans."""
    ours, plain = twins(build)
    handle = checkpoint_blocks(ours, Full(segment_size=size), **options)
    data = data or rows()
    assert_equal(trace(ours, data, step), trace(plain, data, step))
    return spans(handle.report().segments)


# --- blocks that follow each other ---


@pytest.mark.supports(strategy="single device", precision="32-true", policy="segments", compile="no")
@pytest.mark.parametrize("build", [lambda: Loop(chain()), lambda: nn.Sequential(*chain())], ids=["loop", "sequential"])
@pytest.mark.parametrize(
    ("size", "joined"),
    [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (6, [6]), (9, [6]), ("sqrt", [2, 2, 2])],
)
def test_blocks_with_batch_norm_and_dropout_are_joined_and_equal_plain(
    build: Callable[[], nn.Module], size: Any, joined: list[int]
) -> None:
    """Every block lies in a segment, the last ones too, and buffers and random numbers are those of the plain run."""
    assert equal_steps(build, size) == joined


def test_a_blocks_parts_are_replayed_once_however_long_the_segment() -> None:
    """One replay of a segment brings back all its blocks: each runs twice a step, and no more."""
    model = Loop(chain(4))
    counted = [Replays(block) for block in model.blocks]
    checkpoint_blocks(model, Full(segment_size=4))
    model(rows()[0]).sum().backward()
    # The last Dropout saves its mask, so nothing ends early in the blocks before.
    assert [(count.calls, count.replays) for count in counted] == [(8, 4)] * 4


@pytest.mark.parametrize("check", ["values", "none"])
def test_any_determinism_check_passes_a_segment(check: Any) -> None:
    """Digests of every value of a replay over several blocks, or no comparison at all: equal to plain."""
    assert equal_steps(lambda: Loop(chain()), 3, determinism_check=check) == [3, 3]


@pytest.mark.supports(strategy="single device", precision="bf16-mixed", policy="segments", compile="no")
def test_autocast_in_bfloat16_equals_plain() -> None:
    """A segment is replayed in the precision of its forward."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, x)

    assert equal_steps(lambda: Loop(chain()), 3, step=step) == [3, 3]


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return T5ForConditionalGeneration(config)


def _without_cache(kind: str) -> nn.Module:
    model = ZOO[kind].build()
    model.config.use_cache = False
    return model


def _masked(model: nn.Module, ids: Tensor) -> Tensor:
    """Rows of different lengths: the model builds a mask from these and hands it to every block by keyword."""
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


@pytest.mark.parametrize("size", [2, "sqrt", 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_are_joined_and_equal_plain(kind: str, size: Any) -> None:
    """Masks and rotary tables come to each block as keyword arguments, and blocks join all the same."""
    torch.manual_seed(1)
    data = [torch.randint(0, 50, (2, 16)) for _ in range(3)]
    joined = equal_steps(lambda: _without_cache(kind), size, step=_masked, data=data)
    assert joined == ([3] if size == 3 else [2, 1])


def test_an_encoder_decoder_is_joined_and_equals_plain() -> None:
    """T5's blocks pass a position bias with a gradient along, and its decoder's all take the encoder's result."""
    torch.manual_seed(1)
    data = [torch.randint(1, 50, (2, 10)) for _ in range(3)]
    assert equal_steps(_t5, 2, step=_masked, data=data) == [2, 2, 2, 2]


def test_a_cache_that_holds_results_of_the_segment_joins_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Llama that is told to fill one hands each block tensors of the blocks before: single segments, and a reason."""
    torch.manual_seed(1)
    data = [torch.randint(0, 50, (2, 16)) for _ in range(3)]
    assert equal_steps(ZOO["llama"].build, 3, step=ZOO["llama"].loss, data=data) == [3]  # turned off in training
    caplog.clear()

    def caching(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=True).loss

    assert equal_steps(ZOO["llama"].build, 3, step=caching, data=data) == [1, 1, 1]
    (line,) = caplog.messages
    assert line.startswith("Block 'model.layers.1' starts a segment of its own, though 3 were to span one: it takes ")


def test_an_argument_that_can_not_be_looked_into_joins_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An object of the user's own may hold results of the blocks before: single segments, and its class is named."""

    class Schedule:
        rate = 2.0

    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, schedule: Schedule) -> Tensor:
            return self.layer(x).tanh() * schedule.rate

    class Scheduling(Loop):
        def forward(self, x: Tensor) -> Tensor:
            schedule = Schedule()
            for block in self.blocks:
                x = block(x, schedule)
            return x

    assert equal_steps(lambda: Scheduling([Scheduled() for _ in range(3)]), 3) == [1, 1, 1]
    assert _lines(caplog) == [
        "Block 'blocks.1' starts a segment of its own, though 3 were to span one: it takes a Schedule, which may hold "
        "results of the segment"
    ]


# --- results used elsewhere ---


class Collecting(Loop):
    """Gives every hidden state back, as Hugging Face models do with `output_hidden_states`."""

    def forward(self, x: Tensor) -> list[Tensor]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return states


def test_collected_hidden_states_are_right_and_supervised() -> None:
    """Deep supervision: each block's result has its own loss, and a gradient of its own."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        states = model(x)
        assert all(state.requires_grad for state in states)
        return sum((index + 1) * state.square().mean() for index, state in enumerate(states))

    assert equal_steps(lambda: Collecting(chain()), 3, step=step) == [3, 3]


def test_the_gradient_of_a_result_in_the_middle_of_a_segment_can_be_asked_for() -> None:
    """`retain_grad` and `autograd.grad` on hidden states see what they see in the plain model."""
    ours, plain = twins(lambda: Collecting(chain()))
    checkpoint_blocks(ours, Full(segment_size=6))
    seen = []
    for model in (ours, plain):
        torch.manual_seed(2)
        states = model(rows()[0])
        states[2].retain_grad()
        (slope,) = torch.autograd.grad(states[4].sum(), states[1], retain_graph=True)
        states[-1].sum().backward()
        seen.append([slope, states[2].grad, *states])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_skips_across_segments_equal_plain() -> None:
    """A U-Net of equal widths: the second half adds the first half's results, and its blocks stay single."""

    class Skips(Loop):
        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for block in self.blocks[:3]:
                x = block(x)
                kept.append(x)
            for block in self.blocks[3:]:
                x = block(x + kept.pop())
            return x

    assert equal_steps(lambda: Skips(chain()), 3) == [3, 1, 1, 1]


@pytest.mark.supports(strategy="single device", precision="32-true", policy="segments", compile="no")
@pytest.mark.parametrize(("build", "size"), [(UNet, 2), (LSTMStack, 3), (ZOO["moe"].build, 3), (GPT, "sqrt")])
def test_models_of_every_kind_equal_plain(build: Any, size: Any) -> None:
    """Pools between convolutions, recurrent states, routed experts, attention."""
    specimen = next(specimen for specimen in ZOO.values() if specimen.build is build)
    torch.manual_seed(1)
    equal_steps(build, size, step=specimen.loss, data=[specimen.batch() for _ in range(3)])


# --- where blocks do not follow ---


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_blocks_joined_by_other_code_stay_single_and_say_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """A model that scales each result takes blocks apart: one line names the block and the reason."""
    assert equal_steps(lambda: Loop(chain(4), lambda index, x: x * 1.5), 4) == [1, 1, 1, 1]
    assert _lines(caplog) == [
        "Block 'blocks.1' starts a segment of its own, though 4 were to span one: it does not take the result of the "
        "block before as it is"
    ]


def test_other_code_in_one_place_makes_shorter_segments(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks before and after it are joined."""
    assert equal_steps(lambda: Loop(chain(5), lambda index, x: x + 1 if index == 1 else x), 5) == [2, 3]
    assert len(_lines(caplog)) == 1
    assert _lines(caplog)[0].startswith("Block 'blocks.2' starts a segment of its own, though 5 were to span one")


def test_a_result_changed_in_place_between_blocks_is_not_joined(caplog: pytest.LogCaptureFixture) -> None:
    """It is the same object and not the same value: a replay would not see the change."""
    equal = equal_steps(
        lambda: Loop([nn.Linear(WIDTH, WIDTH) for _ in range(4)], lambda index, x: x.mul_(2)), 4, blocks=nn.Linear
    )
    assert equal == [1, 1, 1, 1]
    assert "does not take the result of the block before as it is" in _lines(caplog)[0]


def test_an_argument_changed_in_place_between_blocks_is_not_joined() -> None:
    """A tensor that every block takes, and to which the model adds each result, is another one each time."""

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Adding() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            total = x * 1
            for block in self.blocks:
                x = block(x, total)
                total += x.sum()
            return x + total

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            return self.layer(x).tanh() + total

    model = Summing()
    handle = checkpoint_blocks(model, Full(segment_size=3))
    model(rows()[0].requires_grad_())
    assert spans(handle.report().segments) == [1, 1, 1]


@pytest.mark.parametrize("order", [[3, 1, 2, 0], [0, 2], [2], [1, 0, 3]])
def test_reordered_and_left_out_blocks_are_joined_as_they_are_called(order: list[int]) -> None:
    """The order of calls counts, not that of names."""

    class Ordered(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for index in order:
                x = self.blocks[index](x)
            return x

    assert sum(equal_steps(lambda: Ordered(chain(4)), 3)) == len(order)


def test_stochastic_depth_equals_plain() -> None:
    """Blocks skipped at random, others each step: whatever joins, gradients and random numbers are the plain run's."""

    class Stochastic(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if torch.rand(()) < 0.6:
                    x = block(x)
            return self.blocks[0](x)

    equal_steps(lambda: Stochastic(chain(8)), 3, data=rows(8))


def test_a_shared_block_equals_plain_and_is_not_joined_with_itself() -> None:
    """One set of weights, three calls: three segments."""
    shared = block()

    class Tied(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return self.blocks[1](x)

    ours, plain = twins(lambda: Tied([shared, block()]))
    handle = checkpoint_blocks(ours, Full(segment_size=4))
    counted = Replays(ours.blocks[0])
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))
    assert max(spans(handle.report().segments)) <= 2
    assert counted.replays == 3 * 3 * 4  # steps, calls and parts: the first block's parts are all needed each time


def test_a_block_that_calls_itself_equals_plain() -> None:
    """A tree of calls: the inner call is a checkpoint within the outer one's."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.layer(x).tanh()
            return self(x, depth - 1) * x if depth else x

    equal_steps(lambda: Loop([Tree() for _ in range(4)]), 4, blocks=Tree)


def test_a_neighbour_called_from_inside_a_block_is_not_its_successor() -> None:
    """A block that calls another one itself, with the tensor it was given, is not joined with that."""

    class Calling(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.other = [other]  # not registered: the other is a block in its own place

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.other[0](x)).tanh() * x

    def build() -> nn.Module:
        last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))
        return Loop([block(), Calling(last), last])

    ours, plain = twins(build)
    for model in (ours, plain):
        model.blocks[1].other[0] = model.blocks[2]
    checkpoint_blocks(ours, Full(segment_size=3), blocks="blocks.*")
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))


def test_a_tensor_made_inside_a_segment_is_not_taken_along(caplog: pytest.LogCaptureFixture) -> None:
    """A second argument that comes from a block before would tie graph and segment together: not joined, and said."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            y = self.layer(x).tanh()
            return y if gate is None else y * gate

    class Gating(Loop):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            gate = x.sigmoid()
            for block in self.blocks[1:]:
                x = block(x, gate=gate)
            return x

    assert equal_steps(lambda: Gating([Gated() for _ in range(4)]), 4) == [1, 3]
    assert _lines(caplog) == [
        "Block 'blocks.1' starts a segment of its own, though 4 were to span one: it takes another tensor with a "
        "gradient, which may come from inside the segment (of a key-value cache, say: turn off use_cache)"
    ]


def test_frozen_blocks_in_the_chain_equal_plain() -> None:
    """Frozen blocks without gradients upstream run as they are; behind trainable ones they are joined."""

    def build() -> nn.Module:
        model = Loop(chain(6))
        for index in (0, 1, 4):
            model.blocks[index].requires_grad_(False)
        return model

    assert equal_steps(build, 4) == [4]


# --- the report ---


def test_the_report_shows_every_segment() -> None:
    """None before a forward pass; afterwards all of them, by name, and in the rich table's caption."""
    model = Loop(chain(5))
    handle = checkpoint_blocks(model, Full(segment_size=2))
    assert handle.report().segments == ()
    model(rows()[0])
    named = (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("blocks.4",))
    assert handle.report().segments == named
    page = StringIO()
    Console(width=120, file=page).print(handle.report())
    assert "One replay spans: blocks.0 .. 1; blocks.2 .. 3; blocks.4" in page.getvalue()


# --- nested segments ---


class Stages(nn.Sequential):
    """Stages of thin blocks."""

    def __init__(self, stages: int = 4, blocks: int = 4, width: int = WIDTH, dropout: float = 0.3) -> None:
        super().__init__(
            *[
                nn.Sequential(
                    *[nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(blocks)]
                )
                for _ in range(stages)
            ]
        )


STAGES = lambda name, module: name.isdecimal()  # noqa: E731


@pytest.mark.parametrize("outer_first", [True, False])
@pytest.mark.parametrize("inner", [1, 2, 3, 9])
@pytest.mark.parametrize("outer", [1, 2, 3])
def test_nested_segments_equal_plain(outer: int, inner: int, outer_first: bool) -> None:
    """Stages in segments, their blocks in segments: an inner one ends with its stage, in forward and replay alike."""
    ours, plain = twins(Stages)
    applied = [(Full(segment_size=outer), STAGES), (Full(segment_size=inner), "*.*")]
    for policy, blocks in applied if outer_first else reversed(applied):
        checkpoint_blocks(ours, policy, blocks=blocks)
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))


def test_a_block_shared_by_two_stages_is_joined_alike_in_forward_and_replay() -> None:
    """What decides is what came before within the stage, not whether another stage has called the block."""

    def build() -> nn.Module:
        first, second = Stages(1, 6)[0], Stages(1, 3)[0]
        return nn.Sequential(first, nn.Sequential(first[1], *second))

    ours, plain = twins(build)
    outer = checkpoint_blocks(ours, Full(), blocks=STAGES)
    inner = checkpoint_blocks(ours, Full(segment_size=3), blocks="*.*")
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))
    assert spans(outer.report().segments) == [1, 1]
    assert spans(inner.report().segments) == [3, 1]  # since the shared block's second call; replays do not count


def test_a_block_called_twice_on_the_way_says_why_it_stays_single(caplog: pytest.LogCaptureFixture) -> None:
    """A shared block starts a segment at each call, with one log line."""
    shared = block()

    class Twice(Loop):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](self.blocks[0](x)))

    equal_steps(lambda: Twice([shared, block()]), 4)
    assert _lines(caplog) == [
        "Block 'blocks.0' starts a segment of its own, though 4 were to span one: it is called a second time on the "
        "way, as a shared block is"
    ]


def test_three_levels_of_segments_equal_plain() -> None:
    """Halves of halves."""

    def build() -> nn.Module:
        return nn.Sequential(*[Stages(2, 2) for _ in range(2)])

    ours, plain = twins(build)
    for depth in range(3):
        checkpoint_blocks(ours, blocks=lambda name, module, depth=depth: name and name.count(".") == depth)
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))


def test_segments_inside_pytorchs_own_checkpoint_equal_plain() -> None:
    """A user's checkpoint around a part of the chain replays that part alone: no segment crosses its border."""

    class Owner(Loop):
        by_hand = True

        def forward(self, x: Tensor) -> Tensor:
            for start in (0, 4):
                part = nn.Sequential(*self.blocks[start : start + 4])
                x = checkpoint(part, x, use_reentrant=False) if self.by_hand else part(x)
            return x

    ours, plain = twins(lambda: Owner(chain(8)))
    plain.by_hand = False
    for deterministic in (ours, plain):  # PyTorch's checkpoint moves running statistics twice
        for module in deterministic.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
    checkpoint_blocks(ours, Full(segment_size=3))
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))


# --- how a step may run ---


def test_several_forwards_before_one_backward_equal_plain() -> None:
    """Each forward has segments of its own."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - model(x.flip(0))).square().mean()

    assert equal_steps(lambda: Loop(chain()), 3, step=step) == [3, 3]


def test_two_backward_passes_over_one_graph_equal_plain() -> None:
    """`retain_graph=True` replays the segments twice, from the same state both times."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.mean().backward(retain_graph=True)
        out[0].sum().backward(retain_graph=True)
        return out.square().mean()

    equal_steps(lambda: Loop(chain()), 3, step=step)


def test_a_gradient_penalty_equals_plain() -> None:
    """A backward pass through a backward pass replays segments within replays."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    assert equal_steps(lambda: Loop(chain(4)), 2, step=step) == [2, 2]


def test_backward_in_the_middle_of_an_open_segment_equals_plain() -> None:
    """A loss on the first blocks goes backward before the next block is called."""

    class Early(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x)
                if index == 1 and self.training:
                    x.square().mean().backward(retain_graph=True)
            return x

    assert equal_steps(lambda: Early(chain(4)), 4) == [4]


def test_training_goes_on_after_an_exception_in_the_middle_of_a_segment() -> None:
    """A step that failed leaves nothing behind: the next ones equal those of a plain model that failed alike."""

    class Failing(nn.Module):
        fail = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            if self.fail:
                raise ValueError("no such token")
            return y

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.blocks[2].fail = True
        with pytest.raises(ValueError, match="no such token"):
            model(x)
        model.blocks[2].fail = False
        return mean_square(model, x)

    assert equal_steps(lambda: Loop([block(), block(), Failing(), block()]), 4, step=step, blocks="blocks.*") == [4]


@pytest.mark.parametrize("instead", [lambda x: x * 2, lambda x: x], ids=["another value", "the same"])
def test_a_caller_that_catches_an_exception_goes_on_without_the_block(instead: Callable[[Tensor], Tensor]) -> None:
    """What ran before the failure keeps its gradients, the block that failed is not replayed, and others join anew."""

    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(str(self.layer(x).tanh().shape))

    class Catching(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    x = instead(x)
            return x

    ours, plain = twins(lambda: Catching([block(), block(), Refusing(), block(), block()]))
    handle = checkpoint_blocks(ours, Full(segment_size=5), blocks="blocks.*")
    counted = [Replays(block) for block in ours.blocks]
    assert_equal(trace(ours, rows(), mean_square), trace(plain, rows(), mean_square))
    assert [count.replays > 0 for count in counted] == [True, True, False, True, True]
    assert handle.report().segments[-1] == ("blocks.3", "blocks.4")


def test_what_a_failed_block_has_left_can_not_be_replayed() -> None:
    """A tensor that gets out of a forward that failed has a place of its own in no replay: an error, no garbage."""

    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.left = self.layer(x).tanh()
            raise ValueError("no such token")

    model = Loop([block(), Leaking()])
    checkpoint_blocks(model, Full(segment_size=2), blocks="blocks.*")
    with pytest.raises(ValueError, match="no such token"):
        model(rows()[0])
    with pytest.raises(CheckpointError, match="whose forward ended in an exception is needed in backward: what such a"):
        model.blocks[1].left.sum().backward()


def test_a_saved_tensor_that_another_hook_can_not_bring_back_is_its_own_error() -> None:
    """What an outer hook raises, as one that offloads to a disk that is full, is not taken for a change in place."""

    def lost(packed: Tensor) -> Tensor:
        raise RuntimeError("the file is gone")

    model = Loop(chain(2))
    checkpoint_blocks(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lost):
        loss = model(rows()[0]).sum()
    with pytest.raises(RuntimeError, match=r"^the file is gone$"):
        loss.backward()


def test_inputs_are_watched_alike_where_pytorch_has_the_public_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a release without the direct way to save a tensor: equal steps, and an input changed in place is refused."""
    monkeypatch.delattr(torch._C._autograd, "_make_saved_tensor", raising=False)
    assert equal_steps(lambda: Loop(chain()), 3) == [3, 3]
    model, x = Loop(chain(2)), rows()[0]
    checkpoint_blocks(model)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(
        CheckpointError, match=r"An input of block 'blocks\.0' was changed in place after the block ran"
    ):
        loss.backward()


def test_nothing_is_joined_without_gradients() -> None:
    """Under `no_grad` blocks run as they are, and leave no segment behind."""
    model = Loop(chain(4))
    handle = checkpoint_blocks(model, Full(segment_size=2))
    counted = Replays(model.blocks[0])
    with torch.no_grad():
        model(rows()[0])
    assert handle.report().segments == ()
    assert (counted.calls, counted.replays) == (4, 0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_joins_its_own_blocks(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """A copy, also one made between forward and backward, trains its own weights, in segments."""
    ours, plain = twins(lambda: nn.Sequential(*chain(4)))
    checkpoint_blocks(ours, Full(segment_size=2))
    loss = mean_square(ours, rows()[0])
    copied = duplicate(ours)
    loss.backward()
    ours.zero_grad()
    plain.load_state_dict(copied.state_dict())
    counted = [Replays(block) for block in copied]
    assert_equal(trace(copied, rows(), mean_square), trace(plain, rows(), mean_square))
    assert all(count.replays == 3 * 4 for count in counted)
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.supports(strategy="single device", precision="32-true", policy="segments", compile="whole")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor's own
def test_a_compiled_model_checkpoints_block_by_block() -> None:
    """With no graph break allowed, within 1e-6 of the plain model compiled alike."""
    specimen = ZOO["gpt"]
    ours, plain = twins(lambda: GPT(depth=4, dropout=0.0))
    checkpoint_blocks(ours, Full(segment_size=2))
    torch.manual_seed(1)
    data = [specimen.batch() for _ in range(3)]
    traces = [trace(torch.compile(model, fullgraph=True), data, specimen.loss) for model in (ours, plain)]
    for mine, theirs in zip(*traces, strict=True):
        for key in mine.keys() - {"random state"}:
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-6)


# --- memory ---


class Masked(nn.Module):
    """Takes a mask, and a table that carries a gradient, as attention with learned positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        y = self.layer(x).tanh()
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return y if table is None else y + table.tanh()


class Masking(Loop):
    def __init__(self, with_table: bool) -> None:
        super().__init__([Masked() for _ in range(4)])
        self.table = nn.Parameter(torch.randn(1, WIDTH)) if with_table else None

    def forward(self, x: Tensor) -> Tensor:
        mask, table = x > 1, None if self.table is None else self.table * 2
        for block in self.blocks:
            x = block(x, mask=mask, table=table)
        return x


KINDS = {
    "alone": lambda: Loop(chain(4)),
    "with a mask": lambda: Masking(False),
    "with a table that has a gradient": lambda: Masking(True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_extra_arguments_are_joined_and_equal_plain(kind: str) -> None:
    """What every block takes from outside the segment is kept once and replayed with."""
    assert equal_steps(KINDS[kind], 4) == [4]


@pytest.mark.parametrize("went_backward", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_freed_without_garbage_collection(kind: str, went_backward: bool) -> None:
    """Memory comes back when the last name goes, also where the graph never went backward."""
    model = KINDS[kind]()
    handle = checkpoint_blocks(model, Full(segment_size=4))
    x = rows()[0] * 1
    out = model(x)
    watched = [weakref.ref(thing) for thing in (model, model.blocks[0], x, out)]
    if went_backward:
        out.sum().backward()
    assert spans(handle.report().segments) == [4]
    gc.collect()
    gc.disable()
    try:
        del model, x, out
        assert [reference() for reference in watched] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("went_backward", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "nested"])
def test_no_tensor_outlives_its_step(kind: str, went_backward: bool) -> None:
    """After each of three steps not one more tensor is alive, with the collector off."""
    model = Stages() if kind == "nested" else KINDS[kind]()
    checkpoint_blocks(model, Full(segment_size=2), blocks=STAGES if kind == "nested" else None)
    if kind == "nested":
        checkpoint_blocks(model, Full(segment_size=2), blocks="*.*")
    x, alive = rows()[0], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            loss = model(x).sum()
            if went_backward:
                loss.backward()
            del loss
            alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    finally:
        gc.enable()
    assert alive[1] == alive[2] == alive[3]


def activation_peak(model: nn.Module, x: Tensor) -> int:
    """Bytes at the worst moment of a step, above what is held before it; parameter gradients are held already."""
    model(x).sum().backward()
    with AllocatorReader() as reader:
        model(x).sum().backward()
    return reader.peak()


def thin(depth: int) -> list[nn.Module]:
    """Layers whose boundary is as large as what they keep: tanh's result, which is the next one's input."""
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth)]


def thin_peak(depth: int, size: Any) -> float:
    """In tensors of the chain's width."""
    model, x = nn.Sequential(*thin(depth)), torch.randn(4096, 16)
    if size:
        checkpoint_blocks(model, Full(segment_size=size))
    return activation_peak(model, x) / x.nbytes


def test_a_deep_thin_chain_peaks_at_the_root_of_its_depth() -> None:
    """Of 64 layers: at most 30 % of plain and 60 % of single segments, as counted by hand; and the same at 256."""
    plain, single, root = thin_peak(64, None), thin_peak(64, 1), thin_peak(64, "sqrt")
    counted = Chain(layers=64, segments=8, activation_bytes=1)
    assert plain == pytest.approx(counted.plain_tensors, abs=0.1)
    assert root == pytest.approx(counted.peak_tensors - 1, abs=0.1)  # the chain's input is held before the step
    assert root <= 0.30 * plain
    assert root <= 0.60 * single
    exponent = math.log(thin_peak(256, "sqrt") / thin_peak(16, "sqrt")) / math.log(256 / 16)
    assert exponent <= 0.6


def test_a_retained_graph_keeps_no_activations() -> None:
    """What a replay brought back goes as backward uses it, and a second backward replays again."""
    model, x = nn.Sequential(*thin(16)), torch.randn(4096, 16)
    checkpoint_blocks(model, Full(segment_size=4))
    model(x).sum().backward()
    with AllocatorReader() as reader:
        loss = model(x).sum()
        before = reader.current()
        loss.backward(retain_graph=True)
        assert reader.current() - before < x.nbytes


def test_nested_segments_peak_lower() -> None:
    """Of 64 thin layers, stages of 16 hold 4 boundaries and 16 layers; in fours, 4 and 3 more and 4."""
    x = torch.randn(4096, 16)

    def peak(*applied: tuple[Any, Any]) -> float:
        model = nn.Sequential(*[nn.Sequential(*thin(16)) for _ in range(4)])
        for policy, blocks in applied:
            checkpoint_blocks(model, policy, blocks=blocks)
        return activation_peak(model, x) / x.nbytes

    single = peak((Full(), STAGES))
    nested = peak((Full(), STAGES), (Full(segment_size=4), "*.*"))
    assert single == pytest.approx(4 + 16, abs=0.1)
    assert nested == pytest.approx(4 + 3 + 4, abs=0.1)
