"""profile_blocks: kept bytes and boundary bytes exact, replay time of what is really replayed, nothing left behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import find_blocks, is_recomputing
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.policies import Full
from lightning_ckpt.profiles import BlockProfile, Profile
from lightning_ckpt.profiling import Profiler, profile_blocks
from lightning_ckpt.recompute import checkpoint_blocks
from zoo import GPT, ZOO, mlp


def profile_of(name: str, **options: Any) -> tuple[nn.Module, Profile]:
    torch.manual_seed(0)
    specimen = ZOO[name]
    model, batch = specimen.build(), specimen.batch()
    return model, profile_blocks(model, lambda: specimen.loss(model, batch), blocks=specimen.blocks, **options)


def test_the_bytes_of_a_chain_are_those_counted_by_hand() -> None:
    """Linear, ReLU, Linear of width 64 on 64 rows keeps one activation beside its input, the ReLU's result."""
    model = mlp(3)
    profile = profile_blocks(model, lambda: model(torch.randn(64, 64)))
    activation = 64 * 64 * 4
    assert [block.kept_bytes for block in profile.blocks] == [activation] * 3
    assert [block.boundary_bytes for block in profile.blocks] == [activation] * 3
    assert (profile.kept_bytes, profile.boundary_bytes) == (3 * activation, 3 * activation)


def test_an_output_that_a_block_saves_is_the_next_ones_boundary() -> None:
    """A block that ends in Tanh keeps its result, which the next block's boundary holds already; the last one's not."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    profile = profile_blocks(model, lambda: model(torch.randn(4, 8)))
    assert [block.kept_bytes for block in profile.blocks] == [0, 0, 4 * 8 * 4]


def test_an_input_that_several_blocks_share_counts_once() -> None:
    """The memory that a decoder's blocks all take is the boundary of the first."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.linear(x).sigmoid() * memory

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, memory)
            return x

    model = Decoder()
    x, memory = torch.randn(4, 8), torch.randn(4, 8)
    profile = profile_blocks(model, lambda: model(x, memory))
    one = 4 * 8 * 4
    assert [block.boundary_bytes for block in profile.blocks] == [2 * one, one, one]


LARGER = {
    "gpt": lambda: torch.randint(0, 50, (16, 64)),
    "resnet": lambda: torch.randn(8, 1, 32, 32),
    "unet": lambda: torch.randn(8, 1, 32, 32),
    "lstm": lambda: torch.randn(32, 24, 16),
    "moe": lambda: torch.randn(512, 16),
}


@pytest.mark.parametrize("name", LARGER)
def test_what_blocks_keep_is_what_the_allocator_counts(name: str) -> None:
    """Plain activations after the forward pass, less checkpointed ones, are the kept bytes, to one part in a hundred.

    Checkpointed calls keep the random state of then, 5 kB each, and copies of buffers.
    """
    torch.manual_seed(0)
    specimen = ZOO[name]
    model, batch = specimen.build(), LARGER[name]()

    def held() -> int:
        for _ in range(4):  # buffers are learned by then
            specimen.loss(model, batch).backward()
        model.zero_grad()
        with AllocatorReader() as reader:
            loss = specimen.loss(model, batch)
            after = reader.current()
            del loss
        return after

    plain = held()
    with checkpoint_blocks(model, Full()):
        full = held()
    profile = profile_blocks(model, lambda: specimen.loss(model, batch), operators=False)
    states = len(profile.blocks) * 2 * torch.get_rng_state().nbytes
    assert profile.kept_bytes == pytest.approx(plain - full, rel=0.01, abs=states)


def test_blocks_of_one_kind_are_measured_once() -> None:
    """Equal blocks share one measurement, blocks of other widths have their own."""
    calls = 0

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x).relu()

    def forwards(*blocks: nn.Module) -> int:
        nonlocal calls
        calls, model = 0, nn.Sequential(*blocks)
        profile_blocks(model, lambda: model(torch.randn(2, 8, requires_grad=True)), operators=False, blocks=Counting)
        return calls

    of_two = forwards(*[Counting(8, 8) for _ in range(2)])
    assert forwards(*[Counting(8, 8) for _ in range(6)]) == of_two + 2 * 4  # each runs, and is counted once
    assert forwards(Counting(8, 4), Counting(4, 8)) == 2 * (of_two - 2)


