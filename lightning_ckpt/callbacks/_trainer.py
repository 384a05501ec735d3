"""The seam to Lightning: every access that Lightning does not document or type, each with its reason."""

from lightning.pytorch import Callback, Trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks; `Trainer.callbacks` is documented, but set where type checkers can't see it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Give the trainer another list of callbacks. A new list, since Lightning may be going through the old one."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
