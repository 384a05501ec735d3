"""`lightning-ckpt doctor`: each check has a model that it finds fault with and one that it passes."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ckpt.cli import _checks_of_blocks as of_blocks
from lightning_ckpt.cli import _checks_of_memory as of_memory
from lightning_ckpt.cli import _checks_of_training as of_training
from lightning_ckpt.cli import main
from lightning_ckpt.cli._checks import CHECKS, examine, quiet
from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.cli._findings import Finding, NotApplicable, OutOfMemory
from lightning_ckpt.cli._measured import measure_target
from lightning_ckpt.cli._measurement import Measurement, Request
from lightning_ckpt.cli._patient import Conditions, Patient
from lightning_ckpt.cli._policies import parse_policy
from lightning_ckpt.cli._target import Target
from lightning_ckpt.cli.doctor import table
from lightning_ckpt.policies import Full
from lightning_ckpt.printed import as_text
from zoo import llama

WIDTH = 32

Forward = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A residual block whose middle a test can replace."""

    def __init__(self, middle: Forward | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.middle = nn.Dropout(dropout), middle or (lambda block, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.middle(self, x)))))


class Model(L.LightningModule):
    """Blocks, and what a test puts before and after them."""

    def __init__(self, *blocks: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.head = head or nn.Identity()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def rows(count: int = 64) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with quiet():
        yield


def patient(
    build: Callable[[], nn.Module] = Model, data: Any = None, policy: str = "full", **conditions: Any
) -> Patient:
    """A patient whose measurements are made in this process."""
    given = rows() if data is None else data
    chosen = parse_policy(policy)
    assert chosen is not None

    def measure(checkpointed: bool) -> Measurement:
        request = Request(target="test", policy=policy if checkpointed else "none", steps=3, seed=0)
        return measure_target(Target("test", build(), given), request)

    return Patient(Target("test", build(), given), Conditions(policy=chosen, **conditions), measure)


def blocks(middle: Forward, **options: Any) -> Callable[[], Model]:
    return lambda: Model(*[Block(middle, **options) for _ in range(3)])


# --- blocks covered ---


def test_blocks_are_covered() -> None:
    """A model with repeated blocks passes, with how many and what share of parameters."""
    found = of_blocks.covered(patient(lambda: Model(head=nn.Linear(WIDTH, 8 * WIDTH))))
    assert (found.status, found.evidence[:14]) == ("pass", "3 of 3 blocks,")


def test_a_model_without_blocks_fails() -> None:
    """The finder's own words say what it saw, and the cure how to name blocks."""
    found = of_blocks.covered(patient(lambda: Model(nn.Identity(), head=nn.Linear(WIDTH, 2))))
    assert found.status == "fail"
    assert "No repeated block was found in Model" in found.evidence
    assert "--blocks" in found.cure


def test_blocks_that_are_all_left_alone_fail() -> None:
    """To find blocks is not to checkpoint them."""
    found = of_blocks.covered(patient(lambda: owned(Model())))
    assert found.status == "fail"
    assert "none is checkpointed here, since their owner does it: gradient_checkpointing=True" in found.evidence
    assert found.cure.endswith('give it the blocks: existing="replace"; model.gradient_checkpointing_disable()')
    transformer = of_blocks.covered(patient(lambda: checkpointing(LanguageModel())))
    assert (transformer.status, transformer.cure) == (found.status, found.cure)


def test_one_block_that_is_the_model_is_warned_of() -> None:
    """Its replay needs all that the model does."""
    found = of_blocks.covered(patient(lambda: Model(Block()), blocks=["Block"]))
    assert found.status == "warn"
    assert "one block is all of the model" in found.evidence


# --- checkpointed by its owner ---


def owned(model: Model) -> Model:
    for block in model.blocks:
        block.gradient_checkpointing = True
    return model


def half_owned() -> Model:
    model = Model()
    model.blocks[0].grad_checkpointing = True
    return model


def test_blocks_that_their_owner_checkpoints_are_warned_of() -> None:
    """The owner's own switch is the way to turn it off."""
    found = of_blocks.owner(patient(half_owned))
    assert found.status == "warn"
    assert found.evidence.startswith("'blocks.0' are checkpointed by their owner")
    assert "set_grad_checkpointing(False)" in found.cure
    assert "gradient_checkpointing_disable" not in found.cure


def test_a_model_that_checkpoints_itself_is_one_finding() -> None:
    """Hugging Face's switch is told once; what asks about checkpointed blocks is skipped, slowdown among it."""
    findings = examine(patient(lambda: owned(Model()), data=rows(2048)))
    assert {name for name, finding in findings.items() if finding.status == "fail"} == {"blocks covered"}
    assert "gradient_checkpointing=True" in findings["blocks covered"].evidence
    assert "gradient_checkpointing_disable()" in findings["blocks covered"].cure
    assert findings["checkpointed by its owner"].evidence == "all of them are; see blocks covered"
    assert findings["slowdown"] == Finding("skip", "no block is checkpointed")


def test_a_model_that_leaves_it_to_us_passes() -> None:
    """The same model without the switch."""
    assert of_blocks.owner(patient(LanguageModel)).status == "pass"


class LanguageModel(L.LightningModule):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.language = llama()
        for name, value in changes.items():
            setattr(self.language.config, name, value)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.language(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def checkpointing(model: LanguageModel) -> LanguageModel:
    model.language.gradient_checkpointing_enable()
    return model


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))


