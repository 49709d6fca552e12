"""A small byte-level transformer with a ReLU-gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.nn import GatedMLP

N_BYTES = 256
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the byte model; the residual stream is read after block ``n_layers // 2``."""

    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    d_ff: int = 512
    context: int = 128


class Block(nn.Module):
    """Attention, then ``down(relu(gate(x)) * up(x))``, each on a normalised input and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d_model, d_ff = config.d_model, config.d_ff
        self.n_heads = config.n_heads
        self.attention_norm = nn.RMSNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.ffn_norm = nn.RMSNorm(d_model)
        self.mlp = GatedMLP(d_model, d_ff, activation="relu")

    def forward(self, x: Tensor, gates: list[Tensor] | None = None) -> Tensor:
        """x ``[B, T, d_model]`` -> the new stream ``[B, T, d_model]``.

        gates: takes the gate's activations ``[B, T, d_ff]``, for which the feed-forward is computed layer by layer.
        """
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + (self.mlp(h) if gates is None else layer_by_layer(self.mlp, h, gates))


def layer_by_layer(mlp: GatedMLP, x: Tensor, gates: list[Tensor] | None = None) -> Tensor:
    """The feed-forward as plain PyTorch; ``gates`` takes the gate's activations."""
    gate = F.relu(mlp.gate_proj(x))
    if gates is not None:
        gates.append(gate)
    return mlp.down_proj(gate * mlp.up_proj(x))


class ByteModel(nn.Module):
    """Predicts the next byte; the stream after the middle block can be read or replaced."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.middle = config.n_layers // 2
        self.embedding = nn.Embedding(N_BYTES, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, N_BYTES, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_stream = name.endswith(("attention_out.weight", "down_proj.weight"))
                std = 0.5 if name.startswith("embedding") else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std / (2 * self.config.n_layers) ** 0.5 if writes_stream else std)

    def forward(
        self, input_ids: Tensor, splice: Callable[[Tensor], Tensor] | None = None, gates: list[Tensor] | None = None
    ) -> Tensor:
        """input_ids ``[B, T]`` -> logits ``[B, T, 256]``.

        splice: replaces the residual stream ``[B, T, d_model]`` after the middle block.
        gates: takes each block's gate activations ``[B, T, d_ff]``; their feed-forward is computed layer by layer.
        """
        x = self.embedding(input_ids.long())
        for layer, block in enumerate(self.blocks, start=1):
            x = block(x, gates)
            if splice is not None and layer == self.middle:
                x = splice(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, gates: list[Tensor] | None = None) -> Tensor:
        """tokens ``[B, T]`` with the ``length`` likeliest bytes after them, one by one; ``gates`` as in ``forward``."""
        for _ in range(length):
            logits = self(tokens[:, -self.config.context :], gates=gates)
            tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
        return tokens

    def residual(self, tokens: Tensor) -> Tensor:
        """tokens ``[B, T]`` -> the residual stream ``[B, T, d_model]`` after the middle block."""
        x = self.embedding(tokens.long())
        for block in self.blocks[: self.middle]:
            x = block(x)
        return x


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x ``[B, H, T, D]``: pairs (i, i + D/2) turn by position."""
    n_positions, half = x.shape[-2], x.shape[-1] // 2
    frequency = ROTARY_BASE ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(n_positions, device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
