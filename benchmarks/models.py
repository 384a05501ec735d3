"""The models that benchmarks train: six architectures, large enough that blocks matter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed, and how its loss is taken.

    Attributes:
        make: builds the model.
        batch: makes a batch.
        loss: the loss of a batch.
        blocks: what to checkpoint, as `find_blocks` takes it.
        uneven: whether its blocks differ in what they keep and how long they take.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: Any = None
    uneven: bool = True


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """With `tied`, tokens go in and come out by one matrix, as in GPT-2."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 128,
        vocabulary: int = 256,
        heads: int = 4,
        context: int = 128,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    def __init__(self, depth: int = 10, width: int = 128, heads: int = 4, patch: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.Sequential(*[Block(width, heads, causal=False) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.head(self.layers(x)[:, 0])


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages: resolution halves, channels double."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(
            *[
                Residual(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1)
                for stage in range(4)
                for first in (True, False)
            ]
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, 1, 1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, 1, 1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
        )


class UNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.downs = nn.ModuleList([DoubleConv(inside, out) for inside, out in zip([3, *widths], widths, strict=False)])
        self.ups = nn.ModuleList(
            [DoubleConv(below + out, out) for below, out in zip(widths[:0:-1], widths[-2::-1], strict=True)]
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for down in self.downs:
            x = down(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        x = skips.pop()
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)


class EncoderDecoder(nn.Module):
    """A long source, a short target: the encoder's blocks hold most of the memory."""

    def __init__(self, depth: int = 5, width: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Experts(nn.Module):
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
        return out


class MoEBlock(nn.Module):
    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4, causal=True)
        self.sparse = sparse
        self.mlp = (
            Experts(width) if sparse else nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + (self.mlp(y.flatten(0, 1)).view_as(x) if self.sparse else self.mlp(y))


class MoE(nn.Module):
    """Every second block has experts."""

    def __init__(self, depth: int = 10, width: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([MoEBlock(width, sparse=index % 2 == 1) for index in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _translation(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    source, target = pair
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


def restored(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def label(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tokens(batch: int, length: int, vocabulary: int = 256) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def images(batch: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


WORKLOADS = {
    "GPT": Workload(GPT, lambda: tokens(8, 129), next_token, uneven=False),
    "ViT": Workload(ViT, lambda: images(8, 96), label, uneven=False),
    "ResNet": Workload(ResNet, lambda: images(16, 64), label),
    "U-Net": Workload(UNet, lambda: torch.randn(8, 3, 64, 64), restored),
    "encoder-decoder": Workload(
        EncoderDecoder, lambda: (tokens(4, 256), tokens(4, 33)), _translation, blocks=["encoder.*", "decoder.*"]
    ),
    "MoE": Workload(MoE, lambda: tokens(8, 129), next_token),
}
