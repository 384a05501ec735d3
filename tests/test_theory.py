"""The textbook model's numbers, by hand and against brute force."""

import pytest

from lightning_ckpt.theory import LEFT_OUT, Chain, best_segment_size, best_segments

MIB = 2**20


@pytest.fixture
def sixteen() -> Chain:
    return Chain(layers=16, segments=4, activation_bytes=8 * MIB)


def test_the_sixteen_layer_picture(sixteen: Chain) -> None:
    """17 tensors are 136 MiB plain; 5 bookmarks (40 MiB) and 4 scratch (32 MiB) peak at 72 MiB."""
    assert (sixteen.plain_tensors, sixteen.plain_bytes) == (17, 136 * MIB)
    assert (sixteen.boundary_tensors, sixteen.boundary_bytes) == (5, 40 * MIB)
    assert (sixteen.scratch_tensors, sixteen.scratch_bytes) == (4, 32 * MIB)
    assert (sixteen.peak_tensors, sixteen.peak_bytes) == (9, 72 * MIB)
    assert sixteen.saved_bytes == 64 * MIB
    assert sixteen.saved_fraction == pytest.approx(0.470588, abs=1e-6)


def test_one_replay_costs_a_third_more(sixteen: Chain) -> None:
    """Forward 1 and backward 2 make 48 units plain and 64 with a replay."""
    assert (sixteen.plain_cost, sixteen.checkpointed_cost) == (48, 64)
    assert sixteen.extra_cost_fraction == pytest.approx(1 / 3)


def test_the_costs_of_a_layer_can_be_given() -> None:
    """A layer whose backward pass costs as much as its forward pass pays half a step for the replay."""
    assert Chain(layers=6, segments=2, activation_bytes=1, backward_cost=1).extra_cost_fraction == pytest.approx(0.5)


def test_an_uneven_cut_counts_the_longest_segment() -> None:
    """Ten layers in four segments are cut 2, 3, 2, 3, and three tensors are scratch."""
    chain = Chain(layers=10, segments=4, activation_bytes=1)
    assert chain.boundaries == (0, 2, 5, 7, 10)
    assert chain.scratch_tensors == 3


def test_a_segment_a_layer_saves_nothing_in_this_model() -> None:
    """Every output is a bookmark and one more is scratch: the peak is above plain, and said so."""
    assert Chain(layers=5, segments=5, activation_bytes=7).saved_bytes == -7


@pytest.mark.parametrize("layers", range(1, 200))
def test_sqrt_is_the_best_segment_size(layers: int) -> None:
    """No number of segments has a lower peak than the square root's."""

    def peak(segments: int) -> int:
        return Chain(layers=layers, segments=segments, activation_bytes=1).peak_tensors

    assert peak(best_segments(layers)) == min(map(peak, range(1, layers + 1)))


def test_the_best_size_of_sixteen_layers_is_four() -> None:
    """Square numbers give their exact root, the next number the next size."""
    assert [best_segment_size(n) for n in (1, 2, 4, 5, 16, 17)] == [1, 2, 2, 3, 4, 5]


def test_what_the_model_leaves_out_is_said() -> None:
    """Each omission is one sentence."""
    assert len(LEFT_OUT) >= 4
    assert all(sentence.endswith(".") for sentence in LEFT_OUT)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"layers": 0}, ValueError, r"layers=0 is too small: give a whole number of at least 1"),
        ({"segments": 0}, ValueError, r"segments=0 is too small"),
        ({"activation_bytes": -1}, ValueError, r"activation_bytes=-1 is too small"),
        ({"layers": 2.5}, TypeError, r"layers=2\.5 is not a whole number: give an int"),
        ({"segments": True}, TypeError, r"segments=True is not a whole number"),
        ({"segments": 17}, ValueError, r"segments=17 is more than layers=16: .* give 1 to 16 segments"),
        ({"forward_cost": 0}, ValueError, r"forward_cost=0 is not a cost: give a number more than 0"),
        ({"backward_cost": float("nan")}, ValueError, r"backward_cost=nan is not a cost"),
    ],
)
def test_a_bad_value_is_named_with_its_cure(changed: dict[str, float], error: type[Exception], text: str) -> None:
    """An error says which argument, which value and what is accepted."""
    with pytest.raises(error, match=text):
        Chain(**{"layers": 16, "segments": 4, "activation_bytes": 8 * MIB, **changed})


@pytest.mark.parametrize("size", [best_segment_size, best_segments])
def test_the_best_size_needs_a_layer(size: object) -> None:
    """No layers is an error with the argument's name."""
    with pytest.raises(ValueError, match="layers=0 is too small"):
        size(0)  # type: ignore[operator]
