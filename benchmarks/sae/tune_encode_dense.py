"""Tiles of the two passes over dense latents, and the kernels of a whole step beside those of compiled PyTorch.

Usage: python -m benchmarks.sae.tune_encode_dense [PART...]. Parts: tiles, step. Needs Triton: a GPU, or
GOSSAMER_INTERPRET=1. A JumpReLU of 4,096 rows and 65,536 latents of which half fire; tiles in CUDA graphs of ten calls.
"""

from __future__ import annotations

import itertools
import sys

import torch

from benchmarks import tune
from benchmarks.nn import bench_sae
from gossamer._core.launch import Tile
from gossamer.sae._triton import encode_dense
from gossamer.sae.records import SaeEncodeDense, SaeEncodeDenseBwd

CUDA = tune.DEVICE.type == "cuda"
M, D, N = (4096, 2304, 65536) if CUDA else (16, 32, 512)
DTYPE = torch.bfloat16 if CUDA else torch.float32


def tiles(results: tune.Results) -> None:
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    x = torch.ones(M, 1, device=tune.DEVICE, dtype=DTYPE)
    weight = torch.randn(1, N, device=tune.DEVICE, generator=generator).to(DTYPE)
    grad = torch.randn(M, N, device=tune.DEVICE, generator=generator).to(DTYPE)
    bias, threshold = torch.zeros(N, device=tune.DEVICE), torch.full((N,), 1e-3, device=tune.DEVICE)
    grad_l0 = torch.ones(M, device=tune.DEVICE)
    given = SaeEncodeDense(x, weight, bias, None, threshold, "jumprelu", 0, 0.25, None, False)
    acts = encode_dense.encode_dense(given)[0]
    ways = {
        "FORWARD": lambda: encode_dense.encode_dense(given)[1:],
        "BACKWARD": lambda: encode_dense.encode_dense_bwd_(
            SaeEncodeDenseBwd(grad, acts, grad_l0, threshold, 0.25, False)
        ),
    }
    for name, call in ways.items():
        want = call()
        calls: tune.Calls = {"as shipped": call, "a copy of as many bytes": lambda: grad.clone()}
        for rows, columns, stages, warps in itertools.product((4, 8, 16), (256, 512), (1, 3, 4), (4, 8)):
            if rows * columns > 256 * 4 * warps:
                continue
            tile = Tile({"ROWS": rows, "COLUMNS": columns, "STAGES": stages}, warps)
            for programs in (16, 32):
                calls[f"{rows} x {columns}, {stages} stages, {warps} warps, {programs} programs"] = tune.under(
                    call, (encode_dense, name, tile), (encode_dense, "PROGRAMS", programs)
                )
        # Gradients are computed in place: each call changes the inputs of the next, and only l0 and its like compare.
        calls = tune.sound(calls, want) if name == "FORWARD" else calls
        results.add(name, tune.replayed(calls), best=12, against="as shipped")


def step(results: tune.Results) -> None:
    case = bench_sae._train("jumprelu", M, D, N, N // 2, DTYPE)
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    ours, _, compiled = case.providers
    inputs = case.make(tune.DEVICE, generator)[0]
    prepared = ours.prepare(*inputs)
    calls: tune.Calls = {"gossamer": lambda: ours.call(*prepared), "compiled": lambda: compiled.call(*inputs)}
    for name, call in calls.items():
        for _ in range(4):
            call()
        results.add(f"step, {name}", tune.kernels(call), best=14)
    results.add("step", tune.sustained(calls), against="compiled")


PARTS = {"tiles": tiles, "step": step}

if __name__ == "__main__":
    results = tune.Results(__file__)
    for part in sys.argv[1:] or PARTS:
        PARTS[part](results)
    results.keep()
