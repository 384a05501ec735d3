"""Which modules of a model to checkpoint: its repeated blocks, or those that a user names."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import nn

from lightning_ckpt._compat import original_class

_log = logging.getLogger(__name__)

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Blocks: TypeAlias = type[nn.Module] | str | Predicate | Sequence[type[nn.Module] | str | Predicate]
Named: TypeAlias = tuple[str, nn.Module]

# Modules that only hold others: their owner calls the children, never the holder, so they can't be blocks.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Where `FullyShardedDataParallel` holds what it wraps, whose attributes it passes on: plain names lead through it, and
# a replay of what is inside gathers no parameters once more.
_WRAPPED = "_fsdp_wrapped_module"


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> list[Named]:
    """The blocks of a model, by qualified name, in the order in which the model holds them.

    A block inside another selected block is left to the outer one, and said in the log.

    Args:
        model: any module. The model itself is never one of its blocks: replaying all of it at once saves nothing.
        blocks: what to look for.

            - `None`: the repeated blocks. These are a Hugging Face model's own `_no_split_modules`; else the children
              of the outermost `ModuleList`, `Sequential` or `ModuleDict` whose children repeat one structure; else the
              attributes of one module that repeat one class; else the children of lists of layers of one class; else
              the stages of one module, three `Sequential`s or more; else the children of the largest `Sequential`.
            - a module class, or the name of one (`"Block"`, `"my_package.Block"`), derived classes included;
            - a glob on the qualified name: `"encoder.layers.*"`, `"*.mlp"`. A `*` stands for any text without a dot,
              at the start of a pattern for any text, and so does `**` anywhere;
            - a predicate `(name, module) -> bool`;
            - a sequence of these: whatever matches any of them; each has to match something.

    Returns:
        `(qualified name, module)` pairs, at least one. A module held under two names is listed under the first, and
        one that `FullyShardedDataParallel` wraps under the name it had before.

    Raises:
        ValueError: nothing was found, or one of several names matches nothing; the message lists the candidates it saw
            and how to name them.
        TypeError: `blocks` is none of the above.
    """
    model = _inside(model)
    if blocks is None:
        found = _repeated(model)
        if not found:
            raise ValueError(
                f"No repeated block was found in {type(model).__name__}. {_candidates(model)}"
                "Name what to checkpoint: blocks=ABlockClass, blocks='encoder.layers.*', or a list of such."
            )
    else:
        found = _named(model, blocks)
    return _outermost(found)


def check_blocks(blocks: Blocks | None) -> None:
    """Check, before there is a model, that `blocks` is something `find_blocks` accepts.

    Raises:
        TypeError: it is not.
    """
    if blocks is not None:
        _matcher(blocks)


def _callable_modules(model: nn.Module) -> Iterator[Named]:
    """Every module below the model that a forward can call."""
    return ((name, module) for name, module in _modules(model) if name and not isinstance(module, _HOLDERS))


def _modules(model: nn.Module) -> Iterator[Named]:
    """The model and every module below it, by plain names."""
    for name, module in model.named_modules():
        if _WRAPPED not in module._modules:
            yield ".".join(part for part in name.split(".") if part != _WRAPPED), module


def _inside(module: nn.Module) -> nn.Module:
    """What `FullyShardedDataParallel` wraps, or the module itself."""
    return module.get_submodule(_WRAPPED) if _WRAPPED in module._modules else module


def _outermost(found: list[Named]) -> list[Named]:
    kept: list[Named] = []
    inside: list[str] = []
    names = {name for name, _ in found}
    for name, module in found:
        parents = name.split(".")[:-1]
        if any(".".join(parents[:depth]) in names for depth in range(1, len(parents) + 1)):
            inside.append(name)
        else:
            kept.append((name, module))
    if inside:
        _log.warning("Blocks inside another selected block are left to the outer one: %s", ", ".join(inside))
    return kept


# --- named by the user ---


def _named(model: nn.Module, blocks: Blocks) -> list[Named]:
    """The modules that match, each once."""
    wanted = _matcher(blocks)
    known = list(_callable_modules(model))
    for one in [blocks] if isinstance(blocks, str) or not isinstance(blocks, Sequence) else blocks:
        matches = _matcher(one)
        if not any(matches(name, module) for name, module in known):
            raise ValueError(f"blocks={one!r} matches no module of {type(model).__name__}. {_near(model, one)}")
    return [(name, module) for name, module in known if wanted(name, module)]


def _matcher(blocks: Blocks) -> Predicate:
    if isinstance(blocks, type) and issubclass(blocks, nn.Module):
        kind = blocks
        return lambda name, module: isinstance(module, kind)
    if isinstance(blocks, str) and blocks:
        return _text_matcher(blocks)
    if callable(blocks) and not isinstance(blocks, type | nn.Module):
        return blocks
    if isinstance(blocks, Sequence) and not isinstance(blocks, str) and blocks:
        matchers = [_matcher(one) for one in blocks]
        return lambda name, module: any(matches(name, module) for matches in matchers)
    raise TypeError(
        f"blocks={blocks!r}: accepted are None, a module class, a class name, a glob on the qualified name such as "
        "'encoder.layers.*', a predicate (name, module) -> bool, or a list of at least one of these"
    )


def _text_matcher(text: str) -> Predicate:
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = re.split(r"(\*\*|\*|\?)", text.lstrip("*"))
    glob = re.compile(".*" * text.startswith("*") + "".join(wild.get(part, re.escape(part)) for part in parts))

    def matches(name: str, module: nn.Module) -> bool:
        return glob.fullmatch(name) is not None or any(
            text in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in _own_classes(module)
        )

    return matches


def _own_classes(module: nn.Module) -> Iterator[type]:
    return (kind for kind in type(module).__mro__ if kind not in (nn.Module, object))


# --- found by structure ---


def _repeated(model: nn.Module) -> list[Named]:
    """The repeated blocks: the first way of looking that finds any."""
    for look in (_declared_or_contained, _repeated_attributes, _lists_of_layers, _stages, _largest_sequential):
        if found := look(model):
            return found
    return []


def _declared_or_contained(model: nn.Module) -> list[Named]:
    """Blocks that a model declares, and else the children of outermost containers that repeat one structure."""
    return list(_walk("", model))


def _walk(name: str, module: nn.Module) -> Iterator[Named]:
    declared = list(_declared(name, module))
    if declared:
        yield from declared
        return
    children = list(_children(name, module))
    repeated = _repeats(children) if isinstance(module, _CONTAINERS) else []
    yield from repeated
    blocks = {id(block) for _, block in repeated}
    for child_name, child in children:
        if id(child) not in blocks:
            yield from _walk(child_name, child)


def _declared(name: str, module: nn.Module) -> Iterator[Named]:
    """The modules of the classes that a Hugging Face model says must stay whole.

    Its embeddings may be declared beside its blocks: they occur once, so they are left out where the blocks repeat.
    """
    declared = getattr(module, "_no_split_modules", None) or ()
    inside = [(below, child) for below, child in _modules(module) if original_class(child).__name__ in declared]
    counts = Counter(original_class(child) for _, child in inside)
    repeated = [(below, child) for below, child in inside if counts[original_class(child)] > 1]
    for below, child in repeated or inside:
        yield f"{name}.{below}".lstrip("."), child


def _repeated_attributes(model: nn.Module) -> list[Named]:
    """Children that repeat one class, of the first module that has such: `self.down1`, `self.down2`, ..."""
    for name, module in _modules(model):
        if found := _repeats(list(_children(name, module))):
            return found
    return []


def _lists_of_layers(model: nn.Module) -> list[Named]:
    """The children of lists that hold one class: a stack of recurrent or linear layers, or a list of one block."""
    return [
        child
        for name, module in _modules(model)
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
        for children in [list(_children(name, module))]
        if len({type(child) for _, child in children}) == 1
        for child in children
        if _has_parameters(child[1])
    ]


def _stages(model: nn.Module) -> list[Named]:
    """Three or more `Sequential`s of one module: the stages of a convolutional net, each built in its own way.

    Of two the one is a classifier as often as not, and the other all the rest.
    """
    for name, module in _modules(model):
        stages = [child for child in _children(name, module) if isinstance(child[1], nn.Sequential)]
        if sum(_has_parameters(stage) for _, stage in stages) >= 3:
            return [stage for stage in stages if _has_parameters(stage[1])]
    return []


def _largest_sequential(model: nn.Module) -> list[Named]:
    """The children of the `Sequential` with the most parameters; its stages alone, where it has such beside layers."""
    sequentials = [
        (name, module)
        for name, module in _modules(model)
        if isinstance(module, nn.Sequential) and len(module) > 1 and _has_parameters(module)
    ]
    if not sequentials:
        return []
    name, largest = max(sequentials, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    children = list(_children(name, largest))
    return [child for child in children if not _is_layer(child[1])] or [
        # What works in place overwrites what its replay would start from, and saves nothing by itself.
        child
        for child in children
        if _has_parameters(child[1]) or not getattr(child[1], "inplace", False)
    ]


def _repeats(children: list[Named]) -> list[Named]:
    """Those children whose structure occurs more than once, layers without parts and without parameters left out."""
    candidates = [child for child in children if not _is_layer(child[1]) and _has_parameters(child[1])]
    counts = Counter(_structure(module) for _, module in candidates)
    return [(name, module) for name, module in candidates if counts[_structure(module)] > 1]


def _structure(module: nn.Module) -> Any:
    """What two blocks must share to be a repetition: the class, and for PyTorch's plain containers their content."""
    # A block that `torch.compile` or PyTorch's own checkpointing wraps counts as what it wraps.
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = getattr(module, wrapped, module)
    kind = original_class(module)
    if kind in _CONTAINERS:
        return kind, tuple(_structure(child) for _, child in _children("", module))
    return kind


def _children(name: str, module: nn.Module) -> Iterator[Named]:
    return ((f"{name}.{below}".lstrip("."), _inside(child)) for below, child in module.named_children())


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _HOLDERS) or next(module.children(), None) is None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# --- for the messages ---


def _candidates(model: nn.Module) -> str:
    classes = Counter(type(module).__name__ for _, module in _callable_modules(model))
    first: dict[str, str] = {}
    for name, module in _callable_modules(model):
        first.setdefault(type(module).__name__, name)
    seen = [f"{kind} ({count} times, first at '{first[kind]}')" for kind, count in classes.most_common(8)]
    return f"It holds: {', '.join(seen)}. " if seen else "It holds no modules. "


def _near(model: nn.Module, blocks: Blocks) -> str:
    names = [name for name, _ in _callable_modules(model)]
    known = [*dict.fromkeys(type(module).__name__ for _, module in _callable_modules(model)), *names]
    near = get_close_matches(blocks, known, n=2) if isinstance(blocks, str) else []
    return (f"Did you mean {' or '.join(map(repr, near))}? " if near else "") + _candidates(model).rstrip()
