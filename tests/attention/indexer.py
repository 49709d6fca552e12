"""Inputs of the indexer, and what it computes, by dense PyTorch."""

from typing import Any

import torch
from torch import Tensor


def inputs(case: tuple[Any, ...], dtype: torch.dtype, device: torch.device, grad: bool = False) -> list[Tensor]:
    b, heads, tq, tk, d = case[:5]
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, heads, tq, d), (b, tk, d), (b, tq, heads), (heads,))
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in drawn]


def visible(case: tuple[Any, ...]) -> Tensor:
    """bool [B, Tq, Tk], written query by query."""
    b, _, tq, tk, _, causal, lengths = case
    out = torch.zeros(b, tq, tk, dtype=torch.bool)
    for i in range(b):
        length = tk if lengths is None else lengths[i]
        for t in range(tq):
            out[i, t, : min(length, t + max(length - tq, 0) + 1) if causal else length] = True
    return out


def dense(q: Tensor, k: Tensor, w: Tensor, bias: Tensor | None, scale: float, activation: str = "sigmoid") -> Tensor:
    x = torch.einsum("bhqd,bkd->bhqk", q, k) * scale
    x = x if bias is None else x + bias[:, None, None]
    if activation == "relu":
        return (w.permute(0, 2, 1)[..., None] * x.relu()).sum(1)
    return (w.sigmoid().permute(0, 2, 1)[..., None] * x.sigmoid()).sum(1)
