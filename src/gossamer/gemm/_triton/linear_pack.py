"""A linear layer and the packing of what it activates, block by block of rows.

The library's product fills a buffer with the pre-activations of a block of rows, and a kernel lists their entries: a
block is small enough to be in the L2 still, where that leaves rows enough for a fast product. So the dense matrix
never exists, the product runs at the library's speed in every dtype and layout, and the kernel reads the L2. Hopper
has a kernel of its own, in `_gluon`, for 16-bit operands whose rows begin on 16 bytes: it packs each tile of the
product by itself, and another kernel brings the tiles of a row together.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.gemm.linear_pack_path import SLOTS, TILE, choose_path, packs
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse._triton.list_entries import Limit, list_slots
from gossamer.rowsparse._triton.twell import gather_tiles, launch_pack_twell
from gossamer.rowsparse.dense_product import multiply_into
from gossamer.rowsparse.formats import empty_slots, empty_twell, equal_spans


def linear_pack(call: LinearPack) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans)."""
    x, weight, bias, threshold, capacity, squared = call
    if choose_path(call) == "blocks":
        values, indices, spans = _list_blocks(x, weight, bias, threshold, capacity)
    else:
        from gossamer.gemm._gluon import linear_pack as hopper

        tiles = empty_twell(x, x.shape[0], weight.shape[0], TILE, SLOTS)
        hopper.launch_linear_pack(x, weight, bias, threshold, tiles)
        values, indices, spans = gather_tiles(*tiles, TILE, capacity)
    if squared:
        values *= values
    return values, indices, spans


def _list_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    values, indices, _ = empty_slots(x, 0, x.shape[0] * capacity)
    found = []
    for rows, z in _products(x, weight, bias):
        place = slice(rows.start * capacity, rows.stop * capacity)
        found.append(list_slots(z, capacity, Limit(None, threshold), out=(values[place], indices[place]))[2])
    spans = found[0] if len(found) == 1 else equal_spans(torch.cat([counts for _, counts in found]), capacity)
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
) -> bool:
    """With `bounds`, float32 [M] from 0 on, an entry exceeds that of its row, and not the threshold of its column; with
    `factors`, float32 [N], that of its row times the factor of its column. Returns whether Hopper's kernel was
    launched, which sees to `words` as its launcher says; elsewhere nothing is done about them."""
    if packs(x, weight, tile, out[0].shape[2]):
        from gossamer.gemm._gluon import linear_pack as hopper

        hopper.launch_linear_pack(x, weight, bias, threshold, out, bounds, factors, words)
        return True
    for rows, z in _products(x, weight, bias):
        limits = None if bounds is None else bounds[rows]
        launch_pack_twell(z, threshold, tile, tuple(part[rows] for part in out), limits, factors)
    return False


def rows_of_block(m: int, n: int) -> int:
    """Rows whose pre-activations exist at a time: 24 MiB of 16-bit numbers stay in the L2, and 1,024 rows make a fast
    product. Products of float32 take so long that it does not matter where they are read from."""
    return max(1, min(m, max(1024, (12 << 20) // max(n, 1) // 128 * 128)))


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, x[rows] @ weight.T + bias) by cuBLAS, block by block of rows; each block takes the place of the last."""
    m, n = x.shape[0], weight.shape[0]
    right = weight.t() if 1 in weight.stride() else weight.t().contiguous()
    step = rows_of_block(m, n)
    buffer = x.new_empty(step, n)
    for first in range(0, max(m, 1), step):
        rows = slice(first, first + step)
        z = buffer[: min(step, m - first)]
        multiply_into(z, x[rows], right, bias)
        yield rows, z
