"""Adjacency of a block mask [Z, R, C], by rows and by columns, without a host sync.

Two launches with a prefix sum between them. The first has two kinds of programs: those of rows write each present
block's rank within its row and the row's count, those of columns the column's count. One sum over both lists of counts
gives row and column offsets. The second walks down columns: a block's rank in its column is a running count, its place
in CSR order is the row's offset plus the rank that the first left, so that everything about a block is written by the
one program that owns its column, and nothing depends on timing. Tiles hold some thousand mask bytes: a layout of
[16, 128, 128] blocks is 1,088 short programs and 64, bound by the latency of a few loads.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse.lists import Lists, length
from gossamer.blocksparse.records import BlocksparseLayout

TILE = {"ROWS": 16, "COLS": 128, "DOWN": 128, "ACROSS": 32}
"""Tile of programs of rows, [ROWS, COLS], and of programs of columns, [DOWN, ACROSS]."""


@launch.kernel
def _layout_count_kernel(
    mask_ptr, positions_ptr, counts_ptr, ZR, R, C, row_programs,
    ROWS: tl.constexpr, COLS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows), and then (matrix, ACROSS columns). counts is a 0, those of rows, those of columns."""
    pid = tl.program_id(0)
    if pid < row_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        count = tl.zeros([ROWS], tl.int32)
        for first in range(0, C, COLS):
            col = first + tl.arange(0, COLS)
            held = (row < ZR)[:, None] & (col < C)[None, :]
            at = row[:, None] * C + col[None, :]
            present = (tl.load(mask_ptr + at, mask=held, other=0) != 0).to(tl.int32)
            rank = count[:, None] + tl.cumsum(present, 1) - present
            tl.store(positions_ptr + at, tl.where(present != 0, rank, -1), mask=held)
            count += tl.sum(present, 1)
        tl.store(counts_ptr + 1 + row, count, mask=row < ZR)
        tl.store(counts_ptr, 0, mask=pid == 0)
    else:
        tiles = tl.cdiv(C, ACROSS)
        z = (pid - row_programs) // tiles
        col = (pid - row_programs) % tiles * ACROSS + tl.arange(0, ACROSS)
        column_count = tl.zeros([ACROSS], tl.int32)
        for first in range(0, R, DOWN):
            row = first + tl.arange(0, DOWN)
            held = (row < R)[:, None] & (col < C)[None, :]
            present = tl.load(mask_ptr + (z * R + row)[:, None] * C + col[None, :], mask=held, other=0)
            column_count += tl.sum((present != 0).to(tl.int32), 0)
        tl.store(counts_ptr + 1 + ZR + z * C + col, column_count, mask=col < C)


