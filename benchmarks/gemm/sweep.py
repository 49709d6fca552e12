"""`gemm` at random: gated layers, and layers whose active entries are packed."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, log_uniform
from benchmarks.gemm import bench_linear_glu, bench_linear_pack, bench_mlp

RANGES = (
    "linear_glu and gated_mlp: M 1-32,768, K 64-16,384, N 64-32,768 (gated_mlp: multiples of 16); linear_pack: N to "
    "131,072, L0 1 to half; log-uniform; at most 2^40 products, 2^38 in float32; bfloat16, float16, float32"
)


def draw(random: Random, device: torch.device, quick: bool) -> Case:
    """One shape, dtype and, where there is one, density of one operator."""
    small = quick or device.type == "cpu"
    kind = random.choice(["linear_glu", "gated_mlp", "linear_pack_relu", "linear_pack_jumprelu"])
    step = 16 if kind == "gated_mlp" else 1
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        M = log_uniform(random, 1, 256 if small else 32768)
        K = log_uniform(random, 64, 256 if small else 16384, step)
        N = log_uniform(random, 64, 1024 if small else 131072 if "pack" in kind else 32768, step)
        products = M * K * N
        if products <= most and M * N <= 2**29:
            break
    if kind == "linear_glu":
        return bench_linear_glu.linear_glu(M, K, N, dtype)
    if kind == "gated_mlp":
        return bench_mlp.mlp(M, K, N, dtype)
    return bench_linear_pack.linear_pack(
        kind, M, K, N, log_uniform(random, 1, N // 2), dtype, kind.endswith("jumprelu")
    )
