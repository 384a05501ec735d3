"""Activation checkpointing for PyTorch Lightning: one callback, measured memory, a batch size that fits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ckpt.blocks import find_blocks
    from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_ckpt.callbacks.batch_size_tuner import BatchSizeTuner
    from lightning_ckpt.callbacks.step_monitor import StepMonitor
    from lightning_ckpt.estimation import estimate_memory
    from lightning_ckpt.policies import Full, MemoryBudget, SelectiveOps
    from lightning_ckpt.profiling import profile_blocks
    from lightning_ckpt.recompute import checkpoint_blocks
    from lightning_ckpt.replay_state import is_recomputing
    from lightning_ckpt.verification import verify_gradients

# Each public name and the room it lives in. Rooms are entered on first use: Lightning alone brings in matplotlib and
# scipy, which a bare loop that only calls `checkpoint_blocks` does not need.
_ROOMS = {
    "ActivationCheckpointing": "callbacks.activation_checkpointing",
    "BatchSizeTuner": "callbacks.batch_size_tuner",
    "Full": "policies",
    "MemoryBudget": "policies",
    "SelectiveOps": "policies",
    "StepMonitor": "callbacks.step_monitor",
    "checkpoint_blocks": "recompute",
    "estimate_memory": "estimation",
    "find_blocks": "blocks",
    "is_recomputing": "replay_state",
    "profile_blocks": "profiling",
    "verify_gradients": "verification",
}

__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "ActivationCheckpointing",
    "StepMonitor",
    "BatchSizeTuner",
    "Full",
    "SelectiveOps",
    "MemoryBudget",
    "checkpoint_blocks",
    "find_blocks",
    "is_recomputing",
    "verify_gradients",
    "estimate_memory",
    "profile_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