# --- gradients, replayed values ---


def counting(block: Block, x: Tensor) -> Tensor:
    block.factor = getattr(block, "factor", 1.0) + 1.0
    return x * block.factor


def test_equal_gradients_pass_and_values_too() -> None:
    """Dropout and all: the replay is the forward."""
    for check in (of_training.gradients, of_training.replayed_values):
        assert check(patient(lambda: Model(*[Block(dropout=0.1) for _ in range(3)]))).status == "pass"


def test_other_gradients_fail() -> None:
    """How many differ, and by how much at worst."""
    found = of_training.gradients(patient(blocks(counting)))
    assert found.status == "fail"
    assert "tensors differ from the plain step's, gradient of blocks." in found.evidence


def test_other_values_fail_with_the_cause() -> None:
    """The block, the operator and the attribute are named."""
    found = of_training.replayed_values(patient(blocks(counting)))
    assert found.status == "fail"
    assert "aten.mul.Tensor, call 1" in found.evidence
    assert "'factor' from" in found.evidence


def test_values_are_not_compared_where_pytorch_has_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is skipped, and says what is lacking in which PyTorch."""
    monkeypatch.delattr(torch, "hash_tensor")
    with pytest.raises(NotApplicable, match=f"^needs torch.hash_tensor, which PyTorch {re.escape(torch.__version__)} "):
        of_training.replayed_values(patient())


# --- random numbers ---


def of_python(block: Block, x: Tensor) -> Tensor:
    return x * random.random()


def of_numpy(block: Block, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def of_its_own(block: Block, x: Tensor) -> Tensor:
    if not hasattr(block, "generator"):
        block.generator = torch.Generator().manual_seed(0)
    return x * torch.rand(x.shape, generator=block.generator)


def with_generator() -> Model:
    model = blocks(of_its_own)()
    for block in model.blocks:
        block.generator = torch.Generator().manual_seed(0)
    return model


@pytest.mark.parametrize(
    ("build", "source"),
    [
        (blocks(of_python), "Python's random"),
        (blocks(of_numpy), "numpy.random"),
        (with_generator, "a generator of its own"),
    ],
)
def test_random_numbers_that_do_not_come_again_fail(build: Callable[[], Model], source: str) -> None:
    """Whose they are is told."""
    found = of_training.random_numbers(patient(build))
    assert found.status == "fail"
    assert f"'blocks.0', 'blocks.1', 'blocks.2' draw from {source}" in found.evidence


def test_dropout_passes_and_fails_without_its_random_state() -> None:
    """The same model, by what the callback is told."""
    build = blocks(lambda block, x: x, dropout=0.1)
    assert of_training.random_numbers(patient(build)).status == "pass"
    found = of_training.random_numbers(patient(build, preserve_rng_state=False))
    assert found.status == "fail"
    assert "preserve_rng_state=True" in found.cure


def test_a_model_made_for_evaluation_is_examined_in_training() -> None:
    """A Trainer would switch dropout on too."""
    found = of_training.random_numbers(patient(lambda: Model(*[Block(dropout=0.1) for _ in range(3)]).eval()))
    assert found.evidence.startswith("3 of 3 blocks draw random numbers")


# --- state ---


def test_buffers_pass_and_attributes_are_warned_of() -> None:
    """BatchNorm's statistics are put back; a counter that is no buffer is not."""

    def norm() -> Model:
        return Model(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(3)])

    passing = of_training.state(patient(norm))
    assert passing.status == "pass"
    assert "9 buffers do" in passing.evidence  # mean, variance and the count of batches, three times
    found = of_training.state(patient(blocks(counting)))
    assert found.status == "warn"
    assert "'factor' from nothing to 2.0 in 'blocks.0'" in found.evidence


