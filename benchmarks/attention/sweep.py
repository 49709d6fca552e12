"""`attention` at random: selection, attention over selected keys, in inference and training, and decoding."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.attention import bench_select_topk, bench_sparse_attention
from benchmarks.engine import Case, log_uniform

RANGES = (
    "T 1,024-32,768, k 16 to half of T, heads 1-32 in groups of 1-8, D 32-128, batch 1-4, log-uniform; selections that "
    "drift or are drawn for each query; at most 2^34 scores; bfloat16, float16. Beside dense attention over all keys "
    "where drifting queries take an eighth of at least 8,192, else over the selection as a mask. Selection: 1-8 heads "
    "of 32-128, beside scores in memory and torch.topk, float32 too"
)
WILD = "T from 64, and attention in float32, at most 2^32 scores"


def pays(T: int, k: int, kind: str) -> bool:
    """Whether selected attention is to be faster than attention over all keys, which computes something else."""
    return kind == "drifting" and T >= 8192 and 8 * k <= T


def draw(random: Random, device: torch.device, quick: bool, wild: bool = False) -> Case:
    """One shape, dtype and selection."""
    small = quick or device.type == "cpu"
    shortest = 64 if wild or small else 1024
    dtypes = [torch.bfloat16, torch.float16, *([torch.float32] if wild else [])]
    if random.random() < 0.2:
        return _selection(random, small, shortest)
    while True:
        dtype = torch.float32 if small else random.choice(dtypes)
        most = 2**32 if dtype == torch.float32 else 2**34
        T, B = log_uniform(random, shortest, 256 if small else 32768), random.choice([1, 1, 1, 2, 4])
        G, group = log_uniform(random, 1, 2 if small else 16), random.choice([1, 2, 4, 8])
        if B * G * group * T * T <= most and G * group <= 32:
            break
    D, k = random.choice([32, 64, 96, 128]), log_uniform(random, 16, T // 2)
    if random.random() < 0.2:
        return bench_sparse_attention.decode_case(T, G * group, G, D, k, dtype, B)
    kind, training = random.choice(["drifting", "drifting", "random"]), random.random() < 0.5
    beside = bench_sparse_attention.DENSE if pays(T, k, kind) else bench_sparse_attention.MASKED
    return bench_sparse_attention.attention_case(T, G * group, G, D, k, dtype, training, B, kind, beside=beside)


def _selection(random: Random, small: bool, shortest: int) -> Case:
    dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
    T = log_uniform(random, shortest, 256 if small else 32768)
    k, heads, d = log_uniform(random, 16, T // 2), random.choice([1, 2, 4, 8]), random.choice([32, 64, 128])
    return bench_select_topk.select_case(T, k, dtype, 1, heads, d)
