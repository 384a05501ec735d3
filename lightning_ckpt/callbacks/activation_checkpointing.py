"""Activation checkpointing as a Lightning callback."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console

from lightning_ckpt.blocks import Blocks, find_blocks
from lightning_ckpt.budget_plan import BudgetPlan
from lightning_ckpt.callbacks._budget_run import BudgetRun
from lightning_ckpt.callbacks._compiled_run import CompiledRun
from lightning_ckpt.callbacks._deepspeed import tell_of_deepspeed
from lightning_ckpt.callbacks._distributions import Callback
from lightning_ckpt.callbacks._trainer import callbacks_of, is_compiled_whole, ranks_of_run, set_callbacks
from lightning_ckpt.callbacks.step_monitor import StepMonitor
from lightning_ckpt.checkpointed_forward import DeterminismCheck
from lightning_ckpt.compiled_budget import all_compiled
from lightning_ckpt.coverage import Coverage
from lightning_ckpt.owners import Existing, owner_of
from lightning_ckpt.policies import MemoryBudget, Policy
from lightning_ckpt.policy_names import resolve_policy
from lightning_ckpt.processes import Alone, Ranks
from lightning_ckpt.recompute import CheckpointedBlocks, check_options, checkpoint_blocks


class ActivationCheckpointing(Callback):
    """Keep only the inputs of a model's blocks in the forward pass, and recompute the rest in backward.

    Training stays what it was, bit for bit on the CPU: loss, gradients, buffers, random numbers, names, checkpoint
    files. Memory falls to the blocks' inputs plus the activations of one block; the price is up to one more forward
    pass of the blocks. Checkpointing helps where activations are most of the memory: long sequences, large batches,
    deep models. It does not help where parameters and optimizer state are.

    It is in place while `fit` runs and is taken back at its end, also after an exception; `validate`, `test`,
    `predict` and everything else that records no gradient run as they are. Blocks made in `LightningModule.setup` or
    `configure_model` are found too. The blocks covered are printed as a table on rank zero, and go into the
    hyperparameters of every logger.

    Args:
        policy: what to recompute: `"full"` or `Full(...)`, whole blocks; `"selective"` or `SelectiveOps(...)`, all but
            the expensive operators; `"auto"` or `MemoryBudget(...)`, only what a memory budget asks. The last measures
            the blocks on the first batch and the peak of some steps, and has settled within five steps of the first.
            Its plan is printed, goes into the run's config and the trainer's checkpoints, and is tightened, with a log
            line, when a later step peaks above the budget. Of a model under `torch.compile` the compiler chooses: it
            is told, by PyTorch's `activation_memory_budget`, what share of the activations the budget lets it keep.
            Options may stand in the word too: `"full:every=2"`, `"selective:attention"`, `"auto:40GiB"`.
        blocks: what to checkpoint: `None` for the model's repeated blocks, a module class, a class name, a glob on the
            qualified name (`"model.layers.*"`), a predicate `(name, module) -> bool`, or a list of these. Names are
            those below the `LightningModule`.
        preserve_rng_state: replay with the random numbers of the forward; needed for dropout.
        determinism_check: `"default"` compares shapes, dtypes and devices of what is replayed; `"values"` compares
            every value too, bit for bit, and names the block, the operator and the likely cause of what differs;
            `"none"` compares nothing.
        check_steps: how many training batches `"values"` checks before it makes way for `"default"`, and says so;
            `None` checks them all. It takes a digest of every operator's results, twice, and waits for the device at
            the end of each backward pass.
        existing: what becomes of checkpointing that the model's owner has turned on, by Hugging Face's
            `gradient_checkpointing_enable()`, timm's `set_grad_checkpointing()`, PyTorch's `CheckpointWrapper` or
            composable `checkpoint`, or a strategy's `activation_checkpointing_policy`: `"keep"` leaves its blocks to
            it, with a warning; `"replace"` turns it off while `fit` runs.
        monitor: log memory and throughput each step: `True`, `False`, or a `StepMonitor` of your own. A `StepMonitor`
            among the trainer's callbacks takes its place.

    Raises:
        ValueError: an argument is out of range, or, when training starts, no block was found.
        TypeError: an argument of another kind.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ActivationCheckpointing()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        policy: str | Policy = "full",
        *,
        blocks: Blocks | None = None,
        preserve_rng_state: bool = True,
        determinism_check: DeterminismCheck = "default",
        check_steps: int | None = 3,
        existing: Existing = "keep",
        monitor: bool | StepMonitor = True,
    ) -> None:
        check_options(policy, blocks, preserve_rng_state, determinism_check, existing)
        if check_steps is not None and (type(check_steps) is not int or check_steps < 1):
            raise ValueError(f"check_steps={check_steps!r}: accepted are a whole number of at least 1, and None")
        if not isinstance(monitor, bool | StepMonitor):
            raise TypeError(f"monitor={monitor!r}: accepted are True, False and a StepMonitor(...)")
        self.policy = policy
        self.blocks = blocks
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.check_steps = check_steps
        self.existing = existing
        self.monitor = monitor
        self._to_check = 0
        self._handle: CheckpointedBlocks | None = None
        self._found: list[tuple[str, int, str | None]] = []
        self._added_monitor: StepMonitor | None = None
        self._budget_run: BudgetRun | None = None
        self._compiled_run: CompiledRun | None = None
        self._last_plan: BudgetPlan | None = None
        self._budget: int | None = None
        self._known: dict[str, Any] | None = None
        self._ranks: Ranks = Alone()

    @property
    def plan(self) -> BudgetPlan | None:
        """What is done with each block, once a plan of a `MemoryBudget` stands; prints as a rich table."""
        return self._budget_run.plan if self._budget_run else self._last_plan

    def report(self) -> Coverage | None:
        """Which portions of the model are checkpointed, while `fit` runs; prints as a rich table."""
        return self._handle.report() if self._handle else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._undo(trainer)
        if isinstance(resolve_policy(self.policy), MemoryBudget):
            # Here, where all ranks are at one place: whichever fails later can tell the others.
            self._ranks = ranks_of_run(trainer, "ActivationCheckpointing")
        self._add_monitor(trainer, pl_module)
        try:
            self._apply(pl_module)
        except ValueError:
            # Blocks may be made later, in the module's own `setup` or `configure_model`: `on_fit_start` decides.
            self._handle = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._handle is None or self._found != _identities(pl_module, self.blocks):
            self._undo_blocks()
            self._apply(pl_module)
        tell_of_deepspeed(trainer)
        self._announce(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        policy = resolve_policy(self.policy)
        if self._handle is None or not isinstance(policy, MemoryBudget):
            return
        if is_compiled_whole(pl_module) or all_compiled(pl_module, self._handle.blocks):
            self._undo_blocks()  # what is compiled chooses by itself
            self._compiled_run = CompiledRun(trainer, pl_module, policy, self._ranks)
        elif not self._checks_values:
            self._plan(trainer, pl_module, policy)

    @property
    def _checks_values(self) -> bool:
        """Whether batches are to be checked first, which takes memory that a plan must not count."""
        return self.determinism_check == "values" and self._to_check > 0

    def _plan(self, trainer: Trainer, pl_module: LightningModule, policy: MemoryBudget) -> None:
        assert self._handle is not None
        known, self._known = self._known, None
        if self._budget is not None:
            policy = MemoryBudget(self._budget)
        self._budget_run = BudgetRun(trainer, pl_module, self._handle, policy, known, self._ranks)

    def to_plan(self, pl_module: LightningModule) -> tuple[CheckpointedBlocks, MemoryBudget] | None:
        """Return the blocks a memory plan is to be made for, with their budget; None where none is to be made."""
        policy = resolve_policy(self.policy)
        if self._handle is None or not isinstance(policy, MemoryBudget) or self._checks_values:
            return None
        if is_compiled_whole(pl_module) or all_compiled(pl_module, self._handle.blocks):
            return None
        return self._handle, policy

    def keep_to(self, budget: int, plan: BudgetPlan | None) -> None:
        """Let training keep to a budget in bytes, whatever the policy would allow, and start with a plan for it."""
        self._known, self._budget = plan.to_json() if plan else None, budget

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._budget_run:
            self._budget_run.begin_batch()
        if self._compiled_run:
            self._compiled_run.begin_batch(batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._budget_run:
            self._budget_run.end_backward()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._budget_run:
            self._budget_run.end_batch()
        self._check_values_no_longer(trainer, pl_module)

    def _check_values_no_longer(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once as many batches were checked as were asked for; a plan waits for it, since the check takes memory."""
        if self._handle is None or self._handle.determinism_check != "values" or self.check_steps is None:
            return
        self._to_check -= 1
        if self._to_check == 0:
            self._handle.determinism_check = "default"
            rank_zero_info(
                f"Every replayed value of {self.check_steps} batches was that of its forward; the check is off now."
            )
            policy = resolve_policy(self.policy)
            if isinstance(policy, MemoryBudget):
                self._plan(trainer, pl_module, policy)

    def state_dict(self) -> dict[str, Any]:
        last = self._last_plan.to_json() if self._last_plan else None
        known = self._budget_run.state() if self._budget_run else self._known or last
        budget = {} if self._budget is None else {"budget": self._budget}
        return {"plan": known, **budget} if known else budget

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._known, self._budget = state_dict.get("plan"), state_dict.get("budget")

    @property
    def state_key(self) -> str:
        return self._generate_state_key(blocks=self.blocks if isinstance(self.blocks, str) else None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._undo(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ranks.failed(exception)
        self._undo(trainer)  # Lightning calls no teardown after an exception

    def _apply(self, pl_module: LightningModule) -> None:
        self._handle = checkpoint_blocks(
            pl_module,
            self.policy,
            blocks=self.blocks,
            preserve_rng_state=self.preserve_rng_state,
            determinism_check=self.determinism_check,
            existing=self.existing,
        )
        self._found = _identities(pl_module, self.blocks)
        self._to_check = self.check_steps or 0

    def _undo(self, trainer: Trainer) -> None:
        self._undo_blocks()
        if self._added_monitor is not None:
            set_callbacks(trainer, [other for other in callbacks_of(trainer) if other is not self._added_monitor])
            self._added_monitor = None

    def _undo_blocks(self) -> None:
        if self._budget_run is not None:
            self._last_plan = self._budget_run.plan
            self._budget_run.close()
            self._budget_run = None
        if self._compiled_run is not None:
            self._compiled_run.close()
            self._compiled_run = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _add_monitor(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = callbacks_of(trainer)
        if self.monitor is False or any(isinstance(callback, StepMonitor) for callback in callbacks):
            return
        self._added_monitor = StepMonitor() if self.monitor is True else self.monitor
        place = callbacks.index(self) + 1
        set_callbacks(trainer, [*callbacks[:place], self._added_monitor, *callbacks[place:]])
        self._added_monitor.setup(trainer, pl_module, "fit")

    @rank_zero_only
    def _announce(self, trainer: Trainer) -> None:
        assert self._handle is not None
        coverage = self._handle.report()
        Console().print(coverage)
        plan: dict[str, Any] = {
            "policy": coverage.policy,
            "blocks": [portion.name for portion in coverage.checkpointed],
        }
        for logger in trainer.loggers:
            logger.log_hyperparams({"activation_checkpointing": plan})


def _identities(pl_module: LightningModule, blocks: Blocks | None) -> list[tuple[str, int, str | None]]:
    """The blocks, and what else checkpoints them: models and strategies wrap, and turn on, after `setup`."""
    return [(name, id(block), owner_of(pl_module, name)) for name, block in find_blocks(pl_module, blocks)]
