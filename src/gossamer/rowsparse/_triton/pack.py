"""The span of a row, and words of a dense row: how they are loaded, and which of their elements are entries.

A thread holds 16 bytes of a row, a *word*, and a bit for each of its elements.
"""

from typing import Any

import triton
import triton.language as tl

from gossamer._core import launch


@triton.jit
def row_span(spans_ptr, row, M, room):
    """(start int64, count int32, whether the span ends beyond the buffers) of one of M rows."""
    start, count = tl.load(spans_ptr + row), tl.load(spans_ptr + M + row)
    return start, count.to(tl.int32), start + count > room


@triton.jit
def overflowed(spans_ptr, rows, M, room):
    """Whether the spans of some rows end beyond the buffers."""
    starts = tl.load(spans_ptr + rows, mask=rows < M, other=0)
    return starts + tl.load(spans_ptr + M + rows, mask=rows < M, other=0) > room


@triton.jit
def chunk_columns(start, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Columns start to start + BLOCK as [BLOCK / VEC, VEC], so that a thread holds VEC neighbours: one *word*."""
    return start + tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_chunk(x_ptr, start, N, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Words of one row."""
    columns = chunk_columns(start, BLOCK, VEC)
    return tl.load(x_ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def word_bits(keep, VEC: tl.constexpr):
    """Bit v of word g is keep[g, v]."""
    return tl.sum(keep.to(tl.int32) << tl.arange(0, VEC)[None, :], axis=1)


@triton.jit
def count_bits(bits):
    """Set bits of words below 256."""
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 0xF


@triton.jit
def lowest_columns(low, start, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Columns of a chunk's words of which one bit is set."""
    first = start + tl.arange(0, BLOCK // VEC) * VEC
    return first + ((low & 0xAA) != 0) + 2 * ((low & 0xCC) != 0).to(tl.int32) + 4 * ((low & 0xF0) != 0).to(tl.int32)


@triton.jit
def pop_lowest(bits, start, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """(column of each word's lowest set bit, whether it has one, the bits that are left): one turn of every loop that
    emits the entries of words."""
    low = bits & -bits
    return lowest_columns(low, start, BLOCK, VEC), low > 0, bits & (bits - 1)


@triton.jit
def append_entries(
    bits, counts, x_ptr, values_ptr, indices_ptr, base, limit, start, BLOCK: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Writes a chunk's entries to slots base, base + 1, ... below limit, in order of column.

    Every word emits its lowest bit in turn, so the work follows the fullest word, which is 1 or 2 in sparse data. The
    values are read again (they are in L1) rather than held in registers.
    """
    slot = base + tl.cumsum(counts, axis=0) - counts
    while tl.max(bits, axis=0) > 0:
        column, held, bits = pop_lowest(bits, start, BLOCK, VEC)
        mask = held & (slot < limit)
        tl.store(values_ptr + slot, tl.load(x_ptr + column, mask=mask, other=0.0), mask=mask)
        tl.store(indices_ptr + slot, column, mask=mask)
        slot += held.to(tl.int32)


@triton.jit
def clear_slots(values_ptr, indices_ptr, first, capacity, step, BLOCK: tl.constexpr):
    """Marks BLOCK slots from `first` on, and again every `step` slots up to capacity, as holding no entry."""
    for slot in range(first, capacity, step):
        slots = slot + tl.arange(0, BLOCK)
        tl.store(indices_ptr + slots, -1, mask=slots < capacity)
        tl.store(values_ptr + slots, 0.0, mask=slots < capacity)


def scan_tile(n: int, element_size: int, groups: int = 256) -> dict[str, Any]:
    """Sizes of the scan of rows of n columns, 16 bytes a group, and no more groups than a row needs; a warp's worth at
    least. A program is one warp: nothing waits for another."""
    vector = 16 // element_size
    return {"BLOCK": vector * max(32, min(groups, launch.next_power_of_2(n) // vector)), "VEC": vector}
