"""The feed-forward block by its definition, and operands of which no rounding decides what is active."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import ffn, gemm
from gossamer.testing import assert_close

METHODS = ("gather", "fused", "dense")
SMALL = (34, 24, 300, 40)
"""Rows, K, N, D: two tiles, the second not full."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or bias.dtype is weight.dtype:
        return F.linear(x, weight, bias)
    return (F.linear(x, weight) + bias).to(weight.dtype)


def dense(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, activation: str, **more: Tensor | None) -> Tensor:
    """In the dtype of its operands."""
    z = linear(x, gate, more.get("gate_bias"))
    threshold = more.get("threshold")
    hidden = torch.relu(z) if threshold is None else torch.where(z <= threshold.clamp(min=0), 0, z)
    hidden = hidden.square() if activation == "relu2" else hidden
    if up is not None:
        hidden = hidden * linear(x, up, more.get("up_bias"))
    return linear(hidden, down, more.get("down_bias"))


def dense64(*operands: Tensor | str | None, **more: Tensor | None) -> Tensor:
    wide = [t.detach().double() if isinstance(t, Tensor) else t for t in operands]
    return dense(*wide, **{k: None if t is None else t.detach().double() for k, t in more.items()})  # type: ignore[arg-type]


def operands(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    shift: float = 2.0,
    shared: float = 0.0,
) -> dict[str, Tensor]:
    """Small integers over a power of two, so that every pre-activation is exact and no rounding decides what is kept.
    The rows of x have `shared` of what they are made of in common."""
    m, k, n, d = shape

    def draw(*size: int, least: int = -1) -> Tensor:
        return torch.randint(least, 2, size, device=device, generator=generator)

    own = torch.rand(m, k, device=device, generator=generator) >= shared
    x = torch.where(own, draw(m, k), draw(1, k))
    scale = 2.0 ** -(k.bit_length() // 2)
    made = {
        "x": x,
        "gate": draw(n, k) * scale,
        "up": torch.randn(n, k, device=device, generator=generator) * scale,
        "down": torch.randn(d, n, device=device, generator=generator) * max(n, 1) ** -0.5,
        "gate_bias": torch.full((n,), -shift, device=device),
        "up_bias": torch.randn(n, device=device, generator=generator),
        "down_bias": torch.randn(d, device=device, generator=generator),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def value(activation: str, threshold: Tensor | None) -> gemm.JumpReLU | str:
    return activation if threshold is None else gemm.JumpReLU(threshold)


def call(a: dict[str, Tensor], **options: Any) -> Tensor:
    biases = {name: a[name] for name in ("gate_bias", "up_bias", "down_bias") if name in a}
    return ffn.gated(a["x"], a["gate"], a["up"], a["down"], **biases, **options)


def check(a: dict[str, Tensor], out: Tensor, activation: str = "relu", threshold: Tensor | None = None) -> None:
    more = {name: a.get(name) for name in ("gate_bias", "up_bias", "down_bias")} | {"threshold": threshold}
    parts = (a["x"], a["gate"], a.get("up"), a["down"], activation)
    assert_close(out, reference64=dense64(*parts, **more), plain=dense(*parts, **more))
