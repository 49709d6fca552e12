"""`sae` at random: encode and decode, by activation, size and density."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, beside_dense, log_uniform
from benchmarks.sae import bench_decode, bench_encode

RANGES = (
    "B 1-32,768 (BatchTopK: from 512), d_in 256-8,192 and d_sae 4,096-131,072 in steps of 64, at least 2^23 weights, "
    "L0 or k 1 to d_sae / 128, log-uniform; at most 2^29 latents and 2^40 products, 2^38 in float32; encode: at least "
    "2^30, as many slots as entries 2^37 in float32; bfloat16, float16, float32"
)
WILD = "d_in from 64, d_sae from 512, steps of 8, L0 1 to all (encode but ReLU: to half), any B and products"


def draw(random: Random, device: torch.device, quick: bool, wild: bool = False) -> Case:
    """One shape, dtype and density of one operator."""
    small = quick or device.type == "cpu"
    wild = wild or small
    kind = random.choice(["decode", "decode_ready", "relu", "relu_csr", "jumprelu", "topk", "batchtopk"])
    least, step = (1, 8) if wild else (512 if kind == "batchtopk" else 1, 64)
    fewest = 1 if wild or kind.startswith("decode") else 2**37 if kind == "relu_csr" else 2**30
    while True:
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32])
        if small or (kind == "relu_csr" and not wild):
            # The host waits, and a product in 16 bits takes no longer than what it does then.
            dtype = torch.float32
        most = 2**38 if dtype == torch.float32 else 2**40
        B = log_uniform(random, least, 256 if small else 32768)
        # cuBLAS is slow at other widths, for dense PyTorch too.
        D = log_uniform(random, 64 if wild else 256, 256 if small else 8192, step)
        F = log_uniform(random, 512 if wild else 4096, 4096 if small else 131072, step)
        products = B * F * D
        if B * F <= 2**29 and fewest <= products <= most and (wild or F * D >= 2**23):
            break
    entries = log_uniform(random, 1, F if wild else F // 128)
    if kind.startswith("decode"):
        shape = (B, F, D, entries, dtype)
        case = bench_decode.decode(kind, *shape) if kind == "decode" else bench_decode.ready(*shape)
        return case if wild else beside_dense(case)
    return bench_encode.encode(kind, B, D, F, entries if kind.startswith("relu") else min(entries, F // 2), dtype)
