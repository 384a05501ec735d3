"""What a `BatchSizeTuner` is asked for, checked."""

from dataclasses import dataclass
from typing import Literal

from lightning_ckpt.callbacks._distributions import MisconfigurationException
from lightning_ckpt.search import Search
from lightning_ckpt.sizes import UNITS, parse_size


@dataclass(frozen=True)
class TunerOptions:
    """The arguments of `BatchSizeTuner`, by its names.

    Raises:
        ValueError: one is out of range.
    """

    mode: Literal["search", "grow"]
    headroom: float
    batch_arg_name: str
    init_val: int | None
    min_val: int
    max_val: int | None
    multiple_of: int
    memory_limit: int | str | None
    max_trials: int
    global_batch_size: int | None
    probe: Literal["first", "longest"]
    stop_at_plateau: float | None
    evaluation: bool

    def __post_init__(self) -> None:
        if self.mode not in ("search", "grow"):
            raise ValueError(f'mode={self.mode!r}: accepted are "search" and "grow"')
        headroom = self.headroom
        if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
            raise ValueError(f"headroom={headroom!r}: give the share of memory to leave free, at least 0 and below 1")
        name = self.batch_arg_name
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f'batch_arg_name={name!r}: give the name of an attribute, like "batch_size"')
        for needed in ("min_val", "multiple_of", "max_trials"):
            _check_count(needed, getattr(self, needed))
        for optional in ("max_val", "init_val", "global_batch_size"):
            if getattr(self, optional) is not None:
                _check_count(optional, getattr(self, optional))
        # Of fewer ranks than there will be: what divides their share of the samples divides all of them.
        Search(0, self.min_val, self.max_val, self.multiple_of, divides=self.global_batch_size)
        _check_first(self.init_val, self.min_val, self.max_val)
        _check_probe(self.probe)
        _check_growth(self.stop_at_plateau)
        _check_switch("evaluation", self.evaluation)
        if self.mode == "grow" and (self.probe != "first" or self.stop_at_plateau is not None or self.evaluation):
            raise ValueError(
                'mode="grow" takes the steps of training as they come: leave probe, stop_at_plateau and evaluation '
                'out, or use mode="search"'
            )
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", _limit(self.memory_limit))

    def search(self, target: int, samples: int | None, divides: int | None) -> Search:
        """The search that is asked for.

        Args:
            target: most memory a step may need, in bytes.
            samples: in the train data, where that is known.
            divides: what every size must divide; None for any size.

        Raises:
            MisconfigurationException: no size is left to try.
        """
        most = min((bound for bound in (self.max_val, samples) if bound is not None), default=None)
        try:
            return Search(target, self.min_val, most, self.multiple_of, self.init_val, self.max_trials, divides)
        except ValueError as error:
            data = "" if samples is None else f"; the train data has {samples} samples"
            raise MisconfigurationException(f"BatchSizeTuner: {error}{data}") from None

    def first(self, known: int | None, divides: int | None) -> int:
        """The size a fit before or a checkpoint has settled, or else the search's first."""
        return self.search(0, None, divides).nearest(known or self.init_val or 2 * self.multiple_of)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1")


def _limit(memory_limit: int | str) -> int:
    limit = parse_size(memory_limit, name="memory_limit")
    if limit < UNITS["KiB"]:
        raise ValueError(f'memory_limit={memory_limit!r} is {limit} bytes: give at least a KiB, such as "40GiB"')
    return limit


def _check_probe(probe: object) -> None:
    if probe not in ("first", "longest"):
        raise ValueError(f'probe={probe!r}: accepted are "first" and "longest"')


def _check_growth(stop_at_plateau: object) -> None:
    number = isinstance(stop_at_plateau, int | float) and not isinstance(stop_at_plateau, bool)
    if stop_at_plateau is not None and not (number and 0 <= stop_at_plateau < 1):  # type: ignore[operator]
        raise ValueError(
            f"stop_at_plateau={stop_at_plateau!r}: give the share by which samples per second must grow, at least 0 "
            "and below 1, such as 0.05, or None"
        )


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: accepted are True and False")


def _check_first(init_val: int | None, min_val: int, max_val: int | None) -> None:
    if init_val is not None and (init_val < min_val or (max_val is not None and init_val > max_val)):
        raise ValueError(f"init_val={init_val}: give a size from min_val={min_val} to max_val={max_val}")
