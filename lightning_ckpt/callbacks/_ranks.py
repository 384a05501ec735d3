"""One row from the rows of all ranks, without waiting for a device."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_ckpt.processes import Processes

Gather = Callable[[Tensor], list[Tensor]]


class AcrossRanks(Metric):
    """A row of figures, reduced over ranks by columns; a figure that any rank lacks is lacking in the result.

    Always one gather of one tensor, whatever was measured, so that no rank waits for another that logs other keys.

    Args:
        how: for each column `"max"`, `"min"`, `"sum"` or `"mean"`.
        share: what sums are multiplied by: less than 1 where several ranks share one batch.
        gather: gives the rows of all ranks for this rank's; `None` for the default process group's own.
    """

    full_state_update = False
    row: Tensor
    _kind: Tensor

    def __init__(self, how: Sequence[str], *, share: float = 1.0, gather: Gather | None = None) -> None:
        gather = gather or _gather_on_device
        # torchmetrics' own gather begins with a barrier and compares shapes on the host: both wait for the device.
        super().__init__(dist_sync_fn=lambda row, group: gather(row))
        kinds = ("max", "min", "sum", "mean")
        self.register_buffer("_kind", torch.tensor([kinds.index(kind) for kind in how]), persistent=False)
        self._share = share
        empty = torch.full((len(how),), math.nan, dtype=torch.float64)
        self.add_state("row", default=empty, dist_reduce_fx=self._over_ranks)

    def update(self, row: Tensor) -> None:
        """Take this rank's row, NaN for what is lacking."""
        self.row = row

    def compute(self) -> Tensor:
        """Return the reduced row."""
        return self.row

    def _over_ranks(self, rows: Tensor) -> Tensor:
        choices = torch.stack([rows.amax(0), rows.amin(0), rows.sum(0) * self._share, rows.mean(0)])
        return choices.gather(0, self._kind.unsqueeze(0)).squeeze(0)


def _gather_on_device(row: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return rows


class Reduced:
    """A row on its way from the device; `ready` tells whether it has arrived."""

    def __init__(self, keys: Sequence[str], row: Tensor) -> None:
        self._keys = keys
        self._event = None
        self._row = row
        if row.device.type != "cpu":
            self._row = torch.empty_like(row, device="cpu", pin_memory=True).copy_(row, non_blocking=True)
            self._event = torch.Event(device=row.device)
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def figures(self) -> dict[str, float]:
        pairs = zip(self._keys, self._row.tolist(), strict=True)
        return {key: value for key, value in pairs if not math.isnan(value)}


def reducer(
    how: Mapping[str, str], device: torch.device, share: float, ranks: Processes | None
) -> Callable[[Mapping[str, float]], Reduced]:
    """Return the function that reduces figures over all ranks, given how each key is reduced.

    Every rank has to call it equally often.

    Args:
        how: `"max"`, `"min"`, `"sum"` or `"mean"`, by key.
        device: where figures are put together.
        share: what sums are multiplied by.
        ranks: put them together where that is the host; `None` leaves it to the device, which nobody waits for.
    """
    metric = AcrossRanks(list(how.values()), share=share, gather=ranks.rows if ranks else None).to(device)

    def reduce(figures: Mapping[str, float]) -> Reduced:
        row = torch.tensor([figures.get(key, math.nan) for key in how], dtype=torch.float64)
        metric.reset()
        metric.update(row.to(device, non_blocking=True))
        return Reduced(list(how), metric.compute())

    return reduce
