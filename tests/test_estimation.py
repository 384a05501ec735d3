"""Estimated steps against real ones: the CPU allocator's own peak is what an estimate has to be."""

import copy
import io
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, Full, checkpoint_blocks, estimate_memory
from lightning_ckpt._compat import compiled_graphs
from lightning_ckpt.cuda_choices import update_as_on_cuda
from lightning_ckpt.fake_copy import CannotEstimate
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.recompute import checkpointed_forwards
from lightning_ckpt.snapshot import RandomState
from steps import ADAMW, POLICIES, RANDOM_STATE, enlarged, estimated, real_peak
from zoo import GPT, ZOO, Specimen


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


GPT_SPECIMEN = Specimen(partial(GPT, depth=3, width=64), lambda: torch.randint(0, 50, (8, 64)), next_token)


# --- exact


OPTIMIZERS = {
    "adamw": ADAMW,
    "adamw, foreach": partial(ADAMW, foreach=True),
    "adamw, fused": partial(ADAMW, fused=True),
    "sgd, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "none": None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_steps_peak_is_the_allocators(name: str) -> None:
    """To the byte, whatever the optimizer works with."""
    optimizer = OPTIMIZERS[name]
    assert estimated(GPT_SPECIMEN, "none", optimizer)["none"].peak == real_peak(GPT_SPECIMEN, "none", optimizer)


@pytest.mark.parametrize("width", [8, 128])
def test_it_is_exact_where_the_optimizer_is_what_counts(width: int) -> None:
    """The peak is in forward or backward, or in the optimizer's step: both are run."""
    specimen = replace(GPT_SPECIMEN, build=partial(GPT, width=width, depth=2), batch=lambda: torch.ones(1, 2).long())
    foreach = partial(ADAMW, foreach=True)
    assert estimated(specimen, "none", foreach)["none"].peak == pytest.approx(
        real_peak(specimen, "none", foreach), 0.01
    )


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_gradients_are_there_in_the_next_forward(accumulate: int) -> None:
    """And while the next backward makes others: exact, and the same from the second batch on."""
    real = real_peak(GPT_SPECIMEN, "none", accumulate=accumulate)
    assert estimated(GPT_SPECIMEN, "none", accumulate=accumulate)["none"].peak == real


@pytest.mark.parametrize("policy", ["full", Full(every=2), Full(segment_size="sqrt")], ids=str)
def test_a_checkpointed_steps_peak_is_the_allocators_but_for_random_states(policy: Any) -> None:
    """What is missing is a whole number of the states that replays start from, one a block at most."""
    missing = real_peak(GPT_SPECIMEN, policy) - estimated(GPT_SPECIMEN, policy)[policy].peak
    assert missing % RANDOM_STATE == 0
    assert 0 <= missing <= 5 * RANDOM_STATE


class Masked(nn.Module):
    """A buffer that is read and never written to, larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("mask", torch.ones(2000, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.mask[: len(x)]).tanh()


def test_a_buffer_that_nobody_writes_to_is_copied_once_as_in_a_real_step() -> None:
    """Fake tensors have no values to compare, and none of them are taken for different: a replay needs no more."""
    specimen = Specimen(
        lambda: nn.Sequential(*[Masked() for _ in range(3)]),
        lambda: torch.randn(32, 64),
        lambda model, x: model(x).square().mean(),
    )
    missing = real_peak(specimen, "full") - estimated(specimen, "full")["full"].peak
    assert 0 <= missing <= 4 * RANDOM_STATE


class Graph(nn.Module):
    """Message passing along a sparse matrix, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("adjacency", torch.eye(6).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, self.layer(x)).relu()


def test_sparse_buffers_are_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    """They have no memory of one piece to count, nor have operators on them a kernel to measure, which is said."""
    specimen = Specimen(lambda: nn.Sequential(Graph(), Graph()), lambda: torch.randn(6, 8), lambda m, x: m(x).sum())
    estimate = estimated(specimen, "none", None, workspaces="measure")
    assert estimate["none"].parameters == 2 * (8 * 8 + 8) * 4
    assert estimate["none"].buffers == 0
    assert "aten._sparse_addmm" in estimate.uncounted
    assert "the kernel of aten._sparse_addmm takes for itself is not counted: its tensors are sparse" in caplog.text


class Fan(nn.Module):
    """One tensor that many small products read: its gradient is added up, which is where the peak is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.readers = nn.ParameterList([nn.Parameter(torch.randn(256, 2)) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return torch.stack([(x @ reader).sum() for reader in self.readers]).sum()


class Gather(nn.Module):
    """Its backward scatters into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).gather(1, torch.zeros(512, 20, dtype=torch.long)).sum()


