"""FLOPs are counted exactly, replays apart, without changing a bit of what is computed, or not at all."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_ckpt import _compat
from lightning_ckpt._compat import FakeTensorMode
from lightning_ckpt.flops import FORMULAS, FlopCounter, Flops, _format, uncountable
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.recompute import checkpoint_blocks
from lightning_ckpt.replay_state import is_recomputing
from zoo import ZOO

PRODUCT = 2 * 64**3
"""FLOPs of one 64x64 by 64x64 product."""


def three_blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3)))


def count(function: Callable[[], Tensor], is_replay: Callable[[], bool] = lambda: False) -> tuple[float, float]:
    """Products of the model and of the replay in one forward and backward."""
    with FlopCounter(is_replay) as counter:
        function().sum().backward()
    flops = counter.result()
    assert flops is not None, counter.problem
    assert set(flops.model) | set(flops.replay) == {"fp32"}
    return flops.model["fp32"] / PRODUCT, flops.replay.get("fp32", 0) / PRODUCT


@pytest.fixture
def settings() -> Iterator[tuple[Any, Any]]:
    """CUDA's precisions of products and of convolutions, which are put back."""
    found = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [kernels.fp32_precision for kernels in found]
    yield found
    for kernels, setting in zip(found, before, strict=True):
        kernels.fp32_precision = setting


class TestCount:
    def test_a_plain_step(self) -> None:
        """Six products forward and twelve backward."""
        model, x = three_blocks(), torch.randn(64, 64, requires_grad=True)
        assert count(lambda: model(x)) == (18, 0)

    def test_checkpointed_blocks(self) -> None:
        """Early stop replays one product a block, and none of them is the model's work."""
        model, x = three_blocks(), torch.randn(64, 64, requires_grad=True)
        with checkpoint_blocks(model, blocks="*"):
            assert count(lambda: model(x), is_recomputing) == (18, 3)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_an_owners_checkpoint(self, reentrant: bool) -> None:
        """A model that checkpoints itself is not credited with its replays, whichever kind they are."""
        model, x = three_blocks(), torch.randn(64, 64, requires_grad=True)

        def forward() -> Tensor:
            hidden = x
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return hidden

        with set_checkpoint_early_stop(False):
            assert count(forward) == (18, 6)

    def test_the_cpus_attention(self) -> None:
        """PyTorch has no formula for the CPU's attention kernel; ours gives what its flash formula gives."""
        q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
        with FlopCounter() as counter:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        products = 2 * 4 * 2 * 32 * 32 * 16  # one score-sized product over batch and heads
        assert counter.result() == Flops({"fp32": products * (2 + 5)}, {})

    def test_formats_apart(self) -> None:
        """Under autocast the products are counted in the format they are computed in."""
        layer, head = nn.Linear(64, 64), nn.Linear(64, 64)
        with FlopCounter() as counter:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = layer(torch.randn(64, 64))
            head(hidden.float())
        assert counter.result() == Flops({"bf16": PRODUCT, "fp32": PRODUCT}, {})

    def test_on_cuda_float32_is_counted_as_its_kernels_setting_says(self, settings: tuple[Any, Any]) -> None:
        """Products and convolutions have one each; formats of fewer bits, and the CPU, have none."""
        formats = {"tf32": "tf32", "ieee": "fp32"}
        with FakeTensorMode():
            single, on_cpu = torch.empty(2, device="cuda"), torch.empty(2)
            operands = (single, single.bfloat16(), on_cpu)
        for chosen in (("tf32", "ieee"), ("ieee", "tf32")):
            for kernels, setting in zip(settings, chosen, strict=True):
                kernels.fp32_precision = setting
            for operator, setting in zip((torch.ops.aten.addmm, torch.ops.aten.convolution), chosen, strict=True):
                told = [_format(operator, (None, operand)) for operand in operands]
                assert told == [formats[setting], "bf16", "fp32"]

    def test_stopped_counter_counts_nothing(self) -> None:
        """What runs while counting is off, such as an optimizer's own products, is not the model's."""
        with FlopCounter() as counter:
            torch.randn(64, 64) @ torch.randn(64, 64)
            counter.counting = False
            torch.randn(64, 64) @ torch.randn(64, 64)
        assert counter.result() == Flops({"fp32": PRODUCT}, {})

    def test_a_sharded_tensor_counts_what_this_rank_computes(self) -> None:
        """A DTensor's product is counted once, by its local operators, and not by those that only work out shapes."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            a, b = (distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]) for _ in range(2))
            with FlopCounter() as counter:
                a @ b
        finally:
            dist.destroy_process_group()
        assert counter.result() == Flops({"fp32": PRODUCT}, {})

    def test_operators_that_take_functions_still_run(self) -> None:
        """Under the counter `cond` gives its result, as it does not under other modes, and is named as unseen."""
        with FlopCounter() as counter:
            out = torch.ops.higher_order.cond(True, lambda a: a @ a, lambda a: a, (torch.eye(3),))
        assert torch.equal(out, torch.eye(3))
        assert counter.problem == "there is no FLOP formula for the operator cond"


class TestNoCount:
    def test_nothing_ran(self) -> None:
        """Zero operations are no count."""
        with FlopCounter() as counter:
            torch.randn(3) + 1
        assert counter.result() is None
        assert counter.problem == "no operator with a formula ran"

    def test_a_heavy_operator_without_a_formula(self) -> None:
        """A recurrent kernel nobody has a formula for spoils the total, by name."""
        lstm, head = nn.LSTM(8, 8), nn.Linear(8, 8)
        with FlopCounter() as counter:
            head(lstm(torch.randn(3, 2, 8))[0])
        assert counter.result() is None
        assert counter.problem == "there is no FLOP formula for the operator mkldnn_rnn_layer"

    def test_a_formula_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step runs on, and the problem is told in words."""

        def broken(*args: object, **kwargs: object) -> int:
            raise ValueError("odd shape")

        monkeypatch.setitem(FORMULAS, torch.ops.aten.mm, broken)
        with FlopCounter() as counter:
            out = torch.eye(3) @ torch.eye(3)
        assert torch.equal(out, torch.eye(3))
        assert counter.problem == "the FLOP formula of mm failed: ValueError('odd shape')"

    def test_a_compiled_function_stays_compiled(self) -> None:
        """The counter neither stops a function from being compiled nor pretends to have seen inside."""
        seen: list[bool] = []

        @torch.compile(backend="eager")
        def product(x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_compiling())
            return x @ x

        with FlopCounter() as counter:
            product(torch.eye(3))
        assert seen == [True]
        assert counter.result() is None
        assert counter.problem is not None
        assert "compiled" in counter.problem

    def test_compiled_modules_are_seen_before_they_run(self) -> None:
        """Both ways to compile a module are found, and named."""
        plain, in_place = three_blocks(), three_blocks()
        in_place[1].compile(backend="eager")
        assert uncountable(plain) is None
        assert uncountable(in_place) == "1 is compiled, and what compiled code runs is not seen"
        assert uncountable(nn.Sequential(torch.compile(plain, backend="eager"))) == (
            "0 is compiled, and what compiled code runs is not seen"
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, 32, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten()
    )


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradient needs a second backward."""
    x = x.clone().requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().sum()


TOKENS, IMAGES = (3, 16, 32), (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "shape", "loss"),
    [
        pytest.param(Attention, TOKENS, squares, id="attention"),
        pytest.param(Attention, TOKENS, autocast, id="attention-bf16"),
        pytest.param(Recurrent, TOKENS, squares, id="lstm"),
        pytest.param(Recurrent, TOKENS, autocast, id="lstm-bf16"),
        pytest.param(convolutions, IMAGES, squares, id="convolutions"),
        pytest.param(convolutions, IMAGES, autocast, id="convolutions-bf16"),
        pytest.param(convolutions, IMAGES, penalised, id="double-backward"),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), TOKENS, squares, id="encoder-layer"
        ),
    ],
)
def test_counting_changes_no_bit(
    make: Callable[[], nn.Module], shape: tuple[int, ...], loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Loss, gradients, buffers and the random state after a step are those of the step without a counter."""
    torch.manual_seed(0)
    plain = make()
    counted, x = copy.deepcopy(plain), torch.randn(shape)

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        value = loss(model, x)
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [value.detach(), *gradients, *model.buffers(), torch.get_rng_state()]

    expected = step(plain)
    with FlopCounter():
        got = step(counted)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_models_are_credited_with_their_own_work(name: str) -> None:
    """Counting changes neither a bit nor the peak of a step, and checkpointing a model adds replays only."""
    torch.manual_seed(0)
    specimen = ZOO[name]
    model, batch = specimen.build(), specimen.batch()

    def step(counter: AbstractContextManager[object]) -> tuple[list[Tensor], int]:
        model.zero_grad()
        torch.manual_seed(1)
        with AllocatorReader() as reader, counter:
            loss = specimen.loss(model, batch)
            loss.backward()
            peak = reader.peak()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)], peak

    model.eval()  # BatchNorm and routers would move on from step to step
    step(nullcontext())
    plain, counter, replaying = step(nullcontext()), FlopCounter(), FlopCounter(is_recomputing)
    counted = step(counter)
    assert counted[1] == plain[1]
    assert all(torch.equal(a, b) for a, b in zip(counted[0], plain[0], strict=True))
    with checkpoint_blocks(model, blocks=specimen.blocks):
        step(replaying)
    alone, ours = counter.result(), replaying.result()
    if alone is None or ours is None:
        assert name == "lstm"
        assert counter.problem == replaying.problem == "there is no FLOP formula for the operator mkldnn_rnn_layer"
    else:
        assert ours.model == alone.model
        assert not alone.replay
        assert 0 < ours.replay["fp32"] < alone.model["fp32"]


