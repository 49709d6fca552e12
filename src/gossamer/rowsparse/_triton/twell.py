"""Dense rows to tile-wise lists of entries, and those to one list a row.

A tile's list needs nothing but the tile, so programs that pack share rows as they like. To bring the tiles of a row
together one warp a row adds up their counts and then takes an entry of each of 256 tiles at a time: it touches the
sectors that hold entries, and the counts, which are a thirtieth of the slots.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.list_entries import load_threshold
from gossamer.rowsparse._triton.pack import (
    append_entries,
    chunk_columns,
    clear_slots,
    count_bits,
    load_chunk,
    scan_tile,
    word_bits,
)
from gossamer.rowsparse.formats import empty_slots
from gossamer.rowsparse.pack import one_program_a_row


@launch.kernel
def _pack_twell_kernel(
    x_ptr, threshold_ptr, bounds_ptr, factors_ptr, values_ptr, indices_ptr, counts_ptr, stride_xm, N, tiles,
    tile, slots, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program (row, share of its tiles): the elements that are not up to max(threshold, 0), the threshold of the column
    or the bound of the row, which a factor of the column may multiply."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    for at in range(tl.program_id(1), tiles, tl.num_programs(1)):
        begin = at * tile
        width = tl.minimum(tile, N - at * tile)
        place = (row * tiles + at) * slots
        base = 0
        for start in range(0, width, BLOCK):
            x = load_chunk(x_ptr + begin, start, width, BLOCK, VEC)
            columns = chunk_columns(start, BLOCK, VEC)
            limit = 0.0
            if bounds_ptr is not None:
                limit = tl.load(bounds_ptr + row)
                if factors_ptr is not None:
                    limit *= tl.load(factors_ptr + begin + columns, mask=columns < width, other=0.0)
            if threshold_ptr is not None:
                limit = load_threshold(threshold_ptr + begin, 1, columns, columns < width)
            bits = word_bits(~(x.to(tl.float32) <= limit) & (columns < width), VEC)
            counts = count_bits(bits)
            count = tl.sum(counts, axis=0)
            if (count > 0) & (base < slots):
                lists = (values_ptr + place, indices_ptr + place)
                append_entries(bits, counts, x_ptr + begin, lists[0], lists[1], base, slots, start, BLOCK, VEC)
            base += count
        tl.store(counts_ptr + row * tiles + at, base)


@launch.kernel
def _gather_tiles_kernel(
    values_ptr, indices_ptr, counts_ptr, out_ptr, columns_ptr, spans_ptr, tiles, slots, tile, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row), to `capacity` slots of its own. A row with more entries, or with more in a tile than that has
    slots for, overflows."""
    row, M = tl.program_id(0).to(tl.int64), tl.num_programs(0)
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
    over = (most > slots) | (total > capacity)
    tl.store(spans_ptr + row, tl.where(over, M, row) * capacity)
    tl.store(spans_ptr + M + row, total)
    if over:
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
                tl.store(columns_ptr + slot + rank, at * tile + column, mask=held)
                tl.store(out_ptr + slot + rank, value, mask=held)
            base += tl.sum(counts, axis=0)
    clear_slots(out_ptr, columns_ptr, total, capacity, 256, 256)


def launch_pack_twell(
    x: Tensor,
    threshold: Tensor | None,
    tile: int,
    out: tuple[Tensor, ...],
    bounds: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    """Fills out: values and indices [M, T, slots], counts [M, T]; slots without an entry stay unwritten."""
    if out[2].numel() == 0:
        return
    x = rows_contiguous(x)
    (m, tiles, slots), n = out[0].shape, x.shape[1]
    # Rows alone fill the GPU, or tiles of a row go to programs of their own.
    share = 1 if one_program_a_row(m, n) else min(tiles, 64)
    meta = scan_tile(tile, x.element_size())
    args = (x, threshold, bounds, factors, *out, x.stride(0), n, tiles, tile, slots)
    _pack_twell_kernel((m, share, 1), args, meta, num_warps=1)


def gather_tiles(
    values: Tensor, indices: Tensor, counts: Tensor, tile: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans) of the entries of tile-wise lists, in `capacity` slots for each row."""
    m, tiles, slots = values.shape
    out = empty_slots(values, m, m * capacity)
    if m == 0 or tiles == 0:
        return out[0].zero_(), out[1].fill_(-1), out[2].zero_()
    block = min(max(launch.next_power_of_2(tiles), 32), 256)
    args = (values, indices, counts, *out, tiles, slots, tile, capacity)
    _gather_tiles_kernel((m, 1, 1), args, {"BLOCK": block}, num_warps=1)
    return out


EXAMPLES = {
    _pack_twell_kernel: {
        "bounds_ptr": None, "factors_ptr": None, "indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 256, "VEC": 8,
        "num_warps": 1,
    },
    _gather_tiles_kernel: {"indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 256, "num_warps": 1},
}  # fmt: skip
