"""Entries regrouped by column, without a host sync and without an order that depends on timing.

Three steps: count the entries of each column (integer atomics: the result does not depend on their order), prefix sum,
and drop every entry's key (row << 32 | slot) into its column's range. The drop takes places in order of arrival, so a
last step sorts each column by key: a key's place is the number of smaller keys in its column, found by comparing
blocks of BLOCK x BLOCK. Columns of a sparse matrix are short, and a warp sorts four at once. The few that are not (a
latent that always fires) would each keep that warp for the square of their length: it only notes them down, and one
more launch, which finds nothing to do in most cases, shares their blocks among all programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.pack import row_span
from gossamer.rowsparse.records import TransposeKeys

LONG = 256
"""Keys up to which a column is one warp's work."""


@launch.kernel
def _column_count_kernel(indices_ptr, spans_ptr, counts_ptr, room, N, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    count = tl.where(overflowed, 0, count)
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
        tl.atomic_add(counts_ptr + index, 1, mask=(index >= 0) & (index < N), sem="relaxed")


@launch.kernel
def _column_fill_kernel(
    indices_ptr, spans_ptr, col_offsets_ptr, counts_ptr, keys_ptr, room, N, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row). A column's places are given out from its end down, by its count, which ends at 0."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    count = tl.where(overflowed, 0, count)
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
        valid = (index >= 0) & (index < N)
        end = tl.load(col_offsets_ptr + index + 1, mask=valid, other=0)
        place = end - tl.atomic_add(counts_ptr + index, -1, mask=valid, sem="relaxed")
        tl.store(keys_ptr + place, (row.to(tl.int64) << 32) | (start + entry), mask=valid)


@triton.jit
def rank_block(keys_ptr, sorted_ptr, columns_ptr, column, at, begin, end, BLOCK: tl.constexpr):
    """Moves a column's keys from `at` on, BLOCK of them, to their places among all from begin to end."""
    mine = at + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + mine, mask=mine < end, other=0)
    smaller = tl.zeros([BLOCK, BLOCK], tl.int32)
    for other in range(begin, end, BLOCK):
        theirs = other + tl.arange(0, BLOCK)
        theirs = tl.load(keys_ptr + theirs, mask=theirs < end, other=0x7FFFFFFFFFFFFFFF)
        smaller += (theirs[None, :] < key[:, None]).to(tl.int32)
    tl.store(sorted_ptr + begin + tl.sum(smaller, axis=1), key, mask=mine < end)
    tl.store(columns_ptr + mine, tl.zeros([BLOCK], tl.int32) + column, mask=mine < end)


@launch.kernel
def _column_sort_kernel(
    keys_ptr, offsets_ptr, sorted_ptr, columns_ptr, long_ptr, found_ptr, N,
    LONG: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS neighbours): sorts those of at most BLOCK keys side by side and the rest in turn.

    A column with more than LONG keys is only added to a list.
    """
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    begin = tl.load(offsets_ptr + column, mask=column < N, other=0)
    count = tl.load(offsets_ptr + column + 1, mask=column < N, other=0) - begin
    fits = tl.where(count <= BLOCK, count, 0)
    # Read twice, as rows and as columns of the comparison, rather than exchanged between threads.
    at = begin[:, None, None] + tl.arange(0, BLOCK)[None, :, None]
    held = tl.arange(0, BLOCK)[None, :, None] < fits[:, None, None]
    key = tl.load(keys_ptr + at, mask=held, other=0)
    theirs = tl.load(
        keys_ptr + begin[:, None, None] + tl.arange(0, BLOCK)[None, None, :],
        mask=tl.arange(0, BLOCK)[None, None, :] < fits[:, None, None],
        other=0x7FFFFFFFFFFFFFFF,
    )
    rank = tl.sum((theirs < key).to(tl.int32), axis=2, keep_dims=True)
    tl.store(sorted_ptr + begin[:, None, None] + rank, key, mask=held)
    tl.store(columns_ptr + at, tl.zeros_like(rank) + column[:, None, None], mask=held)
    if tl.max(count, axis=0) > BLOCK:
        for each in range(first, tl.minimum(first + COLUMNS, N)):
            start = tl.load(offsets_ptr + each)
            end = tl.load(offsets_ptr + each + 1)
            if end - start > LONG:
                # In order of arrival, which nothing shows: each column is sorted by itself.
                tl.store(long_ptr + tl.atomic_add(found_ptr, 1, sem="relaxed"), each)
            elif end - start > BLOCK:
                for block in range(start, end, BLOCK):
                    rank_block(keys_ptr, sorted_ptr, columns_ptr, each, block, start, end, BLOCK)


@launch.kernel
def _column_sort_long_kernel(
    keys_ptr, offsets_ptr, sorted_ptr, columns_ptr, long_ptr, found_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs share (listed column, part of its blocks): as many parts as keep them all at work."""
    found = tl.load(found_ptr)
    if found > 0:
        parts = tl.maximum(tl.num_programs(0) // found, 1)
        for item in range(tl.program_id(0), found * parts, tl.num_programs(0)):
            column = tl.load(long_ptr + item // parts)
            begin = tl.load(offsets_ptr + column)
            end = tl.load(offsets_ptr + column + 1)
            for at in range(begin + item % parts * BLOCK, end, parts * BLOCK):
                rank_block(keys_ptr, sorted_ptr, columns_ptr, column, at, begin, end, BLOCK)


def transpose_keys(call: TransposeKeys) -> tuple[Tensor, Tensor, Tensor]:
    """As its record says."""
    indices, spans, n = call
    m, room, device = spans.shape[1], indices.shape[0], indices.device
    keys = torch.empty(room, dtype=torch.int64, device=device)
    columns = torch.empty(room, dtype=torch.int32, device=device)
    if m == 0 or n == 0 or room == 0:
        return torch.zeros(n + 1, dtype=torch.int64, device=device), keys, columns
    meta = {"BLOCK": 128}
    # How many columns are long, a zero ahead of the counts, and, each from an aligned address on, counts and columns.
    list_at = 4 + launch.cdiv(n, 4) * 4
    found = torch.zeros(list_at + min(n, room // LONG), dtype=torch.int32, device=device)
    counts, long = found[4 : 4 + n], found[list_at:]
    _column_count_kernel((m, 1, 1), (indices, spans, counts, room, n), meta, num_warps=4)
    col_offsets = torch.cumsum(found[3 : 4 + n], 0, dtype=torch.int64)
    args = (indices, spans, col_offsets, counts, keys, room, n)
    _column_fill_kernel((m, 1, 1), args, meta, num_warps=4)
    ordered = torch.empty_like(keys)
    args = (keys, col_offsets, ordered, columns, long, found)
    meta = {"LONG": LONG, "COLUMNS": 4, "BLOCK": 16}
    _column_sort_kernel((launch.cdiv(n, 4), 1, 1), (*args, n), meta, num_warps=1)
    if long.numel():
        _column_sort_long_kernel((8 * tuning.programs(device), 1, 1), args, {"BLOCK": 64}, num_warps=4)
    return col_offsets, ordered, columns


EXAMPLES = {
    _column_count_kernel: {"BLOCK": 128},
    _column_fill_kernel: {"col_offsets_ptr": "*i64", "BLOCK": 128},
    _column_sort_kernel: {
        "offsets_ptr": "*i64", "sorted_ptr": "*i64", "LONG": 256, "COLUMNS": 4, "BLOCK": 16, "num_warps": 1,
    },
    _column_sort_long_kernel: {"offsets_ptr": "*i64", "sorted_ptr": "*i64", "BLOCK": 64},
}  # fmt: skip
