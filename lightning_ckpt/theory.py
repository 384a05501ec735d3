"""The textbook model of activation checkpointing: a chain of equal layers, cut into segments.

Source: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174,
section 4. Pure arithmetic over integers, for explaining and for choosing a segment size; what a real model saves is
measured, not computed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt

LEFT_OUT: Sequence[str] = (
    "Real layers keep several tensors of different sizes; here each keeps exactly one, its output.",
    "Parameters, gradients, optimizer state, temporaries and the allocator's fragments also take memory.",
    "Attention kernels and fused losses already avoid keeping their largest tensors.",
    "A replay stops at the last tensor the backward pass needs, so it often costs less than a whole forward pass.",
    "Gradients are freed and made while a segment is replayed, which moves the peak.",
)
"""What the model does not count, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of `layers` equal layers, of which only segment boundaries are kept for the backward pass.

    Tensors are counted as a training step sees them: the chain's input, and the output of every layer.

    Args:
        layers: number of layers n, at least 1.
        segments: number of segments k, from 1 to `layers`. Where k does not divide n, the longest segment counts.
        activation_bytes: size a of one layer's output, in bytes, at least 1.
        forward_cost: cost of one layer's forward pass, in any unit, more than 0.
        backward_cost: cost of one layer's backward pass, in the same unit. Two matrix products against the forward
            pass's one make it 2.

    Raises:
        TypeError: a count is not a whole number.
        ValueError: a value is out of its range.
    """

    layers: int
    segments: int
    activation_bytes: int
    forward_cost: float = 1.0
    backward_cost: float = 2.0

    def __post_init__(self) -> None:
        _check_count("layers", self.layers)
        _check_count("segments", self.segments)
        _check_count("activation_bytes", self.activation_bytes)
        if self.segments > self.layers:
            raise ValueError(
                f"segments={self.segments} is more than layers={self.layers}: a segment holds at least one layer, "
                f"so give 1 to {self.layers} segments"
            )
        for name, cost in (("forward_cost", self.forward_cost), ("backward_cost", self.backward_cost)):
            if not cost > 0:
                raise ValueError(f"{name}={cost!r} is not a cost: give a number more than 0")

    @property
    def plain_tensors(self) -> int:
        """Tensors kept without checkpointing: n + 1."""
        return self.layers + 1

    @property
    def boundary_tensors(self) -> int:
        """Bookmarks kept with checkpointing: the chain's input and each segment's output, k + 1."""
        return self.segments + 1

    @property
    def scratch_tensors(self) -> int:
        """Tensors made anew while one segment replays: its layers' outputs, n / k rounded up.

        The last of them equals a bookmark that is kept already; counting both makes the peak an upper bound by one.
        """
        return ceil(self.layers / self.segments)

    @property
    def peak_tensors(self) -> int:
        """Tensors alive at the worst moment: all bookmarks and one segment's scratch."""
        return self.boundary_tensors + self.scratch_tensors

    @property
    def plain_bytes(self) -> int:
        """Activation bytes kept without checkpointing: (n + 1) a."""
        return self.plain_tensors * self.activation_bytes

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the bookmarks: (k + 1) a."""
        return self.boundary_tensors * self.activation_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes needed while one segment replays: (n / k) a."""
        return self.scratch_tensors * self.activation_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst moment: (k + 1 + n / k) a."""
        return self.peak_tensors * self.activation_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that checkpointing saves at the peak; negative where it costs memory, as with a segment a layer."""
        return self.plain_bytes - self.peak_bytes

    @property
    def saved_fraction(self) -> float:
        """Saved bytes over plain bytes: at most 1, negative where checkpointing costs memory."""
        return self.saved_bytes / self.plain_bytes

    @property
    def plain_cost(self) -> float:
        """Cost of a step without checkpointing: every layer once forward, once backward."""
        return self.layers * (self.forward_cost + self.backward_cost)

    @property
    def checkpointed_cost(self) -> float:
        """Cost of a step with every layer's forward pass run a second time."""
        return self.plain_cost + self.layers * self.forward_cost

    @property
    def extra_cost_fraction(self) -> float:
        """Share that the replay adds to a step: forward / (forward + backward), 1/3 for costs of 1 and 2."""
        return self.checkpointed_cost / self.plain_cost - 1

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Positions of the bookmarks, from 0 (the chain's input) to n (its output); lengths differ by at most one."""
        return tuple(self.layers * segment // self.segments for segment in range(self.segments + 1))


def best_segment_size(layers: int) -> int:
    """Layers a segment for the lowest peak: the square root of the number of layers, rounded up.

    With segments of s layers the peak is n / s + 1 + s tensors (Chen et al., section 4.1), lowest at s = sqrt(n), where
    memory grows as 2 sqrt(n) instead of n.

    Args:
        layers: number of layers, at least 1.

    Raises:
        TypeError: not a whole number.
        ValueError: less than 1.
    """
    _check_count("layers", layers)
    return isqrt(layers - 1) + 1


def best_segments(layers: int) -> int:
    """Number of segments that `best_segment_size` makes of a chain; arguments and errors are the same."""
    return ceil(layers / best_segment_size(layers))


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number: give an int of at least 1")
    if value < 1:
        raise ValueError(f"{name}={value} is too small: give a whole number of at least 1")
