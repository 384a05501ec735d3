"""Checks that training is what it was: gradients, replayed values, random numbers, state."""

import torch

from lightning_ckpt.cli._findings import Finding, NotApplicable, failed, passed, some, warned
from lightning_ckpt.cli._patient import Patient
from lightning_ckpt.cli._watched import PYTORCH
from lightning_ckpt.verification import verify_gradients

_LOOK = 'ActivationCheckpointing(determinism_check="values") names the block and the operator; see "replayed values"'


def gradients(patient: Patient) -> Finding:
    """Loss, gradients and buffers of a step are those of the plain step."""
    if not patient.module.automatic_optimization:
        return _gradients_by_hand(patient)
    with patient.under_policy():
        result = verify_gradients(patient.module, patient.batch, lambda module, batch: patient.loss())
    if result.equal:
        return passed(f"{len(result.comparisons)} tensors, loss, gradients and buffers, are those of the plain step")
    different = [comparison for comparison in result.comparisons if not comparison.equal]
    return failed(
        f"{len(different)} of {len(result.comparisons)} tensors differ from the plain step's, "
        f"{result.worst.name} by up to {result.worst.largest:.3g}",
        _LOOK,
    )


def _gradients_by_hand(patient: Patient) -> Finding:
    """Of a module that optimizes by hand a Trainer's own first step tells, on a CPU, where equal means bit for bit."""
    if not patient.plain.on_host:
        raise NotApplicable("the module optimizes by hand, and on this device two plain steps may differ already")
    names, different = patient.plain.digests, patient.checkpointed.differences(patient.plain)
    if not different:
        return passed(
            f"{len(names)} tensors, losses and gradients of a Trainer's first step, are those of the plain step"
        )
    return failed(f"{len(different)} of {len(names)} tensors differ from the plain step's: {some(different)}", _LOOK)


def replayed_values(patient: Patient) -> Finding:
    """What a replay computes is what its forward computed."""
    if not hasattr(torch, "hash_tensor"):
        raise NotApplicable(f"needs torch.hash_tensor, which PyTorch {torch.__version__} lacks")
    difference = patient.difference_in_values()
    if difference is None:
        return passed(f"every value that {len(patient.coverage.checkpointed)} blocks replay is that of their forward")
    return failed(difference, "remove the cause, or leave the block out: name the others with --blocks")


def random_numbers(patient: Patient) -> Finding:
    """Random numbers of a forward come again in its replay."""
    draws = {name: sources for name, sources in patient.watched.draws.items() if sources}
    foreign = {name: sources - {PYTORCH} for name, sources in draws.items() if sources - {PYTORCH}}
    if foreign:
        sources = ", ".join(sorted(set().union(*foreign.values())))
        return failed(
            f"{some(list(foreign))} draw from {sources}, and the replay draws other numbers",
            "draw with torch.rand and its like, from the global generator, or outside of the blocks",
        )
    if draws and not patient.conditions.preserve_rng_state:
        return failed(
            f"{some(list(draws))} draw random numbers, and preserve_rng_state is off: the replay draws others",
            "ActivationCheckpointing(preserve_rng_state=True), the default",
        )
    if not draws:
        return passed("no block draws random numbers")
    return passed(f"{len(draws)} of {len(patient.watched.draws)} blocks draw random numbers, all from {PYTORCH}")


def state(patient: Patient) -> Finding:
    """What a forward changes on its block, a replay does not change once more."""
    attributes = {name: changes for name, changes in patient.watched.attributes.items() if changes}
    buffers = sum(len(changed) for changed in patient.watched.buffers.values())
    if not attributes:
        return passed(f"no attribute changes in a forward; {buffers} buffers do, and are put back for the replay")
    name, changes = next(iter(attributes.items()))
    listed = ", ".join(f"{attribute!r} {change}" for attribute, change in changes.items())
    return warned(
        f"{some(list(attributes))} change attributes in a forward, and once more in its replay: {listed} in {name!r}",
        "register_buffer, or guard the change: if not lightning_ckpt.is_recomputing(): ...",
    )
