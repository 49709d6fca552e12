"""Adjacency of a block mask [Z, R, C], by rows and by columns, without a host sync.

One running sum goes over the cells of all matrices, row by row and then once more column by column. So each cell knows
how many present blocks stand before it in either order: its block's place in CSR order, and in CSC order. A program
owns a tile of cells of one order, and writes everything about their blocks into that order's half of the buffer.
Nothing depends on timing.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse.lists import Lists, length
from gossamer.blocksparse.records import BlocksparseLayout

TILE = 512
"""Cells of a program."""


@launch.kernel(do_not_specialize=["capacity"])
def _layout_kernel(ranks_ptr, lists_ptr, half, cells, R, C, capacity, TILE: tl.constexpr):
    """Program (TILE cells, order: by rows or by columns). `lists` is the buffer, of -1, whose second half begins at
    `half`; `ranks` are the running sums."""
    by = tl.program_id(1).to(tl.int64)
    own_ptr, other_ptr = ranks_ptr + by * cells, ranks_ptr + (1 - by) * cells
    R, C = tl.where(by == 0, R, C), tl.where(by == 0, C, R)
    cell = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = (cell >= 0) & (cell < cells)
    line, across = cell // C, cell % C
    total = tl.load(ranks_ptr + (cells - 1))
    # The sum goes on across both orders.
    earlier, ahead = tl.where(by == 0, 0, total), tl.where(by == 0, total, 0)
    place = tl.load(own_ptr + cell - 1, mask=exists & (by * cells + cell > 0), other=0) - earlier
    present = exists & (tl.load(own_ptr + cell, mask=exists, other=0) - earlier > place)
    turned = (line // R * C + across) * R + line % R
    entry = tl.load(other_ptr + turned, mask=present, other=0) - ahead - 1
    lines = cells // C
    # Each list is padded to a multiple of four.
    offsets_ptr, room = lists_ptr + by * half, tl.cdiv(capacity, 4).to(tl.int64) * 4
    entries_ptr = offsets_ptr + (lines + 4) // 4 * 4
    tl.store(offsets_ptr + line, place, mask=exists & (across == 0))
    tl.store(offsets_ptr + lines, total, mask=tl.program_id(0) == 0)
    held = present & (place < capacity)
    tl.store(entries_ptr + place, across, mask=held)
    tl.store(entries_ptr + (room + place), line, mask=held)
    # Where there are more blocks than room nothing is right, but whoever follows an order stays inside.
    order = entries_ptr + (2 * room + entry)
    tl.store(order, tl.minimum(place, capacity - 1), mask=present & (entry < capacity))
    tl.store(entries_ptr + (3 * room + cell), tl.where(present, place, -1), mask=exists)


def layout(call: BlocksparseLayout) -> Tensor:
    mask, (z, rows, cols), cells = call.mask, call.mask.shape, call.mask.numel()
    buffer = torch.full((length(call.form),), -1, dtype=torch.int32, device=mask.device)
    lists = Lists(buffer, call.form)
    if not cells:
        lists.row_offsets.zero_()
        lists.col_offsets.zero_()
        return buffer
    present = torch.empty(2, cells, dtype=torch.int32, device=mask.device)
    present[0].view(z, rows, cols).copy_(mask)
    present[1].view(z, cols, rows).copy_(mask.mT)
    ranks = present.view(-1).cumsum_(0)
    args = (ranks, buffer, lists.col_offsets.storage_offset(), cells, rows, cols, lists.form.capacity)
    _layout_kernel((launch.cdiv(cells, TILE), 2, 1), args, {"TILE": TILE}, num_warps=4)
    return buffer


EXAMPLES = {_layout_kernel: {"TILE": TILE}}
