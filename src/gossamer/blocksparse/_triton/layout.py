"""Adjacency of a block mask [Z, R, C], by rows and by columns, without a host sync.

Two launches with a prefix sum between them. The first has two kinds of programs: those of rows write each present
block's rank within its row and the row's count, those of columns the column's count. One sum over both lists of counts
gives row and column offsets. The second walks down columns: a block's rank in its column is a running count, its place
in CSR order is the row's offset plus the rank that the first left, so that everything about a block is written by the
one program that owns its column, and nothing depends on timing. Tiles hold some thousand mask bytes: a layout of
[16, 128, 128] blocks is 1,088 short programs and 64, bound by the latency of a few loads.

The transposed layout needs neither counts nor sums: its rows are the columns that there are. One launch has programs of
entries of the column lists, each of which is an entry of the row lists to be, and programs of the grid, for what is
absent. Where blocks are lost the lists are no permutation; then they only name what exists, and the grid has numbers
beyond the capacity.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch

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
    positions_ptr, offsets_ptr, col_indices_ptr, row_indices_ptr, col_offsets_ptr, order_ptr, ZR, R, C, capacity,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Program (matrix, ACROSS columns). Ranks within rows become places in CSR order; padding is -1."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(C, ACROSS)
    z = pid // tiles
    col = pid % tiles * ACROSS + tl.arange(0, ACROSS)
    nnz = tl.load(offsets_ptr + ZR)
    begin = tl.load(offsets_ptr + ZR + z * C + col, mask=col < C, other=0) - nnz
    tl.store(col_offsets_ptr + z * C + col, begin, mask=col < C)
    tl.store(col_offsets_ptr + tl.num_programs(0) // tiles * C, nnz, mask=pid == 0)
    for first in range(0, R, DOWN):
        row = first + tl.arange(0, DOWN)
        held = (row < R)[:, None] & (col < C)[None, :]
        at = (z * R + row)[:, None] * C + col[None, :]
        rank = tl.load(positions_ptr + at, mask=held, other=-1)
        start = tl.load(offsets_ptr + z * R + row, mask=row < R, other=0)
        present = (rank >= 0).to(tl.int32)
        place = start[:, None] + rank
        tl.store(positions_ptr + at, place, mask=rank >= 0)
        inside = (rank >= 0) & (place < capacity)
        tl.store(col_indices_ptr + place, tl.zeros_like(place) + col[None, :], mask=inside)
        tl.store(row_indices_ptr + place, tl.zeros_like(place) + (z * R + row)[:, None], mask=inside)
        by_column = begin[None, :] + tl.cumsum(present, 0) - present
        # Where there are more blocks than room nothing is right, but whoever follows the order stays inside.
        tl.store(order_ptr + by_column, tl.minimum(place, capacity - 1), mask=(rank >= 0) & (by_column < capacity))
        begin += tl.sum(present, 0)
    for first in range(nnz + pid * DOWN, capacity, tl.num_programs(0) * DOWN):
        at = first + tl.arange(0, DOWN)
        tl.store(col_indices_ptr + at, -1, mask=at < capacity)
        tl.store(row_indices_ptr + at, -1, mask=at < capacity)
        tl.store(order_ptr + at, -1, mask=at < capacity)


@launch.kernel(do_not_specialize=["nnz_ptr", "capacity"])
def _layout_transpose_kernel(
    nnz_ptr, columns_ptr, rows_ptr, order_ptr, positions_ptr, out_columns_ptr, out_rows_ptr, out_order_ptr,
    out_positions_ptr, total, R, C, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK entries), and then (BLOCK of the transposed grid's total places)."""
    nnz = tl.load(nnz_ptr)
    lost = nnz > capacity
    entries = tl.cdiv(capacity, BLOCK)
    if tl.program_id(0) < entries:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        held = at < tl.minimum(nnz, capacity)
        source = tl.load(order_ptr + at, mask=held, other=0)
        line = tl.load(rows_ptr + source, mask=held, other=0)
        column = tl.load(columns_ptr + source, mask=held, other=0)
        turned = line // R * C + column
        inside = at < capacity
        tl.store(out_columns_ptr + at, tl.where(held, line % R, -1), mask=inside)
        tl.store(out_rows_ptr + at, tl.where(held, turned, -1), mask=inside)
        tl.store(out_order_ptr + tl.where(held & (not lost), source, at), tl.where(held, at, -1), mask=inside)
        tl.store(out_positions_ptr + (turned * R + line % R), at, mask=held & (not lost))
    else:
        to = (tl.program_id(0) - entries) * BLOCK + tl.arange(0, BLOCK)
        held = to < total
        place = to // (R * C) * (R * C) + to % R * C + to // R % C
        absent = tl.load(positions_ptr + place, mask=held, other=0) < 0
        tl.store(out_positions_ptr + to, tl.where(absent, -1, capacity), mask=held & (absent | lost))


def layout(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `blocksparse_layout` -> (row_offsets, col_indices, row_indices, col_offsets, transpose_order, positions)
    of a contiguous bool mask [Z, R, C]; int32 all."""
    z, rows, cols = mask.shape
    device = mask.device

    def ints(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=device)

    positions = ints(mask.numel())
    if mask.numel() == 0:
        row_offsets, col_offsets = (torch.zeros(z * n + 1, dtype=torch.int32, device=device) for n in (rows, cols))
        absent = (torch.full((capacity,), -1, dtype=torch.int32, device=device) for _ in range(3))
        col_indices, row_indices, order = absent
        return row_offsets, col_indices, row_indices, col_offsets, order, positions
    counts = ints(1 + z * rows + z * cols)
    row_programs, col_programs = launch.cdiv(z * rows, TILE["ROWS"]), z * launch.cdiv(cols, TILE["ACROSS"])
    args = (mask.view(torch.uint8), positions, counts, z * rows, rows, cols, row_programs)
    _layout_count_kernel((row_programs + col_programs, 1, 1), args, TILE, num_warps=4)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    col_indices, row_indices, order, col_offsets = ints(capacity), ints(capacity), ints(capacity), ints(z * cols + 1)
    args = (positions, offsets, col_indices, row_indices, col_offsets, order, z * rows, rows, cols, capacity)
    tile = {"DOWN": TILE["DOWN"], "ACROSS": TILE["ACROSS"]}
    _layout_fill_kernel((col_programs, 1, 1), args, tile, num_warps=8)
    return offsets[: z * rows + 1], col_indices, row_indices, col_offsets, order, positions


ENTRIES = 1024
"""Entries or places of a program that transposes."""


def layout_transpose(
    nnz: Tensor, col_indices: Tensor, row_indices: Tensor, transpose_order: Tensor, positions: Tensor, rows: int,
    cols: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Operator `blocksparse_layout_transpose` -> (col_indices, row_indices, transpose_order, positions)."""
    given = col_indices, row_indices, transpose_order, positions
    out = col_indices, row_indices, order, turned = tuple(torch.empty_like(x) for x in given)
    total, capacity = positions.shape[0], col_indices.shape[0]
    programs = launch.cdiv(capacity, ENTRIES) + launch.cdiv(total, ENTRIES)
    if programs:
        args = (nnz, *given, *out, total, max(rows, 1), max(cols, 1), capacity)
        _layout_transpose_kernel((programs, 1, 1), args, {"BLOCK": ENTRIES}, num_warps=4)
    return col_indices, row_indices, order, turned


EXAMPLES = {
    _layout_count_kernel: TILE,
    _layout_fill_kernel: {"DOWN": 128, "ACROSS": 32, "num_warps": 8},
    _layout_transpose_kernel: {"BLOCK": ENTRIES},
}
