"""A block's forward, replayed: activation checkpointing of the blocks of any module.

A checkpointed block keeps its class, its place and its names. Only its `forward` is replaced, on the instance, so
`state_dict` keys, hooks, `isinstance` and checkpoint files are those of the plain model.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.activations import Keeping, kept_by_modules
from lightning_ckpt.blocks import Blocks, check_blocks, find_blocks
from lightning_ckpt.caches import turn_caches_off
from lightning_ckpt.checkpointed_forward import Application, CheckpointedForward, DeterminismCheck, Observer
from lightning_ckpt.coverage import Coverage, Portion
from lightning_ckpt.owners import Existing, check_existing, owner_of, turn_owners_off
from lightning_ckpt.policies import Policy, ReplayContexts, keeping_calls
from lightning_ckpt.policy_names import resolve_policy
from lightning_ckpt.replay_state import warn_of_chance
from lightning_ckpt.snapshot import Snapshot
from lightning_ckpt.treatments import Treatment


class CheckpointedBlocks:
    """The handle that `checkpoint_blocks` returns: says what is covered, and undoes it.

    As a context manager it undoes on the way out, also after an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        forwards: dict[str, CheckpointedForward],
        application: Application,
        coverage: Coverage,
        undo: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._undo = undo
        self._model = weakref.ref(model)
        self._forwards = forwards
        self._application = application
        self._coverage = coverage
        self._parts: list[CheckpointedForward] = []

    @property
    def blocks(self) -> tuple[str, ...]:
        """The qualified names of the checkpointed blocks, in order; none after `remove`."""
        return tuple(self._forwards)

    def report(self, run: Callable[[], Any] | None = None) -> Coverage:
        """Which portions of the model are checkpointed; prints as a rich table.

        After a forward pass it also says which blocks were joined into segments.

        Args:
            run: calls the model with gradients and returns what it gives, `lambda: model(batch)`. It is run once, and
                the report says how many bytes of activations each block lets go, and which modules keep the rest. The
                model and all random numbers are left as found.
        """
        coverage = replace(self._coverage, segments=tuple(map(tuple, self._application.segments)))
        model = self._model()
        if run is None or model is None:
            return coverage
        device = next((parameter.device for parameter in model.parameters()), "cpu")
        found = Snapshot([model], device=device)
        self._application.keeping = let_go = Keeping(model)
        try:
            kept = kept_by_modules(model, self.blocks, run)
        finally:
            self._application.keeping = None
            found.restore()
        portions = tuple(replace(portion, let_go=let_go.sizes[portion.name]) for portion in coverage.portions)
        return replace(coverage, portions=portions, kept=tuple(kept.items()))

    @property
    def determinism_check(self) -> DeterminismCheck:
        """What is compared between forward and replay; may be set, and holds from the next forward on."""
        return self._application.determinism_check

    @determinism_check.setter
    def determinism_check(self, check: DeterminismCheck) -> None:
        check_determinism(check)
        self._application.determinism_check = check

    def treat(self, treatments: Mapping[str, Treatment]) -> None:
        """Treat blocks otherwise from their next forward on; those not named are replayed whole.

        Args:
            treatments: by qualified name of a checkpointed block. All are checked before any holds.

        Raises:
            ValueError: a block that is not checkpointed, a submodule that its block does not have, or an operator that
                this PyTorch does not have.
        """
        for name, treatment in treatments.items():
            if name not in self._forwards:
                raise ValueError(f"{name!r} is no checkpointed block; those are: {', '.join(self._forwards)}")
            if treatment.kept == "rest" and treatment.part not in dict(self._forwards[name].block.named_modules()):
                raise ValueError(f"block {name!r} has no submodule {treatment.part!r}")
        contexts = {name: self._contexts(name, treatment) for name, treatment in treatments.items()}
        self._remove_parts()
        self._application.treated += 1
        for name, forward in self._forwards.items():
            forward.contexts = contexts.get(name, self._application.contexts)
        for name, treatment in treatments.items():
            if treatment.kept == "rest":
                part = self._forwards[name].block.get_submodule(treatment.part)
                self._parts.append(install(part, f"{name}.{treatment.part}", self._application))

    def _contexts(self, name: str, treatment: Treatment) -> ReplayContexts | None:
        """What goes around a block's forward and replay; `None` where it runs plain."""
        if treatment.kept == "nothing":
            return self._application.contexts
        if treatment.kept != "calls":
            return None
        try:
            return keeping_calls(treatment.calls)
        except ValueError:
            calls = ", ".join(treatment.calls)
            raise ValueError(f"block {name!r}: this PyTorch lacks an operator among the calls {calls}") from None

    def _remove_parts(self) -> None:
        while self._parts:
            self._parts.pop().remove()

    def observe(self, *observers: Observer) -> None:
        """Let these look on from now on, instead of those that did."""
        self._application.observers = observers

    def remove(self) -> None:
        """Give every block its own forward back, and what was turned off for it. A second call does nothing."""
        self._remove_parts()
        for forward in self._forwards.values():
            forward.remove()
        self._forwards = {}
        for undo in self._undo:
            undo()

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
    existing: Existing = "keep",
) -> CheckpointedBlocks:
    """Checkpoint the blocks of any module: keep their inputs, and recompute the rest in backward.

    Loss, gradients, buffers and random numbers stay those of the plain model. Where no gradient is recorded, and where
    a block has nothing to save (no parameter and no input that requires grad), its forward runs as it is.

    Args:
        model: any module. It keeps its class, names and `state_dict`.
        policy: `"full"`, `"selective"`, `"auto"`, `Full(...)`, `SelectiveOps(...)` or `MemoryBudget(...)`; options may
            stand in the word too: `"full:every=2"`. Under a `MemoryBudget` everything is checkpointed until a
            `BudgetLoop` has measured some steps; the callback has one.
        blocks: what to checkpoint; see `find_blocks`.
        preserve_rng_state: replay with the random numbers of the forward. Without it a replayed dropout draws another
            mask, and the gradients are wrong.
        determinism_check: `"default"` compares shapes, dtypes and devices of what is replayed, `"values"` every value
            that a replayed operator gives, bit for bit, at the price of a digest of each; `"none"` compares nothing.
        existing: what becomes of checkpointing that the model's owner has turned on for these blocks, their parts or
            their parents (Hugging Face's and timm's flags, PyTorch's `CheckpointWrapper` and composable `checkpoint`):
            `"keep"` leaves such blocks to it, with a warning; `"replace"` turns it off until `remove`.

    Returns:
        A handle: `.blocks`, `.report()`, `.remove()`; also a context manager.

    Raises:
        ValueError: an argument is out of range, or no block was found.
        TypeError: an argument of another kind.

    Blocks that can't be checkpointed are left alone with a warning that says why: already checkpointed, by an earlier
    call or by the model's owner, or compiled by TorchScript. Hugging Face models fill no key-value cache in training
    meanwhile, with a log line; their configuration stays as it is.

    Examples:
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "abc"])
        >>> handle = checkpoint_blocks(model, Full(every=2))
        >>> handle.blocks
        ('0', '2')
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: accepted is a torch.nn.Module")
    check_options(policy, blocks, preserve_rng_state, determinism_check, existing)
    policy = resolve_policy(policy)
    found = find_blocks(model, blocks)
    chosen = {found[index][0] for index in policy.choose(len(found))}
    left_alone = {n: _why_not(model, n, block, existing) if n in chosen else _BY_POLICY for n, block in found}
    _warn_of(left_alone)
    covered = [(name, block) for name, block in found if left_alone[name] is None]
    if not preserve_rng_state:
        warn_of_chance(covered)
    portions = (Portion(name, type(block).__name__, _count(block), left_alone[name]) for name, block in found)
    coverage = Coverage(str(policy), tuple(portions), _count(model))
    application = Application(policy, policy.span(len(covered)), preserve_rng_state, determinism_check)
    undo = [turn_caches_off(model, [name for name, _ in covered])]
    if existing == "replace":
        undo.append(turn_owners_off(model, [name for name, _ in found]))
    forwards = {name: install(block, name, application) for name, block in covered}
    return CheckpointedBlocks(model, forwards, application, coverage, undo)


def check_options(
    policy: str | Policy, blocks: Blocks | None, preserve_rng_state: bool, determinism_check: str, existing: str
) -> None:
    """Check what can be checked before there is a model.

    Raises:
        ValueError: a policy, a check or a way with existing checkpointing that does not exist.
        TypeError: an argument of another kind.
    """
    resolve_policy(policy)
    check_blocks(blocks)
    if not isinstance(preserve_rng_state, bool):
        raise TypeError(f"preserve_rng_state={preserve_rng_state!r}: accepted are True and False")
    check_determinism(determinism_check)
    check_existing(existing)


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


def checkpointed_forwards(model: nn.Module) -> list[CheckpointedForward]:
    """What stands in the place of the forwards of a model's blocks, whoever has put it there."""
    return [forward for module in model.modules() if (forward := _forward_of(module))]


