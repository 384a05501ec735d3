"""`TARGET`: the user's factory, found by `module:factory` or `path/file.py:factory`, called, and its model."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from lightning_ckpt.cli._command import UsageError

TARGET_HELP = "module:factory or path/file.py:factory, a function or class that takes no arguments and returns a model"


def load_model(target: str) -> nn.Module:
    """Return the model that the target's factory makes.

    A factory may return a tuple whose first item is the model, and a module is taken as it is. Layers that a
    LightningModule makes in `configure_model` are made.

    Raises:
        UsageError: the target can't be found, its code fails, or what it makes is no module.
    """
    factory = _factory(target)
    made = factory if isinstance(factory, nn.Module) else _called(factory, target)
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target}: returned a {type(model).__name__}: return a torch.nn.Module or a LightningModule")
    configure = getattr(model, "configure_model", None)
    if callable(configure):
        _called(configure, f"{target}: configure_model")
    return model


def _factory(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise UsageError(f"{target}: is not a target: give {TARGET_HELP}")
    module = _called(lambda: _file(Path(place)) if place.endswith(".py") else _module(place), place)
    factory = getattr(module, name, None)
    if not callable(factory):
        near = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UsageError(f"{target}: {place} has no function or class {name!r}; it has: {near or 'none'}")
    return factory  # type: ignore[no-any-return]


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: can't be imported")
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
