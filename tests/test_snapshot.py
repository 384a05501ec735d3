"""State captured before a step and put back after it."""

import collections
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC

from lightning_ckpt.snapshot import RandomState, Snapshot


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.seen, self.sizes = 0, [1.0]


class Slotted:
    """One without a `__dict__`, whose second slot is empty at first."""

    __slots__ = ("__late", "seen", "sizes")

    def __init__(self) -> None:
        self.seen, self.sizes = 0, [1.0]

    def spoil(self) -> None:
        self.seen, self.__late = 5, 1
        self.sizes.append(2.0)

    def __repr__(self) -> str:
        return repr((self.seen, self.sizes, hasattr(self, "_Slotted__late")))


class Model(nn.Module):
    """Every kind of state that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.tied = self.linear.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.loose = torch.zeros(2, dtype=torch.bfloat16)
        self.steps, self.losses, self.best = 0, [0.5], None
        self.recent = collections.deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.tally = collections.Counter({"x": 3})
        self.array = np.arange(3)
        self.counter, self.slotted = Counter(), Slotted()
        self.space, self.mapping = SimpleNamespace(seen=0), collections.UserDict({"seen": 0})
        self.rng, self.noise, self.dice = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.old_noise = np.random.RandomState(0)
        self.metric, self.auc = MeanMetric(), MetricCollection([BinaryAUROC()])


def spoil(model: Model) -> None:
    """Change all of it, in place and by replacement."""
    with torch.no_grad():
        model.linear.weight.mul_(2)
        model.loose.add_(1)
    model.linear.weight.grad = torch.ones(3, 3)
    model.linear.bias.requires_grad_(False)
    model.linear.bias.data = torch.zeros(5)
    model.norm(torch.randn(4, 3))
    model.mask = torch.zeros(3)
    model.norm.eval()
    model.steps, model.best, model.added = 7, 1.0, "new"
    model.losses.append(0.1)
    model.recent.append(9)
    model.names.add("b")
    model.tally["x"] += 1
    model.tally["y"] += 1
    model.array[0] = 99
    model.counter.seen, model.counter.extra = 5, 1  # type: ignore[attr-defined]
    model.counter.sizes.append(2.0)
    model.slotted.spoil()
    model.space.seen, model.mapping["seen"] = 1, 1
    torch.rand(1, generator=model.rng), model.noise.random(), model.dice.random(), model.old_noise.rand()
    model.metric.update(3.0)
    model.auc.update(torch.rand(4), torch.tensor([0, 1, 0, 1]))
    torch.rand(1), np.random.rand(), random.random()
    del model.tied


def state(model: Model) -> dict[str, Any]:
    """All of it as plain values."""
    values = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    others = {k: v for k, v in vars(model).items() if not k.startswith("_") and not isinstance(v, torch.Tensor)}
    metric = {k: v for k, v in vars(model.metric).items() if isinstance(v, int | bool | torch.Tensor)}
    rng = [model.rng.get_state(), model.noise.bit_generator.state, model.dice.getstate(), model.old_noise.get_state()]
    return {
        "values": values | {"mask": model.mask.clone(), "loose": model.loose.clone()},
        "flags": [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()],
        "others": repr({k: v for k, v in others.items() if k not in ("counter", "rng", "noise", "dice", "old_noise")}),
        "counter": repr(vars(model.counter)),
        "slotted": repr(model.slotted),
        "holders": repr((model.space, model.mapping)),
        "metric": repr(metric),
        "auc": repr([vars(m)["_update_count"] for m in model.auc.values()] + [model.auc["BinaryAUROC"].preds]),
        "rng": repr(rng),
        "grads": repr([p.grad for p in model.parameters()]),
        "global": repr((torch.get_rng_state().sum(), random.getstate(), np.random.get_state())),
    }


@pytest.mark.parametrize("times", [1, 2])
def test_everything_a_step_changes_comes_back(times: int) -> None:
    """Values, identities, added and removed attributes, metrics, generators, gradients; and again after more steps."""
    model = Model()
    before, weight, losses = state(model), model.linear.weight, model.losses
    snapshot = Snapshot([model])
    for _ in range(times):
        spoil(model)
        changed = state(model) if hasattr(model, "added") else {}
        assert all(repr(changed[key]) != repr(before[key]) for key in before)
        snapshot.restore()
    after = state(model)
    for key in before:
        assert repr(after[key]) == repr(before[key]), key
    assert all(torch.equal(after["values"][name], value) for name, value in before["values"].items())
    assert model.linear.weight is weight is model.tied
    assert model.losses is losses
    assert not hasattr(model, "added")
    assert model.linear.weight.grad is None


def test_a_result_that_is_kept_gets_its_values_back_and_stays_a_result() -> None:
    """The hidden state of a step before, with the gradient it has retained and its place in the graph."""
    layer = nn.Linear(3, 3)
    layer.state = layer(torch.ones(1, 3))
    layer.state.retain_grad()
    layer.state.sum().backward()
    before, slope, node = layer.state.detach().clone(), layer.state.grad, layer.state.grad_fn
    snapshot = Snapshot([layer])
    with torch.no_grad():
        layer.state.mul_(2)
    snapshot.restore()
    assert torch.equal(layer.state, before)
    assert layer.state.grad is slope
    assert layer.state.grad_fn is node


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_fresh_optimizer_and_its_scheduler_stay_fresh(make: type[torch.optim.Optimizer]) -> None:
    """No state, no changed rate, no trace that a step was taken."""
    layer = nn.Linear(3, 3)
    optimizer = make(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    before = repr(optimizer.state_dict()), repr(scheduler.state_dict()), set(vars(optimizer))
    snapshot = Snapshot([layer, optimizer, scheduler])
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    snapshot.restore()
    assert (repr(optimizer.state_dict()), repr(scheduler.state_dict()), set(vars(optimizer))) == before


def test_a_gradient_scaler_gets_its_scale_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    snapshot = Snapshot([scaler, optimizer])
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    snapshot.restore()
    assert scaler.get_scale() == 8.0
    assert not scaler._per_optimizer_states


class Noisy(Dataset[torch.Tensor]):
    """A dataset with generators and a counter of its own, and samples that must not be copied."""

    def __init__(self) -> None:
        self.samples, self.rng, self.reads = torch.zeros(1000), np.random.default_rng(1), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return self.samples[index] + self.rng.random()


def test_reading_samples_leaves_dataset_and_sampler_as_they_were() -> None:
    data, generator = Noisy(), torch.Generator()
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator))
    before = data.rng.bit_generator.state, generator.get_state()
    snapshot = Snapshot([], data=[data, loader.sampler])
    list(loader)
    assert data.reads == 8
    snapshot.restore()
    assert data.reads == 0
    assert data.rng.bit_generator.state == before[0]
    assert torch.equal(generator.get_state(), before[1])
    assert snapshot.nbytes == 0


def test_the_copies_are_counted_and_not_in_pytorchs_allocator() -> None:
    layer = nn.Linear(100, 100)
    assert Snapshot([layer]).nbytes == 4 * (100 * 100 + 100)


def test_random_states_tell_whether_anything_was_drawn() -> None:
    first, second = RandomState(), RandomState()
    assert first.same_as(second)
    random.random()
    assert not first.same_as(RandomState())
    first.restore()
    assert first.same_as(RandomState())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_and_random_numbers_of_a_gpu_come_back_from_host_copies() -> None:
    layer = nn.Linear(8, 8, device="cuda")
    before = layer.weight.detach().clone()
    allocated = torch.cuda.memory_allocated()
    snapshot = Snapshot([layer], device="cuda")
    assert torch.cuda.memory_allocated() == allocated
    drawn = torch.rand(4, device="cuda")
    with torch.no_grad():
        layer.weight.zero_()
    snapshot.restore()
    assert torch.equal(layer.weight, before)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
