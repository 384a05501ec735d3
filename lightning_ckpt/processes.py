"""The processes of a run, which must decide alike: what each knows is gathered, or the first one's word is taken."""

from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


class Ranks(Protocol):
    """The processes that must decide alike; all of them call the same of these in the same order."""

    def gather(self, value: _T) -> list[_T]:
        """The value of every rank, in order."""

    def from_first(self, value: _T) -> _T:
        """The first rank's value."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, without waiting for a device."""


class Alone:
    """One process."""

    def gather(self, value: _T) -> list[_T]:
        """This process's value alone."""
        return [value]

    def from_first(self, value: _T) -> _T:
        """This process's value."""
        return value

    def most(self, number: int) -> int:
        """This process's number."""
        return number


class Processes:
    """All ranks of the default process group."""

    def __init__(self) -> None:
        # Numbers of every step go over the host, so that nobody waits for a device.
        self._host = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def gather(self, value: _T) -> list[_T]:
        """The value of every rank, in order."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._host)
        return values

    def from_first(self, value: _T) -> _T:
        """The first rank's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, without waiting for a device."""
        most = torch.tensor([number])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._host)
        return int(most)


def is_first_rank() -> bool:
    """Whether this process is the first of its run, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def ranks_of(world_size: int) -> Ranks:
    """Return the ranks of a run of this many processes."""
    return Processes() if world_size > 1 else Alone()
