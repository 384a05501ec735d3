"""A block's forward, replayed: activation checkpointing of the blocks of any module.

A checkpointed block keeps its class, its place and its names. Only its `forward` is replaced, on the instance, by an
object that runs the block's own forward under `torch.utils.checkpoint`, so `state_dict` keys, hooks, `isinstance` and
checkpoint files are those of the plain model.
"""

import inspect
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_ckpt._compat import DropoutBase, is_sharded
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.blocks import Blocks, check_blocks, find_blocks
from lightning_ckpt.coverage import Coverage, Portion
from lightning_ckpt.owners import owner_of
from lightning_ckpt.policies import Policy, resolve_policy
from lightning_ckpt.replay_state import Environment, ReplayState, tensor_version
from lightning_ckpt.segments import Segment
from lightning_ckpt.value_check import Comparisons, ValueCheck
from lightning_ckpt.witness import Witness

_log = logging.getLogger(__name__)

DeterminismCheck = Literal["default", "values", "none"]

# Backward runs replays on a thread of its own for each device, so the flag belongs to the thread.
_replaying = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs in a replay, to keep what must happen once a step out of it.

    Guard the side effect, not the computation: what forward computed with gradients, the replay must compute again.

    Example:
        >>> balance = []
        >>> class Router(torch.nn.Linear):
        ...     def forward(self, x):
        ...         y = super().forward(x)
        ...         loss = y.square().mean()
        ...         if not is_recomputing():
        ...             balance.append(loss)
        ...         return y
    """
    return not torch.compiler.is_compiling() and getattr(_replaying, "depth", 0) > 0


@contextmanager
def _recomputing() -> Iterator[None]:
    _replaying.depth = getattr(_replaying, "depth", 0) + 1
    try:
        yield
    finally:
        _replaying.depth -= 1


class _How:
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
        self._open: weakref.ref[Segment] | None = None
        self._said_why = False
        self._told: set[tuple[type, str]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # The contexts are local functions, and a segment is nothing to take along.
        return _How, (self.policy, self.span, self.preserve_rng_state, self.determinism_check)

    def segment_for(self, name: str, block: nn.Module, arguments: Arguments) -> Segment:
        """The segment that a call goes to: the open one if the call follows from it, else a new one."""
        latest = self._open() if self._open else None
        if any(name in segment for segment in self.segments):
            self.segments = []  # called before: another forward pass begins, or a block that is called twice
        elif latest and not latest.full:
            refused = self._refuses(block, arguments) or latest.refuses(arguments.tensors)
            if refused is None:
                self.segments[-1].append(name)
                return latest
            self._say(name, refused)
        segment = Segment(self.span, self.determinism_check != "none")
        self.segments.append([name])
        self._open = weakref.ref(segment)
        return segment

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
        # A partial made on the spot: the compiler takes no function for `context_fn` that it finds on an object.
        more: dict[str, Any] = (
            {} if self.contexts.make is noop_context_fn else {"context_fn": partial(self.contexts.make)}
        )
        return checkpoint(function, *args, use_reentrant=False, **more)


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
        how: _How,
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
            _recomputing(),
            self._environment.restored(),
            forward.state.as_before(self._buffers),
            forward.watching_attributes(self._block),
        ):
            watch = self._check.replay() if self._check else nullcontext()
            # What watches operators comes last: the copying of buffers is none of the block's.
            with self._around_replay, watch:
                output = forward.plain(self._block, *args, **kwargs)
        return Arguments((output,), {}).take_tensors()

    def cause(self) -> str:
        """What may have made the latest replay differ from the forward, in words."""
        anything = (
            "something the block depends on changed in between: autocast, an attribute, a cache that grew, the training "
            "mode, a parameter's requires_grad, or random numbers"
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


class CheckpointedBlocks:
    """The handle that `checkpoint_blocks` returns: says what is covered, and undoes it.

    As a context manager it undoes on the way out, also after an exception.
    """

    def __init__(self, forwards: dict[str, CheckpointedForward], how: _How, coverage: Coverage) -> None:
        self._forwards = forwards
        self._how = how
        self._coverage = coverage

    @property
    def blocks(self) -> tuple[str, ...]:
        """The qualified names of the checkpointed blocks, in order; none after `remove`."""
        return tuple(self._forwards)

    def report(self) -> Coverage:
        """Which portions of the model are checkpointed; prints as a rich table.

        After a forward pass it also says which blocks were joined into segments.
        """
        return replace(self._coverage, segments=tuple(map(tuple, self._how.segments)))

    @property
    def determinism_check(self) -> DeterminismCheck:
        """What is compared between forward and replay; may be set, and holds from the next forward on."""
        return self._how.determinism_check

    @determinism_check.setter
    def determinism_check(self, check: DeterminismCheck) -> None:
        check_determinism(check)
        self._how.determinism_check = check

    def remove(self) -> None:
        """Give every block its own forward back. A second call does nothing."""
        for forward in self._forwards.values():
            forward.remove()
        self._forwards = {}

    def __enter__(self) -> "CheckpointedBlocks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def checkpoint_blocks(
    model: nn.Module,
    policy: str | Policy = "full",
    *,
    blocks: Blocks | None = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
) -> CheckpointedBlocks:
    """Checkpoint the blocks of any module: keep their inputs, and recompute the rest in backward.

    Loss, gradients, buffers and random numbers stay those of the plain model. Where no gradient is recorded, and where
    a block has nothing to save (no parameter and no input that requires grad), its forward runs as it is.

    Args:
        model: any module. It keeps its class, names and `state_dict`.
        policy: `"full"`, `"selective"`, `Full(...)` or `SelectiveOps(...)`.
        blocks: what to checkpoint; see `find_blocks`.
        preserve_rng_state: replay with the random numbers of the forward. Without it a replayed dropout draws another
            mask, and the gradients are wrong.
        determinism_check: `"default"` compares shapes, dtypes and devices of what is replayed, `"values"` every value
            that a replayed operator gives, bit for bit, at the price of a digest of each; `"none"` compares nothing.

    Returns:
        A handle: `.blocks`, `.report()`, `.remove()`; also a context manager.

    Raises:
        ValueError: an argument is out of range, or no block was found.
        TypeError: an argument of another kind.

    Blocks that can't be checkpointed are left alone with a warning that says why: already checkpointed, by an earlier
    call or by the model's owner, or compiled by TorchScript.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "abc"])
        >>> handle = checkpoint_blocks(model, Full(every=2))
        >>> handle.blocks
        ('0', '2')
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: accepted is a torch.nn.Module")
    check_options(policy, blocks, preserve_rng_state, determinism_check)
    policy = resolve_policy(policy)
    found = find_blocks(model, blocks)
    chosen = {found[index][0] for index in policy.choose(len(found))}
    left_alone = {name: _why_not(model, name, block) if name in chosen else _BY_POLICY for name, block in found}
    _warn_of(left_alone)
    covered = [(name, block) for name, block in found if left_alone[name] is None]
    if not preserve_rng_state:
        _warn_of_chance(covered)
    how = _How(policy, policy.span(len(covered)), preserve_rng_state, determinism_check)
    forwards = {name: _replace(block, name, how) for name, block in covered}
    portions = (Portion(name, type(block).__name__, _count(block), left_alone[name]) for name, block in found)
    return CheckpointedBlocks(forwards, how, Coverage(str(policy), tuple(portions), _count(model)))


