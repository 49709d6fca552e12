"""`nn.GatedMLP` in training: forward and backward pass of a block at the shape of Llama 3 8B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case, Provider, error_beside_mean, random_matrix
from gossamer import nn


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16; one small float32 case for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield mlp(64, 256, 704, torch.float32)
    else:
        for tokens in (1024, 4096, 16384):
            yield mlp(tokens, 4096, 14336, torch.bfloat16)


def mlp(M: int, K: int, N: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        block = nn.GatedMLP(K, N, dtype=dtype, device=device)
        for parameter in block.parameters():
            drawn = random_matrix(*parameter.shape, dtype, device, generator)
            parameter.data.copy_(drawn.mul_(parameter.shape[1] ** -0.5))
        return [(random_matrix(M, K, dtype, device, generator), block, random_matrix(M, K, dtype, device, generator))]

    def dense(block: Any, x: Tensor) -> Tensor:
        return block.down_proj(F.silu(block.gate_proj(x)) * block.up_proj(x))

    def ours(block: nn.GatedMLP, x: Tensor, recompute: bool) -> Tensor:
        block.recompute = recompute
        return block(x)

    def liger(block: Any, x: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return block.down_proj(LigerSiLUMulFunction.apply(block.gate_proj(x), block.up_proj(x)))

    def training(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def call(x: Tensor, block: Any, grad: Tensor) -> tuple[Tensor, ...]:
            leaves = [
                x.detach().requires_grad_(),
                *(getattr(block, f"{n}_proj").weight for n in ("gate", "up", "down")),
            ]
            out = forward(block, leaves[0])
            return (out.detach(), *torch.autograd.grad(out, leaves, grad))

        return call

    def reference(x: Tensor, block: nn.GatedMLP, grad: Tensor) -> tuple[Tensor, ...]:
        exact = {n: block.get_parameter(f"{n}_proj.weight").double().requires_grad_() for n in ("gate", "up", "down")}
        layers = {f"{n}_proj": SimpleNamespace(weight=w) for n, w in exact.items()}

        def forward(_: Any, x: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(x, exact["gate"])) * F.linear(x, exact["up"]), exact["down"])

        return training(forward)(x.double(), SimpleNamespace(**layers), grad.double())

    return Case(
        room="gemm",
        name="mlp",
        parameters={"M": M, "K": K, "N": N},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", training(lambda block, x: ours(block, x, False)), ours=True, capturable=True),
            Provider("gossamer, recompute", training(lambda block, x: ours(block, x, True)), ours=True),
            Provider("dense", training(dense), capturable=True),
            Provider("torch.compile", training(torch.compile(dense, dynamic=False))),
            Provider("Liger", training(liger), devices=("cuda",), capturable=True),
        ),
        reference=reference,
        bytes=(4 * M * K + 6 * N * K) * dtype.itemsize,
        flops=18 * M * N * K,
        grad=True,
        error=error_beside_mean,
        budget=2e-2 if dtype == torch.bfloat16 else None,
    )
