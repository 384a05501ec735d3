"""Lightning's two distributions, `lightning` and `pytorch_lightning`: one code, twice, with classes of its own each.

The callbacks are written against `lightning`, and a trainer, logger or loader of the other is none of its classes. So
kinds are asked for with `is_a`, what goes into a trainer is that trainer's own by `of`, and the classes that users
derive from or catch are both's.
"""

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import lightning.fabric.utilities.exceptions as exceptions
import lightning.pytorch as pytorch

_T = TypeVar("_T")

_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def is_a(value: object, *kinds: type[_T]) -> TypeGuard[_T]:
    """As `isinstance`, for classes of `lightning`: whether a value is one of either distribution's."""
    return any(isinstance(value, each) for kind in kinds for each in _both(kind))


def of(owner: object, thing: _T) -> _T:
    """A class or function of `lightning` as the distribution of a trainer or module has it."""
    roots = {kind.__module__.partition(".")[0] for kind in type(owner).__mro__}
    return _twin(thing) if "pytorch_lightning" in roots else thing


def _twin(thing: Any) -> Any:
    ours = next(name for name in _NAMES if thing.__module__.startswith(name))
    return getattr(import_module(thing.__module__.replace(ours, _NAMES[ours], 1)), thing.__qualname__)


def _both(kind: type) -> tuple[type, ...]:
    """The class, and its twin if somebody has loaded the other distribution, and it has one."""
    if "pytorch_lightning" not in sys.modules:
        return (kind,)
    with suppress(ImportError, AttributeError):  # one of another version
        return kind, _twin(kind)
    return (kind,)


def _joined(kind: type) -> type:
    """A class that is a subclass of either distribution's, as far as they are loaded when this is."""
    kinds = _both(kind)
    return kind if len(kinds) == 1 else type(kind.__name__, kinds, {"__doc__": kind.__doc__, "__module__": __name__})


if TYPE_CHECKING:
    Callback = pytorch.Callback
    MisconfigurationException = exceptions.MisconfigurationException
else:
    Callback = _joined(pytorch.Callback)
    MisconfigurationException = _joined(exceptions.MisconfigurationException)
