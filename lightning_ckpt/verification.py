"""Gradients against the plain model: proof that a checkpointed step is the step it was."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from lightning_ckpt.blocks import Blocks
from lightning_ckpt.policies import Policy
from lightning_ckpt.printed import whole
from lightning_ckpt.recompute import checkpoint_blocks, checkpointed_forwards
from lightning_ckpt.snapshot import Snapshot
from lightning_ckpt.training_step import LossFn, loss_of

# Where kernels add up in any order, plain runs beside the first, and how many times their largest difference counts as
# equal: a few runs show what is usual, not the most there can be, and a wrong gradient is off by far more.
_REPEATS, _SPREAD = 2, 4.0


@dataclass(frozen=True)
class Comparison:
    """One tensor of the checkpointed step beside that of the plain step.

    Attributes:
        name: `"loss"`, `"gradient of <parameter>"` or `"buffer <name>"`.
        largest: the largest absolute difference of two elements; infinite where one of the two has no such tensor, or
            a NaN that the other has not.
        allowed: the largest that counts as equal.
    """

    name: str
    largest: float
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether the difference is within what is allowed."""
        return self.largest <= self.allowed


@dataclass(frozen=True)
class Verification:
    """What `verify_gradients` found: every comparison, the worst first; prints as a rich table."""

    comparisons: tuple[Comparison, ...]
    blocks: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether loss, gradients and buffers are those of the plain step."""
        return all(comparison.equal for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest difference beyond what is allowed."""
        return self.comparisons[0]

    def raise_if_different(self) -> None:
        """Raise an `AssertionError` that names the tensors that differ."""
        different = [c for c in self.comparisons if not c.equal]
        if different:
            listed = "; ".join(f"{c.name} by up to {c.largest:.3g}" for c in different[:5])
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise AssertionError(
                f"The checkpointed step differs from the plain one in {len(different)} of {len(self.comparisons)} "
                f'tensors: {listed}{more}. determinism_check="values" names the block and the operator.'
            )

    def __str__(self) -> str:
        outcome = "equal" if self.equal else f"different, {self.worst.name} by up to {self.worst.largest:.3g}"
        return f"{len(self.comparisons)} tensors of {len(self.blocks)} checkpointed blocks and the rest: {outcome}"

    def __rich__(self) -> Table:
        table = Table(whole("Tensor"), "Largest difference", "Allowed", "Equal", title=str(self))
        for comparison in self.comparisons[:10]:
            table.add_row(
                comparison.name,
                f"{comparison.largest:.3g}",
                f"{comparison.allowed:.3g}",
                "yes" if comparison.equal else "no",
            )
        if len(self.comparisons) > 10:
            table.caption = f"The worst 10 of {len(self.comparisons)}"
        return table


def verify_gradients(
    module: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    policy: str | Policy = "full",
    blocks: Blocks | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Run one training step plain and checkpointed, from the same state, and compare loss, gradients and buffers.

    The module, its gradients and buffers, and all random numbers are left as found.

    Args:
        module: a `LightningModule`, or any module with a `loss_fn`. Where blocks of it are checkpointed already, those
            are compared, and `policy` and `blocks` do not count.
        batch: what the step takes, on the module's device.
        loss_fn: `loss_fn(module, batch)`, a scalar; without it the module's own `training_step`.
        policy: as in `checkpoint_blocks`.
        blocks: as in `checkpoint_blocks`.
        tolerance: the largest absolute difference that counts as equal. By default none is allowed on the CPU;
            elsewhere a tensor may differ by four times as much as between plain runs, whose kernels add up in any
            order: by nothing where they don't.

    Raises:
        ValueError: there is no loss to run, or none that depends on a parameter, or no block that can be checkpointed.
        TypeError: `module` is no module.

    Examples:
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> verify_gradients(model, torch.randn(2, 4), lambda model, x: model(x).sum()).equal
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r}: accepted is a torch.nn.Module")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r}: accepted are None and a difference of at least 0")
    step = loss_of(module, loss_fn, asked_by="verify_gradients")
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    found = Snapshot([module], device=device)
    existing = [forward for forward in checkpointed_forwards(module) if forward.active]

    def run() -> dict[str, Tensor]:
        try:
            return _run(module, batch, step)
        finally:
            found.restore()

    try:
        for forward in existing:
            forward.active = False
        plain = run()
        repeats = [run() for _ in range(_REPEATS)] if tolerance is None and device.type != "cpu" else [plain]
    finally:
        for forward in existing:
            forward.active = True
    if existing:
        names = tuple(forward.name for forward in existing)
        ours = run()
    else:
        with checkpoint_blocks(module, policy, blocks=blocks) as handle:
            names = handle.blocks
            if not names:
                raise ValueError("no block is checkpointed, so there is nothing to verify; the warning above says why")
            ours = run()
    compared = [
        Comparison(
            name,
            largest=_largest(ours.get(name), plain.get(name)),
            allowed=_spread(name, repeats, plain) if tolerance is None else tolerance,
        )
        for name in plain.keys() | ours.keys()
    ]
    return Verification(tuple(sorted(compared, key=lambda c: (c.allowed - c.largest, c.name))), names)


def _run(module: nn.Module, batch: Any, step: LossFn) -> dict[str, Tensor]:
    """Loss, gradients and buffers of one step from where the module is."""
    if not module.training:
        module.train()
    for parameter in module.parameters():
        parameter.grad = None
    loss = step(module, batch)
    if not loss.requires_grad:
        raise ValueError(
            "the step gave a loss that depends on no parameter that trains: there is no gradient to verify"
        )
    loss.backward()
    seen = {"loss": loss.detach().clone()}
    seen |= {f"gradient of {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    seen |= {f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return seen


def _spread(name: str, repeats: list[dict[str, Tensor]], plain: dict[str, Tensor]) -> float:
    """The largest difference of a tensor that counts as equal, by what it was in plain runs."""
    return _SPREAD * max(_largest(repeat.get(name), plain.get(name)) for repeat in repeats)


def _largest(one: Tensor | None, other: Tensor | None) -> float:
    """The largest absolute difference, infinite where the two can't be compared."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other) or not one.numel():
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    # Equal infinities and NaN in the same places are equal; any other NaN makes the difference one.
    same = (one == other) | ((one != one) & (other != other))
    difference = (one.to(kind) - other.to(kind)).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(float("inf")).max())
