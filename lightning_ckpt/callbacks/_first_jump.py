"""The first jump of a search: as far as the step's memory on fake tensors says."""

import logging
import math
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ckpt.callbacks._trainer import callbacks_of
from lightning_ckpt.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_ckpt.estimation import PLAIN, estimate_memory
from lightning_ckpt.fitting import MOST, largest_size
from lightning_ckpt.search import Measurement, Search

log = logging.getLogger(__name__)

# What estimates were seen to leave out, of the target: a jump that lands a hair above it has to be followed by another.
_LEFT_OUT = 0.005
# An estimate that is further off at the size that was measured, as a share of what was, says little of others.
_AGREES = 0.1
# A model whose step takes so long on fake tensors costs less to try than to estimate.
_MOST_SECONDS = 10


class Seen(Callback):
    """Keeps the latest batch.

    Attributes:
        batch: as the module's `training_step` takes it; None before the first.
    """

    batch: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch = batch


def first_jump(trainer: Trainer, module: LightningModule, batch: Any, hint: Measurement, search: Search) -> int | None:
    """Return the size whose step is estimated to fill the target.

    The estimate is moved by the little that it is off at the size that was measured.

    Args:
        trainer: whose precision, accumulation and checkpointing count.
        module: what it trains; not touched.
        batch: of the size that was measured; only shapes and dtypes are read.
        hint: what a small size would measure.
        search: what is looked for.

    Returns:
        A size that is allowed, larger than the one measured; None where the step does not run on fake tensors, takes
        long on them, runs kernels that take memory of their own, or was measured at something else.
    """
    started = perf_counter()
    try:
        estimate = estimate_memory(
            module,
            batch,
            **_checkpointed(trainer),
            precision=str(trainer.precision),
            accumulate=min(trainer.accumulate_grad_batches, 2),
        )
        if estimate.uncounted:
            raise ValueError(f"the memory of {', '.join(estimate.uncounted)} is not known")
        off = hint.peak - estimate.steps[0].peak
        if abs(off) > _AGREES * hint.peak:
            raise ValueError(f"{estimate.steps[0].peak} bytes were estimated where {hint.peak} were measured")

        def peak(size: int) -> int:
            if perf_counter() - started > _MOST_SECONDS:
                raise TimeoutError(f"it took more than {_MOST_SECONDS} s")
            return estimate.at(size).steps[0].peak + off

        most = search.allowed.largest
        limit = int((1 - _LEFT_OUT) * search.target)
        found = search.nearest(largest_size(peak, limit, start=hint.size, most=MOST if math.isinf(most) else int(most)))
    except Exception as error:  # any code of the user's may run in it, and the trials do without
        log.debug("The first jump is not estimated: %s", error)
        return None
    return found if found > hint.size else None


def _checkpointed(trainer: Trainer) -> dict[str, Any]:
    """How the blocks are checkpointed in trials: a plan comes later, and until then everything is."""
    for other in callbacks_of(trainer):
        if isinstance(other, ActivationCheckpointing) and (portion := other.report()) is not None:
            policy = "full" if other.to_plan(trainer.lightning_module) else other.policy
            return {"policy": policy, "blocks": [part.name for part in portion.checkpointed]}
    return {"policy": PLAIN}
