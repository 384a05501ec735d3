"""Which modules are blocks: found by structure, or named by the user."""

import logging
import re

import pytest
import torch
from torch import nn

from lightning_ckpt import find_blocks
from zoo import GPT, MoE, ResNet, UNet, ViT, gpt2, llama, lora_llama, mlp


def names(model: nn.Module, blocks: object = None) -> list[str]:
    return [name for name, _ in find_blocks(model, blocks)]  # type: ignore[arg-type]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Holder(nn.Module):
    """Puts modules into attributes by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


# --- found ---


def test_the_repeated_children_of_containers_are_the_blocks() -> None:
    """A GPT's blocks, a ViT's layers, a ResNet's stages with their shortcuts, a U-Net's two sides, experts' layers."""
    assert names(GPT(depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(ViT()) == [f"encoder.layers.{i}" for i in range(3)]
    assert names(ResNet()) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert names(UNet()) == ["downs.0", "downs.1", "downs.2", "ups.0", "ups.1"]
    assert names(MoE()) == ["layers.0", "layers.1", "layers.2"]


def test_an_encoder_and_a_decoder_are_found_together() -> None:
    """Every outermost container counts, in the order in which the model holds them."""
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    assert names(model) == [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]


def test_dictionaries_of_blocks_count_and_other_children_stay_out() -> None:
    """`ModuleDict` as well; in a mixed `Sequential` the repeated ones alone."""
    assert names(Holder(branches=nn.ModuleDict({"a": Part(), "b": Part()}))) == ["branches.a", "branches.b"]
    stem, norm = nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Sequential(nn.LayerNorm(4), nn.Tanh())
    assert names(nn.Sequential(stem, Part(), Part(), norm)) == ["1", "2"]


def test_plain_sequentials_repeat_if_their_content_does() -> None:
    """`Sequential(Linear, ReLU)` twice is a repetition, beside `Sequential(Linear, Tanh)` it is none."""
    assert names(mlp()) == ["0", "1", "2"]
    one, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert names(nn.Sequential(one, other, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == ["0", "2"]


@pytest.mark.parametrize(("build", "prefix"), [(llama, "model.layers"), (gpt2, "transformer.h")])
def test_hugging_face_models_name_their_own(build: object, prefix: str) -> None:
    """`_no_split_modules` decides, also inside another module and behind adapters."""
    assert names(build()) == [f"{prefix}.{i}" for i in range(3)]  # type: ignore[operator]
    assert names(Holder(net=build())) == [f"net.{prefix}.{i}" for i in range(3)]  # type: ignore[operator]


def test_adapted_hugging_face_models_are_seen_through() -> None:
    """Peft's wrappers change neither the blocks nor their order."""
    assert names(lora_llama()) == [f"base_model.model.model.layers.{i}" for i in range(3)]


def test_embeddings_that_a_hugging_face_model_keeps_whole_are_no_blocks() -> None:
    """ViT declares its embeddings beside its layers; they occur once."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8)
    config.patch_size = 4
    assert all("embeddings" not in name for name in names(ViTModel(config)))
    assert len(names(ViTModel(config))) == 2


def test_attributes_of_one_class_are_blocks_where_no_container_repeats() -> None:
    """The U-Net of many tutorials: `self.down1`, `self.down2`, ..., with a `Sequential` inside each."""
    model = Holder(inc=nn.Conv2d(1, 1, 1), down1=Part(), down2=Part(), up1=Part())
    assert names(model) == ["down1", "down2", "up1"]


def test_lists_of_single_layers_and_of_one_block_count_where_nothing_else_does() -> None:
    """A stack of recurrent layers, and a GPT of depth one; a list of norms beside blocks stays out."""
    assert names(Holder(rnn=nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)]))) == ["rnn.0", "rnn.1"]
    assert names(GPT(depth=1)) == ["blocks.0"]
    both = Holder(blocks=nn.ModuleList([Part(), Part()]), norms=nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)]))
    assert names(both) == ["blocks.0", "blocks.1"]


def test_the_largest_sequential_is_the_last_resort() -> None:
    """A convolutional net of unlike stages: its stages; a flat one: its layers."""
    stages = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
    )
    assert names(Holder(small=nn.Sequential(nn.Linear(1, 1), nn.Tanh()), net=stages)) == ["net.0", "net.1"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "1", "2"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))) == ["0", "2"]


def test_metrics_and_losses_are_no_blocks() -> None:
    """Repeated modules without parameters, torchmetrics among them, have nothing to replay for."""
    from torchmetrics import MeanMetric, MetricCollection

    metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
    assert names(Holder(metrics=metrics, blocks=nn.ModuleList([Part(), Part()]))) == ["blocks.0", "blocks.1"]


def test_a_block_that_is_compiled_counts_as_what_it_wraps() -> None:
    """`torch.compile` on each block leaves a repetition a repetition."""
    model = mlp()
    model[1] = torch.compile(model[1], backend="eager")
    assert names(model) == ["0", "1", "2"]


def test_a_shared_block_is_listed_once() -> None:
    """Tied layers have one name, the first."""
    part = Part()
    assert names(nn.ModuleList([part, Part(), part])) == ["0", "1"]


# --- named ---


@pytest.mark.parametrize(
    "blocks",
    [
        Part,
        "Part",
        f"{Part.__module__}.Part",
        "layers.*",
        "layers.?",
        "*layers.*",
        "**.[0-9]" and "layers.*",
        lambda name, module: isinstance(module, Part),
        [Part, "layers.0"],
        ["layers.0", "layers.1"],
    ],
)
def test_a_class_a_name_a_glob_a_predicate_or_a_list_of_these_names_blocks(blocks: object) -> None:
    """Every way of naming them gives the same two."""
    assert names(Holder(layers=nn.ModuleList([Part(), Part()]), head=nn.Linear(4, 4)), blocks) == [
        "layers.0",
        "layers.1",
    ]


def test_globs_cross_dots_at_their_start_only() -> None:
    """`*.inner` finds parts at any depth, `layers.*` no grandchildren."""
    model = Holder(layers=nn.ModuleList([Part(), Part()]))
    assert names(model, "*.inner") == ["layers.0.inner", "layers.1.inner"]
    assert names(model, "layers.*") == ["layers.0", "layers.1"]
    assert names(model, "layers.**.0") == ["layers.0.inner.0", "layers.1.inner.0"]
    assert names(model, "*inner") == ["layers.0.inner", "layers.1.inner"]


def test_derived_classes_count_by_name_too() -> None:
    """A class name stands for what is derived from it, as `isinstance` does."""

    class Special(Part):
        pass

    assert names(nn.ModuleList([Special(), Part()]), "Part") == ["0", "1"]


def test_a_block_inside_another_is_left_to_the_outer_one_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Naming parent and child checkpoints one level."""
    model = Holder(layers=nn.ModuleList([Part(), Part()]))
    with caplog.at_level(logging.INFO, logger="lightning_ckpt"):
        assert names(model, [Part, "*.inner"]) == ["layers.0", "layers.1"]
    assert "left to the outer one: layers.0.inner, layers.1.inner" in caplog.text


def test_the_model_itself_and_mere_holders_are_never_blocks() -> None:
    """Replaying all at once saves nothing, and a `ModuleList` has no forward."""
    model = Holder(layers=nn.ModuleList([Part(), Part()]))
    assert names(model, nn.Module) == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match="matches no module of Holder"):
        names(model, Holder)


def test_nothing_found_lists_the_candidates_and_how_to_name_them() -> None:
    """The message shows classes with counts and first names, and the nearest name to a typo."""
    model = Holder(layers=nn.ModuleList([Part(), Part()]))
    with pytest.raises(
        ValueError, match=r"blocks='Prat' matches no module.*mean 'Part'.*Part \(2 times, first at 'lay"
    ):
        names(model, "Prat")
    with pytest.raises(
        ValueError,
        match=r"No repeated block was found in Holder. It holds: Linear \(1 times.*blocks='encoder\.layers\.\*'",
    ):
        names(Holder(head=nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [
        (["layers.*", "nope.*"], "blocks='nope.*' matches"),
        (["Prat", Part], "blocks='Prat' matches no module of Holder. Did you mean 'Part'?"),
        ([nn.Conv2d, "Part"], "blocks=<class 'torch.nn.modules.conv.Conv2d'> matches"),
    ],
)
def test_each_of_several_has_to_match_something(blocks: object, wrong: str) -> None:
    """One that is mistyped among others is an error as it is alone."""
    with pytest.raises(ValueError, match=re.escape(wrong)):
        names(Holder(layers=nn.ModuleList([Part(), Part()])), blocks)


@pytest.mark.parametrize("blocks", [3, [], [3], object(), "", ["Part", ""]])
def test_something_else_is_refused(blocks: object) -> None:
    """The message lists what is accepted."""
    with pytest.raises(TypeError, match="accepted are None, a module class, a class name, a glob"):
        names(mlp(), blocks)


class FSDPModule:
    """By this name `fully_shard` puts a class of its own before a module's."""


def test_sharded_blocks_are_found_as_plain_ones() -> None:
    """By the classes that a Hugging Face model declares, and where only some of the blocks are sharded."""
    declared = Holder(layers=nn.ModuleList([Part(), Part()]), embed=Part(), others=nn.ModuleList([mlp(), mlp()]))
    declared._no_split_modules = ["Part"]
    for model in (declared, mlp(), Holder(layers=nn.ModuleList([Part(), Part()]))):
        plain = names(model)
        for block in list(model.modules())[2:4]:
            kind = type(block)
            block.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        assert names(model) == plain
