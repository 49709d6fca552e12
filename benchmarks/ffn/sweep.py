"""`ffn` at random: gated and plain blocks, by size, activation, density and what neighbouring rows share."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, log_uniform
from benchmarks.ffn import bench_block, bench_training

RANGES = (
    "M 1-32,768, K 128-8,192, N 256-32,768; ReLU, its square or JumpReLU; active neurons a row 1 to N, log-uniform; up "
    "to K / 10 neighbours share nothing, half or nine tenths of them; at most 2^28 elements and 2^40 products, 2^38 in "
    "float32; bfloat16, float16, float32; one in four in training, with ReLU and M from 256"
)


def draw(random: Random, device: torch.device, quick: bool) -> Case:
    """One shape, dtype and density of a block."""
    small, trained = quick or device.type == "cpu", random.random() < 0.25
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        few = (256, 512) if trained else (1, 64)
        M, K = log_uniform(random, few[0], few[1] if small else 32768), log_uniform(random, 128, 256 if small else 8192)
        N = log_uniform(random, 256, 1024 if small else 32768)
        products = M * N * K
        if M * N <= 2**28 and products <= most:
            break
    nnz = log_uniform(random, 1, N)
    kind, activation = random.choice(["gated", "plain"]), random.choice(["relu", "relu", "relu2", "jumprelu"])
    # A gate can make no fuller pattern at will.
    shared = random.choice([0, 0.5, 0.9]) if nnz <= K // 10 else 0
    if trained:
        return bench_training.training(kind == "gated", M, nnz, shared, (K, N), dtype)
    return bench_block.block_case(kind, M, nnz, shared, (K, N), dtype, steps=6, swept=True, activation=activation)
