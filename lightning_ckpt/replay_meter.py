"""What checkpointed blocks let go in each forward pass, and when they are replayed: the live figures of a run.

Bytes are counted once for each block and shapes of its inputs, and remembered: counting takes a look at every tensor
that autograd saves, and a training loop repeats itself.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt._compat import StorageWeakRef

# Calls remembered at most: sequences of every length would let them grow for ever.
_MOST = 4096


@dataclass(frozen=True)
class Replays:
    """What was measured since it was last asked for.

    Attributes:
        saved: bytes that backward needs and that were not kept, of the forward pass that let most go; `None` where no
            call of a checkpointed block has come to its backward.
        spans: beginning and end of each replay, as the meter's clock marks them.
    """

    saved: int | None
    spans: tuple[tuple[Any, Any], ...]


class ReplayMeter:
    """Watches the calls of checkpointed blocks.

    Args:
        mark: takes the time: a number of seconds, or an event that a device will reach later.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.mark = mark
        self._known: dict[tuple[Any, ...], int] = {}
        self._calls = 0
        self._sum = 0  # of the calls whose bytes are known
        self._tallies: list[Tally] = []
        self._saved: int | None = None
        self._spans: list[tuple[Any, Any]] = []

    def begins(self, name: str, contexts: Hashable, tensors: Sequence[Tensor]) -> "Tally | None":
        """A call of a block begins: what its tensors are to be noted in; `None` where its bytes are known.

        Args:
            name: the block.
            contexts: how it is treated.
            tensors: its inputs.
        """
        key = (name, contexts, *((tensor.shape, tensor.dtype) for tensor in tensors))
        self._calls += 1
        if (known := self._known.get(key)) is None:
            return Tally(self._tallies, key, tensors)
        self._sum += known
        return None

    def replayed(self, begun: Any) -> None:
        """A replay has ended that began at this mark."""
        self._spans.append((begun, self.mark()))

    def forward_over(self) -> None:
        """The forward pass is over, and backward is about to begin: what is gone now was let go.

        The first replay says so too, a little late: what lies behind the last checkpointed block has gone by then.
        """
        if not self._calls:
            return
        saved, seen = self._sum, {memory for tally in self._tallies for memory in tally.saved}
        if len(self._known) > _MOST:
            self._known.clear()
        for tally in self._tallies:
            self._known[tally.key] = nbytes = tally.let_go(seen)
            saved += nbytes
        self._saved = saved if self._saved is None else max(self._saved, saved)
        self._forget_pass()

    def take(self) -> Replays:
        """Return what was measured, and begin anew; a forward pass without a backward is forgotten."""
        taken = Replays(self._saved, tuple(self._spans))
        self._saved, self._spans = None, []
        self._forget_pass()
        return taken

    def by_block(self) -> dict[str, int]:
        """The bytes that one call of each block lets go, of the largest call that was counted."""
        sizes: dict[str, int] = {}
        for (name, *_), nbytes in self._known.items():
            sizes[name] = max(nbytes, sizes.get(name, nbytes))
        return sizes

    def _forget_pass(self) -> None:
        self._calls = self._sum = 0
        self._tallies.clear()


class Tally:
    """The memory of one call, by weak reference: nothing is held, and no identity is given to other memory.

    Args:
        done: where it adds itself once the call has ended.
        key: what it is to be remembered by.
        inputs: the tensors the call was given.
    """

    def __init__(self, done: "list[Tally]", key: tuple[Any, ...], inputs: Sequence[Tensor]) -> None:
        self.key = key
        self.saved: dict[StorageWeakRef, int] = {}
        self._done = done
        # What no operator has made from a parameter was there before, and others hold it: the batch, a mask.
        self._held = dict(filter(None, (_memory(tensor) for tensor in inputs if tensor.grad_fn is not None)))

    def note(self, tensor: Tensor) -> None:
        """Autograd saves this tensor."""
        if (memory := _memory(tensor)) is not None:
            self.saved[memory[0]] = memory[1]

    def ends(self, kept: Iterable[Tensor]) -> None:
        """The call has ended, and its policy keeps these results for the replay."""
        self._held.update(filter(None, map(_memory, kept)))
        self._done.append(self)

    def let_go(self, without_replay: set[StorageWeakRef]) -> int:
        """The bytes that are gone, less those that are kept for the replay alone; each counts once.

        Args:
            without_replay: the memory that plain calls would keep; what is counted is taken out.
        """
        gone = [memory for memory in self.saved if memory in without_replay and memory.expired()]
        kept = [memory for memory in self._held if memory not in without_replay and not memory.expired()]
        without_replay.difference_update(gone)
        without_replay.update(kept)
        return sum(map(self.saved.__getitem__, gone)) - sum(map(self._held.__getitem__, kept))


def _memory(tensor: Tensor) -> tuple[StorageWeakRef, int] | None:
    """A tensor's memory and its bytes, of a sharded tensor the shard that is here; `None` where it is of no piece."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()
