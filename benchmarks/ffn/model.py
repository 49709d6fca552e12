"""A decoder with random weights whose feed-forward blocks let through as many neurons as is asked, layer by layer.

Numbers of entries are not random numbers: in a trained sparse model they have a hump in the early middle layers, some
tokens and the first positions have ten times the mean, and neighbours share most of theirs. Here a token's embedding
has a part in the direction v, the same for all; a part in the direction u, how active the token is, large for the
tokens that stand first; a part that its topic has in common; and noise. A text stays with a topic for 64 tokens. The
gate of a layer is random but for its parts in v and u, a threshold and a gain, which are found one layer after the
other by what really comes in, so that the mean and the largest number of entries of the first sequence are those asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import nn

TOPIC, SHARED = 64, 0.8
"""Neighbouring tokens that have a topic in common, and the share of their noise's variance that is its."""
FIRST = 16
"""Positions at the beginning that fire more."""
LARGEST = 12
"""The largest number of entries over the mean, as in the paper's figures by layer."""


@dataclass(frozen=True)
class Sizes:
    """Of a decoder: the paper's are the defaults (its Table 2)."""

    layers: int = 28
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 32
    vocabulary: int = 49_152
    length: int = 2048


class Layer(torch.nn.Module):
    """Attention and a feed-forward block, each on a normalised stream and added to it."""

    def __init__(self, sizes: Sizes, gated: bool, activation: str) -> None:
        super().__init__()
        hidden, block = sizes.hidden, nn.GatedMLP if gated else nn.MLP
        self.heads = sizes.heads
        self.attention_norm = torch.nn.RMSNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.norm = torch.nn.RMSNorm(hidden)
        self.mlp: Any = block(hidden, sizes.intermediate, activation)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], dense: bool = False) -> Tensor:
        """With `dense` the block is plain PyTorch."""
        x = self.attend(x, rotation)
        h = self.norm(x)
        return x + (self.dense(h) if dense else self.mlp(h))

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, *rotation), rotate(k, *rotation), v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def dense(self, x: Tensor) -> Tensor:
        """The block in plain PyTorch."""
        mlp = self.mlp
        activation = F.silu if mlp.activation == "silu" else F.relu
        if isinstance(mlp, nn.GatedMLP):
            return mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
        return mlp.down_proj(activation(mlp.up_proj(x)))


