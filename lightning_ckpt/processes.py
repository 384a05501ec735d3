"""The processes of a run, which must decide alike: what each knows is gathered, or the first one's word is taken.

No rank waits for one that has failed. A rank that fails leaves a note in the store that the process group was made
with, and whoever waits for it reads the note within a second. A rank that is killed leaves none: its connections
break, or the process group's timeout passes, and then the others tell who among them has not come.
"""

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ckpt._compat import store_of_the_process_group

_T = TypeVar("_T")

# How long to wait for others before looking for their notes, again and again.
_LISTEN = timedelta(seconds=1)

# How long the first rank stays, once one has failed, for the others to hear of it.
_PATIENCE = timedelta(seconds=5)


class Ranks(Protocol):
    """The processes that must decide alike; all of them call the same of these in the same order."""

    def gather(self, value: _T) -> list[_T]:
        """The value of every rank, in order."""

    def from_first(self, value: _T) -> _T:
        """The first rank's value."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, without waiting for a device."""

    def failed(self, error: BaseException) -> None:
        """Let the others know that this rank has failed and comes no more. This one needs no other to call it too."""


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

    def failed(self, error: BaseException) -> None:
        """Nobody waits."""


class Processes:
    """All ranks of the default process group.

    Made by all of them, in the same order.

    Args:
        who: what waits, for messages.
        timeout: for the connections made where the process group's own don't reach the host; `None` for PyTorch's.

    Raises:
        RuntimeError: from any method but `failed`: another rank has failed or has not come. The message says which, and
            what it said.
    """

    _made = 0
    _heard: str | None = None  # of a rank that has failed

    def __init__(self, who: str = "lightning_ckpt", timeout: timedelta | None = None) -> None:
        self._who, self._rank, self._size = who, dist.get_rank(), dist.get_world_size()
        Processes._made += 1
        # Notes of a run before are none of this one's, and every rank counts alike.
        self._store = store_of_the_process_group(f"lightning_ckpt/{Processes._made}")
        self._calls = 0
        # Numbers of every step go over the host, so that nobody waits for a device.
        self._host = _on_the_host(timeout)

    def gather(self, value: _T) -> list[_T]:
        """The value of every rank, in order."""
        mine = _packed(value)
        sizes = [int(size) for size in self.rows(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        return [_unpacked(row[:size]) for row, size in zip(self.rows(padded), sizes, strict=True)]

    def from_first(self, value: _T) -> _T:
        """The first rank's value."""
        mine = _packed(value)
        size = torch.tensor([len(mine)])
        self._wait(lambda: dist.broadcast(size, src=0, group=self._host, async_op=True))
        whole = mine if self._rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(whole, src=0, group=self._host, async_op=True))
        self.most(0)  # the first one has only sent, and is to hear too of a rank that did not come
        return value if self._rank == 0 else _unpacked(whole)

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, without waiting for a device."""
        most = torch.tensor([number])
        self._wait(lambda: dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._host, async_op=True))
        return int(most)

    def rows(self, row: Tensor) -> list[Tensor]:
        """The tensor of every rank, in order; all on the host and of one shape and kind."""
        rows = [torch.empty_like(row) for _ in range(self._size)]
        self._wait(lambda: dist.all_gather(rows, row, group=self._host, async_op=True))
        return rows

    def failed(self, error: BaseException) -> None:
        """Let the others know that this rank has failed; the note of the first one to fail stays."""
        note = f"rank {self._rank} failed with {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # whoever kept the store may be gone
            self._store.compare_set("failed", "", note)
            self._note()
            # The store often goes with the first rank, which therefore stays until the others have heard.
            until = time.monotonic() + _PATIENCE.total_seconds()
            others = [f"heard by {rank}" for rank in range(1, self._size)]
            while self._rank == 0 and not self._store.check(others) and time.monotonic() < until:
                time.sleep(0.05)

    def _wait(self, begin: Callable[[], Any]) -> None:
        self._calls += 1
        broken: RuntimeError | None = None
        try:
            work = begin()
            while not _is_over(work):
                self._say_how_far()
                if self._note() and not _is_over(work):  # one that failed since has done its part in this call
                    break
            else:
                return
        except RuntimeError as error:
            broken = error
        raise RuntimeError(f"{self._who}: {self._why(broken)}") from broken

    def _why(self, broken: RuntimeError | None) -> str:
        """Why a wait is over that has brought nothing, in words."""
        if note := self._note():
            return f"{note}. Rank {self._rank} waits for it no longer; what that process printed says more"
        return (
            f"rank {self._rank} waited in vain for {self._missing()} ({broken}). What that process printed tells why "
            "it ended; if it is only slow, give the strategy a longer timeout"
        )

    def _note(self) -> str | None:
        """What the first rank to fail has left."""
        with suppress(RuntimeError):  # whoever kept the store may be gone
            if self._heard is None and self._store.check(["failed"]):
                self._heard = self._store.get("failed").decode()
                self._store.set(f"heard by {self._rank}", "")
        return self._heard

    def _missing(self) -> str:
        """The ranks that have not come to this call, in words."""
        try:
            self._say_how_far()
            time.sleep(2 * _LISTEN.total_seconds())  # until those that wait have said so
            missing = [str(rank) for rank in range(self._size) if self._how_far(rank) < self._calls]
        except RuntimeError:
            return "rank 0, with which the process group's store is gone"
        return f"rank {', '.join(missing)}" if missing else "another rank, which came too late"

    def _say_how_far(self) -> None:
        """Tell the others which call this rank waits in: some calls are over sooner for one rank than for another."""
        self._store.set(f"call of {self._rank}", f"{self._calls}")

    def _how_far(self, rank: int) -> int:
        """The latest call that a rank was seen waiting in; 0 for none."""
        key = f"call of {rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def is_first_rank() -> bool:
    """Whether this process is the first of its run, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def ranks_of(world_size: int, who: str = "lightning_ckpt", timeout: timedelta | None = None) -> Ranks:
    """Return the ranks of a run of this many processes; all of them ask, in the same order. See `Processes`."""
    return Processes(who, timeout) if world_size > 1 else Alone()


def _is_over(work: dist.Work) -> bool:
    """Whether a collective is done, waiting a while for it."""
    try:
        work.wait(_LISTEN)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # done since: it raises what went wrong, and not that it was late
    return True


_hosts: list[tuple[Any, Any]] = []


def _on_the_host(timeout: timedelta | None) -> Any:
    """A group of all ranks whose collectives run on the host: the default one, or one made once beside it."""
    world = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return world
    if not _hosts or _hosts[0][0] is not world:
        _hosts[:] = [(world, dist.new_group(backend="gloo", timeout=timeout))]
    return _hosts[0][1]


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