@pytest.mark.parametrize("build", [Fan, Gather])
def test_gradients_are_added_up_in_place_as_they_are_on_real_tensors(build: Callable[[], nn.Module]) -> None:
    """Autograd does not do so on tensors like fake ones; counted as it runs there, a fan is a quarter too high."""
    specimen = Specimen(build, lambda: torch.randn(512, 256), lambda model, x: model(x))
    real = real_peak(specimen, "none", None)
    assert estimated(specimen, "none", None)["none"].peak == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_kernels_with_memory_of_their_own_are_named(name: str) -> None:
    """An estimate that is too low says by whose fault, in the value and below the table."""
    specimen = enlarged(ZOO[name], 8)
    estimate = estimated(specimen, "none")
    assert estimate.uncounted == {"resnet": ("aten.convolution",), "lstm": ("aten.mkldnn_rnn_layer",)}[name]
    assert estimate["none"].peak < real_peak(specimen, "none")
    assert f"Not counted: what the kernels of {estimate.uncounted[0]}" in printed(estimate)


# --- Lightning


class Net(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module | None = None
        self.seen: list[Tensor] = []

    def configure_model(self) -> None:
        self.net = self.net or GPT(depth=4, width=self.hparams["width"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = next_token(self.net, batch) + torch.zeros((), device=self.device)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"a": loss, "b": 1.0})
        self.seen.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = ADAMW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class ThirdStep(Callback):
    def __init__(self, reader: AllocatorReader, batches: int) -> None:
        self.reader, self.batches = reader, batches

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.batches:
            self.reader.reset_peak()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 * self.batches - 1:
            self.peak = self.reader.peak()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_lightning_modules_peak_is_that_of_a_trainers_run(policy: str, accumulate: int) -> None:
    """In Lightning's order, in which the gradients of the last step outlive the next forward; metrics are bytes."""
    torch.manual_seed(0)
    data = torch.randint(0, 50, (3 * accumulate * 16, 64))
    estimate = estimate_memory(Net(), data[:16], policy=policy, accumulate=accumulate)
    with AllocatorReader() as reader:
        watch = ThirdStep(reader, accumulate)
        extra = [ActivationCheckpointing(policy, monitor=False)] if policy != "none" else []
        trainer = L.Trainer(
            max_steps=3,
            accumulate_grad_batches=accumulate,
            callbacks=[watch, *extra],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), DataLoader(data, 16))
    states = 5 * RANDOM_STATE if policy != "none" else 0
    assert estimate[policy].peak <= watch.peak <= estimate[policy].peak + states + 256


def test_a_trainer_that_is_attached_is_neither_copied_nor_told() -> None:
    """Its loggers, data and callbacks belong to a run that may be under way."""
    module = Net()
    module.trainer = trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.lock = threading.Lock()  # can't be copied
    assert estimate_memory(module, torch.ones(2, 8).long())["full"].peak > 0
    assert module.trainer is trainer
    assert trainer.callback_metrics == {}


class AsksForTheTrainer(Net):
    def configure_optimizers(self) -> Any:
        return ADAMW(self.parameters(), lr=self.trainer.max_epochs)


def test_a_module_that_asks_for_the_trainer_gets_an_answer() -> None:
    """An estimate has none; the error says how to do without."""
    with pytest.raises(CannotEstimate, match=r"runs without one: give optimizer=, such as torch.optim.AdamW"):
        estimate_memory(AsksForTheTrainer(), torch.ones(2, 8).long())
    assert estimate_memory(AsksForTheTrainer(), torch.ones(2, 8).long(), optimizer=ADAMW)["full"].optimizer_state


# --- parts, precisions, ranks, devices


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_parts_are_what_they_are() -> None:
    """Parameters are 4 bytes each, Adam's state twice that and a counter a parameter; all parts add up to the peak."""
    step = estimated(GPT_SPECIMEN, "none")["none"]
    model = GPT_SPECIMEN.build()
    assert step.parameters == 4 * count(model)
    assert step.optimizer_state == 8 * count(model) + 4 * len(list(model.parameters()))
    assert step.gradients <= step.parameters
    parts = (step.parameters, step.buffers, step.gradients, step.optimizer_state, step.activations, step.temporaries)
    assert step.peak == sum(parts)


