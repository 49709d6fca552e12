"""`rowsparse` at random: the product of packed rows, their packing, and products at the entries of a pattern."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, beside_dense, log_uniform
from benchmarks.rowsparse import bench_matmul, bench_pack, bench_sampled_matmul

RANGES = (
    "M 1-32,768, N 1,024-131,072 and D 256-8,192 in steps of 64, at least 2^24 weights, entries a row 1 to N / 128, "
    "log-uniform; at most 2^29 elements and 2^40 products, 2^38 in float32; bfloat16, float16, float32"
)
WILD = "N and D from 64 in steps of 8, entries a row 1 to all"


def draw(random: Random, device: torch.device, quick: bool, wild: bool = False) -> Case:
    """One shape, dtype and density of one operator."""
    small = quick or device.type == "cpu"
    wild = wild or small
    step = 8 if wild else 64
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        M = log_uniform(random, 1, 256 if small else 32768)
        # cuBLAS is slow at other widths, for dense PyTorch too.
        D = log_uniform(random, 64 if wild else 256, 256 if small else 8192, step)
        N = log_uniform(random, 64 if wild else 1024, 4096 if small else 131072, step)
        products = M * N * D
        if M * N <= 2**29 and products <= most and (wild or N * D >= 2**24):
            break
    nnz = log_uniform(random, 1, N if wild else N // 128)
    kind = random.choice(["matmul", "sampled_matmul", "pack"])
    if kind == "pack":
        return bench_pack.pack(M, N, nnz, dtype)
    case = (bench_matmul.matmul if kind == "matmul" else bench_sampled_matmul.sampled_matmul)(M, N, D, nnz, dtype)
    return case if wild else beside_dense(case)
