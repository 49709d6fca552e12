"""`blocksparse` at random: products, softmax, transposition and attention, by size, block and sparsity."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

from benchmarks.blocksparse import bench_attention, bench_matmul, bench_softmax
from benchmarks.engine import Case, log_uniform

RANGES = (
    "half, 75, 90 or 95% missing; products of n 1,024-8,192 in blocks of 64 or 128; softmax and transposition of n "
    "1,024-8,192 in blocks of 16 to 128; attention of T 1,024-16,384, heads 1-32, D 64 or 128, in blocks of 64 or 128; "
    "log-uniform, whole blocks; bfloat16, float16, float32"
)
WILD = "n and T from 128, blocks of 16 and 32 in products, 0, 2 and 25% missing"
COPIES = 16
"""Copies of the inputs at most, which then may fit in the last cache, for every provider alike. To make and to capture
hundreds of small ones would take longer than to time them."""


def draw(random: Random, device: torch.device, quick: bool, wild: bool = False) -> Case:
    """One shape, block, sparsity and dtype of one operator, beside dense PyTorch.

    The other peers search tiles or compile for each shape anew, which takes seconds: `python -m benchmarks
    blocksparse` has them.
    """
    small = quick or device.type == "cpu"
    case = _case(random, small, wild or small)
    return replace(case, providers=tuple(p for p in case.providers if p.ours or p.name.startswith("dense")))


def _case(random: Random, small: bool, wild: bool) -> Case:
    dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
    kind = random.choice(["matmul", "mixed", "dense", "softmax", "transpose", "attention"])
    missing = random.choice([0, 2, 25, 50, 75, 90, 95] if wild else [50, 75, 90, 95])
    if kind == "attention":
        block = random.choice([64, 128])
        T = log_uniform(random, 2 * block if wild else 1024, 512 if small else 16384, block)
        heads, D = log_uniform(random, 1, 2 if small else 32), random.choice([64, 128])
        return bench_attention.attention_case(T, heads, D, block, 100 - missing, dtype, random.random() < 0.5)
    block = random.choice([16, 32, 64, 128] if wild or kind in ("softmax", "transpose") else [64, 128])
    n = log_uniform(random, 128 if wild else 1024, 512 if small else 8192, block)
    if kind == "mixed":
        return bench_matmul.mixed_case(
            n, block, missing, dtype, random.choice(["SSD", "SDS", "DSS", "DDS", "DSD"]), COPIES
        )
    if kind == "softmax":
        return bench_softmax.softmax_case(n, block, missing, dtype, random.random() < 0.5, COPIES)
    case = {
        "matmul": bench_matmul.matmul_case,
        "dense": bench_matmul.dense_case,
        "transpose": bench_softmax.transpose_case,
    }
    return case[kind](n, block, missing, dtype, COPIES)
