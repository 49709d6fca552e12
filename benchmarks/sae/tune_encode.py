"""The two ways of `sae.encode` without gradients beside each other, for `encode_path.packs_in_product`.

Usage: python benchmarks/sae/tune_encode.py [--rounds N]. Needs a Hopper GPU. For each shape: a JumpReLU encoder in
bfloat16 that packs from dense pre-activations or tile by tile (`gemm.linear_pack`), alone and followed by `sae.decode`,
beside plain PyTorch. Each is replayed from a CUDA graph of ten calls, in random order; the table has medians in
microseconds. The last shapes have more entries than slots: every row overflows. Set OUT to a folder to keep the
numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gemm.bench_linear_pack import _operands
from benchmarks.sae.tune_decode import replayed
from gossamer import gemm, sae
from gossamer.cli.bench.command import command_line
from gossamer.cli.environment import provenance
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


def ways(x: Tensor, W_enc: Tensor, b_enc: Tensor, threshold: Tensor, W_dec: Tensor) -> dict[str, Callable[[], Any]]:
    """Calls by name. The choice is made at the first call of a graph, before it is recorded."""

    def encoded(packs: bool, decodes: bool) -> Callable[[], Any]:
        def call() -> Any:
            choice, encode_path.packs_in_product = encode_path.packs_in_product, lambda m, weight: packs
            sys.modules["gossamer.sae.encode"]._checked.clear()  # type: ignore[attr-defined]
            rows = sae.encode(x, W_enc, b_enc, activation=gemm.JumpReLU(threshold))
            encode_path.packs_in_product = choice
            return sae.decode(rows, W_dec) if decodes else rows

        return call

    def dense() -> Tensor:
        z = torch.addmm(b_enc, x, W_enc)
        return torch.where(z > threshold, z, 0)

    found: dict[str, Callable[[], Any]] = {"product": lambda: torch.addmm(b_enc, x, W_enc), "dense encode": dense}
    for name, packs in (("dense source", False), ("tiles", True)):
        found[f"{name} encode"] = encoded(packs, False)
    found["dense both"] = lambda: dense() @ W_dec
    for name, packs in (("dense source", False), ("tiles", True)):
        found[f"{name} both"] = encoded(packs, True)
    return found


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, float]:
    m, d_in, d_sae, l0 = shape
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, b_enc, threshold = _operands(m, d_in, d_sae, l0, torch.bfloat16, True, torch.device("cuda"), generator)
    W_dec = torch.randn(d_sae, d_in, device="cuda", generator=generator).bfloat16() / d_in**0.5
    calls = ways(x, weight.t(), b_enc, threshold, W_dec)
    want = calls["dense both"]().float()
    for name, call in calls.items():
        if "both" in name:
            error = (call().float() - want).norm() / want.norm()
            assert error < 0.01, f"{shape} {name}: {error}"
    return replayed(calls, rounds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each graph (default 5)")
    rounds = parser.parse_args().rounds
    results: dict[str, dict[str, float]] = {}
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        found = results[str(shape)] = measure(shape, rounds)
        if len(results) == 1:
            print(" " * 28, *(f"{name:>19}" for name in found))
        print(f"{shape!s:28}", *(f"{time:19.1f}" for time in found.values()), flush=True)
        torch.cuda.empty_cache()
    if "OUT" in os.environ:
        command = command_line("python benchmarks/sae/tune_encode.py", sys.argv[1:])
        record = provenance(command, Path(__file__).parent, torch.device("cuda", 0)) | {"microseconds": results}
        (Path(os.environ["OUT"]) / "tune_encode.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
