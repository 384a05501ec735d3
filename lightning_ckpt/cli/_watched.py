"""One plain forward pass, watched: what its blocks draw, change and keep, and the work of attention in it."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ckpt._compat import TorchDispatchMode
from lightning_ckpt.flops import FORMULAS
from lightning_ckpt.operators import PRESETS, resolve_all
from lightning_ckpt.witness import Witness

PYTORCH, PYTHON, NUMPY, OWN = "PyTorch's global generator", "Python's random", "numpy.random", "a generator of its own"

# The second is what `scaled_dot_product_attention` runs where it has no fused kernel.
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)


@dataclass
class Watched:
    """What was seen.

    Attributes:
        draws: whose random numbers each block drew, by its name.
        attributes: what became of attributes that a block's forward changed, by block and attribute.
        buffers: the buffers that a block's forward changed, by its name.
        matrices: bytes of attention matrices that were computed in each block, by its name.
        kernels: fused attention kernels that ran.
        flops: of everything that ran.
        attention_flops: of these, those of fused attention kernels.
    """

    draws: dict[str, set[str]] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    buffers: dict[str, list[str]] = field(default_factory=dict)
    matrices: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    flops: int = 0
    attention_flops: int = 0


@contextmanager
def watching(blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[Watched]:
    """Watch these blocks, and every operator, while the context is open."""
    watched = Watched()
    running: list[tuple[str, _State]] = []

    def enter(name: str, block: nn.Module) -> None:
        running.append((name, _State(block)))

    def leave(block: nn.Module) -> None:
        name, before = running.pop()
        before.compare(_State(block), name, watched)

    with ExitStack() as stack:
        for name, block in blocks:
            entering = block.register_forward_pre_hook(lambda block, *_, name=name: enter(name, block))
            leaving = block.register_forward_hook(lambda block, *_: leave(block))
            stack.callback(entering.remove)
            stack.callback(leaving.remove)
        stack.enter_context(_Operators(watched, lambda: running[-1][0] if running else ""))
        yield watched


class _State:
    """What a block's forward may change beside what it computes."""

    def __init__(self, block: nn.Module) -> None:
        self._random = {PYTORCH: _random_of_torch(), PYTHON: random.getstate(), NUMPY: _random_of_numpy()}
        self._random[OWN] = [generator.get_state().tolist() for generator in _generators(block)]
        self._witness = Witness(block)
        self._buffers = {name: buffer.detach().clone() for name, buffer in block.named_buffers()}

    def compare(self, later: "_State", name: str, watched: Watched) -> None:
        drawn = {source for source, state in self._random.items() if state != later._random[source]}
        changed = [
            buffer
            for buffer, before in self._buffers.items()
            if buffer in later._buffers and not torch.equal(before, later._buffers[buffer])
        ]
        watched.draws.setdefault(name, set()).update(drawn)
        watched.attributes.setdefault(name, {}).update(self._witness.changes(later._witness))
        watched.buffers.setdefault(name, []).extend(changed)


def _random_of_torch() -> list[Any]:
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        states.append(torch.get_device_module(device).get_rng_state())
    return [state.tolist() for state in states]


def _random_of_numpy() -> Any:
    kind, words, *rest = np.random.get_state(legacy=True)
    return kind, bytes(np.asarray(words)), rest


def _generators(block: nn.Module) -> Iterator[torch.Generator]:
    for module in block.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Generator))


class _Operators(TorchDispatchMode):
    """Looks for attention: fused kernels, and square matrices that a softmax gives."""

    def __init__(self, watched: Watched, running: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self._running = watched, running
        self._fused = resolve_all(name for name in PRESETS["attention"] if "attention" in name or "attn" in name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "_overloadpacket", func))
        flops = int(formula(*args, **(kwargs or {}), out_val=result)) if formula else 0
        self._watched.flops += flops
        if func in self._fused:
            self._watched.kernels += 1
            self._watched.attention_flops += flops
        elif func in _SOFTMAX and _is_square(result):
            self._watched.matrices[self._running()] += result.nbytes
        return result


def _is_square(result: Tensor) -> bool:
    return result.ndim >= 3 and result.shape[-1] == result.shape[-2] > 1