# --- what is left out ---


def test_a_head_that_keeps_more_than_blocks_let_go_is_warned_of() -> None:
    """Checkpointing the rest does not help before that is dealt with."""
    head = nn.Sequential(nn.Linear(WIDTH, 4000), nn.GELU())
    found = of_blocks.left_out(patient(lambda: Model(head=head)))
    assert found.status == "warn"
    assert "'head.1'" in found.cure
    assert of_blocks.left_out(patient(lambda: Model(*[Block() for _ in range(3)]))).status == "pass"


def test_where_only_inputs_of_blocks_are_kept_nothing_is_left_out() -> None:
    """Of three blocks the inputs, 64 rows of 32 numbers of four bytes each."""

    class Mean(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return nn.Sequential(*self.blocks)(batch).mean()

    found = of_blocks.left_out(patient(Mean))
    assert (found.status, found.cure) == ("pass", "")
    assert found.evidence.endswith(" let go, 24 KiB kept, all of it inputs of blocks")


# --- worth replaying ---


class Teacher(Block):
    """Asks a large network without gradients: much to replay, nothing more to save."""

    def __init__(self) -> None:
        super().__init__(lambda block, x: x + self.answer(x))
        self.weight = nn.Parameter(torch.randn(WIDTH, 160_000) * 0.0005, requires_grad=False)

    @torch.no_grad()
    def answer(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight.T


def test_a_block_that_is_all_work_and_saves_little_is_warned_of() -> None:
    """One of four takes nearly all of the replay."""
    found = of_blocks.worth(patient(lambda: Model(Block(), Block(), Block(), Teacher()), blocks=["Block"]))
    assert found.status == "warn"
    assert found.evidence.startswith("'blocks.3' save little and replay long")


def test_blocks_that_keep_nothing_inside_are_warned_of() -> None:
    """What a Linear and a Tanh keep is the next block's input, so only segments save anything."""
    found = of_blocks.worth(
        patient(lambda: Model(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "abcd"]))
    )
    assert found.status == "warn"
    assert "'blocks.0', 'blocks.1', 'blocks.2' keep nothing inside" in found.evidence
    assert 'segment_size="sqrt"' in found.cure


def test_equal_blocks_are_worth_their_replay() -> None:
    """Nothing sticks out."""
    assert of_blocks.worth(patient(data=rows(4096))).status == "pass"


def test_blocks_without_a_gradient_have_no_worth_to_tell() -> None:
    """Nothing of them could be measured, which is said and is no failure."""
    whole = patient(lambda: Model(nn.Identity(), head=nn.Linear(WIDTH, 2)), blocks=["Identity"])
    with pytest.raises(NotApplicable, match="no block was measured: in this run none was called with a gradient"):
        of_blocks.worth(whole)


# --- frozen blocks ---


def frozen() -> Model:
    model = Model(*[Block() for _ in range(4)])
    model.blocks[:2].requires_grad_(False)
    return model


def test_frozen_blocks_are_warned_of() -> None:
    """The first two of four have nothing to save; the last two have."""
    found = of_blocks.frozen(patient(frozen))
    assert found.status == "warn"
    assert found.evidence.startswith("'blocks.0', 'blocks.1' have no parameter that trains")
    assert of_blocks.frozen(patient()).status == "pass"


# --- activations matter ---


def test_a_model_that_is_mostly_parameters_is_warned_of() -> None:
    """Two rows against thousands of parameters; and the other way round."""
    found = of_memory.activations(patient(data=rows(2)))
    assert found.status == "warn"
    assert "bf16 parameters" in found.cure
    assert of_memory.activations(patient(data=rows(2048))).status == "pass"


# --- attention ---


class Attention(nn.Module):
    def __init__(self, fused: bool, inner: int) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def attending(fused: bool, inner: int = WIDTH) -> Callable[[], Model]:
    return lambda: Model(*[Attention(fused, inner) for _ in range(2)])


def sequences(length: int = 64) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))


