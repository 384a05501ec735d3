"""Small models of every kind that users bring, each with a batch and a loss, for tests that compare with a twin."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ckpt.blocks import Blocks


@dataclass(frozen=True)
class Specimen:
    """How to build a model, what to feed it, and the loss of a step."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: Blocks | None = field(default=None)


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32, heads: int = 4, vocabulary: int = 50, dropout: float = 0.1):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList([GPTBlock(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True), nn.Dropout2d(0.1)
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [8, 16, 32]
        self.downs = nn.ModuleList([DoubleConv(inside, out) for inside, out in zip([1, *widths], widths, strict=False)])
        self.ups = nn.ModuleList([DoubleConv(32 + 16, 16), DoubleConv(16 + 8, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], 1))
        return self.head(x)


class LSTMStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(16, 16, batch_first=True) for _ in range(3)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
            x = self.dropout(x)
        return self.head(x)


class MoEBlock(nn.Module):
    """Top-2 of four experts, with the router's weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + out


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoEBlock(16) for _ in range(3)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.backbone.requires_grad_(False)
        self.heads = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.backbone(x))


def mlp(depth: int = 3, width: int = 64) -> nn.Sequential:
    """Blocks of Linear, ReLU, Linear: the chain whose saved tensors and matrix products can be counted by hand."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)]
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # GPT-2's defaults, with dropout in three places.
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=50,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_dropout_prob=0.1,
        )
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,  # the balancing loss takes them from inside the blocks
        )
    )


def adapted(model: nn.Module, config: Any) -> nn.Module:
    """The model under an adapter of peft's."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that goes away
        return get_peft_model(model, config)


def lora_llama() -> nn.Module:
    from peft import LoraConfig

    config = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, r=4, init_lora_weights=False)
    return adapted(llama(), config)


def _tokens() -> Tensor:
    return torch.randint(0, 50, (2, 16))


def _images() -> Tensor:
    return torch.randn(4, 1, 8, 8)


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _hugging_face(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _scores(model: nn.Module, images: Tensor) -> Tensor:
    return model(pixel_values=images).logits.square().mean()


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


ZOO = {
    "gpt": Specimen(GPT, _tokens, _next_token),
    "vit": Specimen(ViT, _images, _mean_square),
    "resnet": Specimen(ResNet, _images, _mean_square),
    "unet": Specimen(UNet, _images, _mean_square),
    "lstm": Specimen(LSTMStack, lambda: torch.randn(4, 6, 16), _mean_square),
    "llama": Specimen(llama, _tokens, _hugging_face),
    "gpt2": Specimen(gpt2, _tokens, _hugging_face),
    "lora-llama": Specimen(lora_llama, _tokens, _hugging_face),
    "frozen-backbone": Specimen(FrozenBackbone, lambda: torch.randn(4, 16), _mean_square),
    "moe": Specimen(MoE, lambda: torch.randn(12, 16), _mean_square),
    "gradient-penalty": Specimen(mlp, lambda: torch.randn(8, 64), _gradient_penalty),
}

# Models of Hugging Face's, from small configurations with random weights.
TRANSFORMERS = {
    "llama": ZOO["llama"],
    "gpt2": ZOO["gpt2"],
    "t5": Specimen(t5, _tokens, _hugging_face),
    "vit": Specimen(transformers_vit, _images, _scores),
    "mixtral": Specimen(mixtral, _tokens, _hugging_face),
}