@launch.kernel(do_not_specialize=["capacity"])
def _layout_fill_kernel(
    offsets_ptr, rows_ptr, columns_ptr, ZR, R, C, capacity, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    """Program (matrix, ACROSS columns). `rows` and `columns` are the halves of the buffer, as `lists.py` has them.
    Ranks within rows become places in CSR order; padding is -1."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(C, ACROSS)
    z = pid // tiles
    col = pid % tiles * ACROSS + tl.arange(0, ACROSS)
    nnz = tl.load(offsets_ptr + ZR)
    begin = tl.load(offsets_ptr + ZR + z * C + col, mask=col < C, other=0) - nnz
    tl.store(columns_ptr + z * C + col, begin, mask=col < C)
    ZC = tl.num_programs(0) // tiles * C
    tl.store(columns_ptr + ZC, nnz, mask=pid == 0)
    # Lists begin at multiples of four: the rest in front of the next list is padding too.
    wide_rows, wide_columns, wide = tl.cdiv(ZR + 1, 4) * 4, tl.cdiv(ZC + 1, 4) * 4, tl.cdiv(capacity, 4) * 4
    for first in range(pid * DOWN, wide_rows, tl.num_programs(0) * DOWN):
        at = first + tl.arange(0, DOWN)
        tl.store(rows_ptr + at, tl.load(offsets_ptr + at, mask=at <= ZR, other=-1), mask=at < wide_rows)
    # Lists of entries are `room` long: columns, rows, order.
    room = wide.to(tl.int64)
    by_rows, by_columns = rows_ptr + wide_rows, columns_ptr + wide_columns
    gap, blocks = tl.arange(0, 4), ZR * C
    tl.store(columns_ptr + ZC + 1 + gap, -1, mask=(ZC + 1 + gap < wide_columns) & (pid == 0))
    behind = (blocks + gap < tl.cdiv(blocks, 4) * 4) & (pid == 0)
    tl.store(by_rows + 3 * room + blocks + gap, -1, mask=behind)
    tl.store(by_columns + 3 * room + blocks + gap, -1, mask=behind)
    for first in range(0, R, DOWN):
        row = first + tl.arange(0, DOWN)
        held = (row < R)[:, None] & (col < C)[None, :]
        positions = by_rows + 3 * room + ((z * R + row)[:, None] * C + col[None, :])
        rank = tl.load(positions, mask=held, other=-1)
        start = tl.load(offsets_ptr + z * R + row, mask=row < R, other=0)
        present = (rank >= 0).to(tl.int32)
        place = start[:, None] + rank
        tl.store(positions, place, mask=rank >= 0)
        entry = begin[None, :] + tl.cumsum(present, 0) - present
        turned = by_columns + 3 * room + ((z * C + col)[:, None] * R + row[None, :])
        tl.store(turned, tl.trans(tl.where(rank >= 0, entry, -1)), mask=(col < C)[:, None] & (row < R)[None, :])
        # Where there are more blocks than room nothing is right, but whoever follows an order stays inside.
        inside = (rank >= 0) & (place < capacity)
        tl.store(by_rows + place, tl.zeros_like(place) + col[None, :], mask=inside)
        tl.store(by_rows + room + place, tl.zeros_like(place) + (z * R + row)[:, None], mask=inside)
        tl.store(by_columns + 2 * room + place, tl.minimum(entry, capacity - 1), mask=inside)
        inside = (rank >= 0) & (entry < capacity)
        tl.store(by_columns + entry, tl.zeros_like(place) + row[:, None], mask=inside)
        tl.store(by_columns + room + entry, tl.zeros_like(place) + (z * C + col)[None, :], mask=inside)
        tl.store(by_rows + 2 * room + entry, tl.minimum(place, capacity - 1), mask=inside)
        begin += tl.sum(present, 0)
    for first in range(tl.minimum(nnz, capacity) + pid * DOWN, wide, tl.num_programs(0) * DOWN):
        at = first + tl.arange(0, DOWN)
        for part in tl.static_range(3):
            tl.store(by_rows + part * room + at, -1, mask=at < wide)
            tl.store(by_columns + part * room + at, -1, mask=at < wide)


def layout(call: BlocksparseLayout) -> Tensor:
    mask, (z, rows, cols) = call.mask, call.mask.shape
    buffer = torch.empty(length(call.form), dtype=torch.int32, device=mask.device)
    lists = Lists(buffer, call.form)
    if mask.numel() == 0:
        buffer.fill_(-1)
        lists.row_offsets.zero_()
        lists.col_offsets.zero_()
        return buffer
    counts = torch.empty(1 + z * rows + z * cols, dtype=torch.int32, device=mask.device)
    row_programs, col_programs = launch.cdiv(z * rows, TILE["ROWS"]), z * launch.cdiv(cols, TILE["ACROSS"])
    args = (mask.view(torch.uint8), lists.positions, counts, z * rows, rows, cols, row_programs)
    _layout_count_kernel((row_programs + col_programs, 1, 1), args, TILE, num_warps=4)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    args = (offsets, lists.half, lists.mT.half, z * rows, rows, cols, lists.form.capacity)
    tile = {"DOWN": TILE["DOWN"], "ACROSS": TILE["ACROSS"]}
    _layout_fill_kernel((col_programs, 1, 1), args, tile, num_warps=8)
    return buffer


EXAMPLES = {
    _layout_count_kernel: TILE,
    _layout_fill_kernel: {"DOWN": 128, "ACROSS": 32, "num_warps": 8},
}