def test_replay_time_is_that_of_what_is_replayed() -> None:
    """Early stop is counted: the operators measured end with the last that backward needs."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)])
    block = profile_blocks(model, lambda: model(torch.randn(4, 16))).blocks[0]
    assert [call.name for call in block.operators] == ["aten.addmm.default#0", "aten.gelu.default#0"]
    assert sum(call.seconds for call in block.operators) <= block.replay_seconds * (1 + 1e-9)


def test_every_operator_call_has_its_bytes_and_place() -> None:
    """Calls are numbered by operator, sizes are those of their results, and what backward needs of them is marked."""
    _, profile = profile_of("gpt")
    calls = {call.name: call for call in profile.blocks[0].operators}
    rows, width = 2 * 15, 32
    assert calls["aten.addmm.default#0"].nbytes == rows * 3 * width * 4
    assert calls["aten.addmm.default#2"].nbytes == rows * 4 * width * 4
    assert calls["aten.addmm.default#2"].saved  # GELU's input
    assert not calls["aten.addmm.default#1"].saved  # goes into a sum and nowhere else
    assert all(call.nbytes > 0 and call.seconds >= 0 for call in profile.blocks[0].operators)


def test_a_result_that_is_overwritten_is_no_option() -> None:
    """An operator whose result the block changes in place can't be kept."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu_().exp()

    model = nn.Sequential(*[InPlace() for _ in range(2)])
    block = profile_blocks(model, lambda: model(torch.randn(4, 8))).blocks[0]
    assert "aten.addmm.default#0" not in [call.name for call in block.operators]
    assert "aten.exp.default#0" in [call.name for call in block.operators]


def test_parts_say_what_is_kept_when_they_alone_are_replayed() -> None:
    """Replaying the MLP of a block frees what lies inside it, and keeps its input, which the block keeps anyway."""
    _, profile = profile_of("gpt")
    block = profile.blocks[0]
    parts = {part.name: part for part in block.parts}
    rows, width = 2 * 15, 32
    inside = 2 * rows * 4 * width * 4 + rows * width  # GELU's input and result, and the dropout's mask
    assert block.kept_bytes - parts["mlp"].kept_bytes == pytest.approx(inside, abs=rows * width * 4)
    assert parts["mlp"].replay_seconds > 0


def test_nothing_is_left_behind() -> None:
    """Random numbers, buffers, gradients, forwards and memory are as found."""
    torch.manual_seed(0)
    specimen = ZOO["resnet"]
    model, batch = specimen.build(), specimen.batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with AllocatorReader() as reader:
        profile_blocks(model, lambda: specimen.loss(model, batch))
        left = reader.current()
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert left == 0


def test_it_needs_no_more_than_one_blocks_memory() -> None:
    """The peak of profiling is below the checkpointed forward pass and what one block keeps and needs."""
    torch.manual_seed(0)
    model, ids = GPT(depth=8, width=64), torch.randint(0, 50, (8, 64))

    def peak(run: Any) -> int:
        with AllocatorReader() as reader:
            run()
        return reader.peak()

    with checkpoint_blocks(model):
        step = peak(lambda: model(ids).sum().backward())
        model.zero_grad()
        profiled = peak(lambda: profile_blocks(model, lambda: model(ids)))
    block = profile_blocks(model, lambda: model(ids)).blocks[0]
    assert profiled <= step + block.kept_bytes


def test_a_block_called_twice_counts_twice() -> None:
    """A shared block's calls are counted, and the profile's sums count each."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](self.layers[0](x)))

    model = Shared()
    profile = profile_blocks(model, lambda: model(torch.randn(4, 8)))
    assert [block.calls for block in profile.blocks] == [2, 1]
    first, second = profile.blocks
    assert profile.kept_bytes == 2 * first.kept_bytes + second.kept_bytes


def test_a_frozen_block_has_nothing_to_measure() -> None:
    """Blocks without anything to save are no part of the profile."""
    model, profile = profile_of("frozen-backbone")
    assert [name for name, _ in find_blocks(model)] != [block.name for block in profile.blocks]
    assert all(block.name.startswith("heads") for block in profile.blocks)


def test_where_nothing_records_a_gradient_it_says_so() -> None:
    """A model without parameters to train has no profile."""
    model = mlp(2).requires_grad_(False)
    with pytest.raises(ValueError, match="no block was measured: in this run none was called with a gradient"):
        profile_blocks(model, lambda: model(torch.randn(2, 64)))


def test_the_profile_is_a_value_that_saves(tmp_path: Any) -> None:
    """It comes back equal from JSON, and prints a row for each kind of block."""
    _, profile = profile_of("gpt")
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert isinstance(profile.blocks[0], BlockProfile)


def test_it_prints_as_a_table(capsys: Any) -> None:
    """Equal blocks share a row, and the title sums up."""
    from rich.console import Console

    block = BlockProfile("blocks.0", "Block", 1, 3 * 2**20, 2**20, 0.002)
    Console(width=120).print(Profile((block, BlockProfile("blocks.1", "Block", 1, 3 * 2**20, 2**20, 0.002))))
    text = capsys.readouterr().out
    assert "6 MiB kept plain beside 2 MiB of boundaries, 4 ms to replay" in text
    assert "blocks.0 .. blocks.1, each of 2" in text
    assert "1.5" in text  # MiB per ms


class Residual(nn.Module):
    """Its body begins with an activation in place, on a tensor of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.body(self.norm(x))


