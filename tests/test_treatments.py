"""The ways to treat a block, by its profile, and a block treated in each of them."""

import copy

import pytest
import torch
from torch import nn

from equality import Replays, assert_equal, trace, twins
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.profiles import BlockProfile, PartProfile, SelectionProfile
from lightning_ckpt.profiling import Profiler, profile_blocks
from lightning_ckpt.recompute import checkpoint_blocks
from lightning_ckpt.treatments import Treatment, choices
from zoo import GPT, ZOO, mlp

PROFILE = BlockProfile(
    "blocks.0",
    "Block",
    calls=2,
    kept_bytes=1000,
    boundary_bytes=100,
    replay_seconds=0.010,
    selections=(
        SelectionProfile(("aten.mm.default#0",), 100, 0, 0.007),
        SelectionProfile(("aten.mm.default#0", "aten.mm.default#1"), 200, 100, 0.004),
    ),
    parts=(PartProfile("mlp", 300, 0.006), PartProfile("norm", 990, 0.001)),
)


def test_the_ways_range_from_all_replayed_to_all_kept() -> None:
    """Replaying all comes first and keeping all last; parts that free next to nothing are left out."""
    ways = choices(PROFILE)
    assert str(ways[0][0]) == "replayed"
    assert str(ways[-1][0]) == "kept"
    assert (ways[0][1].kept, ways[0][1].seconds) == (0, 0.020)
    assert (ways[-1][1].kept, ways[-1][1].seconds) == (1000, 0.0)
    assert [way.part for way, _ in ways if way.part] == ["mlp"]


def test_kept_results_cost_their_bytes_and_spare_their_time() -> None:
    """A result that backward does not need is there beside the replay's."""
    first, option = choices(PROFILE)[1]
    assert first == Treatment("calls", calls=("aten.mm.default#0",))
    assert (option.kept, option.own) == (100, 0)
    assert option.seconds == 0.014
    second, option = choices(PROFILE)[2]
    assert second.calls == ("aten.mm.default#0", "aten.mm.default#1")
    assert (option.kept, option.own) == (200, 100)


def test_a_part_costs_what_the_rest_keeps() -> None:
    """Replaying one submodule takes its own time, once a call."""
    option = next(option for way, option in choices(PROFILE) if way.part == "mlp")
    assert (option.kept, option.seconds) == (300, 0.012)


def test_a_treatment_is_a_plain_value() -> None:
    """It comes back from JSON, and reads as words."""
    for treatment, _ in choices(PROFILE):
        assert Treatment.from_json(treatment.to_json()) == treatment
    assert str(choices(PROFILE)[2][0]) == "replayed but for mm 1, mm 2"


@pytest.mark.parametrize("name", ["gpt", "vit", "resnet", "unet", "llama", "lstm", "moe"])
def test_every_way_of_treating_gives_plain_gradients(name: str) -> None:
    """Loss, gradients, buffers and random numbers are the plain run's under each option of every block."""
    specimen = ZOO[name]
    plain, model = twins(specimen.build)
    torch.manual_seed(1)
    batches = [specimen.batch() for _ in range(3)]
    profile = profile_blocks(model, lambda: specimen.loss(model, batches[0]), blocks=specimen.blocks)
    ways = {block.name: [way for way, _ in choices(block)] for block in profile.blocks}
    expected = trace(plain, batches, specimen.loss)
    for index in range(max(map(len, ways.values()))):
        ours = copy.deepcopy(model)
        with checkpoint_blocks(ours, "auto", blocks=specimen.blocks) as handle:
            handle.treat({block: some[min(index, len(some) - 1)] for block, some in ways.items()})
            assert_equal(trace(ours, batches, specimen.loss), expected)


def test_treatments_are_taken_back() -> None:
    """Blocks not named are replayed whole again, and parts get their own forward back."""
    model = GPT(depth=2)
    handle = checkpoint_blocks(model, "auto")
    handle.treat({"blocks.0": Treatment("rest", part="mlp"), "blocks.1": Treatment("everything")})
    assert "forward" in vars(model.blocks[0].mlp)
    handle.treat({})
    assert "forward" not in vars(model.blocks[0].mlp)
    handle.treat({"blocks.0": Treatment("rest", part="mlp")})
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_kept_block_is_not_replayed() -> None:
    """Blocks treated as kept run once a step, the others twice."""
    model = mlp(3)
    replays = [Replays(block) for block in model]
    with checkpoint_blocks(model) as handle:
        handle.treat({"1": Treatment("everything")})
        model(torch.randn(4, 64)).sum().backward()
    assert [count.replays > 0 for count in replays] == [True, False, True]


def kept_by(model: nn.Module) -> int:
    """The bytes that a forward pass leaves for its backward."""
    with AllocatorReader() as reader:
        loss = model(torch.randint(0, 50, (2, 8))).sum()
        held = reader.current()
    del loss
    return held


def test_a_wrong_name_changes_nothing() -> None:
    """Treatments are checked before any holds, and the message says what there is."""
    model = GPT(depth=2)
    handle = checkpoint_blocks(model, "auto")
    handle.treat({"blocks.0": Treatment("everything")})
    with pytest.raises(ValueError, match=r"'blocks.7' is no checkpointed block; those are: blocks.0, blocks.1"):
        handle.treat({"blocks.1": Treatment("everything"), "blocks.7": Treatment()})
    with pytest.raises(ValueError, match=r"block 'blocks.1' has no submodule 'ffn'"):
        handle.treat({"blocks.1": Treatment("rest", part="ffn")})
    held = kept_by(model)
    handle.treat({})
    assert kept_by(model) < held


def test_a_copy_of_a_treated_model_keeps_what_its_original_keeps() -> None:
    """By bytes and by gradients, with its own weights; and what watches the original sees nothing of it."""
    model = GPT(depth=2)
    ids = torch.randint(0, 50, (4, 16))
    with checkpoint_blocks(model) as handle:
        handle.treat({"blocks.0": Treatment("everything"), "blocks.1": Treatment("calls", ("aten.addmm.default#0",))})
        profiler = Profiler(model, 2, operators=False)
        handle.observe(profiler)
        twin = copy.deepcopy(model)
        held = []
        for each in (twin, model):
            torch.manual_seed(0)
            with AllocatorReader() as reader:
                loss = each(ids).sum()
                held.append(reader.current())
            if each is twin:
                assert not profiler.profile().blocks
            loss.backward()
            del loss
    assert held[0] == pytest.approx(held[1], rel=0.05)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_an_operator_that_is_not_there_changes_nothing() -> None:
    """A plan of another PyTorch is refused whole, with the block and its calls."""
    model = GPT(depth=2)
    handle = checkpoint_blocks(model, "auto")
    missing = Treatment("calls", calls=("aten.nosuch.default#0",))
    with pytest.raises(
        ValueError, match=r"block 'blocks.1': this PyTorch lacks an operator among the calls aten.nosuch"
    ):
        handle.treat({"blocks.0": Treatment("everything"), "blocks.1": missing})
    held = kept_by(model)
    handle.treat({})
    assert kept_by(model) == held
