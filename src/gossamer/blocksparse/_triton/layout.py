"""Adjacency of a block mask [Z, R, C], by rows and by columns, without a host sync.

One running sum goes over the cells of all matrices, row by row and then once more column by column. So each cell knows
how many present blocks stand before it in either order: its block's place in CSR order, and in CSC order. A program
owns a tile of cells, and writes everything about their blocks into both halves of the buffer. Nothing depends on
timing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse.lists import Lists, length
from gossamer.blocksparse.records import BlocksparseLayout

TILE = 32
"""Rows and columns of cells of a program."""


@triton.jit
def cells_of(R, C, TILE: tl.constexpr):
    """(matrix, row and column of a program's cells, their numbers row by row and column by column, which exist)."""
    down, across = tl.cdiv(R, TILE), tl.cdiv(C, TILE)
    z = tl.program_id(0) // (down * across)
    row = tl.program_id(0) // across % down * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    row, column = tl.broadcast(row[:, None], column[None, :])
    return z, row, column, (z * R + row) * C + column, (z * C + column) * R + row, (row < R) & (column < C)


@launch.kernel
def _layout_flags_kernel(mask_ptr, ranks_ptr, cells, R, C, TILE: tl.constexpr):
    """1 for each present block, row by row, and behind all rows column by column."""
    _, _, _, cell, turned, exists = cells_of(R, C, TILE)
    present = (tl.load(mask_ptr + cell, mask=exists, other=0) != 0).to(tl.int32)
    tl.store(ranks_ptr + cell, present, mask=exists)
    tl.store(ranks_ptr + cells + turned, present, mask=exists)


@triton.jit
def fill_half(lists_ptr, line, lines, across, cell, exists, present, place, entry, total, capacity):
    """The lists of one order, as `lists.py` has them: each padded to a multiple of four. `place` is a block's number in
    this order, `entry` in the other."""
    room = tl.cdiv(capacity, 4).to(tl.int64) * 4
    tl.store(lists_ptr + line, place, mask=exists & (across == 0))
    tl.store(lists_ptr + lines, total, mask=tl.program_id(0) == 0)
    lists_ptr += (lines + 4) // 4 * 4
    held = present & (place < capacity)
    tl.store(lists_ptr + place, across, mask=held)
    tl.store(lists_ptr + (room + place), line, mask=held)
    # Where there are more blocks than room nothing is right, but whoever follows an order stays inside.
    order = lists_ptr + (2 * room + entry)
    tl.store(order, tl.minimum(place, capacity - 1), mask=present & (entry < capacity))
    tl.store(lists_ptr + (3 * room + cell), tl.where(present, place, -1), mask=exists)


@launch.kernel(do_not_specialize=["capacity"])
def _layout_kernel(ranks_ptr, lists_ptr, half, cells, R, C, capacity, TILE: tl.constexpr):
    """`lists` is the buffer, of -1, whose second half begins at `half`; `ranks` are the running sums."""
    z, row, column, cell, turned, exists = cells_of(R, C, TILE)
    total = tl.load(ranks_ptr + (cells - 1))
    before = tl.load(ranks_ptr + cell - 1, mask=exists & (cell > 0), other=0)
    present = exists & (tl.load(ranks_ptr + cell, mask=exists, other=0) > before)
    # The sum has gone on across both orders.
    entry = tl.load(ranks_ptr + cells + turned, mask=exists, other=0) - total - present.to(tl.int32)
    line, turned_line = z * R + row, z * C + column
    fill_half(lists_ptr, line, cells // C, column, cell, exists, present, before, entry, total, capacity)
    lists_ptr += half
    fill_half(lists_ptr, turned_line, cells // R, row, turned, exists, present, entry, before, total, capacity)


def layout(call: BlocksparseLayout) -> Tensor:
    mask, (z, rows, cols), cells = call.mask, call.mask.shape, call.mask.numel()
    buffer = torch.full((length(call.form),), -1, dtype=torch.int32, device=mask.device)
    lists = Lists(buffer, call.form)
    if not cells:
        lists.row_offsets.zero_()
        lists.col_offsets.zero_()
        return buffer
    ranks = torch.empty(2 * cells, dtype=torch.int32, device=mask.device)
    grid, meta = (z * launch.cdiv(rows, TILE) * launch.cdiv(cols, TILE), 1, 1), {"TILE": TILE}
    _layout_flags_kernel(grid, (mask.view(torch.uint8), ranks, cells, rows, cols), meta, num_warps=4)
    args = (ranks.cumsum_(0), buffer, lists.col_offsets.storage_offset(), cells, rows, cols, lists.form.capacity)
    _layout_kernel(grid, args, meta, num_warps=4)
    return buffer


EXAMPLES = {kernel: {"TILE": TILE} for kernel in (_layout_flags_kernel, _layout_kernel)}
