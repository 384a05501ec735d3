"""Floating point operations of a training step, the model's own and the replayed ones apart.

Formulas are those of `torch.utils.flop_counter`: matrix products, convolutions and attention kernels, two operations
a multiply-add; pointwise work is not counted.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from typing_extensions import Self

from lightning_ckpt import _compat

aten = torch.ops.aten

FORMULAS: dict[Any, Callable[..., int]] = {
    # The CPU's attention kernel takes the same leading arguments as the flash kernel; PyTorch has no formula for it.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}

# An operator of such a name that has no formula does work nobody counts: recurrent cells, foreign attention kernels,
# quantised products. So does one that takes functions, and runs them unseen. A total without it would be too small,
# and so would an MFU made from it.
_HEAVY = re.compile(r"(^|_)(\w?mm|add\w*mm|matmul|gemm|linear|attention|attn|rnn|conv\d?d?|convolution)(_|$)")

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Flops:
    """Operations by format (`"bf16"`, `"fp16"`, `"tf32"`, `"fp32"`, else the dtype's name).

    Args:
        model: of the model's forward and backward, each operation once.
        replay: of what was computed a second time.
    """

    model: Mapping[str, int]
    replay: Mapping[str, int]


class FlopCounter(_compat.TorchDispatchMode):
    """Counts what runs while it is entered, in forward and backward, and changes nothing.

    Args:
        is_replay: tells at any time whether a forward is being replayed; a replay that PyTorch's own checkpoint
            starts is noticed without it.

    `problem` says in words why the count can't be trusted, None while it can.
    """

    # Without this an operator that takes functions (flex attention, cond) fails under any dispatch mode.
    supports_higher_order_operators = True

    def __init__(self, is_replay: Callable[[], bool] = lambda: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counting = True
        self.problem: str | None = None
        self._graphs = 0
        self._is_replay = is_replay
        self._model: Counter[str] = Counter()
        self._replay: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled code run compiled: under any other mode it falls back to eager."""
        return True

    def __enter__(self) -> Self:
        self._graphs = _compat.compiled_graphs()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if _compat.compiled_graphs() != self._graphs:
            self.problem = "a part of the model is compiled, and what compiled code runs is not seen"

    def result(self) -> Flops | None:
        """Return the count, or None when it can't be trusted; `problem` then says why."""
        if self.problem is None and not self._model:
            self.problem = "no operator with a formula ran"
        return None if self.problem else Flops(dict(self._model), dict(self._replay))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper, such as a DTensor: what it is made of is what runs, so wait for that
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        computes = not any(issubclass(kind, _compat.FakeTensor) for kind in types)  # a DTensor works out shapes so
        if self.counting and computes and self.problem is None:
            self._count(getattr(func, "_overloadpacket", func), args, kwargs, out)
        return out

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        formula = FORMULAS.get(packet)
        if formula is None:
            if _HEAVY.search(_name(packet)) or not isinstance(packet, _compat.OpOverloadPacket):
                self.problem = f"there is no FLOP formula for the operator {_name(packet)}"
            return
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except Exception as error:
            self.problem = f"the FLOP formula of {_name(packet)} failed: {error!r}"
            return
        counts = self._replay if self._is_replay() or _compat.in_checkpoint_replay() else self._model
        counts[_format(packet, args)] += flops


def _name(packet: Any) -> str:
    return getattr(packet, "__name__", str(packet))


def _format(packet: Any, args: tuple[Any, ...]) -> str:
    """Return the format the operator computes in: that of its first tensor, TF32 where the device may round to it."""
    tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if tensor.dtype is torch.float32 and tensor.device.type == "cuda":
        return "tf32" if _rounds_to_tf32(_name(packet)) else "fp32"
    return _FORMATS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _rounds_to_tf32(name: str) -> bool:
    settings: Any = torch.backends
    kernel = settings.cudnn.conv if "conv" in name else settings.cuda.matmul
    return bool(kernel.fp32_precision == "tf32")


def uncountable(model: torch.nn.Module) -> str | None:
    """Return why the FLOPs of a model can't be counted, as far as that can be told before it runs."""
    for name, module in model.named_modules():
        if _compat.is_compiled(module):
            return f"{name or 'the model'} is compiled, and what compiled code runs is not seen"
    return None
