"""DeepSpeed's own activation checkpointing beside ours."""

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn


def tell_of_deepspeed(trainer: Trainer) -> None:
    """Say in one line what DeepSpeed's settings do and don't, where any is on: they are easily taken for a switch."""
    # By name: both distributions of Lightning have one.
    if not any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
        return
    config = getattr(trainer.strategy, "config", None)
    settings = config.get("activation_checkpointing") if isinstance(config, dict) else None
    on = [name for name, value in (settings or {}).items() if value]
    if on:
        rank_zero_warn(
            f"DeepSpeed's activation_checkpointing settings ({', '.join(on)}) act on code that calls "
            "deepspeed.checkpointing.checkpoint, and on nothing else; ActivationCheckpointing does not use them. A "
            "block that is called that way is replayed twice: leave it out of `blocks`, or leave "
            "ActivationCheckpointing out"
        )
