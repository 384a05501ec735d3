"""The phases of a training step, forward, backward and optimizer, with the peak of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ckpt.callbacks._distributions import Callback
from lightning_ckpt.memory import HostReader, MemoryReader, marks_of
from lightning_ckpt.search import Measurement, Phase


@dataclass(frozen=True)
class Held:
    """What lasts from one step to the next, in bytes, beside the model.

    Attributes:
        optimizer: state of the optimizers.
        gradients: those that are there between steps, and through the forward pass of the next.
    """

    optimizer: int
    gradients: int


class Phases(Callback):
    """Marks where backward passes begin and optimizers step, in steps that are taken while this is a callback.

    A resident size keeps what a step has freed, so by it no phases are told apart.

    Args:
        reader: tells the peaks.
    """

    def __init__(self, reader: MemoryReader) -> None:
        self._marks = None if isinstance(reader, HostReader) else marks_of(reader)
        self._ends: list[str] = []
        self._steps: list[tuple[list[str], list[int]]] = []

    def around(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, with its phases kept until the next `forget`."""
        marks = self._marks
        if marks is None:
            return step

        def marked() -> None:
            self._ends = []
            marks.mark()
            marks.marked()
            step()
            self._mark("step")
            self._steps.append((self._ends, marks.marked()))

        return marked

    def forget(self) -> None:
        """Begin anew."""
        self._steps = []

    def peaks(self, *, floor: int, gradients: int) -> tuple[Phase, ...]:
        """The highest peak of each phase in the steps kept; none where the steps differ in their phases.

        Args:
            floor: bytes that are there whatever the batch size.
            gradients: bytes that are there besides until the first forward pass is done.
        """
        if not self._steps or any(ends != self._steps[0][0] for ends, _ in self._steps):
            return ()
        highest = [max(peaks) for peaks in zip(*(peaks for _, peaks in self._steps), strict=True)]
        return (Phase(highest[0], floor + gradients), *(Phase(peak, floor) for peak in highest[1:]))

    def as_if_later(self, size: int, *, before: Held, after: Held, floor: int) -> Measurement | None:
        """What a second step would measure, from the first: with the optimizer state and the gradients it made.

        Gradients of the step before are there until the forward pass is done, optimizer state until the optimizer
        steps; there it is made, so that its peak is what it will be. None where a step is not like that.
        """
        first = self.peaks(floor=floor, gradients=after.gradients)
        if not first or self._steps[0][0][-2:] != ["optimizer", "step"] or self._steps[0][0].count("optimizer") != 1:
            return None
        state, gradients = after.optimizer - before.optimizer, after.gradients - before.gradients
        forward = Phase(first[0].peak + state + gradients, first[0].floor)
        backward = (Phase(phase.peak + state, phase.floor) for phase in first[1:-1])
        phases = (forward, *backward, first[-1])
        return Measurement(size, max(phase.peak for phase in phases), phases=phases)

    def on_before_backward(self, *_: Any) -> None:
        self._mark("forward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._mark("optimizer")

    def _mark(self, end: str) -> None:
        if self._marks is not None:
            self._ends.append(end)
            self._marks.mark()
