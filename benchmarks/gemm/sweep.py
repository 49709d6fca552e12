"""`gemm` at random: gated layers, and layers whose active entries are packed."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, log_uniform
from benchmarks.gemm import bench_linear_glu, bench_linear_pack, bench_mlp

RANGES = (
    "linear_glu and gated_mlp: M 1-32,768, K 256-16,384, N 1,024-32,768; linear_pack: N to 131,072, L0 1 to N / 64, "
    "at least 2^30 products; K and N in steps of 64, at least 2^23 weights; log-uniform; at most 2^40 products, 2^38 "
    "in float32; bfloat16, float16, float32"
)
WILD = "K and N from 64, odd ones but for gated_mlp, L0 1 to half"


def draw(random: Random, device: torch.device, quick: bool, wild: bool = False) -> Case:
    """One shape, dtype and, where there is one, density of one operator."""
    small = quick or device.type == "cpu"
    wild = wild or small
    kind = random.choice(["linear_glu", "gated_mlp", "linear_pack_relu", "linear_pack_jumprelu"])
    step = 16 if kind == "gated_mlp" else 1
    step, fewest = (step, 1) if wild else (64, 2**30 if "pack" in kind else 1)
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        M = log_uniform(random, 1, 256 if small else 32768)
        K = log_uniform(random, 64 if wild else 256, 256 if small else 16384, step)
        widest = 1024 if small else 131072 if "pack" in kind else 32768
        N = log_uniform(random, 64 if wild else 1024, widest, step)
        products = M * K * N
        if fewest <= products <= most and M * N <= 2**29 and (wild or K * N >= 2**23):
            break
    if kind == "linear_glu":
        return bench_linear_glu.linear_glu(M, K, N, dtype)
    if kind == "gated_mlp":
        return bench_mlp.mlp(M, K, N, dtype)
    entries = log_uniform(random, 1, N // (2 if wild else 64))
    return bench_linear_pack.linear_pack(kind, M, K, N, entries, dtype, kind.endswith("jumprelu"))
