"""Kept bytes, boundary bytes and replay time of each block, measured in place on one forward pass.

A block is measured right after its forward, by replays of that very call: on its own inputs, with the random numbers,
buffers and parameters of then, all of which are left as found. Nothing is held from one block to the next, so the
memory it needs beyond the checkpointed forward pass is one block's own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from lightning_ckpt._compat import StorageWeakRef, storage_id, without_modes
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.checkpointed_forward import Application, Call
from lightning_ckpt.held import with_memory
from lightning_ckpt.measured_replay import Saved, attributes_kept, count_saved, median_seconds, unrecorded
from lightning_ckpt.operator_times import operator_calls, selections
from lightning_ckpt.policies import Full, ReplayContexts
from lightning_ckpt.profiles import BlockProfile, PartProfile, Profile
from lightning_ckpt.recompute import checkpoint_blocks, checkpointed_forwards, install
from lightning_ckpt.snapshot import Snapshot

_log = logging.getLogger(__name__)


def profile_blocks(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    blocks: Blocks | None = None,
    operators: bool = True,
    progress: bool = False,
) -> Profile:
    """Measure what each block keeps for backward and how long its replay takes, on one forward pass.

    The model runs checkpointed meanwhile, so that one block's activations are in memory at a time. Blocks of one class,
    with arguments and parameters of the same shapes, are measured once. The model, its buffers and all random numbers
    are left as found.

    Args:
        model: any module; where blocks of it are checkpointed already, those are measured.
        run: calls the model with gradients, `lambda: model(batch)`.
        blocks: what to measure; see `find_blocks`.
        operators: measure the single operator calls and submodules of each block too, which takes longer.
        progress: show a progress bar.

    Returns:
        The profile: sizes in bytes, times in seconds; prints as a rich table, and saves to JSON.

    Raises:
        ValueError: no block was found, or none of them ran with anything to save.

    Examples:
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "abc"]
        >>> model = torch.nn.Sequential(*layers)
        >>> profile = profile_blocks(model, lambda: model(torch.randn(2, 8)))
        >>> [(block.name, block.kept_bytes, block.boundary_bytes) for block in profile.blocks]
        [('0', 0, 64), ('1', 0, 64), ('2', 64, 64)]
    """
    existing = [forward for forward in checkpointed_forwards(model) if forward.active]
    if not existing:
        with checkpoint_blocks(model, blocks=blocks):
            return profile_blocks(model, run, operators=operators, progress=progress)
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    found = Snapshot([model], device=device)
    with Profiler(model, len(existing), operators=operators, progress=progress) as profiler:
        watched = {id(forward.how): forward.how for forward in existing}.values()
        before = [how.observers for how in watched]
        try:
            for how in watched:
                how.observers = (profiler,)
            profiler.begin_batch()
            with torch.enable_grad():
                output = run()
        finally:
            for how, observers in zip(watched, before, strict=True):
                how.observers = observers
            found.restore()
        del output
    profile = profiler.profile()
    if not profile.blocks:
        raise ValueError("no block was measured: in this run none was called with a gradient to record")
    return profile


class Profiler:
    """Measures blocks as they run; an observer of theirs, and a context manager for its progress bar.

    Args:
        model: the model the blocks are part of: its parameters and buffers are no activations.
        total: how many blocks there are, for the progress bar.
        operators: whether operator calls and submodules are measured too.
        progress: whether to show a progress bar.

    Attributes:
        inputs: for each block, the bytes of its inputs in the batch in which it was measured.
    """

    def __init__(self, model: nn.Module, total: int, *, operators: bool = True, progress: bool = False) -> None:
        self._model = model
        self._own: set[int] = set()
        self._operators = operators
        self._batch = 0
        self.inputs: dict[str, int] = {}
        self._known: dict[Any, _Measured] = {}
        self._seen: dict[str, _Seen] = {}
        self._takers: dict[int, str] = {}  # which block was the first to take the memory of an input
        # Weak references keep the identity of memory its own, and not the memory.
        self._boundaries: list[StorageWeakRef] = []
        self._progress = Progress(transient=True, disable=not progress)
        self._task = self._progress.add_task("Measuring blocks", total=total)

    def __enter__(self) -> "Profiler":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin_batch(self) -> None:
        """Another forward pass begins: a block's calls are those of the pass in which it was first seen."""
        self._batch += 1

    def forward_begins(self, name: str) -> None:
        """Nothing is measured before a block has run."""

    def forward_ends(self, name: str, call: Call | None, tensors: Sequence[Tensor], output: Any) -> None:
        """Measure a block's call, unless one like it was measured."""
        seen = self._seen.get(name)
        if call is None or (seen is not None and seen.batch != self._batch):
            return
        try:
            # Whoever watches operators must not count these, nor slow them down.
            with without_modes(), attributes_kept(call.block):
                measured = unrecorded(partial(self._measured, call, tensors))
        except Exception as error:
            _log.warning("Block %r can't be measured, so it is replayed whole: %s", name, error)
            return
        self.inputs[name] = self.inputs.get(name, 0) + sum(tensor.nbytes for tensor in with_memory(tensors))
        results = with_memory(Arguments((output,), {}).take_tensors())
        outputs = [StorageWeakRef(result.untyped_storage()) for result in results]
        if seen is None:
            boundary = self._take(name, tensors)
            self._seen[name] = _Seen(name, type(call.block).__name__, measured, boundary, outputs, self._batch)
            self._progress.advance(self._task)
            return
        seen.calls += 1
        seen.boundary_bytes += self._take(name, tensors)
        if measured.profile.kept_bytes > seen.measured.profile.kept_bytes:  # the largest of its calls counts
            seen.measured, seen.outputs = measured, outputs

    def profile(self) -> Profile:
        """What was measured so far."""
        return Profile(tuple(map(self._profile, self._seen.values())))

    def _profile(self, seen: "_Seen") -> BlockProfile:
        """A block's own profile: outputs that it saves and that another block keeps as its input are that block's."""
        saved = zip(seen.outputs, seen.measured.outputs, strict=False)
        shared = sum(size for output, size in saved if self._takers.get(output.cdata, seen.name) != seen.name)
        return replace(
            seen.measured.profile,
            name=seen.name,
            kind=seen.kind,
            calls=seen.calls,
            kept_bytes=max(0, seen.measured.profile.kept_bytes - shared),
            boundary_bytes=seen.boundary_bytes,
            parts=tuple(
                replace(part, kept_bytes=max(0, part.kept_bytes - shared)) for part in seen.measured.profile.parts
            ),
        )

    def _take(self, name: str, tensors: Sequence[Tensor]) -> int:
        """The bytes of a block's inputs that no block before it took."""
        taken = 0
        for tensor in with_memory(tensors):
            if storage_id(tensor) not in self._own and storage_id(tensor) not in self._takers:
                self._takers[storage_id(tensor)] = name
                self._boundaries.append(StorageWeakRef(tensor.untyped_storage()))
                taken += tensor.untyped_storage().nbytes()
        return taken

    def _measured(self, call: Call, tensors: Sequence[Tensor]) -> "_Measured":
        """What is known of calls like this one; what it saves is counted each time, since likeness may deceive."""
        self._own = set(map(storage_id, with_memory((*self._model.parameters(), *self._model.buffers()))))
        saved = count_saved(call, tensors, there=self._own)
        key = _signature(call, tensors), saved
        if key not in self._known:
            self._known[key] = self._measure(call, tensors, saved)
        return self._known[key]

    def _measure(self, call: Call, tensors: Sequence[Tensor], saved: Saved) -> "_Measured":
        plain, seconds = self._seconds(call, tensors) if saved.count else (0.0, 0.0)
        profile = BlockProfile("", "", 1, saved.nbytes, 0, seconds)
        if self._operators:
            operators = operator_calls(call, tensors, saved.count, seconds)
            selected = tuple(selections(call, tensors, plain, seconds, operators))
            parts = tuple(self._parts(call, tensors))
            profile = replace(profile, operators=operators, selections=selected, parts=parts)
        return _Measured(profile, saved.outputs)

    def _seconds(self, call: Call, tensors: Sequence[Tensor]) -> tuple[float, float]:
        """The time of a plain forward, and what checkpointing it adds."""
        with torch.enable_grad():
            plain = median_seconds(partial(call.again, tensors), tensors)
            rehearsed = median_seconds(partial(call.rehearse, tensors, ReplayContexts()), tensors)
        return plain, max(0.0, rehearsed - plain)

    def _parts(self, call: Call, tensors: Sequence[Tensor]) -> Iterator[PartProfile]:
        """Each submodule in turn is checkpointed while the rest of the block is kept."""
        for name, child in call.block.named_children():
            if "forward" in vars(child) or next(child.parameters(), None) is None:
                continue
            with suppress(Exception):  # a part that can't be replayed alone is no option
                yield from self._part(call, tensors, name, child)

    def _part(self, call: Call, tensors: Sequence[Tensor], name: str, child: nn.Module) -> Iterator[PartProfile]:
        application = Application(Full(), 1, preserve_rng_state=True, determinism_check="none")
        listener = _Listener()
        application.observers = (listener,)
        forward = install(child, name, application)
        try:
            kept = count_saved(call, tensors, there=self._own)
        finally:
            forward.remove()
            application.observers = ()  # a listener whose calls hold it would outlive the block's activations
        if listener.calls:
            # Not while the block runs: its own hooks would see what a measurement saves.
            seconds = self._seconds(*listener.calls[0])[1]
            yield PartProfile(name, kept.nbytes, seconds * len(listener.calls))


class _Listener:
    """Notes the calls of a block's part."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Sequence[Tensor]]] = []

    def forward_begins(self, name: str) -> None:
        """Only what has run is noted."""

    def forward_ends(self, name: str, call: Call | None, tensors: Sequence[Tensor], output: Any) -> None:
        """Note a call."""
        assert call is not None, "a part that is listened to is checkpointed"
        self.calls.append((call, tensors))


@dataclass
class _Seen:
    name: str
    kind: str
    measured: "_Measured"
    boundary_bytes: int
    outputs: list[StorageWeakRef]
    batch: int
    calls: int = 1


@dataclass(frozen=True)
class _Measured:
    profile: BlockProfile
    outputs: tuple[int, ...]


def _signature(call: Call, tensors: Sequence[Tensor]) -> Any:
    """What two blocks must share to be measured once."""
    own = [(p.shape, p.dtype, p.requires_grad) for p in (*call.block.parameters(), *call.block.buffers())]
    given = [(t.shape, t.dtype, t.requires_grad) for t in tensors]
    return type(call.block), repr(call.block), call.block.training, *own, *given