def test_an_attention_matrix_is_warned_of() -> None:
    """Two blocks, two sequences, four heads, 64 by 64 numbers of four bytes."""
    found = of_memory.attention(patient(attending(fused=False), sequences()))
    assert found.status == "warn"
    assert "128 KiB" not in found.evidence
    assert "its matrix, 256 KiB in 2 blocks" in found.evidence
    assert "scaled_dot_product_attention" in found.cure


def test_the_matrix_of_a_kernel_that_does_not_fuse_is_warned_of() -> None:
    """On a CPU dropout in Hugging Face's attention takes the fused kernel away."""
    found = of_memory.attention(patient(LanguageModel, tokens()))
    assert found.status == "warn"
    assert "in 3 blocks" in found.evidence


def test_fused_attention_passes() -> None:
    """It keeps no matrix, and its share of the work is told."""
    found = of_memory.attention(patient(attending(fused=True), sequences()))
    assert found.status == "pass"
    assert found.evidence.startswith("2 fused attention kernels keep no matrix")


def test_keeping_attention_that_is_little_of_the_work_is_warned_of() -> None:
    """By its share of FLOPs: of short sequences and wide layers little, of long ones and narrow layers much."""
    short = patient(attending(fused=True, inner=64 * WIDTH), sequences(8), policy="selective:attention")
    assert of_memory.attention(short).status == "warn"
    long = patient(attending(fused=True), sequences(512), policy="selective:attention")
    assert of_memory.attention(long).status == "pass"


def test_keeping_attention_that_is_not_there_is_warned_of() -> None:
    """Then every operator is replayed."""
    found = of_memory.attention(patient(policy="selective:attention"))
    assert found.status == "warn"
    assert "no attention kernel ran" in found.evidence
    assert of_memory.attention(patient()).status == "pass"


# --- caches ---


class WithTeacher(LanguageModel):
    """A second language model, whose blocks are not checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = llama()


def test_a_cache_in_training_is_warned_of_unless_checkpointing_turns_it_off() -> None:
    """Hugging Face's default is on, and stays on in a part that has no checkpointed block."""
    found = of_memory.caches(patient(WithTeacher, tokens(), blocks=["language.model.layers.*"]))
    assert found.status == "warn"
    assert found.evidence.startswith("use_cache is on in 'teacher': ")
    assert "use_cache = False" in found.cure
    turned_off = of_memory.caches(patient(lambda: LanguageModel(use_cache=True), tokens()))
    assert (turned_off.status, turned_off.evidence) == (
        "pass",
        "use_cache is on in 'language', and turned off in training while blocks are checkpointed",
    )
    off = of_memory.caches(patient(lambda: LanguageModel(use_cache=False), tokens()))
    assert (off.status, off.evidence) == ("pass", "no part of the model has use_cache on")