def test_a_part_that_can_not_be_replayed_alone_is_no_option() -> None:
    """A submodule that changes its input in place costs an option, and nothing else."""
    model = nn.Sequential(*[Residual() for _ in range(2)])
    profile = profile_blocks(model, lambda: model(torch.randn(4, 8)))
    assert all("body" not in [part.name for part in block.parts] for block in profile.blocks)
    assert all(block.kept_bytes > 0 for block in profile.blocks)


def test_a_block_that_can_not_be_measured_is_replayed_whole(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, with its name and the reason, and the others are measured: nothing is said of their counters."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise ArithmeticError("not again")
            return self.linear(x).tanh()

    model = nn.Sequential(Residual(), Once(), Residual())
    profile = profile_blocks(model, lambda: model(torch.randn(4, 8)), blocks="?")
    assert [block.name for block in profile.blocks] == ["0", "2"]
    assert caplog.messages == ["Block '1' can't be measured, so it is replayed whole: not again"]


def test_a_block_that_differentiates_inside_and_throws_graphs_away_is_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it saves on the way is handed back to it, and what is gone by then does not have to be brought back."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.linear(x).exp()
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.linear(place).tanh().sum(), place)
            return self.linear(x + force).tanh()

    model = nn.Sequential(Forces(), Forces())
    profile = profile_blocks(model, lambda: model(torch.randn(4, 8)), blocks="?", operators=False)
    assert [block.name for block in profile.blocks] == ["0", "1"]
    assert not caplog.messages


def test_attributes_are_left_as_a_step_leaves_them() -> None:
    """A counter in a block has counted the step's own call, and no measurement's."""
    model = nn.Sequential(*[Residual() for _ in range(2)])
    with checkpoint_blocks(model) as handle:
        handle.observe(Profiler(model, 2))
        model(torch.randn(4, 8))
    assert [block.calls for block in model] == [1, 1]


def test_a_pass_counts_its_own_calls() -> None:
    """Blocks that run again for a further batch of the step are no more often called in one pass."""
    model = mlp(2)
    with checkpoint_blocks(model) as handle:
        profiler = Profiler(model, 2, operators=False)
        handle.observe(profiler)
        for _ in range(4):
            profiler.begin_batch()
            model(torch.randn(8, 64))
    assert [block.calls for block in profiler.profile().blocks] == [1, 1]


def test_the_largest_of_a_blocks_calls_counts() -> None:
    """A block that is called with few rows and with many is measured on the many."""
    model = mlp(2)

    def run() -> Tensor:
        return model(torch.randn(2, 64)).sum() + model(torch.randn(200, 64)).sum()

    assert [block.kept_bytes for block in profile_blocks(model, run).blocks] == [200 * 64 * 4] * 2


def test_likeness_may_deceive() -> None:
    """Blocks that print alike and keep differently are told apart."""

    class Repeats(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(8, 8), times

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(self.times):
                x = x.sin()
            return x

    model = nn.Sequential(Repeats(1), Repeats(1), Repeats(20))
    kept = [block.kept_bytes for block in profile_blocks(model, lambda: model(torch.randn(4, 8))).blocks]
    assert kept[0] == kept[1]
    assert kept[2] >= 20 * 4 * 8 * 4


def test_lazy_parameters_are_no_activations() -> None:
    """A block that gets its parameters with the first batch is measured like any other."""
    lazy = nn.Sequential(*[nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
    eager = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
    kept = [
        [block.kept_bytes for block in profile_blocks(m, lambda m=m: m(torch.randn(4, 8)), operators=False).blocks]
        for m in (lazy, eager)
    ]
    assert kept[0] == kept[1]
