"""What the doctor examines: a module on its device with a batch, and everything that checks ask of it, found once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_ckpt.blocks import find_blocks
from lightning_ckpt.callbacks._distributions import of
from lightning_ckpt.checkpointed_forward import DeterminismCheck
from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._findings import NotApplicable, OutOfMemory
from lightning_ckpt.cli._measurement import Measurement
from lightning_ckpt.cli._target import Target
from lightning_ckpt.cli._watched import Watched, watching
from lightning_ckpt.coverage import Coverage
from lightning_ckpt.oom import is_out_of_memory
from lightning_ckpt.policies import Policy
from lightning_ckpt.profiles import Profile
from lightning_ckpt.profiling import profile_blocks
from lightning_ckpt.recompute import CheckpointedBlocks, checkpoint_blocks
from lightning_ckpt.snapshot import Snapshot
from lightning_ckpt.training_step import LossFn, loss_of


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which conditions a module is examined.

    Attributes:
        policy: as it would be trained with.
        blocks: what to checkpoint; None for the repeated blocks.
        preserve_rng_state: as in `ActivationCheckpointing`.
        max_slowdown: the largest ratio of step times that is acceptable.
        memory_limit: bytes there are for training; None for what the device has.
    """

    policy: Policy
    blocks: list[str] | None = None
    preserve_rng_state: bool = True
    max_slowdown: float = 1.5
    memory_limit: int | None = None


class Patient:
    """A module, its batch, and what is found out about them. The module is left as found.

    Args:
        target: the module and its data.
        conditions: under which it is examined.
        measure: trains it plain (False) or under the policy (True), and tells what that took; None where no check asks.
    """

    def __init__(
        self, target: Target, conditions: Conditions, measure: Callable[[bool], Measurement] | None = None
    ) -> None:
        self.target, self.conditions = target, conditions
        self.module = target.module
        self._measure = measure
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.module.to(self.device)
        self.batch: Any = self.module.transfer_batch_to_device(target.batch(), self.device, 0)
        if not self.module.training:
            self.module.train()
        # A training step may ask its trainer for things; without its own loops this one takes no logged values.
        self.module.trainer = of(self.module, L.Trainer)(barebones=True)

    @cached_property
    def plain(self) -> Measurement:
        """What plain training takes."""
        return self._measured(False)

    @cached_property
    def checkpointed(self) -> Measurement:
        """What training under the policy takes."""
        return self._measured(True)

    def _measured(self, checkpointed: bool) -> Measurement:
        if self._measure is None:
            raise NotApplicable("no training step was timed")
        return self._measure(checkpointed)

    @cached_property
    def found(self) -> list[tuple[str, nn.Module]]:
        """The blocks, by name.

        Raises:
            NotApplicable: there are none; its cause says what there is.
        """
        try:
            return find_blocks(self.module, self.conditions.blocks)
        except ValueError as error:
            raise NotApplicable("there are no blocks") from error

    @cached_property
    def loss_fn(self) -> LossFn:
        """The loss of a step.

        Raises:
            NotApplicable: the module has no one loss.
        """
        try:
            return loss_of(self.module, None, asked_by="verify_gradients")
        except ValueError as error:
            raise NotApplicable(str(error).partition(":")[0]) from error

    def loss(self) -> Tensor:
        """Run the forward of a step.

        Raises:
            NotApplicable: the module has no one loss.
            OutOfMemory: the forward does not fit into memory.
            UsageError: the user's code fails.
        """
        run = self.loss_fn
        try:
            return run(self.module, self.batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(f"{type(error).__name__}: {error}") from error
            raise UsageError(f"{self.target.name}: training_step: {type(error).__name__}: {error}") from error

    @contextmanager
    def under_policy(self, check: DeterminismCheck = "none") -> Iterator[CheckpointedBlocks]:
        """Checkpoint the blocks for a while."""
        given, _ = self.conditions, self.found
        with checkpoint_blocks(
            self.module,
            given.policy,
            blocks=given.blocks,
            preserve_rng_state=given.preserve_rng_state,
            determinism_check=check,
        ) as handle:
            if not handle.blocks:
                raise NotApplicable("no block is checkpointed")
            yield handle

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Put the module and all random numbers back afterwards."""
        before = Snapshot([self.module], device=self.device)
        try:
            yield
        finally:
            before.restore()

    @cached_property
    def coverage(self) -> Coverage:
        """Which portions are checkpointed, and what they let go."""
        with self.under_policy() as handle:
            return handle.report(self.loss)

    @cached_property
    def profile(self) -> Profile:
        """What each block keeps, and what its replay takes.

        Raises:
            NotApplicable: no block ran with anything to save.
        """
        with self.under_policy():
            try:
                return profile_blocks(self.module, self.loss, operators=False)
            except ValueError as error:
                raise NotApplicable(str(error)) from error

    @cached_property
    def watched(self) -> Watched:
        """What a plain forward pass does beside computing its result."""
        with self.as_found(), watching(self.found) as watched:
            self.loss()
        return watched

    def difference_in_values(self) -> str | None:
        """Take a step whose replays are compared value by value; return what differs, in words."""
        with self.as_found(), self.under_policy("values"):
            try:
                self.loss().backward()
            except CheckpointError as error:
                return str(error)
        return None