@pytest.mark.parametrize(("precision", "nbytes"), [("bf16-true", 2), ("16-true", 2), (64, 8), (32, 4), ("bf16", 4)])
def test_true_precisions_convert_the_model_and_mixed_ones_do_not(precision: str | int, nbytes: int) -> None:
    """Lightning's names and their short forms."""
    step = estimated(GPT_SPECIMEN, "none", precision=precision)["none"]
    assert step.parameters == nbytes * count(GPT_SPECIMEN.build())


@pytest.mark.parametrize("policy", ["none", "full"])
def test_autocast_is_what_it_is_in_a_real_step(policy: str) -> None:
    """Half of most activations, and the cast weights; the CPU's bf16 products pack inputs in memory of their own."""
    specimen = replace(GPT_SPECIMEN, build=partial(GPT, depth=4, width=128))
    mixed, single = (estimated(specimen, policy, precision=p)[policy].peak for p in ("bf16-mixed", "32-true"))
    assert mixed == pytest.approx(real_peak(specimen, policy, autocast=torch.bfloat16), rel=0.05)
    assert mixed < single


def test_a_table_that_is_no_buffer_keeps_its_dtype() -> None:
    """A true precision converts what `Module.to` converts, whoever else holds tensors."""

    class Tables(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("ours", torch.ones(1000))
            self.own = torch.ones(1000)

    step = estimate_memory(Tables(), torch.ones(2, 4), lambda m, x: m(x).sum(), policy="none", precision="bf16-true")
    assert step["none"].buffers == (2 + 4) * 1000


def test_ranks_divide_what_they_share() -> None:
    """Parameters, gradients and optimizer state; activations are each rank's own."""
    whole, shared = (estimated(GPT_SPECIMEN, "none", ranks=ranks)["none"] for ranks in (1, 4))
    assert shared.parameters == -(-whole.parameters // 4)
    assert shared.optimizer_state == -(-whole.optimizer_state // 4)
    assert shared.activations == whole.activations
    assert shared.peak < whole.peak


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, length: int = 256) -> Tensor:
        q, k, v = self.qkv(x).view(-1, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).square().mean()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_cuda_attention_keeps_no_scores(precision: str) -> None:
    """With dropout the CPU's attention keeps a score for each pair of positions; CUDA's kernels, flash or not, none."""
    scores = 4 * 256 * 256 * (4 if precision == "32-true" else 2)
    on_cpu, on_cuda = (
        estimate_memory(
            Attending(),
            torch.randn(1, 256, 32),
            lambda model, x: model(x),
            policy="none",
            precision=precision,
            device=device,
        )["none"].activations
        for device in ("cpu", "cuda")
    )
    assert on_cpu > 2 * scores
    assert on_cuda < scores


def test_on_cuda_multi_head_attention_keeps_no_scores_either() -> None:
    """The layer calls attention from inside PyTorch."""
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

    def loss(layer: Any, x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0].square().mean()

    on_cpu, on_cuda = (
        estimate_memory(layer, torch.randn(1, 256, 32), loss, policy="none", device=device)["none"].activations
        for device in ("cpu", "cuda")
    )
    assert on_cuda < 4 * 4 * 256 * 256 < on_cpu


class Grouped(nn.Module):
    """Four heads of queries for one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 32 + 8 + 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([32, 8, 8], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square().mean()


def test_on_cuda_grouped_heads_keep_scores_where_flash_does_not_run() -> None:
    """The memory-efficient kernel takes no groups, and flash takes no float32: plain attention is left."""
    single, half = (
        estimate_memory(
            Grouped(), torch.randn(1, 256, 32), lambda m, x: m(x), policy="none", precision=precision, device="cuda"
        )["none"].activations
        for precision in ("32-true", "bf16-true")
    )
    scores = 4 * 256 * 256
    assert half < 2 * scores < 4 * scores < single


def test_on_cuda_autocast_computes_softmax_in_float32() -> None:
    """Four bytes for each probability that backward needs, where the CPU's autocast computes them in two."""
    on_cpu, on_cuda = (
        estimate_memory(
            nn.Linear(8, 5000),
            torch.randn(100, 8),
            lambda model, x: model(x).softmax(-1)[:, 0].sum(),
            policy="none",
            precision="bf16-mixed",
            device=device,
        )["none"].activations
        for device in ("cpu", "cuda")
    )
    assert on_cuda - on_cpu == pytest.approx(2 * 100 * 5000, rel=0.01)


def test_on_cuda_sizes_are_whole_blocks_and_optimizers_take_all_parameters_at_once() -> None:
    """512 bytes is the caching allocator's smallest block; AdamW's default needs one more copy of the parameters."""
    tiny = replace(GPT_SPECIMEN, batch=lambda: torch.ones(1, 2).long())
    on_cpu, on_cuda = (estimated(tiny, "none", device=device)["none"] for device in ("cpu", "cuda"))
    assert all(part % 512 == 0 for part in (on_cuda.parameters, on_cuda.optimizer_state, on_cuda.peak))
    assert on_cuda.temporaries >= on_cuda.parameters > on_cpu.temporaries


@pytest.mark.parametrize(
    ("given", "foreach"),
    [({}, True), ({"foreach": False}, False), ({"fused": True}, None), ({"differentiable": True}, None)],
    ids=str,
)
def test_on_cuda_an_optimizer_that_has_chosen_is_left_as_it_is(given: dict[str, bool], foreach: bool | None) -> None:
    """Only where PyTorch would choose does it take all parameters at once; one without the choice has none."""
    optimizer = ADAMW([nn.Parameter(torch.ones(2))], **given)
    update_as_on_cuda(optimizer)
    assert optimizer.param_groups[0]["foreach"] is foreach
    without = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    update_as_on_cuda(without)
    assert "foreach" not in without.param_groups[0]


def test_code_that_names_an_accelerator_runs() -> None:
    """`device="cuda"` in a forward needs no such device."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x.to("cuda:0")) + torch.zeros(2, device="cuda")).sum()

    assert estimate_memory(nn.Linear(4, 2), torch.ones(3, 4), loss, policy="none", device="cuda")["none"].peak > 0


def test_a_model_on_the_meta_device_is_taken_to_cuda() -> None:
    """Nobody builds one there to train on a CPU; its blocks, parameters and peak are those of the real model."""
    with torch.device("meta"):
        meta = GPT_SPECIMEN.build()
    estimate = estimate_memory(meta, torch.empty(8, 64, dtype=torch.long, device="meta"), next_token, optimizer=ADAMW)
    assert estimate.device == "cuda"
    assert estimate.steps == estimated(GPT_SPECIMEN, ("none", "full"), device="cuda").steps


LLAMA = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from lightning_ckpt import estimate_memory

config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32,
                     num_key_value_heads=8, vocab_size=128256)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
ids = torch.empty(1, 4096, dtype=torch.long)
loss = lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss
policies, adamw = ("none", "full"), torch.optim.AdamW
estimate = estimate_memory(model, ids, loss, policy=policies, optimizer=adamw, precision="bf16-true")
used = resource.getrusage(resource.RUSAGE_SELF)
parameters = sum(parameter.numel() for parameter in model.parameters())
print(parameters, *(step.peak for step in estimate.steps), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kibibytes of resident memory are Linux's")
def test_eight_billion_parameters_are_estimated_on_a_laptop() -> None:
    """Under a minute of processor time and 4 GiB of memory, for a step that takes eighty."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LLAMA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parameters, plain, full, seconds, resident = map(float, done.stdout.split())
    assert 8.0e9 < parameters < 8.1e9
    assert 4 * 2 * parameters < full < plain < 100 * 2**30
    assert seconds < 60
    assert resident < 4 * 2**30


# --- batch sizes


def test_another_batch_size_is_the_estimate_of_that_batch() -> None:
    """Whether asked for at once or of an estimate that is there."""
    twice = replace(GPT_SPECIMEN, batch=lambda: torch.randint(0, 50, (16, 64)))
    expected = estimated(twice, ("none", "selective")).steps
    assert estimated(GPT_SPECIMEN, ("none", "selective"), batch_size=16).steps == expected
    assert estimated(GPT_SPECIMEN, ("none", "selective")).at(16).steps == expected


def test_only_dimensions_of_the_batchs_size_are_resized() -> None:
    """A table that comes with every batch stays as it is."""
    batch = {"x": torch.ones(4, 8), "y": [torch.ones(4)], "table": torch.ones(100, 8), "scale": torch.tensor(2.0)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert batch["table"].shape == (100, 8)
        assert batch["scale"].shape == ()
        assert len(batch["x"]) == len(batch["y"][0])
        return (model(batch["x"]).sum(1) * batch["y"][0]).sum() * batch["scale"]

    estimate = estimate_memory(nn.Linear(8, 8), batch, loss, policy="none")
    assert estimate["none"].batch_size == 4
    assert estimate.at(40)["none"].batch_size == 40


def test_the_largest_batch_size_fits_and_the_next_does_not() -> None:
    """For every policy, exactly."""
    estimate = estimated(GPT_SPECIMEN, ("none", "full"))
    found = estimate.max_batch_size("8MiB")
    for policy, size in found.items():
        assert estimate.at(size)[policy].peak <= 8 * 2**20 < estimate.at(size + 1)[policy].peak
    assert found["full"] > found["none"] > 0
    assert estimate.max_batch_size(1000) == {"none": 0, "full": 0}


def test_a_batch_without_samples_has_no_other_size() -> None:
    """The error says so, for one size and for a search."""
    estimate = estimate_memory(nn.Linear(1, 1), torch.tensor(2.0), lambda m, x: m(x[None]).sum(), policy="none")
    assert estimate["none"].batch_size is None
    with pytest.raises(ValueError, match="batch_size=4: the batch has no tensor with a first dimension"):
        estimate.at(4)
    with pytest.raises(ValueError, match="max_batch_size: the batch has no tensor with a first dimension"):
        estimate.max_batch_size("1GiB")


# --- what is left alone


def fingerprint(module: nn.Module) -> dict[str, Any]:
    state = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in module.named_parameters() if p.grad is not None}
    forwards = {name: part.__dict__.get("forward") for name, part in module.named_modules()}
    modes = {name: part.training for name, part in module.named_modules()}
    hooks = [dict(p._post_accumulate_grad_hooks or {}) for p in module.parameters()]
    return {"state": state, "gradients": gradients, "forwards": forwards, "modes": modes, "hooks": hooks}


def assert_untouched(module: nn.Module, before: dict[str, Any]) -> None:
    now = fingerprint(module)
    for what in ("state", "gradients"):
        assert now[what].keys() == before[what].keys()
        for name, (tensor, values) in before[what].items():
            assert now[what][name][0] is tensor
            assert torch.equal(now[what][name][1], values)
    assert all(now[what] == before[what] for what in ("forwards", "modes", "hooks"))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_module_and_the_random_numbers_are_untouched(name: str, fails: bool) -> None:
    """Tensors, gradients, modes, forwards, hooks, and what is drawn next; also after an error."""
    specimen = ZOO[name]
    model, batch = specimen.build().eval(), specimen.batch()
    specimen.loss(model, batch).backward()
    handle = checkpoint_blocks(model, "full", blocks=specimen.blocks)
    before, numbers, attention = fingerprint(model), RandomState(), F.scaled_dot_product_attention

    def loss(model: nn.Module, batch: Any) -> Tensor:
        random.random(), np.random.rand(), torch.rand(3)
        found = specimen.loss(model, batch)
        return found if not fails or found > 0 else -found

    with pytest.raises(CannotEstimate) if fails else nullcontext():
        estimate_memory(model, batch, loss, policy=POLICIES, optimizer=ADAMW, device="cuda", precision="bf16-mixed")
    assert RandomState().same_as(numbers)
    assert_untouched(model, before)
    assert len(checkpointed_forwards(model)) == len(handle.blocks)
    assert F.scaled_dot_product_attention is attention
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1).add(1).item() == 2


def test_a_lightning_modules_own_attributes_are_untouched() -> None:
    """Lists that a step fills are filled in the copy."""
    module = Net()
    estimate_memory(module, torch.ones(2, 8).long(), precision="bf16-true", device="cuda")
    assert module.net is None
    assert module.seen == []
    assert module.dtype == torch.float32


def test_a_model_that_is_checkpointed_already_is_estimated_like_the_plain_one() -> None:
    """What is asked about are the policies given."""
    plain = GPT_SPECIMEN.build()
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, "selective")
    batch = GPT_SPECIMEN.batch()
    one, other = (estimate_memory(m, batch, next_token, optimizer=ADAMW).steps for m in (plain, checkpointed))
    assert one == other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # by the compiler's own imports
