"""Where the batch size of a run lives, and the train loaders that follow it."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ckpt.callbacks._distributions import MisconfigurationException
from lightning_ckpt.callbacks._loaders import (
    batch_size_of,
    changed,
    combined,
    drawn_from,
    for_trial,
    leaves,
    most_samples,
    resized,
    samples_up_to,
)
from lightning_ckpt.callbacks._trainer import (
    data_ranks,
    datamodule_of,
    hand_train_loaders,
    loaded_train_loaders,
    request_train_loaders,
    shares_samples_out,
    train_loaders_handed,
)

ForTrial = Callable[[Any, int], Any]


class _Place:
    """An attribute of a module or datamodule, or a key of its hyperparameters, that holds the batch size."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._is_key = isinstance(owner, MutableMapping)
        self._is_own = self._is_key or name in vars(owner)
        self.found = self.read()

    def read(self) -> Any:
        return self._owner[self._name] if self._is_key else getattr(self._owner, self._name)

    def write(self, value: Any) -> None:
        if self.read() == value:
            return
        if self._is_key:
            self._owner[self._name] = value
        else:
            setattr(self._owner, self._name, value)

    def put_back(self) -> None:
        if not self._is_own and self._name in vars(self._owner):  # found on the class, which now shows again
            delattr(self._owner, self._name)
        self.write(self.found)


class BatchSize:
    """The batch size of one `fit`: read, changed for a trial, put back, settled.

    Args:
        trainer: whose loaders they are.
        pl_module: whose attribute or hyperparameter the size may be.
        name: of that attribute or hyperparameter.
        for_trial: makes of a loader one that gives batches of a size, over and over.

    Attributes:
        size: the size as the user set it; None where it was left open.

    Raises:
        MisconfigurationException: when there is none that could be changed.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, name: str, for_trial: ForTrial = for_trial
    ) -> None:
        self._trainer, self._name, self._for_trial = trainer, name, for_trial
        self._places = list(places_of(trainer, pl_module, name))
        self._handed = train_loaders_handed(trainer)
        # What trials copy: the loaders handed to `fit`, or those the hook made for the size that was set then.
        self._loaders: Any = self._handed
        self._follows = True
        if self._handed is not None:
            self.size: int | None = self._size_of_handed()
        elif self._places:
            self.size = next((place.found for place in self._places if isinstance(place.found, int)), None)
        else:
            raise MisconfigurationException(
                f"BatchSizeTuner found no batch size to change: no attribute and no hyperparameter {name!r} on "
                f"{_owners(trainer, pl_module)}, and no DataLoader handed to `fit`. Give the class that makes the "
                f"train loader an attribute {name!r} and use it there, name the one there is with batch_arg_name, or "
                "hand a DataLoader to `fit`"
            )

    def prepare(self, size: int) -> None:
        """Have train loaders to copy, made by the hook at `size` where none were handed to `fit`.

        Raises:
            MisconfigurationException: when the hook's loaders do not follow the attribute.
        """
        if self._handed is not None:
            return
        loaded = loaded_train_loaders(self._trainer)
        if loaded is not None and self.size is not None and self.size in map(batch_size_of, loaded.flattened):
            self._loaders, made_at = loaded, self.size
        else:
            self._write(size)
            self._loaders, made_at = request_train_loaders(self._trainer), size
        self._check_followed(made_at)

    @property
    def most_samples(self) -> int | None:
        """The largest size there are samples for on a rank; None where that is unknown."""
        return most_samples(self._loaders, self._ranks_sharing)

    def samples_up_to(self, size: int) -> int:
        """How many samples there are, counted no further than `size`."""
        return samples_up_to(self._loaders, size, self._ranks_sharing)

    def _ranks_sharing(self, loader: Any) -> int:
        """How many ranks will share this loader's samples out among them."""
        return data_ranks(self._trainer) if shares_samples_out(self._trainer, loader) else 1

    def drawn_from(self) -> Iterable[object]:
        """The objects whose state reading a batch may change."""
        return drawn_from(self._loaders)

    def trial_loaders(self, size: int) -> CombinedLoader:
        """Set the size everywhere it lives, and return loaders that give batches of it."""
        self._write(size)
        if not self._follows:
            return combined(request_train_loaders(self._trainer))
        # Not `combined(changed(...))` of a CombinedLoader that is loaded already: its limits are those of another size.
        loaders = combined(changed(self._loaders, lambda leaf: self._for_trial(leaf, size)))
        loaders.limits = None
        return loaders

    def loaders(self) -> list[Any]:
        """The loaders that trials copy, one by one."""
        return leaves(self._loaders)

    def put_back(self) -> None:
        """Set the size everywhere as it was found."""
        for place in self._places:
            place.put_back()

    def settle(self, size: int) -> bool:
        """Set the size for good, in the loaders handed to `fit` too; return whether that changed anything."""
        changes = self.size != size or any(place.found != size for place in self._places)
        self._write(size)
        if self._handed is not None and self.size != size:
            hand_train_loaders(self._trainer, changed(self._handed, lambda leaf: resized(leaf, size)))
        return changes

    def _write(self, size: int) -> None:
        for place in self._places:
            place.write(size)

    def _size_of_handed(self) -> int:
        sizes = {size for leaf in leaves(self._handed) if (size := batch_size_of(leaf)) is not None}
        if len(sizes) == 1:
            return sizes.pop()
        if sizes:
            raise MisconfigurationException(
                f"BatchSizeTuner can't choose between the batch sizes {sorted(sizes)} of the train loaders handed to "
                "`fit`: give them one size"
            )
        raise MisconfigurationException(
            f"BatchSizeTuner can't change the batch size of what was handed to `fit`, "
            f"{', '.join(map(_described, leaves(self._handed)))}: hand a DataLoader with a batch_size, or with a batch "
            "sampler that has an attribute `batch_size` which it reads at each epoch"
        )

    def _check_followed(self, size: int | None) -> None:
        found = leaves(self._loaders)
        sizes = [batch_size_of(leaf) for leaf in found]
        if size in sizes:
            return
        fixed = [leaf for leaf in found if isinstance(leaf, DataLoader) and leaf.batch_sampler is not None]
        if not fixed:  # loaders of the user's own class: made by the hook for each size
            self._follows = False
            return
        made = ", ".join(map(_described, fixed))
        raise MisconfigurationException(
            f"BatchSizeTuner set {self._name}={size}, and `train_dataloader` still made {made}: use {self._name} in "
            "it, as the attribute `batch_size` of a batch sampler of your own"
        )


def places_of(trainer: Trainer, pl_module: LightningModule, name: str) -> Iterator[_Place]:
    """Every place that holds the batch size."""
    for owner in (pl_module, datamodule_of(trainer)):
        if owner is None:
            continue
        fixed = getattr(type(owner), name, None)
        if hasattr(owner, name) and not (isinstance(fixed, property) and fixed.fset is None):
            yield _Place(owner, name)
        if isinstance(owner.hparams, MutableMapping) and name in owner.hparams:
            yield _Place(owner.hparams, name)


def _owners(trainer: Trainer, pl_module: LightningModule) -> str:
    owners = [pl_module, datamodule_of(trainer)]
    return " or ".join(f"{type(owner).__name__} (nor its hparams)" for owner in owners if owner is not None)


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if loader.batch_size is None and loader.batch_sampler is not None:
        return f"a {type(loader).__name__} with a {type(loader.batch_sampler).__name__}"
    return f"a {type(loader).__name__} with batch_size={loader.batch_size}"
