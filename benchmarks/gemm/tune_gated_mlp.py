"""Ways of a gated block's backward pass on Hopper beside each other and Liger's, for tuning.

Usage: python -m benchmarks.gemm.tune_gated_mlp [M,K,N ...]. Each candidate runs for a good half second at a time, as
training does; then one pass of each, kernel by kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import tune
from gossamer import gemm
from gossamer.gemm._triton import gated_mlp as kernels

CUDA = tune.DEVICE.type == "cuda"
SHAPES = [(1024, 4096, 14336), (4096, 4096, 14336), (16384, 4096, 14336), (4096, 2048, 5632), (4096, 3072, 8192)]


def candidates(m: int, k: int, n: int) -> tune.Calls:
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    dtype = torch.bfloat16 if CUDA else torch.float32

    def draw(rows: int, columns: int, scale: int) -> Tensor:
        return (torch.randn(rows, columns, device=tune.DEVICE, generator=generator) / scale**0.5).to(dtype)

    x, grad, gate, up, down = draw(m, k, 1), draw(m, k, 1), draw(n, k, k), draw(n, k, k), draw(k, n, n)
    leaves = [tensor.requires_grad_() for tensor in (x, gate, up, down)]

    def step(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad)

    ours = lambda: gemm.gated_mlp(*leaves)  # noqa: E731
    found: tune.Calls = {
        "gates beside": tune.under(lambda: step(ours()), (kernels, "choose_path", lambda *_: "hopper")),
        "gates after": tune.under(lambda: step(ours()), (kernels, "choose_path", lambda *_: "product")),
        "as it is": lambda: step(ours()),
    }
    found = tune.sound(found, step((torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()), 2e-2)
    found["forward alone"] = ours
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        liger = lambda: LigerSiLUMulFunction.apply(x @ gate.t(), x @ up.t()) @ down.t()  # noqa: E731
        found |= {"Liger": lambda: step(liger()), "Liger, forward alone": liger}
    except ImportError:
        print("liger-kernel is not installed")
    return found


def main(arguments: list[str]) -> None:
    shapes: Any = [tuple(map(int, argument.split(","))) for argument in arguments]
    results = tune.Results(__file__)
    for shape in shapes or (SHAPES if CUDA else [(8, 16, 24)]):
        calls = candidates(*shape)
        results.add(str(shape), tune.sustained(calls), against="as it is")
        for name, call in calls.items() if CUDA else ():
            results.add(f"{shape} {name}, kernels", tune.kernels(call))
    results.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