def test_a_compiled_model_is_run_as_it_was_written() -> None:
    """Nothing is compiled for an estimate, neither a wrapped model nor blocks compiled in place."""
    plain, batch = GPT_SPECIMEN.build(), GPT_SPECIMEN.batch()
    in_place = copy.deepcopy(plain)
    for block in in_place.blocks:
        block.compile()
    graphs = compiled_graphs()
    expected = estimate_memory(plain, batch, next_token).steps
    assert estimate_memory(in_place, batch, next_token).steps == expected
    assert estimate_memory(torch.compile(plain), batch, next_token, policy="none").steps == expected[:1]
    assert compiled_graphs() == graphs


# --- errors


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() if x.max() > 0 else self.layer(-x).sum()


def test_a_branch_on_a_value_is_an_error_that_names_the_operator() -> None:
    """Nothing is guessed; the way out is a measurement."""
    with pytest.raises(CannotEstimate, match=r"runs aten\._local_scalar_dense\.default.*lightning-ckpt compare"):
        estimate_memory(Branches(), torch.ones(2, 4), lambda model, x: model(x), policy="none")
    with pytest.raises(CannotEstimate, match=r"runs aten\.nonzero\.default"):
        estimated(ZOO["moe"], "none")


class Holding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"policy": "most"}, ValueError, "policy='most': accepted are"),
        ({"policy": []}, ValueError, r"policy=\[\]: give at least one"),
        ({"policy": "auto"}, ValueError, "policy='auto': "),
        ({"precision": "8-true"}, ValueError, "precision='8-true': accepted are '64-true', '32-true', '16-true'"),
        ({"accumulate": 0}, ValueError, "accumulate=0: accepted is a whole number of at least 1"),
        ({"ranks": True}, ValueError, "ranks=True: accepted is a whole number of at least 1"),
        ({"device": "tpu"}, ValueError, "device='tpu': accepted are 'cpu' and 'cuda'"),
        ({"batch_size": 0}, ValueError, "batch_size=0: the batch needs a size of at least 1"),
        (
            {"loss_fn": None},
            ValueError,
            r"Sequential has no training_step: give estimate_memory\(module, batch, loss_fn\)",
        ),
        ({"loss_fn": lambda m, x: m(x)}, ValueError, r"the step gave a tensor of shape \(2, 4\): accepted is a loss"),
        ({"module": nn.LazyLinear(3)}, ValueError, "LazyLinear: weight is not made yet: run one batch"),
        ({"module": 3}, TypeError, "module=3: accepted is a torch.nn.Module"),
        ({"batch": None}, TypeError, "batch=None: give a batch as the step takes it"),
        ({"optimizer": "adam"}, TypeError, "optimizer='adam': accepted is a function of the parameters"),
        ({"module": Holding()}, CannotEstimate, "Holding can't be copied.*cannot pickle"),
    ],
)
def test_what_cannot_be_estimated_is_said(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    """The argument, the value, what is accepted."""
    given = {"module": nn.Sequential(nn.Linear(4, 4)), "batch": torch.ones(2, 4), "loss_fn": lambda m, x: m(x).sum()}
    with pytest.raises(kind, match=text):
        estimate_memory(**{"policy": "none", **given, **arguments})


def test_a_policy_that_was_not_estimated_is_no_key() -> None:
    """The error lists those that were."""
    with pytest.raises(KeyError, match="selective was not estimated; there are none, full"):
        estimated(GPT_SPECIMEN, ("none", "full"))["selective"]


# --- as text and as JSON


def printed(estimate: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(estimate)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_prints_as_a_table_in_one_unit() -> None:
    """A row for each policy, the title says what was assumed."""
    text = printed(estimated(GPT_SPECIMEN, ("none", Full(every=2)), precision="64-true", ranks=2))
    assert "A step of batch size 8 in MiB: 64-true, cpu, each of 2 ranks" in text
    assert "Full(every=2)" in text
    assert "Not counted" not in text


def test_its_json_is_bytes() -> None:
    """Every figure a whole number, nothing that JSON does not know."""
    estimate = estimated(GPT_SPECIMEN, ("none", "full"))
    value = json.loads(json.dumps(estimate.to_dict()))
    assert value["device"] == "cpu"
    assert [step["peak"] for step in value["steps"]] == [step.peak for step in estimate.steps]
    assert value["steps"][1]["policy"] == "full"
    assert not any(name.startswith("_") for name in value)
