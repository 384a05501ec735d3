"""What a block depends on beside its arguments, as it is at one moment: parameters, buffers, simple attributes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Kinds of attributes that are cheap to look at. Others, such as lists and objects, go unseen.
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Witness:
    """The versions of a block's parameters and the values of its simple attributes, by qualified name.

    An attribute that holds a tensor counts by the tensor's identity and version.
    """

    parameters: dict[str, int]
    attributes: dict[str, Any]

    @staticmethod
    def of(block: nn.Module) -> "Witness":
        """Look at a block and its parts."""
        parameters = {name: parameter._version for name, parameter in block.named_parameters()}
        attributes = {
            f"{below}.{name}".lstrip("."): (id(value), value._version) if isinstance(value, Tensor) else value
            for below, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, (*_SIMPLE, Tensor))
        }
        return Witness(parameters, attributes)

    def changed_attributes(self, later: "Witness") -> dict[str, str]:
        """The attributes that differ in `later`, each with what became of it, in words."""
        return {
            name: f"from {_words(self.attributes.get(name))} to {_words(later.attributes.get(name))}"
            for name in sorted(self.attributes.keys() | later.attributes.keys())
            if self.attributes.get(name) != later.attributes.get(name)
        }

    def changed_parameters(self, later: "Witness") -> list[str]:
        """The parameters that were written to, or replaced, before `later`."""
        return [name for name, version in self.parameters.items() if later.parameters.get(name) != version]


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return "one tensor"
    return "nothing" if value is None else repr(value)
