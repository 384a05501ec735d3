"""Adapters, quantised-like layers and patched forwards: what people put into and around a model's blocks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equality import Replays, assert_equal, each_policy, trace, trains_as_plain, twins
from lightning_ckpt import checkpoint_blocks, find_blocks
from zoo import ZOO, adapted, gpt2, llama, lora_llama

loss_of = ZOO["llama"].loss


def tokens() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 50, (2, 9)) for _ in range(3)]


# --- adapters of peft ---


class Quantised(nn.Module):
    """A linear layer as quantisation leaves it: whole numbers and a scale, made into weights in each forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.adapter = nn.Sequential(
            nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + self.adapter(x)


def quantised_llama() -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Quantised(child))
    return model


def with_input_gradients(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What guides say must be called before checkpointing a frozen model; ours does not need it."""

    def made() -> nn.Module:
        model = build()
        model.enable_input_require_grads()
        return model

    return made


@each_policy
@pytest.mark.parametrize("build", [lora_llama, quantised_llama])
def test_adapters_on_a_frozen_base_learn_as_plain(build: Callable[[], nn.Module], policy: Any) -> None:
    """With the inputs' gradients switched on by hand, as reentrant checkpointing needs it, and without."""
    for made in (build, with_input_gradients(build)):
        model, _ = trains_as_plain(made, tokens(), loss_of, policy)
        learning = [p for p in model.parameters() if p.requires_grad]
        assert learning
        assert all(p.grad is not None and p.grad.any() for p in learning)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # peft's name for a cache
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_tuned_prompts_learn_as_plain(kind: str) -> None:
    """Virtual tokens before the first, and keys and values before those of every layer, which come in as a cache."""
    from peft import PrefixTuningConfig, PromptTuningConfig

    config = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[kind]

    def build() -> nn.Module:
        return adapted(gpt2(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))

    ours, _ = trains_as_plain(build, tokens(), loss_of)
    assert [name for name, p in ours.named_parameters() if p.requires_grad] == [
        "prompt_encoder.default.embedding.weight"
    ]
    assert ours.prompt_encoder.default.embedding.weight.grad.any()


# --- forwards that accelerate patches ---


def hooked(model: nn.Module) -> nn.Module:
    """Under accelerate's hooks, which put a forward of their own on the instance of every block."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Scaled(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 0.5, *args[1:]), kwargs

    for _, block in find_blocks(model):
        add_hook_to_module(block, Scaled())
    return model


def unhooked(model: nn.Module) -> nn.Module:
    from accelerate.hooks import remove_hook_from_module

    for _, block in find_blocks(model):
        remove_hook_from_module(block)
    return model


@pytest.mark.parametrize("first", [True, False], ids=["hooks first", "ours first"])
def test_hooks_of_accelerate_stay_around_a_blocks_forward(first: bool) -> None:
    """Patched before or after: the plain training, no second application, and each can go before the other."""
    ours, plain = twins(llama)
    hooked(plain)
    counted = Replays(find_blocks(ours)[0][1])
    if first:
        hooked(ours)
    handle = checkpoint_blocks(ours)
    if not first:
        hooked(ours)
    with pytest.warns(
        UserWarning, match="Left alone: .*: checkpointed by an earlier call, which its own handle undoes"
    ):
        assert checkpoint_blocks(ours).blocks == ()
    assert_equal(trace(ours, tokens(), loss_of), trace(plain, tokens(), loss_of))
    assert counted.replays
    handle.remove()
    before = counted.replays
    assert_equal(trace(ours, tokens(), loss_of), trace(plain, tokens(), loss_of))
    assert counted.replays == before


def test_what_accelerate_puts_back_does_not_pass_for_checkpointing() -> None:
    """Hooks over ours that go after it leave our old forward on the block: the blocks can be checkpointed again."""
    ours, plain = twins(llama)
    handle = checkpoint_blocks(ours)
    hooked(ours)
    handle.remove()
    unhooked(ours)
    with checkpoint_blocks(ours) as again:
        assert len(again.blocks) == 3
        assert_equal(trace(ours, tokens(), loss_of), trace(plain, tokens(), loss_of))
    assert not any("forward" in block.__dict__ for _, block in find_blocks(ours))


def test_a_whole_model_patched_for_mixed_precision_trains_the_same() -> None:
    """`Accelerator.prepare` wraps the model's forward in autocast and casts what it returns."""
    from accelerate.utils import convert_outputs_to_fp32

    ours, plain = twins(llama)
    checkpoint_blocks(ours)
    for model in (ours, plain):
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    assert_equal(trace(ours, tokens(), loss_of), trace(plain, tokens(), loss_of))
    assert copy.deepcopy(ours.model) is not None
