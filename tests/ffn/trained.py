"""Sparse blocks under gradients, and the same blocks by their definition."""

from typing import Any

import torch
from torch import Tensor

from gossamer import ffn, gemm
from gossamer._core.ops import INTERPRET
from gossamer.testing import assert_close
from tests.ffn.dense import SMALL as LARGER
from tests.ffn.dense import dense, operands

SMALL = (20, 16, 70, 12) if INTERPRET else LARGER
"""M, K, N, D. The interpreter takes seconds for each of a call's ten kernels."""
TINY = (10, 8, 36, 6)
"""For tests that compute a block many times, and compare it with itself."""
BIASES = ("gate_bias", "up_bias", "down_bias")


def pattern(m: int, n: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Which entries are active, bool `[m, n]`: a third, but no row 2 and no column 3, and all of row 5."""
    active = torch.rand(m, n, device=device, generator=generator) < 0.33
    active[5], active[2], active[:, 3] = True, False, False
    return active


def taken(a: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """The operands of a block that take part."""
    return {name: t for name, t in a.items() if gated or not name.startswith("up")}


def block(a: dict[str, Tensor], activation: Any = "relu", **options: Any) -> Tensor:
    options = {"method": "gather", "activation": activation} | options
    if "up" in a:
        biases = {name: a.get(name) for name in BIASES}
        return ffn.gated(a["x"], a["gate"], a["up"], a["down"], **biases, **options)
    return ffn.plain(a["x"], a["gate"], a["down"], up_bias=a.get("gate_bias"), down_bias=a.get("down_bias"), **options)


def reference(a: dict[str, Tensor], activation: str = "relu", threshold: Tensor | None = None) -> Tensor:
    more = {name: a.get(name) for name in BIASES} | {"threshold": threshold}
    return dense(a["x"], a["gate"], a.get("up"), a["down"], activation, **more)


def leaves(a: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: t.detach().to(dtype or t.dtype).clone().requires_grad_() for name, t in a.items()}


def gradients(a: dict[str, Tensor], out: Tensor, grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, list(a.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(a, found, strict=True))}


def check(a: dict[str, Tensor], grad: Tensor, activation: str = "relu", threshold: Tensor | None = None) -> None:
    """Result and gradients within their budgets."""
    value = activation if threshold is None else gemm.JumpReLU(threshold)
    ours, plain, wide = leaves(a), leaves(a), leaves(a, torch.float64)
    wide_threshold = None if threshold is None else threshold.double()
    got = gradients(ours, block(ours, value), grad)
    usual = gradients(plain, reference(plain, activation, threshold), grad)
    want = gradients(wide, reference(wide, activation, wide_threshold), grad)
    rows, magnitude = a["x"].shape[0], {name: t.square().mean().sqrt() for name, t in want.items()}
    for name, result in got.items():
        # Of so few elements the error of plain PyTorch may be small by luck.
        assert_close(
            result, reference64=want[name], plain=usual[name], factor=3.0, length=max(rows, a["gate"].shape[0]),
            magnitude=magnitude[name], name=name,
        )  # fmt: skip


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator,
    shift: float = 2.0,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    a = operands(shape, dtype, device, generator, shift)
    return a, torch.randn(shape[0], shape[3], device=device, generator=generator).to(dtype)


def operator_arguments(a: dict[str, Tensor], limit: int, room: int, slots: int = 256, hot: int = 16) -> tuple[Any, ...]:
    weights = (a["x"], a["gate"], a.get("gate_bias"), None, a.get("up"), a.get("up_bias"), a["down"])
    return *weights, a.get("down_bias"), False, limit, room, slots, hot
