"""How much memory a step may need."""

from dataclasses import dataclass

from lightning.pytorch import Trainer

from lightning_ckpt.callbacks._distributions import MisconfigurationException
from lightning_ckpt.callbacks._tuner_options import TunerOptions
from lightning_ckpt.memory import reader_for
from lightning_ckpt.sizes import format_size


@dataclass(frozen=True)
class Room:
    """How much memory a step may need; prints as words.

    Attributes:
        limit: what the device or the process can hold, in bytes.
        target: what a step may need of it, in bytes.
        noise: what else was taken off, in words.
    """

    limit: int
    target: int
    noise: str

    def __str__(self) -> str:
        return f"{format_size(self.target)}, of {format_size(self.limit)} less the headroom{self.noise}"


def room_of(trainer: Trainer, options: TunerOptions, *, usable: float, copies: int) -> Room:
    """Return the room on this rank.

    Args:
        trainer: on whose device.
        options: the headroom to leave, and the limit where one is given.
        usable: share of the target that a step may show.
        copies: bytes of copies of the state that lie in the same memory while trials run.

    Raises:
        MisconfigurationException: nobody knows how much memory there is.
    """
    limit = options.memory_limit or reader_for(trainer.strategy.root_device).limit()
    if not isinstance(limit, int):
        raise MisconfigurationException(
            "BatchSizeTuner can't tell how much memory there is on this machine: give memory_limit, in bytes or as "
            '"40GiB"'
        )
    # The copies must not push a trial over the edge.
    target = min(int(limit * (1 - options.headroom) * usable), limit - copies)
    noise = f" and {1 - usable:.0%} for what a resident size can't tell" if usable < 1 else ""
    return Room(limit, max(0, target), noise)