def test_replays_are_seen_where_pytorch_starts_them() -> None:
    """The frames looked for exist in this version: inside a replay yes, in forward and after it no."""
    seen: list[bool] = []

    def watched(x: Tensor) -> Tensor:
        seen.append(_compat.in_checkpoint_replay())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        seen.clear()
        checkpoint(watched, x, use_reentrant=reentrant).sum().backward()
        assert seen == [False, True]
    assert not _compat.in_checkpoint_replay()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheDevice:
    def test_backward_on_the_devices_thread_is_counted(self) -> None:
        """The device's backward runs in a thread of its own, and is counted as on the CPU, replays apart."""
        model, x = three_blocks().cuda(), torch.randn(64, 64, device="cuda", requires_grad=True)
        assert count(lambda: model(x)) == (18, 0)
        with checkpoint_blocks(model, blocks="*"):
            assert count(lambda: model(x), is_recomputing) == (18, 3)

    def test_tf32_is_told_from_fp32(self) -> None:
        """The format follows the setting that the kernels follow."""
        before = torch.backends.cuda.matmul.fp32_precision
        try:
            for setting, expected in (("tf32", "tf32"), ("ieee", "fp32")):
                torch.backends.cuda.matmul.fp32_precision = setting
                with FlopCounter() as counter:
                    torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
                assert counter.result() == Flops({expected: PRODUCT}, {})
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
