"""Checkpointing beside what else a Lightning run brings: other callbacks, strategies, metrics, names, exports."""

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torchmetrics import MeanMetric

from equality import Replays
from lightning_ckpt import ActivationCheckpointing, checkpoint_blocks, is_recomputing
from lightning_ckpt.recompute import CheckpointedForward
from modules import Adversaries, Images, Language, differences, fit, trainer
from zoo import GPTBlock


def ours(**options: Any) -> ActivationCheckpointing:
    return ActivationCheckpointing(monitor=False, **options)


class _Patched(Callback):
    """Notes the modules that are checkpointed when training starts."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.patched = [
            name for name, m in pl_module.named_modules() if isinstance(m.__dict__.get("forward"), CheckpointedForward)
        ]


def same_as_plain(
    make: Callable[[], LightningModule],
    others: Callable[[], list[Callback]] = list,
    *,
    last: bool = False,
    callback: ActivationCheckpointing | None = None,
    **options: Any,
) -> LightningModule:
    """Hold a fit with ours among other callbacks to the fit with the others alone; gives back the trained module."""
    torch.manual_seed(0)
    checkpointed = make()
    plain = copy.deepcopy(checkpointed)
    callback = callback or ours()
    callbacks = [*others(), callback] if last else [callback, *others()]
    assert not differences(fit(checkpointed, callbacks, **options), fit(plain, others(), **options))
    return checkpointed


# --- freezing, averaging, searching ---


class _Thaws(BaseFinetuning):
    """Freezes the blocks at first and thaws them in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.gpt.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.gpt.blocks, optimizer)


class _Notes(Callback):
    """Whether the first block has a gradient, for each step."""

    def __init__(self) -> None:
        self.learns: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.learns.append(next(pl_module.gpt.blocks.parameters()).grad is not None)


class Plain(Language):
    """Without dropout: Lightning's files hold no random state, so a resumed run draws other masks."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def test_blocks_that_thaw_in_the_second_epoch_learn_from_then_on(tmp_path: Path) -> None:
    """Frozen and then thawed, in one run and in a resumed one: the weights of the run without us, each time."""
    same_as_plain(Plain, lambda: [_Thaws()], max_epochs=3)
    left = []
    for callbacks in ([ours()], []):
        torch.manual_seed(0)
        notes, path = _Notes(), tmp_path / f"{len(callbacks)}.ckpt"
        running = trainer([*callbacks, _Thaws(), notes])
        running.fit(Plain())
        running.save_checkpoint(path)
        assert notes.learns == [False] * 4
        resumed = trainer([*callbacks, _Thaws(), notes], max_epochs=3)
        resumed.fit(Plain(), ckpt_path=path, weights_only=False)
        assert notes.learns[4:] == [True] * 8
        left.append(dict(resumed.lightning_module.state_dict()))
    assert not differences(*left)


class _WithBackbone(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.gpt.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.gpt.head.parameters(), lr=1e-3)


OTHERS: dict[str, Callable[[], list[Callback]]] = {
    "weight averaging": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)],
    "moving average of weights": lambda: [EMAWeightAveraging(decay=0.5)],
    "accumulation schedule": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
}


@pytest.mark.parametrize("last", [False, True], ids=["ours first", "ours last"])
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("make", [Language, Images])
def test_other_callbacks_leave_what_they_leave_without_us(make: type, kind: str, last: bool) -> None:
    """Averages of weights with statistics measured anew, and accumulation by schedule, in either order."""
    same_as_plain(make, OTHERS[kind], last=last, max_epochs=3)


def test_a_backbone_thawed_by_lightnings_own_callback_trains_the_same() -> None:
    """`BackboneFinetuning`, which keeps BatchNorm trainable or not and adds a parameter group."""
    same_as_plain(
        _WithBackbone,
        lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, verbose=False)],
        max_epochs=2,
    )


@pytest.mark.parametrize("last", [False, True], ids=["ours first", "ours last"])
def test_a_search_for_the_learning_rate_finds_and_leaves_the_same(last: bool, tmp_path: Path) -> None:
    """Weights, BatchNorm statistics and random numbers after the search and the training are those without us."""

    class Searched(Images):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    search = partial(LearningRateFinder, num_training_steps=4, max_lr=1e-2)
    same_as_plain(Searched, lambda: [search()], last=last, default_root_dir=tmp_path, limit_val_batches=0)


class _Fails(Plain):
    """Ends with an error in its second epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1:
            raise ZeroDivisionError("in the user's code")


@pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning")  # Lightning looks for its file
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning")
@pytest.mark.parametrize("last", [False, True], ids=["ours first", "ours last"])
def test_a_checkpoint_saved_on_an_exception_is_the_plain_runs(last: bool, tmp_path: Path) -> None:
    """`OnExceptionCheckpoint`, before our undoing or after it: the file goes on to the plain run's weights."""
    left = []
    for name, own in (("ours", [ours()]), ("plain", [])):
        saving = OnExceptionCheckpoint(tmp_path, filename=name)
        torch.manual_seed(0)
        callbacks = [saving, *own] if last else [*own, saving]
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 3}
        with pytest.raises(ZeroDivisionError, match="in the user's code"):
            fit(_Fails(), callbacks, **options)
        resumed = trainer(own, max_epochs=3)
        resumed.fit(Plain(), ckpt_path=tmp_path / f"{name}.ckpt", weights_only=False)
        assert resumed.global_step == 12
        left.append(dict(resumed.lightning_module.state_dict()))
    assert not differences(*left)


# --- training options ---


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"detect_anomaly": True},
        {"overfit_batches": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 1},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
        {"inference_mode": False},
        {"strategy": "auto", "accelerator": "auto"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:You are using `torch.autograd.set_detect_anomaly`")
def test_options_of_the_trainer_leave_the_plain_training(options: dict[str, Any]) -> None:
    """Clipping, anomaly detection, overfitting, validation between steps, reloading, no inference mode, "auto"."""
    same_as_plain(Images, **options)


class _Compiled(Adversaries):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # without `self.log`, which does not compile
        optimizer = self.optimizers()[0]
        self.toggle_optimizer(optimizer)
        loss = self.critic(self.generator(batch[0].flatten(1))).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at every tensor
def test_manual_optimization_of_compiled_networks_can_toggle_its_optimizers() -> None:
    """Both networks compiled inside the module: toggling finds its parameters, the blocks inside are replayed."""
    module, spy = _Compiled(), _Patched()
    module.generator = torch.compile(module.generator, backend="eager")
    running = trainer([ours(), spy], limit_train_batches=2, limit_val_batches=0)
    running.fit(module)
    assert running.global_step == 2
    assert [name.replace("_orig_mod.", "") for name in spy.patched] == [
        f"{net}.{index}" for net in ("generator", "critic") for index in range(3)
    ]
    assert all(p.grad is not None for p in module.generator.parameters())


# --- who else checkpoints ---


class _WrapsInSetup(SingleDeviceStrategy):
    """Checkpoints the blocks when it wraps the model, as FSDP does with an `activation_checkpointing_policy`."""

    def setup(self, trainer: Any) -> None:
        apply_activation_checkpointing(self.model, check_fn=lambda module: isinstance(module, GPTBlock))
        super().setup(trainer)


def _one_step_wrapped(callback: ActivationCheckpointing) -> tuple[Language, Replays, list[str]]:
    """A step under such a strategy: the module, the calls inside its first block, and the blocks that are ours."""
    module, spy = Language(), _Patched()
    calls = Replays(module.gpt.blocks[0])
    running = trainer([callback, spy], strategy=_WrapsInSetup("cpu"), limit_train_batches=1, limit_val_batches=0)
    running.fit(module)
    assert [isinstance(block, CheckpointWrapper) for block in module.gpt.blocks] == [True] * 3
    return module, calls, spy.patched


_PARTS = len(list(GPTBlock(16, 4, 0.0).modules())) - 1


@pytest.mark.parametrize("blocks", [None, GPTBlock, "gpt.blocks.*"], ids=["found", "class", "glob"])
def test_a_strategy_that_checkpoints_by_itself_keeps_its_one_level(blocks: Any) -> None:
    """It wraps after our setup: ours stands aside with a warning, and every block runs twice a step, not thrice."""
    with pytest.warns(UserWarning, match=r"Left alone: gpt\.blocks\..*checkpointed by its owner: a CheckpointWrapper"):
        _, calls, patched = _one_step_wrapped(ours(blocks=blocks))
    assert patched == []
    assert calls.calls == 2 * _PARTS


@pytest.mark.parametrize("blocks", [None, GPTBlock, "gpt.blocks.*"], ids=["found", "class", "glob"])
def test_a_strategys_checkpointing_is_replaced_on_request(blocks: Any) -> None:
    """`existing="replace"`: ours in its place, every block still runs twice, and its wrappers act again after."""
    module, calls, patched = _one_step_wrapped(ours(blocks=blocks, existing="replace"))
    assert len(patched) == 3
    assert (calls.calls, calls.replays) == (2 * _PARTS, _PARTS)
    module.gpt(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert (calls.calls, calls.replays) == (4 * _PARTS, _PARTS)


# --- names, copies, exports ---


def test_optimizer_groups_by_name_are_those_of_the_plain_module() -> None:
    """Decay by `norm` in the name and by exact names, decided while the blocks are checkpointed; no name twice."""

    class Grouped(Language):
        groups: dict[str, list[str]]

        def __init__(self) -> None:
            super().__init__()
            self.gpt.head.weight = self.gpt.tokens.weight  # tied

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.seen = any(isinstance(m.__dict__.get("forward"), CheckpointedForward) for m in self.modules())
            named = dict(self.named_parameters())
            without = [n for n in named if "norm" in n or n.endswith("bias") or n == "gpt.positions"]
            self.groups = {"decay": [n for n in named if n not in without], "no decay": without}
            return torch.optim.AdamW(
                [
                    {"params": [named[n] for n in names], "weight_decay": 0.1 * (key == "decay")}
                    for key, names in self.groups.items()
                ]
            )

    results = []
    for callbacks in ([ours()], []):
        torch.manual_seed(0)
        module = Grouped()
        left = fit(module, callbacks)
        assert module.seen is bool(callbacks)
        results.append((module.groups, left))
    assert results[0][0] == results[1][0]
    assert not differences(results[0][1], results[1][1])


def test_the_tree_that_a_strategy_sees_is_the_original_one() -> None:
    """While training: module types, module names, parameter names and `state_dict` keys of a module nobody touched."""

    class Tree(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
            self.seen = _tree(pl_module)

    tree, module = Tree(), Language()
    before = _tree(module)
    fit(module, [ours(), tree])
    assert tree.seen == before


def _tree(module: nn.Module) -> list[Any]:
    return [
        [(name, type(part)) for name, part in module.named_modules()],
        [name for name, _ in module.named_parameters(remove_duplicate=False)],
        list(module.state_dict()),
    ]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_a_trained_module_exports_and_copies_as_if_never_patched() -> None:
    """After `fit`: `torch.export`, tracing, pickling, a deep copy in the middle of training that trains by itself."""

    class Copies(Callback):
        copied: LightningModule

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.copied = copy.deepcopy(pl_module.gpt)

    copies, module = Copies(), Language()
    start = copy.deepcopy(module.gpt)
    fit(module, [ours(), copies])
    assert not any("forward" in part.__dict__ for part in module.modules())
    net, ids = module.gpt.eval(), torch.randint(0, 50, (2, 8))
    exported = torch.export.export(net, (ids,))
    assert torch.equal(exported.module()(ids), net(ids))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids), net(ids))
    # The copy of then has the weights of then, and goes on being checkpointed with them.
    counted = Replays(copies.copied.blocks[0])
    copies.copied(ids).square().mean().backward()
    assert counted.replays > 0
    assert not torch.equal(copies.copied.head.weight, start.head.weight)
    assert not torch.equal(copies.copied.head.weight, net.head.weight)
    assert torch.equal(copies.copied.eval()(ids), copy.deepcopy(copies.copied)(ids))


# --- what a block logs ---


class _Metered(nn.Module):
    """A block that measures itself half-way, once a step if it is careful."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.mean = MeanMetric()
        self.careful = careful
        self.log: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        if not (self.careful and is_recomputing()):
            self.mean.update(y.detach().abs())
            if self.log:
                self.log("activation", y.detach().abs().mean())
        return self.layer(y)


class _Measured(Images):
    def __init__(self, careful: bool = True) -> None:
        LightningModule.__init__(self)
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), _Metered(careful), _Metered(careful), nn.Linear(16, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.net[2].log = self.log
        loss = super().training_step(batch, batch_idx)
        self.net[2].log = None
        return loss

    def on_train_epoch_end(self) -> None:
        self.updates = [block.mean.update_count for block in self.net[2:4]]
        self.log("mean", self.net[3].mean.compute())


def test_a_metric_inside_a_block_counts_every_batch_once() -> None:
    """Behind `is_recomputing`, `MeanMetric.update` and `self.log` in a block see each batch once, as without us."""
    module = same_as_plain(_Measured, callback=ours(blocks=_Metered))
    assert module.updates == [4 + 4 + 2] * 2  # batches of training, of validation, and of the sanity check before
    careless = _Measured(careful=False)
    careless.log = lambda *_, **__: None  # type: ignore[method-assign]
    fit(careless, [ours(blocks=_Metered)])
    assert careless.updates == [4 + 4 + 2 + 4] * 2  # the replays too


def test_a_block_that_is_checkpointed_by_hand_before_fit_is_left_to_its_handle() -> None:
    """`checkpoint_blocks` first, the callback later: one level, said once, and the user's handle still undoes it."""
    module = Language()
    handle = checkpoint_blocks(module)
    with pytest.warns(UserWarning, match="checkpointed by an earlier call"):
        fit(module, [ours()])
    assert len(handle.blocks) == 3
    assert all("forward" in block.__dict__ for block in module.gpt.blocks)
    handle.remove()
    assert not any("forward" in block.__dict__ for block in module.gpt.blocks)
