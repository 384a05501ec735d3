"""A memory budget in an estimate: it plans on what it measures, but how high it goes is known before."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_ckpt.cli._policies import PLAIN
from lightning_ckpt.policies import Full, MemoryBudget, Policy

if TYPE_CHECKING:
    from lightning_ckpt.estimation import Estimate, StepMemory

FULL = Full()


def to_estimate(policies: Iterable[str | Policy]) -> list[str | Policy]:
    """The policies whose steps can be run: plain and full in the place of budgets."""
    wanted = [(PLAIN, FULL) if isinstance(policy, MemoryBudget) else (policy,) for policy in policies]
    return [one for some in wanted for one in some]


def step_of(policy: str | Policy, estimate: "Estimate", memory: int) -> "StepMemory":
    """The step with a policy; for a budget the highest that it allows.

    That is the plain one where it stays within the budget, or else full, which training starts with, with activations
    that are kept until the budget is used.

    Args:
        policy: which.
        estimate: of the policies that `to_estimate` tells.
        memory: of the device, in bytes.
    """
    if not isinstance(policy, MemoryBudget):
        return estimate[policy]
    plain, full = estimate[PLAIN], estimate[FULL]
    peak = max(full.peak, policy.nbytes(memory))
    if plain.peak <= peak:
        return replace(plain, policy=str(policy))
    return replace(full, policy=str(policy), activations=full.activations + peak - full.peak)


def largest_of(policy: str | Policy, largest: dict[str, int], *, memory: int, usable: int) -> int:
    """The largest batch size with a policy; under a budget that of the steps that it allows.

    Args:
        policy: which.
        largest: of the policies that `to_estimate` tells.
        memory: of the device, in bytes.
        usable: what of it a step may take.
    """
    if not isinstance(policy, MemoryBudget):
        return largest[str(policy)]
    return largest[str(FULL if policy.nbytes(memory) <= usable else PLAIN)]