# --- headroom ---


class Batches:
    """A loader whose last batch is eight times as long as its first."""

    def __iter__(self) -> Iterator[Tensor]:
        yield rows(1024)
        yield rows(8 * 1024)


@pytest.mark.parametrize(("share", "status"), [(2.0, "pass"), (1.05, "warn"), (0.5, "fail")])
def test_the_longest_batch_must_fit(share: float, status: str) -> None:
    """Against the memory there is: plenty of it, hardly any left, too little."""
    memory = patient(data=Batches()).checkpointed.memory
    needed = memory.peak + 7 * memory.causes["activations"]
    found = of_memory.headroom(patient(data=Batches(), memory_limit=int(share * needed)))
    assert found.status == status
    assert "the longest of 2 batches has 262,144 elements, 8.00 times the measured one" in found.evidence


def test_a_build_for_cuda_examines_on_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch was built for is not what there is."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Patient(Target("test", Model(), rows()), Conditions(policy=Full())).device == torch.device("cpu")


def test_a_first_batch_that_does_not_fit_fails() -> None:
    """Plain training that does not fit is no fault; the policy's own steps must."""
    whole = Patient(Target("test", Model(), rows()), Conditions(policy=Full()), does_not_fit)
    found = of_memory.headroom(whole)
    assert found.status == "fail"
    assert found.evidence == "not even the first batch fits: CUDA out of memory"
    with pytest.raises(NotApplicable, match="out of memory"):
        of_memory.activations(whole)


def test_memory_is_not_judged_where_no_step_was_measured() -> None:
    """As of a patient whose blocks alone are asked about."""
    with pytest.raises(NotApplicable, match=r"^no training step was timed$"):
        of_memory.activations(Patient(Target("test", Model(), rows()), Conditions(policy=Full())))


def does_not_fit(checkpointed: bool) -> Measurement:
    raise OutOfMemory("CUDA out of memory")


def test_a_batch_without_tensors_has_no_length() -> None:
    """What can't be told is skipped, not guessed."""

    class Fixed(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(rows(), batch_idx)

    with pytest.raises(NotApplicable, match="no tensor in the batch"):
        of_memory.headroom(patient(Fixed, data=["text"]))


# --- slowdown ---


def test_a_slowdown_beyond_what_is_accepted_fails() -> None:
    """The same figures, by what is accepted."""
    found = of_memory.slowdown(patient(max_slowdown=1e-6))
    assert found.status == "fail"
    assert "accepted are 1e-06" in found.evidence
    fast = of_memory.slowdown(patient(max_slowdown=1e6))
    assert fast.status == "pass"
    assert "ms of replay when measured alone" in fast.evidence


@pytest.mark.parametrize(
    ("plain", "ours", "status"),
    [
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "fail"),
        ([1.0, 1.0, 3.0], [2.0, 2.0, 2.0], "warn"),
        ([1.0] * 9 + [3.0], [2.0] * 10, "fail"),
        ([1.0] * 6 + [3.0] * 4, [2.0] * 10, "warn"),
        ([1.0] * 10, [1.0] * 4 + [2.0] * 6, "warn"),
    ],
)
def test_steps_that_spread_too_much_are_only_warned_of(plain: list[float], ours: list[float], status: str) -> None:
    """A few slow steps on a busy machine prove nothing; steps that are all slow do."""
    one = patient()
    one.plain, one.checkpointed = replace(one.plain, seconds=plain), replace(one.checkpointed, seconds=ours)
    found = of_memory.slowdown(one)
    assert found.status == status
    assert ("spread too much to tell" in found.evidence) == (status == "warn")
    assert ("--steps 50" in found.cure) == (status == "warn")


# --- all of them ---


