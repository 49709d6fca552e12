"""`nn.GatedMLP` and `nn.MLP` in training: both passes of a block of the paper's 1.5B model, by how sparse it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case, Provider, random_matrix
from benchmarks.engine.timing import matmul_precision
from benchmarks.ffn.bench_block import GROUP, PLAIN, K, N, counts, dense_inputs
from benchmarks.inputs import inputs_for
from gossamer import gemm, nn
from gossamer.testing import random_rows, trained_rows

SETTLING = 12
"""Calls after which a block knows how sparse it is, and whether it has hot neurons."""
TENTH = ", nearly all in 10%"
TEXT = {"39, of a text": (K, N), "57, of a text": (K, N), "26, of a text": (768, 2048)}
"""K and N of the layers of `testing.trained_rows`."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16; two small float32 cases for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for gated in (True, False):
            yield training(gated, 64, 8, 0.0, (96, 256), torch.float32)
        return
    for nnz, sizes in TEXT.items():
        yield training(True, 16384, nnz, 0.0, sizes, torch.bfloat16)
    for nnz in (60, 29):
        yield training(True, 16384, nnz, 0.0, (K, N), torch.bfloat16)
    for nnz in (29, 100):
        yield training(True, 16384, nnz, 0.9, (K, N), torch.bfloat16)
    yield training(False, 16384, 29, 0.0, (K, PLAIN), torch.bfloat16)
    yield training(True, 8192, 29, 0.0, (K, N), torch.bfloat16)
    for nnz in (f"29{TENTH}", "40, 440 in 15%", 900, 100, 300):
        yield training(True, 16384, nnz, 0.0, (K, N), torch.bfloat16)
    yield training(False, 16384, 100, 0.0, (K, PLAIN), torch.bfloat16)


def error_of_tensors(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest error of a result or gradient, by norm: of 92 million pre-activations rounding lets some through that
    are 0 exactly, and their rows get another gradient in any precision."""
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(got, want, strict=True))


def training(gated: bool, M: int, nnz: int | str, shared: float, sizes: tuple[int, int], dtype: torch.dtype) -> Case:
    """Rows have nnz entries on average, of which neighbours share a part; in text some rows have more."""
    k, n = sizes
    names = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        cls: Any = nn.GatedMLP if gated else nn.MLP
        block = cls(k, n, "relu", bias=True, dtype=dtype, device=device)
        # Biases make the pattern, and are not trained.
        for name in names:
            block.get_submodule(name).bias.requires_grad_(False)
        for parameter in block.parameters():
            drawn = random_matrix(*parameter.shape, dtype, device, generator) if parameter.dim() == 2 else None
            parameter.data.zero_() if drawn is None else parameter.data.copy_(drawn.mul_(parameter.shape[1] ** -0.5))
        active = block.get_submodule(names[0])
        if isinstance(nnz, int) and not shared:
            x, active.bias.data = dense_inputs(M, nnz, active.weight.data, generator)
        elif isinstance(nnz, str) and nnz.endswith(TENTH):
            # One input is 0 in most rows, and lifts nearly all neurons of every tenth.
            active.weight.data[:, 0] = 0.25
            x, active.bias.data = dense_inputs(M, int(nnz.removesuffix(TENTH)), active.weight.data, generator)
            x[:, 0] = 0
            x[::10, 0] = 16
        else:
            options = {"dtype": dtype, "device": device, "generator": generator, "group": GROUP, "shared": shared}
            if nnz in TEXT:
                rows = trained_rows((M, n), layer=int(str(nnz)[:2]), device=device).sign()
            else:
                rows = random_rows((M, n), l0=counts(M, nnz), **options)
            with matmul_precision("high"):
                x, active.bias.data = inputs_for(rows, active.weight.data, steps=20)
        grad = random_matrix(M, k, dtype, device, generator)
        for _ in range(SETTLING if device.type == "cuda" else 0):
            both_passes(ours("auto"))(x, block, grad)
        return [(x, block, grad)]

    def both_passes(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def call(x: Tensor, block: Any, grad: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_(), *(block.get_submodule(name).weight for name in names)]
            out = forward(block, leaves[0])
            return (out.detach(), *torch.autograd.grad(out, leaves, grad))

        return call

    def dense(block: Any, x: Tensor) -> Tensor:
        hidden = F.relu(block.get_submodule(names[0])(x))
        return block.down_proj(hidden * block.up_proj(x) if gated else hidden)

    def fused(block: Any, x: Tensor) -> Tensor:
        weights = (block.get_submodule(name).weight for name in names)
        biases = {"gate_bias": block.gate_proj.bias, "up_bias": block.up_proj.bias, "down_bias": block.down_proj.bias}
        return gemm.gated_mlp(x, *weights, activation="relu", **biases)

    def ours(method: str) -> Callable[[Any, Tensor], Tensor]:
        def forward(block: Any, x: Tensor) -> Tensor:
            block.method = method
            return block(x)

        return forward

    def reference(x: Tensor, block: Any, grad: Tensor) -> tuple[Tensor, ...]:
        exact = type(block)(k, n, "relu", bias=True, dtype=torch.float64, device=x.device)
        exact.load_state_dict(block.state_dict())
        return both_passes(dense)(x.double(), exact, grad.double())

    providers = [
        Provider("gossamer", both_passes(ours("auto")), ours=True, capturable=True),
        Provider("gossamer, lists", both_passes(ours("gather")), ours=True, capturable=True),
        Provider("dense", both_passes(dense), capturable=True),
        Provider("torch.compile", both_passes(torch.compile(dense, dynamic=False)), devices=("cuda",)),
    ]
    if gated:
        providers.insert(2, Provider("gemm.gated_mlp", both_passes(fused), capturable=True))
    return Case(
        room="ffn",
        name="training" if gated else "training, plain",
        parameters={"M": M, "K": k, "N": n, "nnz": nnz, "shared": f"{shared:.0%}"},
        dtype=dtype,
        make=make,
        providers=tuple(providers),
        reference=reference,
        bytes=(4 * M * k + 2 * len(names) * n * k) * dtype.itemsize,
        flops=2 * M * k * (n + (8 if gated else 5) * int(str(nnz).partition(",")[0])),
        grad=True,
        energy=True,
        error=error_of_tensors,
        budget=2e-2 if dtype == torch.bfloat16 else None,
    )