def check_options(
    policy: str | Policy, blocks: Blocks | None, preserve_rng_state: bool, determinism_check: str
) -> None:
    """Check what can be checked before there is a model.

    Raises:
        ValueError: a policy or a check that does not exist.
        TypeError: an argument of another kind.
    """
    resolve_policy(policy)
    check_blocks(blocks)
    if not isinstance(preserve_rng_state, bool):
        raise TypeError(f"preserve_rng_state={preserve_rng_state!r}: accepted are True and False")
    check_determinism(determinism_check)


def check_determinism(check: str) -> None:
    """Refuse what is no determinism check.

    Raises:
        ValueError: a check that does not exist, or not in this PyTorch.
    """
    if check not in get_args(DeterminismCheck):
        accepted = ", ".join(map(repr, get_args(DeterminismCheck)))
        raise ValueError(f"determinism_check={check!r}: accepted are {accepted}")
    if check == "values" and not hasattr(torch, "hash_tensor"):
        raise ValueError(f'determinism_check="values" needs torch.hash_tensor, which PyTorch {torch.__version__} lacks')


_BY_POLICY = "left out by the policy"


def _why_not(model: nn.Module, name: str, block: nn.Module) -> str | None:
    if isinstance(block.__dict__.get("forward"), CheckpointedForward):
        return "checkpointed by an earlier call, which its own handle undoes"
    if any(isinstance(module, torch.jit.ScriptModule) for module in block.modules()):
        return "compiled by TorchScript, which can't be replayed from outside"
    owner = owner_of(model, name)
    return owner and f"checkpointed by its owner: {owner}"


def _warn_of(left_alone: dict[str, str | None]) -> None:
    for reason in dict.fromkeys(left_alone.values()):
        if reason not in (None, _BY_POLICY):
            names = [name for name, why in left_alone.items() if why == reason]
            warnings.warn(f"Left alone: {', '.join(names)}: {reason}", stacklevel=3)


def _warn_of_chance(chosen: list[tuple[str, nn.Module]]) -> None:
    for name, block in chosen:
        for below, module in block.named_modules():
            # Dropout layers call their probability `p`, recurrent and attention layers `dropout`.
            chance = getattr(module, "p", None) if isinstance(module, DropoutBase) else getattr(module, "dropout", None)
            if isinstance(module, nn.RReLU) or (isinstance(chance, float) and chance > 0):
                warnings.warn(
                    f"preserve_rng_state=False, and {f'{name}.{below}'.rstrip('.')!r} ({type(module).__name__}) draws "
                    "random numbers: its replay draws others, and the gradients are wrong. Leave preserve_rng_state on",
                    stacklevel=3,
                )
                return


def _replace(block: nn.Module, name: str, how: _How) -> CheckpointedForward:
    # PyTorch 2.13's early stop gives the block of an RReLU wrong gradients (pytorch issue 193671).
    early_stop = not any(isinstance(module, nn.RReLU) for module in block.modules())
    forward = CheckpointedForward(block, name, how, early_stop, block.__dict__.get("forward"))
    block.forward = forward
    return forward


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
