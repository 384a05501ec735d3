"""`TARGET`: the user's factory, found by `module:factory` or `path/file.py:factory`, called, and what it returns."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_ckpt.cli._command import UsageError

if TYPE_CHECKING:
    from lightning import LightningModule

TARGET_HELP = "module:factory or path/file.py:factory, a function or class that takes no arguments and returns a model"


@dataclass(frozen=True)
class Target:
    """What a factory made.

    Attributes:
        name: the target as the user wrote it.
        model: the model.
        data: a batch, a loader or a LightningDataModule; None where the factory returned a model alone.
    """

    name: str
    model: nn.Module
    data: Any = None

    @property
    def module(self) -> "LightningModule":
        """The model, where it is one that a Trainer can train.

        Raises:
            UsageError: it is a plain module.
        """
        from lightning import LightningModule

        from lightning_ckpt.callbacks._distributions import is_a

        if is_a(self.model, LightningModule):
            return self.model
        raise UsageError(
            f"{self.name}: returned a {type(self.model).__name__}, which has no training_step and no optimizer: return "
            "a LightningModule"
        )

    def loader(self) -> Iterable[Any]:
        """The batches it trains on: those of the loader, or the one batch there is.

        Raises:
            UsageError: there is no data, or the user's code fails.
        """
        if hasattr(self.data, "train_dataloader"):
            return _called(lambda: _loader_of(self.data), f"{self.name}: train_dataloader")  # type: ignore[no-any-return]
        if self.data is not None:
            return self.data if is_loader(self.data) else [self.data]
        model: Any = self.model
        if has_train_loader(model):
            return _called(model.train_dataloader, f"{self.name}: train_dataloader")  # type: ignore[no-any-return]
        raise UsageError(
            f"{self.name}: returned a model alone, and {type(model).__name__} has no train_dataloader: return "
            "(model, batch), (model, DataLoader) or (model, LightningDataModule)"
        )

    def batch(self) -> Any:
        """The first batch, on the host.

        Raises:
            UsageError: as `loader`, or the loader gives none.
        """
        batches = self.loader()
        nothing = object()
        first = _called(lambda: next(iter(batches), nothing), f"{self.name}: the first batch")
        if first is nothing:
            raise UsageError(f"{self.name}: the loader gives no batch")
        return first


def load_target(target: str, *, configure: bool = True) -> Target:
    """Return what the target's factory makes.

    A factory returns a model, or a tuple of the model and its data. A module is taken as it is.

    Args:
        target: as the user wrote it.
        configure: make the layers that a LightningModule makes in `configure_model`; a Trainer does so by itself.

    Raises:
        UsageError: the target can't be found, its code fails, or what it makes is no module.
    """
    factory = _factory(target)
    made = factory if isinstance(factory, nn.Module) else _called(factory, target)
    model, data = (*made, None)[:2] if isinstance(made, tuple) and made else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target}: returned a {type(model).__name__}: return a torch.nn.Module or a LightningModule")
    layers = getattr(model, "configure_model", None)
    if configure and callable(layers):
        _called(layers, f"{target}: configure_model")
    return Target(target, model, data)


def is_loader(data: Any) -> bool:
    """Whether data is gone through batch by batch; tensors, lists, tuples and mappings are one batch."""
    return isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | list | tuple | str)


def elements_in(batch: Any) -> int:
    """How many elements the largest tensor of a batch has."""
    if isinstance(batch, Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif hasattr(batch, "__dict__"):  # dataclasses, and what graph libraries batch into
        batch = vars(batch).values()
    elif not isinstance(batch, list | tuple):
        return 0
    return max(map(elements_in, batch), default=0)


def has_train_loader(model: nn.Module) -> bool:
    """Whether a LightningModule brings its own training data."""
    from lightning import LightningModule

    from lightning_ckpt.callbacks._distributions import is_a, of

    own = of(model, LightningModule).train_dataloader
    return is_a(model, LightningModule) and type(model).train_dataloader is not own


def _loader_of(datamodule: Any) -> Any:
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule.train_dataloader()


def _factory(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise UsageError(f"{target}: is not a target: give {TARGET_HELP}")
    module = _called(lambda: _file(Path(place)) if place.endswith(".py") else _module(place), place)
    factory = getattr(module, name, None)
    if not callable(factory):
        near = ", ".join(_factories(module))
        raise UsageError(f"{target}: {place} has no function or class {name!r}; it has: {near or 'none'}")
    return factory  # type: ignore[no-any-return]


def _factories(module: ModuleType) -> list[str]:
    """The names that could be called: those that the module defines, and where it defines none, those it imports."""
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    own = [name for name in names if getattr(vars(module)[name], "__module__", None) == module.__name__]
    return own or names


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # of a file whose name ends in .py there always is one, with its loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name; a script's neighbours are imported from its folder.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; an installed command doesn't
    return importlib.import_module(name)


def _called(code: Callable[[], Any], what: str) -> Any:
    """Call the user's code; whatever goes wrong in it is theirs to read in one line."""
    try:
        return code()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}: {type(error).__name__}: {error}") from error
