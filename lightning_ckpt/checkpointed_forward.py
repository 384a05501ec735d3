"""What stands in the place of a block's forward: the same forward, its activations recomputed in backward."""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, count, islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ckpt._compat import inside_checkpoint, inside_transform, is_sharded, without_modes
from lightning_ckpt.activations import Keeping
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.block_state import Buffers, Parameters
from lightning_ckpt.collectives import Speakers
from lightning_ckpt.kept_results import kept_by
from lightning_ckpt.policies import Policy, ReplayContexts
from lightning_ckpt.replay_meter import ReplayMeter
from lightning_ckpt.replay_state import Environment, is_recomputing, recomputing
from lightning_ckpt.segments import CALLED_AGAIN, Segment
from lightning_ckpt.value_check import Comparisons, ValueCheck
from lightning_ckpt.versions import version_of
from lightning_ckpt.witness import Witness

_log = logging.getLogger(__name__)

DeterminismCheck = Literal["default", "values", "none"]


class Observer(Protocol):
    """Who looks on as blocks run, while somebody measures."""

    def forward_begins(self, name: str) -> None:
        """A block that has something to save is about to run."""

    def forward_ends(self, name: str, call: "Call | None", tensors: Sequence[Tensor], output: Any) -> None:
        """It ran. `call` is what replays it, with `tensors` as its inputs; `None` where it is kept whole."""


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
        self.latest: weakref.ref[Environment] | None = None  # of the latest call, while its graph lives
        self.keeping: Keeping | None = None  # counts what blocks let go, while somebody measures
        self.observers: tuple[Observer, ...] = ()
        self.meter: ReplayMeter | None = None  # counts what calls let go and times replays, while somebody monitors
        self.treated = 0  # how often blocks were treated otherwise than before
        self.comparisons = Comparisons()
        self.calls = count()
        self.speakers = Speakers()
        self.segments: list[list[str]] = []  # of the latest forward pass, by the names of their blocks
        self._seen: set[str] = set()
        self._open: weakref.ref[Segment] | None = None
        self._said_why = False
        self._told: set[tuple[type, str]] = set()
        self._looked: set[str] = set()
        self._said_inside = False

    def __reduce__(self) -> tuple[Any, ...]:
        # The contexts are local functions, and a segment is nothing to take along.
        return Application, (self.policy, self.span, self.preserve_rng_state, self.determinism_check)

    def segment_for(self, name: str, block: nn.Module, arguments: Arguments) -> Segment:
        """The segment that a call goes to: the open one if the call follows from it, else a new one."""
        latest = self._open() if self._open else None
        again = name in self._seen  # another forward pass begins, or the block is called twice in one
        alone = self.speakers.why_alone(name, block) if self.span > 1 else None
        refused = "" if latest is None or latest.full else self._refuses(block, arguments) if alone is None else alone
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
        segment = Segment(self.span if alone is None else 1, self.determinism_check != "none")
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

    def tell_of_attributes(self, where: str, kind: type, changes: dict[str, str]) -> None:
        """Tell, once for all blocks of a class, of attributes that a replay finds other than its forward found them."""
        for name, change in changes.items():
            if (kind, name) not in self._told:
                self._told.add((kind, name))
                _log.warning(
                    "The attribute %r of a checkpointed %s changed, %s, between the start of its forward and its "
                    "replay, which computes with what it finds and may change it once more. Buffers are put back for "
                    "a replay, attributes are not: make it a buffer, or change it under `if not is_recomputing():`",
                    f"{where}.{name}",
                    kind.__name__,
                    change,
                )

    def look_around(self, name: str) -> None:
        """Tell, once, of a checkpoint of the model's own around a block; the first call of each is looked at."""
        if name in self._looked:
            return
        self._looked.add(name)
        if inside_checkpoint() and not self._said_inside:
            self._said_inside = True
            _log.warning(
                "Block %r is called inside torch.utils.checkpoint by the model itself, which replays it too, so each "
                "step computes it three times: turn that one off, or leave the block out of blocks, unless it is meant",
                name,
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

    Attributes:
        contexts: what goes around the block's forward and replay; `None` where the block is kept whole.
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
        self.buffers = Buffers()
        self.contexts: ReplayContexts | None = how.contexts
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
        if not (self.active and torch.is_grad_enabled()) or inside_transform():
            return self.plain(block, *args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler tracks tensors wherever they are; keywords are kept from `checkpoint`, which has its own.
            return self.how.run_compiled(lambda *given: self.plain(block, *given, **kwargs), args)
        if self.contexts is None and not self.how.observers:
            return self.plain(block, *args, **kwargs)
        arguments = Arguments(args, kwargs)
        if not any(tensor.requires_grad for tensor in chain(arguments.tensors, block.parameters())):
            return self.plain(block, *args, **kwargs)
        self.how.look_around(self.name)
        observers = self.how.observers
        for observer in observers:
            observer.forward_begins(self.name)
        segment = self.how.segment_for(self.name, block, arguments) if self.contexts else None
        tensors = arguments.take_tensors()
        call = self._call(block, arguments, tensors) if segment else None
        if segment and call:
            output = segment.run(call, tensors, lambda: call.forward(tensors, args, kwargs))
        else:
            output = self.plain(block, *args, **kwargs)
        for observer in observers:
            observer.forward_ends(self.name, call, tensors, output)
        return output

    def _call(self, block: nn.Module, arguments: Arguments, tensors: Sequence[Tensor]) -> "Call":
        with without_modes():
            return Call(self, self.contexts or ReplayContexts(), block, arguments, tensors)

    def plain(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        return self.replaced(*args, **kwargs) if self.replaced else type(block).forward(block, *args, **kwargs)

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
        # Blocks that share an application share its copy, which nobody observes.
        block, replaced, how = deepcopy((self.block, self.replaced, self.how), memo)
        copied = CheckpointedForward(block, self.name, how, self.early_stop, replaced)
        if self.contexts is not self.how.contexts:  # a plan's
            copied.contexts = self.contexts
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        made = CheckpointedForward, (self.block, self.name, self.how, self.early_stop, self.replaced)
        return made if self.contexts else (*made, {"contexts": None})


class Call:
    """One call of a checkpointed block: its forward, then a replay each time backward asks for one.

    It keeps the block alive, since a graph may go backward after its model is gone.
    """

    def __init__(
        self,
        forward: CheckpointedForward,
        contexts: ReplayContexts,
        block: nn.Module,
        arguments: Arguments,
        tensors: Sequence[Tensor],
    ) -> None:
        self.name = forward.name
        self.early_stop = forward.early_stop
        self.block = block
        self._forward = forward
        self._contexts = contexts
        self._arguments = arguments
        how = forward.how
        devices = (*tensors, *islice(block.parameters(), 1))
        latest = how.latest() if how.latest else None
        self._environment = Environment(devices, how.preserve_rng_state, latest)
        how.latest = weakref.ref(self._environment)
        self._parameters = Parameters(block)
        self._buffers = forward.buffers.before_forward(block)
        # Attributes cost more to look at than they usually tell: while buffers are learned, and no longer.
        self._witness = Witness(block) if forward.buffers.learning else None
        self._around_forward, self._around_replay = contexts.make()
        # Not in the replay of an outer checkpoint: that is no second call.
        meter = None if is_recomputing() else how.meter
        self._tally = meter.begins(self.name, contexts, tensors) if meter else None
        self._check: ValueCheck | None = None
        if how.determinism_check == "values":
            self._check = ValueCheck(self.name, block, how.preserve_rng_state, how.comparisons, next(how.calls))

    def forward(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass: it gets the caller's own objects, which it may fill."""
        versions = [version_of(tensor) for tensor in tensors]
        how = self._forward.how
        with (
            self._around_forward,
            self._check.forward() if self._check else nullcontext(),
            how.speakers.listening_to(self.name, self.block) if how.span > 1 else nullcontext(),
        ):
            output = self._forward.plain(self.block, *args, **kwargs)
        if how.keeping:
            how.keeping.let_go()
        if self._tally:
            self._tally.ends(kept_by(self._around_forward))
            self._tally = None
        with without_modes():
            self._forward.buffers.after_forward(self.block, self._buffers)
        for tensor, version in zip(tensors, versions, strict=True):
            if version_of(tensor) != version:
                raise self._changed_in_place(tensor)
        return output

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The forward pass again, on the arguments, random numbers, parameters and buffers of then."""
        meter = self._forward.how.meter
        if meter is None or is_recomputing():
            return self._replay(tensors)
        meter.forward_over()
        begun = meter.mark()
        try:
            return self._replay(tensors)
        finally:  # most replays end early, by an exception
            meter.replayed(begun)

    def _replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self._contexts.on_replay()
        if self._witness:
            changes = self._witness.changes(Witness(self.block))
            self._forward.how.tell_of_attributes(self.name, type(self.block), changes)
        return self.again(tensors, self._around())

    def _around(self) -> Iterator[AbstractContextManager[Any]]:
        # What watches operators comes last: the copying of buffers is none of the block's.
        yield self._around_replay()
        if self._check:
            yield self._check.replay()

    def again(self, tensors: Sequence[Tensor], around: Iterable[AbstractContextManager[Any]] = ()) -> Sequence[Tensor]:
        """What a replay runs, and nothing that checks or tells: for whoever measures it."""
        args, kwargs = self._arguments.rebuild(tensors)
        with self._as_then(), ExitStack() as stack:
            for context in around:
                stack.enter_context(context)
            output = self._forward.plain(self.block, *args, **kwargs)
        return Arguments((output,), {}).take_tensors()

    def rehearse(self, tensors: Sequence[Tensor], contexts: ReplayContexts) -> None:
        """A checkpointed forward and its replay as a step runs them, and no trace of it: for whoever measures it."""
        how = Application(self._forward.how.policy, 1, self._forward.how.preserve_rng_state, "default")
        forward = CheckpointedForward(self.block, self.name, how, self.early_stop, self._forward.replaced)
        args, kwargs = self._arguments.rebuild(tensors)
        segment = Segment()
        with self._as_then():
            call = Call(forward, contexts, self.block, self._arguments, tensors)
            call._witness = None  # a step's own replay tells of attributes, and once
            output = segment.run(call, tensors, lambda: call.forward(tensors, args, kwargs))
            segment.bring_back()
        del output  # its graph held what was brought back

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Run with the random numbers, parameters and buffers of the forward."""
        with (
            recomputing(),
            self._environment.restored(),
            self._parameters.as_then(self.name),
            self._forward.buffers.as_before(self._buffers),
        ):
            yield

    def saves(self, tensor: Tensor) -> None:
        """Take note of a tensor that autograd saves, in the forward or in a replay."""
        if self._check:
            self._check.saves(tensor)
        if self._forward.how.keeping:
            self._forward.how.keeping.note(self.name, tensor)
        if self._tally:
            self._tally.note(tensor)

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
            f"The block {self._forward.name!r} ({type(self.block).__name__}) changed one of its inputs in place (a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}), so it can't be replayed from that input. Write "
            "`x = x + 1` for `x += 1`, turn off `inplace=True` in the block's first layer, or leave the block out of "
            "`blocks`."
        )
