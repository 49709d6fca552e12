"""The two ways of `sae.encode` without gradients beside each other, for `encode_path.packs_in_product`.

Usage: python -m benchmarks.sae.tune_encode. For each shape: a JumpReLU encoder in bfloat16 that packs from dense
pre-activations or, on Hopper, tile by tile (`gemm.linear_pack`), alone and followed by `sae.decode`, beside plain
PyTorch, in CUDA graphs of ten calls. The last shapes have more entries than slots: every row overflows.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks import tune
from benchmarks.gemm.bench_linear_pack import operands
from gossamer import gemm, sae
from gossamer._core.calls import Checked
from gossamer.sae import encode_path

# M, d_in, d_sae, L0
SHAPES = [
    *((m, 2304, 65536, 64) for m in (32, 128, 256, 512, 1024, 2048, 4096, 16384)),
    *((m, 2304, 16384, 64) for m in (128, 512, 1024, 4096)),
    (512, 768, 24576, 32),
    (4096, 768, 24576, 32),
    (4096, 2304, 65536, 1500),
    (4096, 2304, 16384, 4000),
]
SMALL = [(8, 32, 512, 8)]


def candidates(shape: tuple[int, int, int, int]) -> tuple[tune.Calls, tune.Calls]:
    """(those that encode, those that decode as well)"""
    m, d_in, d_sae, l0 = shape
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    dtype = torch.bfloat16 if tune.DEVICE.type == "cuda" else torch.float32
    x, weight, b_enc, threshold = operands(m, d_in, d_sae, l0, dtype, True, tune.DEVICE, generator)
    W_dec = torch.randn(d_sae, d_in, device=tune.DEVICE, generator=generator).to(dtype) / d_in**0.5
    W_enc = weight.t()

    def dense() -> Tensor:
        z = torch.addmm(b_enc.to(dtype), x, W_enc)
        return torch.where(z > threshold, z, 0)

    encoded: tune.Calls = {"product": lambda: torch.addmm(b_enc.to(dtype), x, W_enc), "dense": dense}
    both: tune.Calls = {"dense": lambda: dense() @ W_dec}
    for name, packs in (("dense source", False), ("tiles", True)):
        choice = (
            (encode_path, "packs_in_product", lambda m, weight, packs=packs: packs),
            (sys.modules["gossamer.sae.encode"], "_checked", Checked()),
        )
        ours = lambda: sae.encode(x, W_enc, b_enc, gemm.JumpReLU(threshold))  # noqa: E731
        encoded[name] = tune.under(ours, *choice)
        both[name] = tune.under(lambda: sae.decode(ours(), W_dec), *choice)
    return encoded, both


@torch.no_grad()
def main(shapes: list[tuple[int, int, int, int]]) -> None:
    results = tune.Results(__file__)
    for shape in shapes:
        encoded, both = candidates(shape)
        both = tune.sound(both, both["dense"]())
        results.add(f"{shape} encode", tune.replayed(encoded), against="dense")
        results.add(f"{shape} encode, decode", tune.replayed(both), against="dense")
    results.keep()


if __name__ == "__main__":
    main(SHAPES if tune.DEVICE.type == "cuda" else SMALL)
