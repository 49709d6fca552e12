"""Dense rows to tile-wise lists of entries, and those to one list a row.

A tile's list needs nothing but the tile, so programs that pack share rows as they like. To bring the tiles of a row
together one warp a row adds up their counts and then takes an entry of each of 256 tiles at a time: it touches the
sectors that hold entries, and the counts, which are a thirtieth of the slots.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.limit import load_threshold
from gossamer.rowsparse._triton.pack import (
    append_entries,
    chunk_columns,
    clear_slots,
    count_bits,
    load_chunk,
    nonzero_bits,
    scan_tile,
    word_bits,
)
from gossamer.rowsparse.formats import empty_ell, empty_twell
from gossamer.rowsparse.pack import one_program_a_row


@launch.kernel
def _pack_twell_kernel(
    x_ptr, threshold_ptr, bounds_ptr, factors_ptr, values_ptr, indices_ptr, counts_ptr, nnz_ptr, stride_xm, N, tiles,
    tile, slots, BLOCK: tl.constexpr, VEC: tl.constexpr, ABOVE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (row, share of its tiles). ABOVE keeps what is not up to max(threshold, 0), the threshold of the column
    or the bound of the row, which a factor of the column may multiply; otherwise what is not 0. `nnz_ptr`, if any,
    takes the entries of rows: where these are SHARED it is 0 before."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    total = 0
    for at in range(tl.program_id(1), tiles, tl.num_programs(1)):
        begin = at * tile
        width = tl.minimum(tile, N - at * tile)
        place = (row * tiles + at) * slots
        base = 0
        for start in range(0, width, BLOCK):
            x = load_chunk(x_ptr + begin, start, width, BLOCK, VEC)
            if ABOVE:
                columns = chunk_columns(start, BLOCK, VEC)
                limit = 0.0
                if bounds_ptr is not None:
                    limit = tl.load(bounds_ptr + row)
                    if factors_ptr is not None:
                        limit *= tl.load(factors_ptr + begin + columns, mask=columns < width, other=0.0)
                if threshold_ptr is not None:
                    limit = load_threshold(threshold_ptr + begin, 1, columns, columns < width)
                bits = word_bits(~(x.to(tl.float32) <= limit) & (columns < width), VEC)
            else:
                bits = nonzero_bits(x, VEC)
            counts = count_bits(bits)
            count = tl.sum(counts, axis=0)
            if (count > 0) & (base < slots):
                lists = (values_ptr + place, indices_ptr + place)
                append_entries(bits, counts, x_ptr + begin, lists[0], lists[1], base, slots, start, BLOCK, VEC)
            base += count
        tl.store(counts_ptr + row * tiles + at, base)
        total += base
    if nnz_ptr is not None:
        if SHARED:
            # Whole numbers: the sum does not depend on the order of arrival.
            tl.atomic_add(nnz_ptr + row, total, sem="relaxed")
        else:
            tl.store(nnz_ptr + row, total)


@launch.kernel
def _twell_to_ell_kernel(
    values_ptr, indices_ptr, counts_ptr, out_ptr, columns_ptr, nnz_ptr, tiles, slots, tile, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * tiles * slots
    indices_ptr += row * tiles * slots
    counts_ptr += row * tiles
    out_ptr += row * capacity
    columns_ptr += row * capacity
    total = 0
    most = 0
    for first in range(0, tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = tl.maximum(tl.load(counts_ptr + at, mask=at < tiles, other=0).to(tl.int32), 0)
        total += tl.sum(counts, axis=0)
        most = tl.maximum(most, tl.max(counts, axis=0))
    if most > slots:
        tl.store(nnz_ptr + row, tl.maximum(total, capacity + 1))
    else:
        tl.store(nnz_ptr + row, total)
    if (most > slots) | (total > capacity):
        total = 0
    else:
        base = 0
        for first in range(0, tiles, BLOCK):
            at = first + tl.arange(0, BLOCK)
            counts = tl.maximum(tl.load(counts_ptr + at, mask=at < tiles, other=0).to(tl.int32), 0)
            slot = base + tl.cumsum(counts, axis=0) - counts
            for rank in range(0, tl.max(counts, axis=0)):
                held = rank < counts
                column = tl.load(indices_ptr + at * slots + rank, mask=held, other=0).to(tl.int32)
                value = tl.load(values_ptr + at * slots + rank, mask=held, other=0.0)
                # An index outside its tile is no column of another: -2 is an error to all who read it.
                column = tl.where((column >= 0) & (column < tile), at * tile + column, -2)
                tl.store(columns_ptr + slot + rank, column, mask=held)
                tl.store(out_ptr + slot + rank, value, mask=held)
            base += tl.sum(counts, axis=0)
    clear_slots(out_ptr, columns_ptr, total, capacity, 256, 256)


def pack_twell(x: Tensor, tile: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `pack_twell`; slots without an entry stay unwritten."""
    out = empty_twell(x, x.shape[0], x.shape[1], tile, slots)
    launch_pack_twell(x, None, False, tile, out)
    return out


def launch_pack_twell(
    x: Tensor,
    threshold: Tensor | None,
    above: bool,
    tile: int,
    out: tuple[Tensor, ...],
    bounds: Tensor | None = None,
    factors: Tensor | None = None,
    nnz: Tensor | None = None,
) -> None:
    """Fills out: values and indices [M, T, slots], counts [M, T]; and nnz, int32 [M], which is 0."""
    if out[2].numel() == 0:
        return
    x = rows_contiguous(x)
    (m, tiles, slots), n = out[0].shape, x.shape[1]
    # Rows alone fill the GPU, or tiles of a row go to programs of their own.
    share = 1 if one_program_a_row(m, n) else min(tiles, 64)
    meta = {**scan_tile(tile, x.element_size()), "ABOVE": above, "SHARED": share > 1}
    args = (x, threshold, bounds, factors, *out, nnz, x.stride(0), n, tiles, tile, slots)
    _pack_twell_kernel((m, share, 1), args, meta, num_warps=1)


def twell_to_ell(
    values: Tensor, indices: Tensor, counts: Tensor, tile: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `twell_to_ell`."""
    m, tiles, slots = values.shape
    out, columns, nnz = empty_ell(values, m, capacity)
    if m == 0 or tiles == 0:
        return out.zero_(), columns.fill_(-1), nnz.zero_()
    block = min(max(launch.next_power_of_2(tiles), 32), 256)
    args = (values, indices, counts, out, columns, nnz, tiles, slots, tile, capacity)
    _twell_to_ell_kernel((m, 1, 1), args, {"BLOCK": block}, num_warps=1)
    return out, columns, nnz


EXAMPLES = {
    _pack_twell_kernel: {
        "bounds_ptr": None, "factors_ptr": None, "indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 256, "VEC": 8,
        "ABOVE": True, "SHARED": True, "num_warps": 1,
    },
    _twell_to_ell_kernel: {"indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 256, "num_warps": 1},
}  # fmt: skip
