"""`ffn` at random: gated and plain blocks, by size, density and what neighbouring rows share."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.ffn import bench_block
from gossamer.cli.bench import Case, log_uniform

RANGES = (
    "M 1-32,768, K 128-8,192, N 256-32,768, active neurons a row 1 to K / 10, log-uniform; neighbours share nothing, "
    "half or nine tenths; at most 2^28 elements and 2^40 products, 2^38 in float32; bfloat16, float16, float32"
)


def draw(random: Random, device: torch.device, quick: bool) -> Case:
    """One shape, dtype and density of a block."""
    small = quick or device.type == "cpu"
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        M, K = log_uniform(random, 1, 64 if small else 32768), log_uniform(random, 128, 256 if small else 8192)
        N = log_uniform(random, 256, 1024 if small else 32768)
        products = M * N * K
        if M * N <= 2**28 and products <= most:
            break
    # A gate can make no fuller pattern at will.
    nnz = log_uniform(random, 1, max(K // 10, 1))
    return bench_block.block_case(
        random.choice(["gated", "plain"]), M, nnz, random.choice([0, 0.5, 0.9]), (K, N), dtype, steps=6, swept=True
    )
