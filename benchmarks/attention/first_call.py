"""Seconds of the first call of `nn.GatedSparseAttention`, kernels compiled included, forward and backward.

Usage: python -m benchmarks.attention.first_call [T]. It compiles into an empty folder, so that nothing is remembered
from runs before, and prints the seconds of the first and of the second call, and how many kernels were compiled.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from gossamer.nn import GatedSparseAttention


def seconds(layer: GatedSparseAttention, x: torch.Tensor, training: bool) -> float:
    """Of one call."""
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        out = layer(x)
        if training:
            out.sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(T: int) -> None:
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    size = (2048, 16) if cuda else (64, 4)
    layer = GatedSparseAttention(*size, k_base=T // 4, k_min=T // 8, k_max=T // 2).to(device, dtype)
    x = torch.randn(1, T, size[0], device=device, dtype=dtype)
    torch.nn.functional.linear(x, layer.q_proj.weight)  # cuBLAS and the device itself are begun
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for training in (False, True):
            times = [seconds(layer, x, training) for _ in range(2)]
            kernels = list(Path(folder).rglob("*.cubin"))
            print(
                f"T {T}, {'training' if training else 'inference'}: first call {times[0]:.2f} s, second "
                f"{times[1] * 1e3:.2f} ms, {len(kernels)} kernels compiled so far",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096 if torch.cuda.is_available() else 128)
