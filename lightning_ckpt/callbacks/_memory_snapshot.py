"""The allocator's history, saved when memory runs out."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_ckpt._compat import CudaAllocationHistory


class MemorySnapshot:
    """Records while a run goes on, where it is asked for and CUDA is there.

    Args:
        path: where to save it; None to record nothing.
        trainer: whose device it is of, and whose rank goes into the file's name where there are several.
    """

    def __init__(self, path: str | None, trainer: Trainer) -> None:
        self._history: CudaAllocationHistory | None = None
        if path is None:
            return
        given = Path(path)
        several = trainer.world_size > 1
        self._path = given.with_stem(f"{given.stem}-rank{trainer.global_rank}") if several else given
        if trainer.strategy.root_device.type == "cuda":
            self._history = CudaAllocationHistory()
        else:
            rank_zero_info(f"StepMonitor: memory_snapshot={path!r} is left out: only CUDA's allocator has a history.")

    def save(self) -> None:
        """Write the file; where it can't be written, say so."""
        if self._history is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._history.save(self._path)
        except OSError as error:
            rank_zero_warn(f"StepMonitor: the memory snapshot can't be written: {error}")

    def close(self) -> None:
        """Record no longer."""
        if self._history:
            self._history.stop()
            self._history = None
