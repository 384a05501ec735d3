"""What the checkpointed blocks of a run's module save and cost, step by step."""

from lightning.pytorch import LightningModule

from lightning_ckpt.callbacks._clock import Clock, Spans
from lightning_ckpt.policies import Policy
from lightning_ckpt.recompute import checkpointed_forwards
from lightning_ckpt.replay_meter import ReplayMeter


class StepReplays:
    """A meter on all checkpointed blocks of a module, whoever has checkpointed them.

    Args:
        pl_module: the module; where none of its blocks is checkpointed, nothing is measured.
        clock: takes the marks around replays.
    """

    def __init__(self, pl_module: LightningModule, clock: Clock) -> None:
        self._forwards = checkpointed_forwards(pl_module)
        self._applications = {id(forward.how): forward.how for forward in self._forwards}.values()
        self._meter = ReplayMeter(clock.mark)
        for application in self._applications:
            application.meter = self._meter

    @property
    def plan(self) -> int | None:
        """A number that changes with what is replayed; None while a plan is being looked for."""
        if not self._forwards:
            return 0
        if any(application.observers for application in self._applications):
            return None
        return sum(application.treated for application in self._applications)

    def begin_backward(self) -> None:
        """The forward pass is over, and all it has not kept is free."""
        self._meter.forward_over()

    def take(self) -> tuple[int | None, Spans | None]:
        """Return the bytes saved and the spans of replays since this was last asked for, None where unknown.

        No call is seen where all blocks are kept whole, which saves and costs nothing; where their calls are compiled,
        nobody knows.
        """
        if not self._forwards:
            return None, None
        replays = self._meter.take()
        if replays.saved is not None:
            return replays.saved, replays.spans
        kept_whole = all(forward.contexts is None for forward in self._forwards)
        return (0, ()) if kept_whole else (None, None)

    @property
    def policy(self) -> Policy | None:
        """How blocks are checkpointed; None for not at all."""
        return next((application.policy for application in self._applications), None)

    def let_go(self) -> dict[str, int | None]:
        """The bytes that each checkpointed block lets go, None before it was counted."""
        counted = self._meter.by_block()
        return {forward.name: counted.get(forward.name) for forward in self._forwards}

    def close(self) -> None:
        """Measure no longer."""
        for application in self._applications:
            if application.meter is self._meter:
                application.meter = None
