"""A linear layer and the packing of what it activates, block by block of rows.

The library's product fills a buffer with the pre-activations of a block of rows, and a kernel packs them from there:
a block is small enough to be in the L2 still, where that leaves rows enough for a fast product. So the dense matrix
never exists, the product runs at the library's speed in every dtype and layout, and the packing reads the L2. Hopper
has a kernel of its own, in `_gluon`, for 16-bit operands whose rows begin on 16 bytes; it is taken where a model says
that it is faster.
"""

import torch
from torch import Tensor

from gossamer._core import launch
from gossamer.gemm.linear_pack_path import choose_path, packs
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse._triton.twell import gather_tiles, launch_pack_twell
from gossamer.rowsparse.formats import empty_twell


def linear_pack(call: LinearPack) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans)."""
    x, weight, bias, threshold, tile, slots, capacity, squared = call
    tiles = empty_twell(x, x.shape[0], weight.shape[0], tile, slots)
    if tiles[2].numel():
        if choose_path(call) == "blocks":
            by_library(x, weight, bias, threshold, tile, tiles)
        else:
            from gossamer.gemm._gluon import linear_pack as hopper

            hopper.launch_linear_pack(x, weight, bias, threshold, tiles)
    values, indices, spans = gather_tiles(*tiles, tile, capacity)
    if squared:
        values *= values
    return values, indices, spans


def launch_linear_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    tile: int,
    out: tuple[Tensor, Tensor, Tensor],
    bounds: Tensor | None = None,
    factors: Tensor | None = None,
    words: tuple[Tensor | None, int] = (None, 0),
) -> launch.Bound | None:
    """With `bounds`, float32 [M] from 0 on, an entry exceeds that of its row, and not the threshold of its column; with
    `factors`, float32 [N], that of its row times the factor of its column. Returns the launch of Hopper's kernel, which
    sees to `words` as its launcher says; None where another way was taken, and nothing is done about them."""
    if packs(x, weight, tile, out[0].shape[2]):
        from gossamer.gemm._gluon import linear_pack as hopper

        return hopper.launch_linear_pack(x, weight, bias, threshold, out, bounds, factors, words)
    by_library(x, weight, bias, threshold, tile, out, bounds, factors)
    return None


def rows_of_block(m: int, n: int, x: Tensor) -> int:
    """Rows whose pre-activations exist at a time: 24 MiB stay in the L2, and 1,024 rows make a fast product."""
    return max(1, min(m, max(1024, (24 << 20) // (n * x.element_size()) // 128 * 128)))


def by_library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    tile: int,
    out: tuple[Tensor, Tensor, Tensor],
    bounds: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    """`launch_linear_pack` by products of cuBLAS."""
    m, n = x.shape[0], weight.shape[0]
    right = weight.t() if 1 in weight.stride() else weight.t().contiguous()
    step = rows_of_block(m, n, x)
    buffer = x.new_empty(step, n)
    for first in range(0, m, step):
        rows = slice(first, first + step)
        z = buffer[: out[0][rows].shape[0]]
        if bias is not None and bias.dtype is x.dtype:
            torch.addmm(bias, x[rows], right, out=z)
        else:
            torch.mm(x[rows], right, out=z)
            if bias is not None:
                z += bias
        limits = None if bounds is None else bounds[rows]
        launch_pack_twell(z, threshold, tile, tuple(part[rows] for part in out), limits, factors)