class Decoder(torch.nn.Module):
    """ids `[B, T]` -> logits `[B, T, vocabulary]`; with `dense` the blocks are plain PyTorch. Layers are called by
    `through(layer, x, rotation, dense)`, which may be compiled: one layer for all is so in seconds."""

    def __init__(self, sizes: Sizes, gated: bool, activation: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = torch.nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = torch.nn.ModuleList(Layer(sizes, gated, activation) for _ in range(sizes.layers))
        self.norm = torch.nn.RMSNorm(sizes.hidden)

    def forward(self, ids: Tensor, dense: bool = False, through: Callable[..., Tensor] = Layer.forward) -> Tensor:
        x = self.embedding(ids)
        rotation = angles(ids.shape[1], self.sizes.hidden // self.sizes.heads, x)
        for layer in self.layers:
            x = through(layer, x, rotation, dense)
        return F.linear(self.norm(x), self.embedding.weight)


def angles(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** -(torch.arange(size // 2, device=like.device) / (size // 2))
    angle = torch.arange(length, device=like.device)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def profile(layers: int, mean: float) -> list[float]:
    """Mean entries of each layer: the first two have the least; there is a hump at a fifth of the depth."""
    shape = [
        0.35 if layer < 2 else 0.6 + 1.4 * math.exp(-(((layer / layers - 0.22) / 0.18) ** 2)) for layer in range(layers)
    ]
    return [mean * layers * weight / sum(shape) for weight in shape]


@torch.no_grad()
def make(
    sizes: Sizes,
    *,
    batch: int,
    gated: bool,
    activation: str,
    entries: float,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Decoder]:
    """Token numbers `[batch, length]` and a decoder whose blocks have `entries` entries a token, on average."""
    with torch.device(device):
        model = Decoder(sizes, gated, activation).requires_grad_(False)
    hidden = sizes.hidden

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    u, v = (F.normalize(normal(hidden), dim=0) for _ in range(2))
    v = F.normalize(v - (u @ v) * u, dim=0)
    topics = normal(-(-sizes.vocabulary // TOPIC), hidden).repeat_interleave(TOPIC, 0)[: sizes.vocabulary]
    active = -torch.rand(sizes.vocabulary, device=device, generator=generator).clamp(min=1e-6).log().clamp(max=5.0)
    active[:FIRST] = 6.0 / (1 + torch.arange(FIRST, device=device)) ** 0.5
    noise = SHARED**0.5 * topics + (1 - SHARED) ** 0.5 * normal(sizes.vocabulary, hidden)
    along = 0.1 * active[:, None] * u + 0.5 * v
    model.embedding.weight.copy_(noise + hidden**0.5 * along)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for weight, scale in ((layer.qkv.weight, 1.0), (layer.out.weight, 0.3)):
            weight.copy_(normal(*weight.shape) * scale * hidden**-0.5)
        for name, parameter in layer.mlp.named_parameters():
            parameter.copy_(normal(*parameter.shape) * (0.02 if "down" in name else hidden**-0.5))
    ids = _text(sizes, batch, device, generator)
    model.to(dtype)
    if activation == "relu":
        _calibrate(model, ids[:1], u, v, profile(sizes.layers, entries))
    return ids, model


def _text(sizes: Sizes, batch: int, device: torch.device, generator: torch.Generator) -> Tensor:
    stretches = -(-sizes.length // TOPIC)
    first = torch.randint(1, sizes.vocabulary // TOPIC, (batch, stretches), device=device, generator=generator) * TOPIC
    within = torch.randint(TOPIC, (batch, stretches * TOPIC), device=device, generator=generator)
    ids = (first.repeat_interleave(TOPIC, 1) + within)[:, : sizes.length]
    ids[:, :FIRST] = torch.arange(FIRST, device=device)[: sizes.length]
    return ids


def _calibrate(model: Decoder, ids: Tensor, u: Tensor, v: Tensor, means: list[float]) -> None:
    """Gives each layer's gate its parts in u and v, by what comes in."""
    x = model.embedding(ids)
    rotation = angles(ids.shape[1], model.sizes.hidden // model.sizes.heads, x)
    for layer, mean in zip(model.layers, means):
        assert isinstance(layer, Layer)
        x = layer.attend(x, rotation)
        h = layer.norm(x)
        weight = (layer.mlp.gate_proj if isinstance(layer.mlp, nn.GatedMLP) else layer.mlp.up_proj).weight
        for direction in (u, v):
            part = (weight.float() @ direction)[:, None] * direction
            weight.copy_(weight.float() - part)
        rows = h[0].float()
        z = (rows @ weight.float().t()).sort(1).values
        gain, threshold = _solve(z, rows @ u, rows @ v, mean, min(LARGEST * mean, weight.shape[0] / 2))
        weight.copy_(weight.float() + gain * u - threshold * v)
        x = x + layer.mlp(h)


def _solve(z: Tensor, along_u: Tensor, along_v: Tensor, mean: float, largest: float) -> tuple[float, float]:
    """The gain and threshold with which rows of ascending z `[M, N]` have these entries: z + gain * along_u >
    threshold * along_v."""
    n = z.shape[1]

    def counts(gain: float, threshold: float) -> Tensor:
        limit = threshold * along_v - gain * along_u
        return n - torch.searchsorted(z, limit[:, None].contiguous(), right=True).squeeze(1)

    def threshold_of(gain: float) -> float:
        low, high = -10.0, 10.0
        for _ in range(22):
            middle = (low + high) / 2
            low, high = (middle, high) if counts(gain, middle).double().mean() > mean else (low, middle)
        return high

    low, high = 0.0, 2.0
    for _ in range(14):
        gain = (low + high) / 2
        low, high = (gain, high) if counts(gain, threshold_of(gain)).max() < largest else (low, gain)
    return low, threshold_of(low)