def _forward_of(module: nn.Module) -> CheckpointedForward | None:
    """What stands in the place of a module's forward, also where another library has wrapped its own around it."""
    forward: Any = inspect.unwrap(module.__dict__.get("forward"))  # type: ignore[arg-type]
    return forward if isinstance(forward, CheckpointedForward) else None


_BY_POLICY = "left out by the policy"


def _why_not(model: nn.Module, name: str, block: nn.Module, existing: Existing) -> str | None:
    forward = _forward_of(block)
    if forward and forward.active:
        return "checkpointed by an earlier call, which its own handle undoes"
    if any(isinstance(module, torch.jit.ScriptModule) for module in block.modules()):
        return "compiled by TorchScript, which can't be replayed from outside"
    owner = owner_of(model, name, existing)
    if owner is None:
        return None
    how = 'existing="replace" takes over' if existing == "keep" else "it has no switch that is known here"
    return f"checkpointed by its owner: {owner}; {how}"


def _warn_of(left_alone: dict[str, str | None]) -> None:
    for reason in dict.fromkeys(left_alone.values()):
        if reason not in (None, _BY_POLICY):
            names = [name for name, why in left_alone.items() if why == reason]
            warnings.warn(f"Left alone: {', '.join(names)}: {reason}", stacklevel=3)


def install(block: nn.Module, name: str, application: Application) -> CheckpointedForward:
    """Put a checkpointed forward in the place of a block's own; its `remove` undoes it."""
    # RReLU's noise is saved before its kernel fills it: a replay that stops there hands out garbage (pytorch issue
    # 193671).
    early_stop = not any(isinstance(module, nn.RReLU) for module in block.modules())
    replaced = block.__dict__.get("forward")
    if isinstance(replaced, CheckpointedForward) and not replaced.active:
        replaced = replaced.replaced  # of a handle that is gone: another library has put it back
    forward = CheckpointedForward(block, name, application, early_stop, replaced)
    block.forward = forward
    return forward


def _count(module: nn.Module) -> int:
    """The number of parameters, those that a lazy module has not made yet left out."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
