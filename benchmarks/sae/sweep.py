"""`sae` at random: encode and decode, by activation, size and density."""

from __future__ import annotations

from random import Random

import torch

from benchmarks.engine import Case, log_uniform
from benchmarks.sae import bench_decode, bench_encode

RANGES = (
    "B 1-32,768, d_in 64-8,192, d_sae 512-131,072 in steps of 8, L0 1 to all (encode but ReLU: to half), log-uniform; "
    "at most 2^29 latents and 2^40 products, 2^38 in float32; bfloat16, float16, float32"
)


def draw(random: Random, device: torch.device, quick: bool) -> Case:
    """One shape, dtype and density of one operator."""
    small = quick or device.type == "cpu"
    while True:
        dtype = torch.float32 if small else random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = 2**38 if dtype == torch.float32 else 2**40
        B, D = log_uniform(random, 1, 256 if small else 32768), log_uniform(random, 64, 256 if small else 8192)
        # cuBLAS is slow at other widths, for dense PyTorch too.
        D, F = D // 8 * 8, log_uniform(random, 512, 4096 if small else 131072) // 8 * 8
        products = B * F * D
        if B * F <= 2**29 and products <= most:
            break
    kind = random.choice(["decode", "decode_ready", "relu", "relu_csr", "jumprelu", "topk", "batchtopk"])
    if kind.startswith("decode"):
        shape = (B, F, D, log_uniform(random, 1, F), dtype)
        return bench_decode.decode(kind, *shape) if kind == "decode" else bench_decode.ready(*shape)
    return bench_encode.encode(kind, B, D, F, log_uniform(random, 1, F if kind.startswith("relu") else F // 2), dtype)
