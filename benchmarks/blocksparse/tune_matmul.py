"""Tiles of `blocksparse.matmul` beside each other and a dense product, for `tile_of` beside the kernel.

Usage: python -m benchmarks.blocksparse.tune_matmul [N ...]. Needs a GPU; with GOSSAMER_INTERPRET=1 it compares the
tiles at a small size and measures nothing of worth. Batch 4, bfloat16. Three products, each at densities 1, 0.75 and
0.25: all three matrices block-sparse (SSS), a block-sparse result of dense operands (SDD), and block-sparse times dense
(DSD). Each tile has to give what the shipped one gives, at a small size. Beside the times stand the GFLOP of the pairs
of blocks that are multiplied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks import tune
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, matmul

# The package's attribute of this name is the function.
kernels = import_module("gossamer.blocksparse._triton.matmul")
CUDA = tune.DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
BATCH, DENSITIES = 4 if CUDA else 1, (1.0, 0.75, 0.25)
SIZES, BLOCKS = [1024, 4096, 8192], (64, 128, 32, 16)
SMALL = [32]


def tiles(block: int) -> Iterator[Any]:
    """Candidates for square blocks: (columns, step along K, warps, stages). Where blocks are found through lists the
    compiler spends every other stage on their indices: 3 and 4 stages are two buffers, 5 are three."""
    for columns in (64, 128, 256):
        for step in sorted({min(step, block) for step in (32, 64)}):
            for warps, stages in ((4, 3), (4, 4), (4, 5), (8, 3), (8, 4), (8, 5)):
                if columns >= block and block * columns <= warps * 128 * 64:
                    yield kernels.Tile(columns, step, warps, stages)


def products(n: int, block: int, density: float) -> dict[str, tuple[Callable[[], Tensor], float]]:
    """Name -> (call, operations)."""
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    shape = (BATCH, n // block, n // block)

    def layout() -> Layout:
        return Layout.random(shape, block, density, generator=generator, device=tune.DEVICE)

    def dense() -> Tensor:
        return torch.randn(BATCH, n, n, device=tune.DEVICE, generator=generator).to(DTYPE)

    def values(*operands: Any) -> Tensor:
        out = matmul(*operands)
        return out.values if isinstance(out, BlockSparseTensor) else out

    x, y, of_out = dense(), dense(), layout()
    a, b = from_dense(x, layout()), from_dense(y, layout())
    meetings = (a.layout.to_dense().float() @ b.layout.to_dense().float() * of_out.to_dense()).sum().item()
    once = 2.0 * block**2 * n
    return {
        "SSS": (lambda: values(a, b, of_out), 2.0 * block**3 * meetings),
        "SDD": (lambda: values(x, y, of_out), once * int(of_out.nnz)),
        "DSD": (lambda: values(a, y), once * int(a.layout.nnz)),
        "dense": (lambda: x @ y, 2.0 * BATCH * n**3),
    }


def by_tile(call: Callable[[], Tensor], candidates: dict[str, Any]) -> tune.Calls:
    changes = {name: (kernels, "tile_of", lambda *_, tile=tile: tile) for name, tile in candidates.items()}
    return {"shipped": call, **{name: tune.under(call, change) for name, change in changes.items()}}


def right(block: int) -> dict[str, Any]:
    """The tiles that all three products come out right with, by name."""
    # The interpreter takes its time, and knows neither warps nor stages.
    found = {str(tile): tile for tile in list(tiles(block))[:: 1 if CUDA else 6]}
    for name, (call, _) in products((8 if CUDA else 2) * block, block, 0.5).items():
        if name != "dense":
            sound = tune.sound(by_tile(call, found), call())
            found = {tile: found[tile] for tile in sound if tile != "shipped"}
    return found


def main(sizes: list[int], blocks: tuple[int, ...]) -> None:
    results = tune.Results(__file__)
    for block in blocks:
        candidates = right(block)
        for n in sizes:
            for density in DENSITIES:
                for name, (call, operations) in products(n, block, density).items():
                    label = f"n {n}, block {block}, density {density}, {name}"
                    given = {} if name == "dense" else candidates
                    results.add(label, tune.eager(by_tile(call, given)), against="shipped")
                    results.note(label, gflop=operations * 1e-9)
    results.keep()


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or (SIZES if CUDA else SMALL), BLOCKS if CUDA else BLOCKS[-1:])
