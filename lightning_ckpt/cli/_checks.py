"""The doctor's checks, in the order in which a reader wants them answered, and how they are run."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_ckpt.cli import _checks_of_blocks as of_blocks
from lightning_ckpt.cli import _checks_of_memory as of_memory
from lightning_ckpt.cli import _checks_of_training as of_training
from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._findings import Finding, NotApplicable
from lightning_ckpt.cli._patient import Patient
from lightning_ckpt.oom import is_out_of_memory

Check = Callable[[Patient], Finding]

CHECKS: dict[str, Check] = {
    "blocks covered": of_blocks.covered,
    "checkpointed by its owner": of_blocks.owner,
    "gradients": of_training.gradients,
    "replayed values": of_training.replayed_values,
    "random numbers": of_training.random_numbers,
    "state of blocks": of_training.state,
    "what is left out": of_blocks.left_out,
    "worth replaying": of_blocks.worth,
    "frozen blocks": of_blocks.frozen,
    "activations matter": of_memory.activations,
    "attention": of_memory.attention,
    "caches": of_memory.caches,
    "headroom": of_memory.headroom,
    "slowdown": of_memory.slowdown,
}


def examine(patient: Patient) -> dict[str, Finding]:
    """Run every check; one that can't be made is skipped, with the reason.

    Raises:
        UsageError: the user's code fails.
    """
    return {name: _outcome(name, check, patient) for name, check in CHECKS.items()}


def _outcome(name: str, check: Check, patient: Patient) -> Finding:
    try:
        return check(patient)
    except NotApplicable as reason:
        return Finding("skip", str(reason))
    except UsageError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return Finding("skip", f"{type(error).__name__}: {error}")
        raise UsageError(f"{name}: {type(error).__name__}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and logs back: findings say what these would, and where."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_ckpt")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
