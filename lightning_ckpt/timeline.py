"""The peaks of a training step apart: one for each stretch in which a block runs forward or backward, and between.

A step's peak is the highest of many, and what a plan adds to memory is there in some of them only. So the peak is read
and reset wherever a block begins or ends. Allocators keep their counts on the host, so nothing waits for a device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ckpt.arguments import Arguments
from lightning_ckpt.checkpointed_forward import Call
from lightning_ckpt.held import with_memory
from lightning_ckpt.memory import Marks
from lightning_ckpt.peak_model import Stretch


@dataclass(frozen=True)
class Peaks:
    """What one step needed.

    Attributes:
        stretches: the highest memory of each stretch, in bytes.
        found: memory at its start, in bytes.
        gradients: bytes of gradients when its peak began.
        gradients_found: bytes of gradients at its start.
        inputs: for each block that ran, by name, the bytes of its inputs in the step's largest batch.
    """

    stretches: Mapping[Stretch, int]
    found: int
    gradients: int
    gradients_found: int
    inputs: Mapping[str, int]

    @property
    def highest(self) -> Stretch:
        """The stretch of the step's peak."""
        return max(self.stretches, key=self.stretches.__getitem__)

    @property
    def peak(self) -> int:
        """The step's peak, in bytes."""
        return max(self.stretches.values())


class Timeline:
    """Records the peak of every stretch of a step; an observer of blocks.

    Args:
        names: the blocks by qualified name; others that run are none of its business.
        marks: tells the peaks of stretches.
        gradients: tells the bytes of all gradients there are.
    """

    def __init__(self, names: Sequence[str], marks: Marks, gradients: Callable[[], int] = lambda: 0) -> None:
        self._names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._marks = marks
        self._gradients = gradients
        self.start()

    def start(self) -> None:
        """Forget everything, and start a step with its first batch."""
        self._gradients_now = self._gradients_found = self._gradients()
        self._peaks: dict[Stretch, int] = {}
        self._highest = self._held = 0
        self._largest: dict[str, int] = {}
        self._marks.mark()
        self._marks.marked()
        self._waiting: list[tuple[Stretch, int]] = []
        self.begin_batch()
        *_, self._found = self._marks.marked()  # no time has passed since the mark before, so it is what there was

    def begin_batch(self) -> None:
        """Start the forward pass of a batch of the step."""
        self._inputs: dict[str, int] = {}
        self._live = [0] * len(self._places)
        self._turn("start", -1)

    def end_backward(self) -> None:
        """What follows is the optimizer's, or another batch."""
        self._live = [0] * len(self._places)
        self._turn("optimizer", -1)
        self._fold()

    def end(self) -> Peaks:
        """End the step and return its peaks."""
        self._turn("optimizer", -1)
        self._fold()
        return Peaks(dict(self._peaks), self._found, self._held, self._gradients_found, dict(self._largest))

    def forward_begins(self, name: str) -> None:
        """A block is about to run."""
        place = self._places.get(name)
        if place is not None:
            self._live[place] += 1  # what it keeps gathers while it runs
            self._turn("forward", place)

    def forward_ends(self, name: str, call: Call | None, tensors: Sequence[Tensor], output: Any) -> None:
        """A block ran: have its backward announced."""
        place = self._places.get(name)
        if place is None:
            return
        self._turn("after", place)
        self._inputs[name] = self._inputs.get(name, 0) + sum(t.nbytes for t in with_memory(tensors))
        self._largest[name] = max(self._largest.get(name, 0), self._inputs[name])
        begun = _Once(self, place)
        for tensor in Arguments((output,), {}).take_tensors():
            if tensor.requires_grad:
                tensor.register_hook(begun)

    def backward_begins(self, place: int) -> None:
        """Gradients have reached a block's output."""
        self._live[place] = max(0, self._live[place] - 1)
        self._turn("backward", place)

    def _turn(self, what: str, block: int) -> None:
        self._marks.mark()
        if what in ("backward", "optimizer"):  # a forward pass makes no gradients
            self._gradients_now = self._gradients()
        self._waiting.append((Stretch(what, block, tuple(self._live)), self._gradients_now))

    def _fold(self) -> None:
        """Take the peaks of all stretches that have ended; a step of many batches must not pile them up."""
        ended = self._marks.marked()
        for (stretch, held), peak in zip(self._waiting, ended, strict=False):
            self._peaks[stretch] = max(self._peaks.get(stretch, 0), peak)
            if peak > self._highest:
                self._highest, self._held = peak, held
        del self._waiting[: len(ended)]


class _Once:
    """A hook on every output of one call, of which the first to get a gradient counts."""

    def __init__(self, timeline: Timeline, place: int) -> None:
        self._timeline, self._place = timeline, place
        self._waits = True

    def __call__(self, gradient: Tensor) -> None:
        if self._waits:
            self._waits = False
            self._timeline.backward_begins(self._place)
