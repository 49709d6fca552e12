"""Tiles of `blocksparse.scatter` beside each other, for `TILES` beside the kernel.

Usage: python -m benchmarks.blocksparse.tune_scatter_reduce. Needs a GPU; with GOSSAMER_INTERPRET=1 it compares the
tiles at a small size and measures nothing of worth. Sums along the rows and the columns of a full matrix, of sources in
half of its blocks, bfloat16. "shipped" goes as it always does, on Hopper by another kernel; each tile has to give what
that gives.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks import tune
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse
from gossamer.blocksparse import scatter_path
from gossamer.blocksparse._triton import scatter_reduce as kernels

CUDA = tune.DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
# n, block
SHAPES = [(1024, 64), (4096, 64), (8192, 64), (4096, 16), (4096, 128)]
SMALL = [(32, 16)]
TILES = [
    kernels.Tile(lines, step, warps, room << 10)
    for lines, step, warps in ((1, 16, 1), (1, 32, 1), (1, 64, 2), (2, 16, 1), (2, 32, 2), (4, 8, 1), (8, 8, 2))
    for room in (96, 192, 384)
]


def calls(n: int, block: int, dim: int) -> tune.Calls:
    """By tile, and as shipped."""
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    mask = peers.random_mask(n, block, 50, tune.DEVICE, generator)
    layout, whole = (peers.layout_of(m, n) for m in (mask, torch.ones_like(mask)))
    index = torch.randint(n, (peers.BATCH, n, n), device=tune.DEVICE, generator=generator)
    index, src = (blocksparse.from_dense(x, layout) for x in (index, peers.random_dense(n, mask, DTYPE, generator)))
    call = lambda: blocksparse.scatter(whole, dim, index, src, "sum").values  # noqa: E731
    axis = 1 if dim == -2 else 2
    lines: tune.Change = scatter_path, "path_for", lambda *_: "lines"
    changed: dict[str, tune.Change] = {str(tile): (kernels, "TILES", kernels.TILES | {axis: tile}) for tile in TILES}
    return {"shipped": call, **{name: tune.under(call, lines, change) for name, change in changed.items()}}


def main(shapes: list[tuple[int, int]]) -> None:
    results = tune.Results(__file__)
    for (n, block), dim in itertools.product(shapes, (-1, -2)):
        found = calls(n, block, dim)
        found = tune.sound(found, found["shipped"]())
        results.add(f"n {n}, block {block}, dim {dim}", tune.replayed(found), best=4, against="shipped")
    results.keep()


if __name__ == "__main__":
    main(SHAPES if CUDA else SMALL)
