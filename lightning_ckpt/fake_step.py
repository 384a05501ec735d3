"""A training step and an optimizer step on fake tensors, as they run: the same model, engine, optimizer and policy."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt._compat import NO_FAKE_RESULT, is_compiled
from lightning_ckpt.arguments import Arguments
from lightning_ckpt.blocks import Blocks
from lightning_ckpt.cuda_choices import BLOCK, as_on_cuda, update_as_on_cuda
from lightning_ckpt.fake_copy import CannotEstimate, FakeBatch, fake_copy
from lightning_ckpt.fake_memory import FakeMemory, Kind
from lightning_ckpt.kernel_memory import KernelMemory, greedy
from lightning_ckpt.policies import Policy
from lightning_ckpt.precision import Precision
from lightning_ckpt.recompute import checkpoint_blocks, checkpointed_forwards
from lightning_ckpt.replay_state import is_recomputing
from lightning_ckpt.snapshot import RandomState
from lightning_ckpt.training_step import LossFn, loss_of

OptimizerFactory = Callable[[Any], Optimizer]
DeviceType = Literal["cpu", "cuda"]


class FakeTraining:
    """A model in training, without memory and without arithmetic.

    Made with a first step, so that the optimizer has its state, as in every step of a training but the first. It holds
    nothing of the model or the batch.

    Args:
        module: a `LightningModule`, or any module with a `loss_fn`.
        batch: what the step takes.
        loss_fn: `loss_fn(module, batch)`, a scalar; without it the module's own `training_step`, in Lightning's order:
            the gradients of the step before are let go after the forward pass.
        optimizer: makes the optimizer of parameters; without it the module's own `configure_optimizers`.
        blocks: as in `checkpoint_blocks`.
        precision: how the forward pass runs.
        accumulate: batches an optimizer step.
        ranks: how many ranks share parameters, gradients and optimizer state.
        device: whose kernels and allocator.
        measure: run each operator once for real, to count what its kernel takes for itself.

    Attributes:
        memory: what the fake tensors would hold.
        batch: what the step takes.
        kernels: what measures operators, `None` where none is.

    Raises:
        ValueError: there is no loss to run.
        CannotEstimate: the step does not run on fake tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        loss_fn: LossFn | None,
        *,
        optimizer: OptimizerFactory | None,
        blocks: Blocks | None,
        precision: Precision,
        accumulate: int,
        ranks: int,
        device: DeviceType,
        measure: bool,
    ) -> None:
        self._loss = loss_of(module, loss_fn, asked_by="estimate_memory")
        self._as_lightning = loss_fn is None
        self._blocks, self._precision, self._accumulate, self._device = blocks, precision, accumulate, device
        self._phase = Kind.BUFFERS
        multiple_of = BLOCK if device == "cuda" else 1
        self.kernels = KernelMemory(device) if measure else None
        self.memory = FakeMemory(born_as=self._born_as, ranks=ranks, multiple_of=multiple_of, measure=self.kernels)
        self.batch = FakeBatch(batch, precision.dtype)
        self._module = fake_copy(module, self.memory, precision.dtype)
        for forward in checkpointed_forwards(self._module):
            forward.remove()
        with self._running():
            self._optimizers = self._configured(optimizer)
        self.peak(None)

    def peak(self, policy: Policy | None, batch_size: int | None = None) -> dict[Kind, int]:
        """Take a step, and return the bytes held at its highest moment, by what for.

        Args:
            policy: how blocks are checkpointed; `None` for plain.
            batch_size: another size of the batch.

        Raises:
            ValueError: a policy that does not fit the model, or a size that the batch can't have.
            CannotEstimate: the step does not run on fake tensors.
        """
        if self.memory.transient:
            gc.collect()  # what an earlier step left in reference cycles is none of this one's
        checkpointed = checkpoint_blocks(self._module, policy, blocks=self._blocks) if policy else nullcontext()
        with checkpointed, self._running():
            self._phase = Kind.ACTIVATIONS
            batch = self.batch.make(batch_size)
            self.memory.reset_peak()
            self._step(batch)
        return self.memory.at_peak

    def uncounted(self) -> tuple[str, ...]:
        """The operators that ran so far whose kernels take memory that the peaks leave out."""
        if self.kernels:
            return tuple(sorted(self.kernels.left_out))
        return greedy(self.memory.operators, self._device)

    def _step(self, batch: Any) -> None:
        for number in range(min(self._accumulate, 2)):  # from the second batch on, gradients are there
            self._phase = Kind.ACTIVATIONS
            with self._precision.forward(cache=not self._as_lightning):
                loss = self._loss(self._module, batch)
            if number == 0:
                self._let_gradients_go()
            self._phase = Kind.BACKWARD
            loss.backward()
            del loss
        self._phase = Kind.OPTIMIZER
        for optimizer in self._optimizers:
            optimizer.step()
            self.memory.count_as(Kind.OPTIMIZER_STATE, Arguments((dict(optimizer.state),), {}).tensors)
        if not self._as_lightning:
            self._let_gradients_go()

    def _let_gradients_go(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def _born_as(self) -> Kind:
        return Kind.ACTIVATIONS if is_recomputing() else self._phase

    @contextmanager
    def _running(self) -> Iterator[None]:
        """What is around every step. All that it changes outside of the fake copy is put back."""
        found = RandomState()
        with ExitStack() as around:
            around.callback(found.restore)
            around.enter_context(_explained())
            around.enter_context(torch.enable_grad())
            if any(map(is_compiled, self._module.modules())):
                around.enter_context(torch.compiler.set_stance("force_eager"))
            if self._device == "cuda":
                around.enter_context(as_on_cuda())
            around.enter_context(self.memory)
            yield

    def _configured(self, optimizer: OptimizerFactory | None) -> list[Optimizer]:
        """Make the layers that are made late, and the optimizers; say what is what."""
        module: Any = self._module
        if not module.training:
            module.train()
        if callable(getattr(module, "configure_model", None)):
            with self._precision.forward(cache=False):
                module.configure_model()
        self.memory.count_as(Kind.PARAMETERS, module.parameters())
        self.memory.count_as(Kind.BUFFERS, module.buffers())
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)
        self._phase = Kind.OPTIMIZER
        if optimizer:
            made: Any = optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])
        else:
            made = getattr(module, "configure_optimizers", lambda: None)()
        optimizers = _optimizers(made)
        if self._device == "cuda":
            for one in optimizers:
                update_as_on_cuda(one)
        return optimizers

    def _note_gradient(self, parameter: Tensor) -> None:
        self.memory.count_as(Kind.GRADIENTS, [parameter.grad])


def _optimizers(configured: Any) -> list[Optimizer]:
    """The optimizers among what `configure_optimizers` may return."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return _optimizers(configured.get("optimizer"))
    return [one for part in configured for one in _optimizers(part)] if isinstance(configured, list | tuple) else []


def _as_written(operator: object) -> str:
    """How a user's code says an operator whose name says little."""
    says = " (.item(), float(), or an if on a tensor)"
    return says if "_local_scalar_dense" in str(operator) else ""


@contextmanager
def _explained() -> Iterator[None]:
    """Say what a step does that can't be estimated, and what to do instead."""
    try:
        yield
    except NO_FAKE_RESULT as error:
        raise CannotEstimate(
            f"The step runs {error.func}{_as_written(error.func)}, whose result, or its shape, depends on values, "
            "which fake tensors do not have. Measure such a model instead: lightning-ckpt compare"
        ) from error
    except RuntimeError as error:
        if "is not attached to a `Trainer`" not in str(error):
            raise
        raise CannotEstimate(
            f"{error} An estimate runs without one: give optimizer=, such as torch.optim.AdamW, where it is "
            "configure_optimizers that asks for it, or loss_fn= where it is training_step"
        ) from error
