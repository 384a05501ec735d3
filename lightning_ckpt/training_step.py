"""The loss of one training step, of a LightningModule's own or of a function."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

LossFn = Callable[[Any, Any], Tensor]


def loss_of(module: nn.Module, loss_fn: LossFn | None, *, asked_by: str) -> LossFn:
    """The function `(module, batch) -> loss` of a step: the one given, or the module's own `training_step`.

    Args:
        module: a `LightningModule`, or any module with a `loss_fn`.
        loss_fn: `loss_fn(module, batch)`, a scalar.
        asked_by: what an error tells the user to call.

    Raises:
        ValueError: there is no loss to run. What the function returns raises it where that is no scalar.
    """
    step = loss_fn or _training_step(module, asked_by)

    def loss(module: Any, batch: Any) -> Tensor:
        given: Any = step(module, batch)
        if isinstance(given, Tensor) and given.numel() == 1:
            return given
        if isinstance(given, bool | int | float):
            raise ValueError(
                f"the step gave {given!r}, a plain number that nothing can be differentiated through: accepted is a "
                "loss, a tensor of one element, without .item() or float()"
            )
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(f"the step gave {what}: accepted is a loss, a tensor of one element, such as output.loss")

    return loss


def _training_step(module: nn.Module, asked_by: str) -> LossFn:
    if getattr(module, "training_step", None) is None:
        raise ValueError(
            f"{type(module).__name__} has no training_step: give {asked_by}(module, batch, loss_fn), with "
            "loss_fn(module, batch) a scalar"
        )
    if not getattr(module, "automatic_optimization", True):
        raise ValueError(
            f"{type(module).__name__} optimizes by hand, so its training_step gives no one loss: give "
            f"{asked_by}(module, batch, loss_fn), with loss_fn(module, batch) a scalar"
        )

    def loss(module: Any, batch: Any) -> Tensor:
        step = module.training_step
        with _unlogged(module):
            output = step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)
        return output["loss"] if isinstance(output, dict) else output  # type: ignore[no-any-return]

    return loss


@contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """Let `self.log` do nothing: without a trainer there is nobody to log to, and one that has trained would raise."""
    own = vars(module).get("log")
    vars(module)["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del vars(module)["log"]
        if own is not None:
            vars(module)["log"] = own