def test_a_sound_model_passes_every_check_and_is_left_as_found() -> None:
    """No warning, no failure, nothing skipped; weights, gradients and random numbers are those of before."""
    whole = patient(data=rows(2048), max_slowdown=1e6)
    before = {name: value.clone() for name, value in whole.module.state_dict().items()}
    assert whole.plain is not whole.checkpointed  # measured before, since a new model draws its weights
    random_state = torch.get_rng_state()
    findings = examine(whole)
    assert list(findings) == list(CHECKS)
    assert {name: finding for name, finding in findings.items() if finding.status != "pass"} == {}
    assert all(torch.equal(value, before[name]) for name, value in whole.module.state_dict().items())
    assert all(parameter.grad is None for parameter in whole.module.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


class FailingBackward(torch.autograd.Function):
    """Passes its input on, and raises an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


class Failing(Model):
    """Fails in forward or backward."""

    def __init__(self, error: Exception, backward: bool) -> None:
        super().__init__()
        self.error, self.backward = error, backward

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.backward:
            raise self.error
        return FailingBackward.apply(super().training_step(batch, batch_idx), self.error)


@pytest.mark.parametrize(
    ("backward", "text"),
    [(False, "test: training_step: KeyError: 'labels'"), (True, "gradients: KeyError: 'labels'")],
)
def test_what_fails_in_a_check_is_told_with_its_place(backward: bool, text: str) -> None:
    """The user's forward by the target's name, what fails elsewhere by the check's; neither is a finding."""
    with pytest.raises(UsageError, match=f"^{text}$"):
        examine(patient(lambda: Failing(KeyError("labels"), backward)))


@pytest.mark.parametrize("backward", [False, True])
def test_a_check_that_does_not_fit_into_memory_is_skipped(backward: bool) -> None:
    """Whoever examines what does not fit without checkpointing gets the other checks."""
    whole = patient(lambda: Failing(torch.OutOfMemoryError("CUDA out of memory."), backward))
    whole._measure = does_not_fit
    findings = examine(whole)
    assert findings["gradients"] == Finding("skip", "OutOfMemoryError: CUDA out of memory.")
    assert findings["blocks covered"].status == "pass"


class ByHand(Model):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.blocks(batch).mean())
        optimizer.step()


def by_hand(middle: Forward | None = None) -> Callable[[], ByHand]:
    def build() -> ByHand:
        torch.manual_seed(0)
        model = ByHand(*[Block(middle) for _ in range(3)])
        model.blocks = nn.Sequential(*model.blocks)
        return model

    return build


def test_a_module_that_optimizes_by_hand_is_still_checked() -> None:
    """Checks that need one loss are skipped with the reason; those of coverage, gradients, memory and time are made."""
    findings = examine(patient(by_hand(), max_slowdown=1e6))
    assert findings["replayed values"].status == "skip"
    assert "optimizes by hand" in findings["replayed values"].evidence
    passing = {"blocks covered", "gradients", "slowdown"}
    assert {findings[name].status for name in passing} == {"pass"}
    printed = as_text(table("TARGET", findings))
    assert printed.count("optimizes") == 1
    assert re.search(r"^ *7 checks +skip ", printed, flags=re.MULTILINE)
    found = of_training.gradients(patient(by_hand(counting)))
    assert found.status == "fail"
    assert "differ from the plain step's: 'gradient of blocks" in found.evidence


def test_gradients_of_a_module_that_optimizes_by_hand_are_judged_on_a_cpu_alone() -> None:
    """Elsewhere kernels add up in any order, so that other bits prove nothing."""
    one = patient(by_hand())
    one.plain = replace(one.plain, on_host=False)
    with pytest.raises(NotApplicable, match="optimizes by hand, and on this device two plain steps may differ already"):
        of_training.gradients(one)


