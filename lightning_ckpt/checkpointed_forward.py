"""What stands in the place of a block's forward: the same forward, its activations recomputed in backward."""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, count, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ckpt._compat import is_sharded
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.policies import Policy
from lightning_ckpt.replay_state import Environment, ReplayState, is_recomputing, recomputing, tensor_version
from lightning_ckpt.segments import CALLED_AGAIN, Segment
from lightning_ckpt.value_check import Comparisons, ValueCheck
from lightning_ckpt.witness import Witness

_log = logging.getLogger(__name__)

DeterminismCheck = Literal["default", "values", "none"]


class Application:
    """How the blocks of one application are checkpointed, and how their calls join into segments.

    Args:
        policy: what goes around each call.
        span: how many calls a segment takes at most.
        preserve_rng_state: as in `checkpoint_blocks`.
        determinism_check: as in `checkpoint_blocks`.
    """

    def __init__(
        self, policy: Policy, span: int, preserve_rng_state: bool, determinism_check: DeterminismCheck
    ) -> None:
        self.policy = policy
        self.span = span
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.contexts = policy.contexts()
        self.comparisons = Comparisons()
        self.calls = count()
        self.segments: list[list[str]] = []  # of the latest forward pass, by the names of their blocks
        self._seen: set[str] = set()
        self._open: weakref.ref[Segment] | None = None
        self._said_why = False
        self._told: set[tuple[type, str]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # The contexts are local functions, and a segment is nothing to take along.
        return Application, (self.policy, self.span, self.preserve_rng_state, self.determinism_check)

    def segment_for(self, name: str, block: nn.Module, arguments: Arguments) -> Segment:
        """The segment that a call goes to: the open one if the call follows from it, else a new one."""
        latest = self._open() if self._open else None
        again = name in self._seen  # another forward pass begins, or the block is called twice in one
        refused = "" if latest is None or latest.full else self._refuses(block, arguments)
        if refused is None and latest:
            # What decides is the open segment alone: a replay of an outer checkpoint must join as its forward did.
            refused = latest.refuses(name, arguments.tensors)
        joins = latest is not None and refused is None
        if not is_recomputing():
            self._note(name, joins, again)
            if refused and (not again or refused == CALLED_AGAIN):
                self._say(name, refused)
        if latest is not None and joins:
            return latest
        segment = Segment(self.span, self.determinism_check != "none")
        self._open = weakref.ref(segment)
        return segment

    def _note(self, name: str, joins: bool, again: bool) -> None:
        """Keep the segments of the latest forward pass, for the report."""
        if again and not joins:
            self._seen, self.segments = set(), []
        self._seen.add(name)
        if joins and self.segments:
            self.segments[-1].append(name)
        else:
            self.segments.append([name])

    def tell_of_attribute(self, where: str, kind: type, name: str, change: str) -> None:
        """Tell, once for all blocks of a class, of an attribute that a replay has changed."""
        if (kind, name) not in self._told:
            self._told.add((kind, name))
            _log.warning(
                "The forward of a checkpointed %s changes the attribute %r, and its replay has changed it again, %s. "
                "Buffers are put back after a replay, attributes are not: change it under `if not is_recomputing():`",
                kind.__name__,
                where,
                change,
            )

    def _refuses(self, block: nn.Module, arguments: Arguments) -> str | None:
        if arguments.opaque:
            return f"it takes a {arguments.opaque}, which may hold results of the segment"
        if is_sharded(block):
            return "its parameters are sharded, and gathered for its own replay alone"
        return None

    def _say(self, name: str, refused: str) -> None:
        if not self._said_why:
            _log.warning(
                "Block %r starts a segment of its own, though %d were to span one: %s", name, self.span, refused
            )
            self._said_why = True

    def run_compiled(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What `torch.compile` traces: PyTorch's own checkpoint, which the compiler knows."""
        if self.contexts.make_compiled is None:
            return checkpoint(function, *args, use_reentrant=False)
        # A partial made on the spot: the compiler takes no function for `context_fn` that it finds on an object.
        return checkpoint(function, *args, use_reentrant=False, context_fn=partial(self.contexts.make_compiled))


class CheckpointedForward:
    """What stands in the place of a block's forward: the same forward, its activations recomputed in backward.

    It refers to its block weakly, so that it makes no reference cycle that delays the freeing of device memory. A copy
    or an unpickled one refers to the copy: a model's copy runs its own weights, checkpointed as the original.

    Args:
        block: the module whose forward it stands for.
        name: the block's qualified name, for messages.
        how: what it shares with the other blocks.
        early_stop: whether a replay ends once the last tensor that backward needs is there.
        replaced: the forward that another library had put on the instance. The class's own is looked up at each call,
            since `fully_shard` swaps the class.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        how: Application,
        early_stop: bool,
        replaced: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.how = how
        self.early_stop = early_stop
        self.replaced = replaced
        self.active = True
        self._watched = False
        self.state = ReplayState()
        self._block = weakref.ref(block)

    @property
    def block(self) -> nn.Module:
        """The module whose forward this stands for."""
        block = self._block()
        if block is None:
            raise ReferenceError(f"the block {self.name!r}, whose forward this is, has been freed")
        return block

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.replaced or type(self.block).forward.__get__(self.block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        if not (self.active and torch.is_grad_enabled()):
            return self.plain(block, *args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler tracks tensors wherever they are; keywords are kept from `checkpoint`, which has its own.
            return self.how.run_compiled(lambda *given: self.plain(block, *given, **kwargs), args)
        arguments = Arguments(args, kwargs)
        if not any(tensor.requires_grad for tensor in chain(arguments.tensors, block.parameters())):
            return self.plain(block, *args, **kwargs)
        segment = self.how.segment_for(self.name, block, arguments)
        tensors = arguments.take_tensors()
        call = _Call(self, block, arguments, tensors)
        return segment.run(call, tensors, lambda: call.forward(tensors, args, kwargs))

    def plain(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        return self.replaced(*args, **kwargs) if self.replaced else type(block).forward(block, *args, **kwargs)

    @contextmanager
    def watching_attributes(self, block: nn.Module) -> Iterator[None]:
        """Tell, after the first replay, which of the block's simple attributes it has changed a second time."""
        if self._watched:
            yield
            return
        self._watched = True
        before = Witness.of(block)
        try:
            yield
        finally:
            for name, change in before.changed_attributes(Witness.of(block)).items():
                self.how.tell_of_attribute(f"{self.name}.{name}", type(block), name, change)

    def remove(self) -> None:
        """Give the block its own forward back; where another library has patched over this one, stand aside."""
        block = self._block()
        if block is None:
            return
        if block.__dict__.get("forward") is not self:
            self.active = False
        elif self.replaced:
            block.forward = self.replaced
        else:
            del block.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointedForward":
        block, replaced = deepcopy((self.block, self.replaced), memo)
        return CheckpointedForward(block, self.name, self.how, self.early_stop, replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self.block, self.name, self.how, self.early_stop, self.replaced)


class _Call:
    """One call of a checkpointed block: its forward, then a replay each time backward asks for one.

    It keeps the block alive, since a graph may go backward after its model is gone.
    """

    def __init__(
        self, forward: CheckpointedForward, block: nn.Module, arguments: Arguments, tensors: Sequence[Tensor]
    ) -> None:
        self.name = forward.name
        self.early_stop = forward.early_stop
        self._forward = forward
        self._block = block
        self._arguments = arguments
        how = forward.how
        self._environment = Environment((*tensors, *islice(block.parameters(), 1)), how.preserve_rng_state)
        self._buffers = forward.state.before_forward(block)
        self._around_forward, self._around_replay = how.contexts.make()
        self._check: ValueCheck | None = None
        if how.determinism_check == "values":
            self._check = ValueCheck(self.name, block, how.preserve_rng_state, how.comparisons, next(how.calls))

    def forward(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass: it gets the caller's own objects, which it may fill."""
        versions = [tensor_version(tensor) for tensor in tensors]
        with self._around_forward, self._check.forward() if self._check else nullcontext():
            output = self._forward.plain(self._block, *args, **kwargs)
        self._environment.after_forward()
        self._forward.state.after_forward(self._buffers)
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor_version(tensor) != version:
                raise self._changed_in_place(tensor)
        return output

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The forward pass again, on the arguments, random numbers and buffers of then."""
        args, kwargs = self._arguments.rebuild(tensors)
        forward = self._forward
        forward.how.contexts.on_replay()
        with (
            recomputing(),
            self._environment.restored(),
            forward.state.as_before(self._buffers),
            forward.watching_attributes(self._block),
        ):
            watch = self._check.replay() if self._check else nullcontext()
            # What watches operators comes last: the copying of buffers is none of the block's.
            with self._around_replay(), watch:
                output = forward.plain(self._block, *args, **kwargs)
        return Arguments((output,), {}).take_tensors()

    def cause(self) -> str:
        """What may have made the latest replay differ from the forward, in words."""
        anything = (
            "something the block depends on changed in between: autocast, an attribute, a cache that grew, the "
            "training mode, a parameter's requires_grad, or random numbers"
        )
        if self._check:
            return self._check.visible_cause() or anything
        return f'{anything}; determinism_check="values" tells more'

    def _changed_in_place(self, tensor: Tensor) -> RuntimeError:
        return RuntimeError(
            f"The block {self._forward.name!r} ({type(self._block).__name__}) changed one of its inputs in place (a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}), so it can't be replayed from that input. Write "
            "`x = x + 1` for `x += 1`, turn off `inplace=True` in the block's first layer, or leave the block out of "
            "`blocks`."
        )
