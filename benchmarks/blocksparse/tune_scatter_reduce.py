"""Times `blocksparse.scatter_reduce` with other tiles, on a GPU; prints the fastest of each shape.

    python -m benchmarks.blocksparse.tune_scatter_reduce

With `--check` it compares results at one small shape instead, on whatever device there is.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse
from gossamer.blocksparse._triton import scatter_reduce as kernels

SHAPES = [(1024, 64), (4096, 64), (8192, 64), (4096, 16), (4096, 128)]
TILES = [
    kernels.Tile(lines, step, warps)
    for lines, step, warps in itertools.product((4, 8, 16), (8, 16), (1, 2, 4))
    if lines * step >= 32 * warps
]


def operands(n: int, block: int, dtype: torch.dtype, device: torch.device):
    generator = torch.Generator(device).manual_seed(0)
    mask = peers.random_mask(n, block, 50, device, generator)
    layout, full = (peers.layout_of(m, n) for m in (mask, torch.ones_like(mask)))
    index = torch.randint(n, (peers.BATCH, n, n), device=device, generator=generator)
    src = peers.random_dense(n, mask, dtype, generator)
    return full, blocksparse.from_dense(index, layout), blocksparse.from_dense(src, layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for (n, block), dim in itertools.product([(32, 16)] if check else SHAPES, (-1, -2)):
        full, index, src = operands(n, block, torch.float32 if check else torch.bfloat16, device)
        found, wanted = [], None
        for tile in TILES:
            kernels.TILES[1 if dim == -2 else 2] = tile
            call = lambda: blocksparse.scatter_reduce(full, dim, index, src, "sum")  # noqa: E731
            if check:
                out = call().to_dense()
                wanted = out if wanted is None else wanted
                torch.testing.assert_close(out, wanted)
                continue
            from triton.testing import do_bench

            found.append((do_bench(call, return_mode="median"), tile))
        for time, tile in sorted(found, key=lambda pair: pair[0])[:3]:
            print(f"n {n}, block {block}, dim {dim}: {1000 * time:.0f} us with {tile}")
    print("checked" if check else "done")


if __name__ == "__main__":
    main()
