"""Tiles of `blocksparse.matmul` beside each other and a dense product, for `tile_of` beside the kernel.

Usage: python benchmarks/blocksparse/tune_matmul.py [--sizes N ...] [--blocks B ...]. Needs a GPU; with
GOSSAMER_INTERPRET=1 it checks the tiles at a small size and measures nothing. Batch 4, bfloat16. Three products, each
at densities 1, 0.75 and 0.25: all three matrices block-sparse (SSS), a block-sparse result of dense operands (SDD), and
block-sparse times dense (DSD). Medians in milliseconds, and in TFLOP/s of the pairs of blocks that are multiplied. Set
OUT to a folder to keep the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import INTERPRET
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, matmul

# The package's attribute of this name is the function.
kernels = import_module("gossamer.blocksparse._triton.matmul")
Tile = kernels.Tile
BATCH, DENSITIES = 4, (1.0, 0.75, 0.25)
DEVICE = torch.device("cpu" if INTERPRET else "cuda")
DTYPE = torch.float32 if INTERPRET else torch.bfloat16


def tiles(block: int) -> Iterator[Any]:
    """What is tried for square blocks: (columns, step along K, warps, stages). Where blocks are found through lists the
    compiler spends every other stage on their indices: 3 and 4 stages are two buffers, 5 are three."""
    for columns in (64, 128, 256):
        for step in sorted({min(step, block) for step in (32, 64)}):
            for warps, stages in ((4, 3), (4, 4), (4, 5), (8, 3), (8, 4), (8, 5)):
                if columns >= block and block * columns <= warps * 128 * 64:
                    yield Tile(columns, step, warps, stages)


def products(n: int, block: int, density: float) -> dict[str, tuple[Callable[[], Any], float]]:
    """Name -> (call, operations)."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (BATCH, n // block, n // block)

    def layout() -> Layout:
        return Layout.random(shape, block, density, generator=generator, device=DEVICE)

    def dense() -> Tensor:
        return torch.randn(BATCH, n, n, device=DEVICE, generator=generator).to(DTYPE)

    x, y, of_out = dense(), dense(), layout()
    a, b = from_dense(x, layout()), from_dense(y, layout())
    meetings = (a.layout.to_dense().float() @ b.layout.to_dense().float() * of_out.to_dense()).sum().item()
    once = 2.0 * block**2 * n
    return {
        "SSS": (lambda: matmul(a, b, of_out), 2.0 * block**3 * meetings),
        "SDD": (lambda: matmul(x, y, of_out), once * int(of_out.nnz)),
        "DSD": (lambda: matmul(a, y), once * int(a.layout.nnz)),
        "dense": (lambda: x @ y, 2.0 * BATCH * n**3),
    }


def timed(call: Callable[[], Any], rounds: int = 5) -> float:
    """Median milliseconds."""
    call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def result(call: Callable[[], Any]) -> Tensor:
    out = call()
    return (out.values if isinstance(out, BlockSparseTensor) else out).float()


def sound(block: int, tile: Any) -> bool:
    """Whether a tile gives what the shipped one gives, at a small size."""
    n = 2 * block if INTERPRET else 8 * block
    shipped = kernels.tile_of
    for name, (call, _) in products(n, block, 0.5).items():
        if name == "dense":
            continue
        want = result(call)
        kernels.tile_of = lambda *_: tile
        try:
            error = float((result(call) - want).norm() / want.norm().clamp_min(1e-30))
        except Exception as problem:
            print(f"block {block} {tile} {name}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
            return False
        finally:
            kernels.tile_of = shipped
        if not error < 1e-2:
            print(f"block {block} {tile} {name}: error {error:.1e}", flush=True)
            return False
    return True


def measure(n: int, block: int, candidates: list[Any]) -> list[dict[str, Any]]:
    found = []
    shipped = kernels.tile_of
    for density in DENSITIES:
        for name, (call, flops) in products(n, block, density).items():
            for tile in [None] if name == "dense" else [None, *candidates]:
                kernels.tile_of = shipped if tile is None else (lambda *_, tile=tile: tile)
                try:
                    ms = timed(call)
                finally:
                    kernels.tile_of = shipped
                entry = {"n": n, "block": block, "density": density, "product": name, "ms": ms}
                found.append(entry | {"tile": "shipped" if tile is None else str(tile), "tflops": flops / ms * 1e-9})
                print(f"n {n} b {block} d {density} {name} {found[-1]['tile']}: {ms:.3f} ms, ", end="")
                print(f"{found[-1]['tflops']:.0f} TFLOP/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 32, 16])
    given = parser.parse_args()
    found = []
    for block in given.blocks:
        candidates = [tile for tile in tiles(block) if sound(block, tile)]
        print(f"block {block}: {len(candidates)} tiles are sound", flush=True)
        for n in () if INTERPRET else given.sizes:
            found += measure(n, block, candidates)
    if "OUT" in os.environ and found:
        Path(os.environ["OUT"], "tune-blocksparse-matmul.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
