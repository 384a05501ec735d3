"""Which modules keep how many bytes of activations for backward."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt._compat import storage_id
from lightning_ckpt.held import has_memory


class Keeping:
    """Bytes that autograd keeps, by the module that was running: unique memory, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: Counter[str] = Counter()
        own = (*model.parameters(), *model.buffers())
        self._own = {storage_id(tensor): tensor for tensor in own if has_memory(tensor)}
        self._counted = dict(self._own)

    def note(self, name: str, tensor: Tensor) -> None:
        """Count a tensor that is saved while the named module runs, and hold it, so that its memory stays its own."""
        if has_memory(tensor) and storage_id(tensor) not in self._counted:
            self._counted[storage_id(tensor)] = tensor.detach()
            self.sizes[name] += tensor.untyped_storage().nbytes()

    def let_go(self) -> None:
        """Hold what was counted no longer."""
        self._counted = dict(self._own)


def kept_by_modules(model: nn.Module, blocks: Collection[str], run: Callable[[], Any]) -> dict[str, int]:
    """Run a forward pass, and count what is kept for backward, by the qualified name of the innermost module.

    Args:
        model: the model that `run` calls.
        blocks: names of blocks that are looked at from outside: what is kept on their behalf counts as theirs.
        run: calls the model with gradients and returns what it gives.
    """
    keeping = Keeping(model)
    running = [type(model).__name__]

    def pack(tensor: Tensor) -> Tensor:
        keeping.note(running[-1], tensor)
        return tensor.detach()  # a result that its own graph node holds as it is would never be freed

    with _telling(model, blocks, running), saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return dict(keeping.sizes.most_common())


@contextmanager
def _telling(model: nn.Module, blocks: Collection[str], running: list[str]) -> Iterator[None]:
    """Keep the names of the modules that run in a stack, blocks and what lies outside of them."""
    inside = tuple(f"{name}." for name in blocks)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name and not name.startswith(inside):
                enter = module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
                leave = module.register_forward_hook(lambda *_: _void(running.pop()), always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
        yield


def _void(_: object) -> None:
    """Drop a result: what a forward hook returns would take the place of the module's output."""