def test_the_cure_is_printed_under_the_evidence() -> None:
    """An arrow, and what to type; nothing where there is nothing to be done."""
    printed = as_text(table("TARGET", {"one": Finding("warn", "seen", "do this"), "two": Finding("pass", "well")}))
    assert re.search(r"^ *one +warn +seen\n +→ do this\n *two +pass +well\n", printed, flags=re.MULTILINE)
    assert printed.count("→") == 1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "doctor_models.py"
    path.write_text(
        "import lightning as L\n"
        "import torch\n"
        "from torch import nn\n\n"
        "class Block(nn.Module):\n"
        "    factor = 1.0\n\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(8, 8)\n\n"
        "    def forward(self, x):\n"
        "        self.factor = self.factor + 1.0\n"
        "        return self.inner(x * self.factor).tanh()\n\n"
        "class Model(L.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.Sequential(Block(), Block())\n\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.blocks(batch).square().mean()\n\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n\n"
        "class Failing(Model):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        raise KeyError('labels')\n\n"
        "class TooLarge(Model):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])\n\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        if 'forward' not in vars(self.blocks[0]):\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "        return super().training_step(batch, batch_idx)\n\n"
        "def make():\n"
        "    return Model(), torch.ones(4, 8)\n\n"
        "def too_large():\n"
        "    with open(f'{__file__}.made', 'a') as made:\n"
        "        made.write('once ')\n"
        "    return TooLarge(), torch.ones(4, 8)\n\n"
        "def failing():\n"
        "    return Failing(), torch.ones(4, 8)\n"
    )
    return path


@pytest.mark.slow
def test_a_failed_check_is_exit_code_one(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check is in the JSON, in order, and the failed ones have evidence and a cure."""
    assert main(["doctor", f"{target}:make", "--steps", "2", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    findings = {finding.pop("check"): finding for finding in said["findings"]}
    assert list(findings) == list(CHECKS)
    assert findings["gradients"]["status"] == findings["replayed values"]["status"] == "fail"
    assert "'factor' from" in findings["replayed values"]["evidence"]
    assert all(finding["cure"] for finding in findings.values() if finding["status"] in ("warn", "fail"))


@pytest.mark.slow
def test_a_model_that_fits_only_with_checkpointing_is_examined(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs plain training is skipped with the reason, which is found once, and the rest is answered."""
    assert main(["doctor", f"{target}:too_large", "--steps", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    skipped = "random numbers, state of blocks, activations matter, attention, slowdown"
    assert f"5 checks skip OutOfMemoryError: CUDA out of memory.: {skipped} " in printed
    assert all(f"{check} pass" in printed for check in ("blocks covered", "replayed values", "headroom"))
    assert Path(f"{target}.made").read_text().split() == ["once"] * 3  # trained plain, with the policy, and looked at


@pytest.mark.slow
def test_what_goes_wrong_in_the_users_code_is_one_line(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, what was being trained, and the error."""
    assert main(["doctor", f"{target}:failing", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "lightning-ckpt: none: KeyError: 'labels'\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "none"], "--policy none: there is nothing to check in plain training"),
        (["--policy", "most"], "policy='most': accepted are"),
        (["--max-slowdown", "0"], "--max-slowdown 0: accepted is a ratio above 0, like 1.5"),
        (["--steps", "0"], "--steps 0: accepted is a whole number of at least 1"),
        (["--memory-limit", "24GB"], "--memory-limit='24GB' is not a size"),
        ([], "nowhere.py: no such file"),
    ],
)
def test_what_is_mistyped_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    """Exit code 2 and what is accepted."""
    assert main(["doctor", "nowhere.py:make", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_a_target_without_blocks_is_examined_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That nothing is covered is a finding with its cure, exit code 1, and the other checks are skipped or made."""
    target = tmp_path / "plain.py"
    target.write_text(
        "import torch, lightning as L\n"
        "class Plain(L.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 8)\n"
        "    def training_step(self, batch, index):\n"
        "        return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), 0.1)\n"
        "def training():\n"
        "    return Plain(), torch.randn(4, 8)\n"
    )
    assert main(["doctor", f"{target}:training", "--json"]) == 1
    findings = {row["check"]: row["status"] for row in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["blocks covered"], findings["slowdown"]) == ("fail", "skip")
