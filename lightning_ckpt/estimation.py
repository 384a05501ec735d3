"""The memory of a training step before it runs, for each policy and batch size: no device, no memory, no arithmetic."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from lightning_ckpt.blocks import Blocks
from lightning_ckpt.fake_memory import Kind
from lightning_ckpt.fake_step import DeviceType, FakeTraining, OptimizerFactory
from lightning_ckpt.fitting import largest_size
from lightning_ckpt.policies import Full, Policy, SelectiveOps
from lightning_ckpt.policy_names import resolve_policy
from lightning_ckpt.precision import resolve_precision
from lightning_ckpt.printed import as_text
from lightning_ckpt.sizes import UNITS, parse_size
from lightning_ckpt.training_step import LossFn

PLAIN = "none"


@dataclass(frozen=True)
class StepMemory:
    """What a step holds at its highest moment, in bytes; the parts add up to the peak.

    Attributes:
        policy: as a user writes it; `"none"` for plain.
        batch_size: samples in the batch; `None` where the batch has no first dimension.
        parameters: of the model.
        buffers: of the model, and other tensors it holds.
        gradients: those that are there at that moment.
        optimizer_state: such as Adam's two averages.
        activations: the batch, and what forward and replay make of it.
        temporaries: what backward or the optimizer works with.
    """

    policy: str
    batch_size: int | None
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int
    temporaries: int

    @property
    def peak(self) -> int:
        """The highest bytes held during the step."""
        parts = (self.parameters, self.buffers, self.gradients, self.optimizer_state)
        return sum(parts) + self.activations + self.temporaries


@dataclass(frozen=True)
class Estimate:
    """What `estimate_memory` found: a step's memory for each policy; prints as a rich table.

    Attributes:
        steps: one for each policy, in the order in which they were given.
        device: whose kernels and allocator were assumed.
        precision: Lightning's name.
        accumulate: batches an optimizer step.
        ranks: how many ranks share parameters, gradients and optimizer state.
        uncounted: operators that ran whose kernels take memory of their own, which is not in the figures; where kernels
            were measured, those that could not be.
    """

    steps: tuple[StepMemory, ...]
    device: DeviceType
    precision: str
    accumulate: int
    ranks: int
    uncounted: tuple[str, ...]
    _training: FakeTraining = field(repr=False, compare=False)
    _policies: dict[str, Policy | None] = field(repr=False, compare=False)

    def __getitem__(self, policy: str | Policy) -> StepMemory:
        """The step with a policy that was asked for."""
        found = {step.policy: step for step in self.steps}
        if str(policy) not in found:
            raise KeyError(f"{policy} was not estimated; there are {', '.join(found)}")
        return found[str(policy)]

    def at(self, batch_size: int) -> "Estimate":
        """The same with another batch size: every first dimension of the batch that is its size becomes another.

        Raises:
            ValueError: a size that the batch can't have.
        """
        steps = _steps(self._training, self._policies, batch_size)
        return replace(self, steps=steps, uncounted=self._training.uncounted())

    def max_batch_size(self, limit: int | str) -> dict[str, int]:
        """The largest batch size of each policy whose peak stays at or under a limit; 0 where not even 1 does.

        Where kernels are measured, that is done anew for each of the few sizes tried, and a kernel that takes less for
        a larger batch can hide a size that fits.

        Args:
            limit: bytes, or a size like `"80GiB"`.

        Raises:
            ValueError: no size, or the batch has no first dimension.
        """
        most, start = parse_size(limit, name="limit"), self._training.batch.size
        if start is None:
            raise ValueError("max_batch_size: the batch has no tensor with a first dimension")

        def peak(policy: Policy | None, size: int) -> int:
            return sum(self._training.peak(policy, size).values())

        return {name: largest_size(partial(peak, policy), most, start=start) for name, policy in self._policies.items()}

    def to_dict(self) -> dict[str, Any]:
        """What is estimated, for JSON; sizes in bytes."""
        about = ("device", "precision", "accumulate", "ranks")
        return {
            **{name: getattr(self, name) for name in about},
            "uncounted": list(self.uncounted),
            "steps": [asdict(step) | {"peak": step.peak} for step in self.steps],
        }

    def __str__(self) -> str:
        return as_text(self.__rich__())

    def __rich__(self) -> Table:
        most = max(step.peak for step in self.steps)
        unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if UNITS[unit] <= most)
        size, ranks = self.steps[0].batch_size, f", each of {self.ranks} ranks" if self.ranks > 1 else ""
        of = f" of batch size {size}" if size else ""
        table = Table("Policy", title=f"A step{of} in {unit}: {self.precision}, {self.device}{ranks}")
        for name in ("Model", "Gradients", "Optimizer", "Activations", "Temporary", "Peak"):
            table.add_column(name, justify="right", no_wrap=True)
        for step in self.steps:
            parts = (step.parameters + step.buffers, step.gradients, step.optimizer_state, step.activations)
            sizes = (*parts, step.temporaries, step.peak)
            table.add_row(step.policy, *(f"{nbytes / UNITS[unit]:.4g}" for nbytes in sizes))
        if self.uncounted:
            table.caption = f"Not counted: what the kernels of {', '.join(self.uncounted)} take for themselves"
        return table


def estimate_memory(
    module: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    policy: str | Policy | Sequence[str | Policy] = (PLAIN, "full"),
    optimizer: OptimizerFactory | None = None,
    blocks: Blocks | None = None,
    batch_size: int | None = None,
    precision: str | int = "32-true",
    accumulate: int = 1,
    ranks: int = 1,
    device: DeviceType | None = None,
    workspaces: Literal["uncounted", "measure"] = "uncounted",
) -> Estimate:
    """Estimate the memory of a training step and an optimizer step, by running both on fake tensors.

    The step is one in the middle of training: the optimizer has its state, buffers are known. Neither the module, its
    parameters, buffers and gradients, nor any random number is touched, and no memory is taken, so that a model that
    was built on the `meta` device can be larger than this machine.

    Args:
        module: a `LightningModule`, or any module with a `loss_fn`. Where blocks of it are checkpointed already, that
            does not count.
        batch: what the step takes; shapes and dtypes are all that is read of its tensors.
        loss_fn: `loss_fn(module, batch)`, a scalar; without it the module's own `training_step`.
        policy: `"none"` for plain, and all that `checkpoint_blocks` takes; one or several.
        optimizer: a function of the parameters, such as `torch.optim.AdamW`; without it the module's own
            `configure_optimizers`, and no optimizer where there is none.
        blocks: as in `checkpoint_blocks`.
        batch_size: another size than that of `batch`.
        precision: as a Trainer's: `"32-true"` (as the module is), `"16-true"`, `"bf16-true"`, `"64-true"`,
            `"16-mixed"`, `"bf16-mixed"`.
        accumulate: batches an optimizer step, as a Trainer's `accumulate_grad_batches`.
        ranks: how many ranks share parameters, gradients and optimizer state: a division, not a simulation of FSDP.
        device: `"cpu"` or `"cuda"`, which need not be there: whose attention kernels, optimizers and block sizes to
            assume. By default that of the module; `"cuda"` for a module on the `meta` device.
        workspaces: `"measure"` to count what kernels take for themselves, such as oneDNN's copies of what it convolves.
            Each operator that the step runs is run once for real, alone, on zeros of its shapes, on `device`, which
            has to be there. That takes the memory of the largest operator and about the time of one block's step;
            an operator whose memory is not free stays in `uncounted`.

    Raises:
        ValueError: an argument is out of range, or there is no loss to run, or no block was found.
        TypeError: an argument of another kind.
        CannotEstimate: the step needs the value of a tensor; the error names the operator.

    Examples:
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "abc"])
        >>> estimate = estimate_memory(model, torch.empty(64, 8), lambda model, x: model(x).sum())
        >>> estimate["none"].peak, estimate["full"].peak
        (12288, 9984)
    """
    _check_kinds(module, batch, optimizer)
    given = [policy] if isinstance(policy, str | Policy) else list(policy)
    policies = {str(one): _resolved(one) for one in given}
    if not policies:
        raise ValueError(f"policy={policy!r}: give at least one")
    for name, count in (("accumulate", accumulate), ("ranks", ranks)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r}: accepted is a whole number of at least 1")
    how, chosen = resolve_precision(precision), _device(module, device)
    _check_workspaces(workspaces, chosen)
    training = FakeTraining(
        module,
        batch,
        loss_fn,
        optimizer=optimizer,
        blocks=blocks,
        precision=how,
        accumulate=accumulate,
        ranks=ranks,
        device=chosen,
        measure=workspaces == "measure",
    )
    steps = _steps(training, policies, batch_size)
    return Estimate(steps, chosen, how.name, accumulate, ranks, training.uncounted(), training, policies)


def _check_kinds(module: Any, batch: Any, optimizer: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r}: accepted is a torch.nn.Module")
    if batch is None:
        raise TypeError("batch=None: give a batch as the step takes it; its shapes and dtypes are what is read")
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r}: accepted is a function of the parameters that makes one, such as "
            "torch.optim.AdamW, or functools.partial of it"
        )


def _resolved(policy: str | Policy) -> Policy | None:
    if policy == PLAIN:
        return None
    resolved = resolve_policy(policy)
    if isinstance(resolved, Full | SelectiveOps):
        return resolved
    raise ValueError(
        f"policy={policy!r}: it plans on what it measures. Estimate 'none' and 'full': its peak is its budget, or that "
        "of 'none' where that is lower, or that of 'full' where that is higher"
    )


def _device(module: nn.Module, device: str | None) -> DeviceType:
    own = next((tensor.device.type for tensor in (*module.parameters(), *module.buffers())), "cpu")
    chosen = device or ("cuda" if own == "meta" else own)
    if chosen == "cpu" or chosen == "cuda":
        return chosen  # type: ignore[return-value]
    raise ValueError(f"device={chosen!r}: accepted are 'cpu' and 'cuda'")


def _check_workspaces(workspaces: str, device: DeviceType) -> None:
    if workspaces not in ("uncounted", "measure"):
        raise ValueError(f"workspaces={workspaces!r}: accepted are 'uncounted' and 'measure'")
    if workspaces == "measure" and device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "workspaces='measure': kernels are measured where they run, and there is no CUDA device here; "
            "give device='cpu', or leave workspaces out"
        )


def _steps(
    training: FakeTraining, policies: dict[str, Policy | None], batch_size: int | None
) -> tuple[StepMemory, ...]:
    steps = []
    for name, policy in policies.items():
        held = training.peak(policy, batch_size)
        temporaries = held.pop(Kind.BACKWARD) + held.pop(Kind.OPTIMIZER)
        parts = {kind.value: nbytes for kind, nbytes in held.items()}
        steps.append(StepMemory(name, batch_size or training.batch.size, temporaries=temporaries, **parts))
    return tuple(steps)
