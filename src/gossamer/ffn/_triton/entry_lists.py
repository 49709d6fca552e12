"""The active entries of a block's rows in one list, row by row, and the same entries neuron by neuron.

`row_lists` brings the tiles of `linear_pack` together: row m has the entries `offsets[m]` to `offsets[m + 1]`, columns
ascending. Entries of hot neurons (`train_hot`) go into `[M, H]` instead. Rows with more entries than pay, or more than
a tile has slots for, or that no longer fit the room, have no entries in either; they are listed in ascending order
instead, for dense tiles.

`column_lists` needs no sort and has no order of arrival. A word of 32 bits holds the rows of a group of 32 that have a
neuron: the bits below a row's own say how many of its group come first, and a running sum over the groups how many
before them. So every entry finds its place by itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer._core.ops import INTERPRET
from gossamer.ffn.records import aligned
from gossamer.rowsparse.formats import column_dtype

GROUP = tl.constexpr(32)
"""Rows to a word of bits."""
RANKS = tl.constexpr(8)
"""Entries of a tile that a program reads at once."""


class Weights(NamedTuple):
    """As the kernels read them: gate and up `[N, K]`, down `[N, D]`, contiguous."""

    gate: Tensor
    gate_bias: Tensor | None
    threshold: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor


class Tile(NamedTuple):
    """A warp's share: entries at a time, bytes of a row; registers of a thread; stages; whether entries are loaded
    together, as a tile. Defaults are of slices so narrow that a part of the rows is found in the L1."""

    entries: int
    width: int = 512
    registers: int | None = None
    stages: int = 1
    together: bool = False


class Hot(NamedTuple):
    """Hot neurons. listed: int32 `[2 + H]`, how many slots are in use, how many neurons are hot, and those with slots;
    slots: int32 `[N]`, a neuron's slot, or -1; values `[1 or 2, M, H]`, zeros: the gate at its entries; behind it there
    is room for the up projection. fired: int32 `[N]`, zeros, takes the entries of columns."""

    listed: Tensor
    slots: Tensor
    values: Tensor
    fired: Tensor


class RowLists(NamedTuple):
    """values `[1 or 2, room]`, the gate's, with room for the up projection's; columns `[room]`, of 16 bits without a
    sign where N <= 65,536; rows and fired as in `Trained`; nnz int32 `[M]`, the entries of rows beside those of hot
    neurons."""

    values: Tensor
    columns: Tensor
    rows: Tensor
    nnz: Tensor
    fired: Tensor

    @property
    def offsets(self) -> Tensor:
        return self.rows[0, : self.nnz.shape[0] + 1]


class ColumnLists(NamedTuple):
    """rows, places (in the row lists), int32 `[room]`, and hidden activations of the entries, neuron by neuron, rows
    ascending; offsets int32 `[N + 1]`."""

    rows: Tensor
    places: Tensor
    hidden: Tensor
    offsets: Tensor


@triton.jit
def widened(column):
    """Columns as they are stored, in 32 bits: those of 16 have no sign."""
    if column.dtype == tl.int16:
        return column.to(tl.int32) & 0xFFFF
    else:
        return column


@triton.jit
def wide(x, HALVES: tl.constexpr):
    """x in float32. HALVES: of bfloat16, two to a word, in an instruction each, where the compiler takes three for two:
    products of rows that are gathered have hardly more instructions than these."""
    # Two need two elements.
    if HALVES and x.numel > 1:
        code: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def load(ptr, mask, EVEN: tl.constexpr):
    """0 where the mask is False; EVEN: it is True everywhere that counts."""
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def offset_of(row, pitch):
    """row * pitch: a product of two words without signs is one instruction."""
    return row.to(tl.uint32).to(tl.uint64) * tl.cast(tl.cast(pitch, tl.uint32), tl.uint64)


@triton.jit
def columns_at(indices_ptr, at, counts, first, slots, tile):
    """(which there are of the entries from `first` on in some tiles of a row, [tiles, RANKS]; their columns)"""
    rank = first + tl.arange(0, RANKS)
    held = rank[None, :] < counts[:, None]
    column = tl.load(indices_ptr + at[:, None] * slots + rank[None, :], mask=held, other=0).to(tl.int32)
    return held, column + at[:, None] * tile


@triton.jit
def listed_counts(indices_ptr, slot_ptr, used, at, counts, slots, tile):
    """How many entries of a row's tiles do not belong to hot neurons."""
    listed = counts
    if used > 0:
        listed = tl.zeros_like(counts)
        for first in range(0, tl.max(counts, axis=0), RANKS):
            held, column = columns_at(indices_ptr, at, counts, first, slots, tile)
            slot = tl.load(slot_ptr + column, mask=held, other=0)
            listed += tl.sum((slot < 0).to(tl.int32), axis=1)
    return listed


@launch.kernel
def _ffn_row_counts_kernel(
    indices_ptr, counts_ptr, hot_ptr, slot_ptr, nnz_ptr, kept_ptr, tiles, slots, tile, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): its entries beside those of hot neurons, and the same of rows that are gathered, -1 of others."""
    row = tl.program_id(0).to(tl.int64)
    used = tl.load(hot_ptr)
    total = 0
    most = 0
    for first in range(0, tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
        most = tl.maximum(most, tl.max(counts, axis=0))
        held = tl.minimum(counts, slots)
        listed = listed_counts(indices_ptr + row * tiles * slots, slot_ptr, used, at, held, slots, tile)
        total += tl.sum(counts - held + listed, axis=0)
    tl.store(nnz_ptr + row, total)
    tl.store(kept_ptr + row, tl.where((most > slots) | (total > limit), -1, total))


@launch.kernel(specialize=("M",))
def _ffn_row_offsets_kernel(kept_ptr, offsets_ptr, heavy_ptr, M, room, BLOCK: tl.constexpr):
    """One program: where the lists of rows, or columns, begin, and which rows have none though they have entries."""
    end = 0
    listed = 0
    tl.store(offsets_ptr, 0)
    for first in range(0, M, BLOCK):
        row = first + tl.arange(0, BLOCK)
        kept = tl.load(kept_ptr + row, mask=row < M, other=0)
        upto = end + tl.cumsum(tl.maximum(kept, 0), axis=0)
        fits = upto <= room
        end = tl.maximum(end, tl.max(tl.where(fits, upto, 0), axis=0))
        # The sum only grows: rows that do not fit come last, and begin and end where the last did that fits.
        tl.store(offsets_ptr + 1 + row, tl.where(fits, upto, end), mask=row < M)
        if heavy_ptr is not None:
            heavy = (kept < 0) | ((kept > 0) & (fits == 0))
            place = listed + tl.cumsum(heavy.to(tl.int32), axis=0)
            tl.store(heavy_ptr + place, row, mask=heavy)
            listed += tl.sum(heavy.to(tl.int32), axis=0)
    if heavy_ptr is not None:
        tl.store(heavy_ptr, listed)


@launch.kernel
def _ffn_row_lists_kernel(
    values_ptr, indices_ptr, counts_ptr, hot_ptr, slot_ptr, kept_ptr, offsets_ptr, out_ptr, columns_ptr, dense_ptr,
    fired_ptr, tiles, slots, tile, H,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row). dense_ptr: [M, H], of zeros, takes the values of hot neurons."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(offsets_ptr + row)
    # A row that no longer fits begins where it ends.
    if tl.load(offsets_ptr + row + 1) - base == tl.load(kept_ptr + row):
        used = tl.load(hot_ptr)
        values_ptr += row * tiles * slots
        indices_ptr += row * tiles * slots
        dense_ptr += row * H
        for first_tile in range(0, tiles, BLOCK):
            at = first_tile + tl.arange(0, BLOCK)
            counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
            listed = listed_counts(indices_ptr, slot_ptr, used, at, counts, slots, tile)
            place = base + tl.cumsum(listed, axis=0) - listed
            for first in range(0, tl.max(counts, axis=0), RANKS):
                held, column = columns_at(indices_ptr, at, counts, first, slots, tile)
                from_ptr = values_ptr + at[:, None] * slots + first + tl.arange(0, RANKS)[None, :]
                value = tl.load(from_ptr, mask=held, other=0.0)
                slot = tl.full([BLOCK, RANKS], -1, tl.int32)
                if used > 0:
                    slot = tl.load(slot_ptr + column, mask=held, other=-1)
                    tl.store(dense_ptr + slot, value, mask=held & (slot >= 0))
                kept = (held & (slot < 0)).to(tl.int32)
                to = place[:, None] + tl.cumsum(kept, axis=1) - 1
                tl.store(columns_ptr + to, column, mask=kept != 0)
                tl.store(out_ptr + to, value, mask=kept != 0)
                # Whole numbers: the sums do not depend on the order of arrival.
                tl.atomic_add(fired_ptr + column, 1, mask=held, sem="relaxed")
                place += tl.sum(kept, axis=1)
            base += tl.sum(listed, axis=0)


@launch.kernel
def _ffn_column_bits_kernel(columns_ptr, offsets_ptr, bits_ptr, N, BLOCK: tl.constexpr):
    """Program (row): its bit in the words of its columns."""
    row = tl.program_id(0)
    end = tl.load(offsets_ptr + row + 1)
    bits_ptr += (row // GROUP).to(tl.int64) * N
    for first in range(tl.load(offsets_ptr + row), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        column = widened(tl.load(columns_ptr + at, mask=at < end, other=0))
        bit = tl.zeros([BLOCK], tl.int32) + (1 << (row % GROUP))
        tl.atomic_or(bits_ptr + column, bit, mask=at < end, sem="relaxed")


@triton.jit
def count_bits(x):
    """The bits of a word that are set."""
    x = x.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@launch.kernel
def _ffn_column_sums_kernel(bits_ptr, before_ptr, counts_ptr, N, groups, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (BLOCK_N columns): how many of each come before each group of rows, and how many there are."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.int32)
    for first in range(0, groups, BLOCK_G):
        group = first + tl.arange(0, BLOCK_G)
        at = group.to(tl.int64)[:, None] * N + columns[None, :]
        mask = (group < groups)[:, None] & (columns < N)[None, :]
        held = count_bits(tl.load(bits_ptr + at, mask=mask, other=0))
        tl.store(before_ptr + at, total[None, :] + tl.cumsum(held, axis=0) - held, mask=mask)
        total += tl.sum(held, axis=0)
    tl.store(counts_ptr + columns, total, mask=columns < N)


@launch.kernel
def _ffn_column_lists_kernel(
    columns_ptr, row_offsets_ptr, bits_ptr, before_ptr, offsets_ptr, gate_ptr, up_ptr, rows_ptr, places_ptr,
    hidden_ptr, N, BLOCK: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """Program (row): puts its entries in their columns' lists, with their hidden activations."""
    row = tl.program_id(0)
    end = tl.load(row_offsets_ptr + row + 1)
    words = (row // GROUP).to(tl.int64) * N
    for first in range(tl.load(row_offsets_ptr + row), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        held = at < end
        column = widened(tl.load(columns_ptr + at, mask=held, other=0))
        ahead = tl.load(bits_ptr + words + column, mask=held, other=0) & ((1 << (row % GROUP)) - 1)
        place = tl.load(offsets_ptr + column, mask=held, other=0) + count_bits(ahead)
        place += tl.load(before_ptr + words + column, mask=held, other=0)
        gate = tl.load(gate_ptr + at, mask=held, other=0.0).to(tl.float32)
        hidden = gate * gate if SQUARED else gate
        if up_ptr is not None:
            hidden = hidden.to(hidden_ptr.dtype.element_ty).to(tl.float32)
            hidden *= tl.load(up_ptr + at, mask=held, other=0.0).to(tl.float32)
        tl.store(rows_ptr + place, row + tl.zeros([BLOCK], tl.int32), mask=held)
        tl.store(places_ptr + place, at, mask=held)
        tl.store(hidden_ptr + place, hidden, mask=held)


@triton.jit
def through(grad, z, active, up, penalty_ptr, SQUARED: tl.constexpr):
    """(hidden activations, gradients through the gate, through the up projection) at entries; grad: of the hidden
    activations, float32, without the L1 penalty's share. z: of the gate; up: float32, or None in a plain block."""
    dtype: tl.constexpr = z.dtype
    gate = tl.where(active, z.to(tl.float32), 0.0)
    hidden = gate * gate if SQUARED else gate
    slope = 2 * gate if SQUARED else tl.full(gate.shape, 1, tl.float32)
    through_up = hidden
    if up is not None:
        if penalty_ptr is not None:
            grad += tl.load(penalty_ptr) * tl.where(up > 0, 1.0, tl.where(up < 0, -1.0, 0.0))
        through_up = tl.where(active, grad * hidden, 0.0)
        hidden = tl.where(active, hidden.to(dtype).to(tl.float32) * up, 0.0)
        slope *= up
    elif penalty_ptr is not None:
        grad += tl.load(penalty_ptr)
    return hidden, tl.where(active, grad * slope, 0.0), through_up


def halves(x: Tensor) -> bool:
    """Whether kernels widen elements of x as `wide` does."""
    return x.dtype is torch.bfloat16 and torch.version.hip is None and not INTERPRET


def row_lists(packed: tuple[Tensor, Tensor, Tensor], hot: Hot, tile: int, n: int, limit: int, room: int) -> RowLists:
    """packed: values and indices `[M, T, slots]` and counts `[M, T]`, all M, T at least 1."""
    values, indices, counts = packed
    m, tiles, slots = values.shape
    device = values.device
    columns = torch.empty(room, dtype=column_dtype(n), device=device)
    nnz, kept, rows = (torch.empty(k, dtype=torch.int32, device=device) for k in (m, m, (2, aligned(m))))
    offsets, out = rows[0, : m + 1], values.new_empty(hot.values.shape[0], room)
    meta = {"BLOCK": min(max(launch.next_power_of_2(tiles), 16), 64)}
    args = (indices, counts, hot.listed, hot.slots, nnz, kept, tiles, slots, tile, limit)
    _ffn_row_counts_kernel((m, 1, 1), args, meta, num_warps=1)
    scan(kept, offsets, rows[1], room)
    args = (values, indices, counts, hot.listed, hot.slots, kept, offsets, out, columns, hot.values, hot.fired)
    _ffn_row_lists_kernel((m, 1, 1), (*args, tiles, slots, tile, hot.values.shape[2]), dict(meta), num_warps=1)
    return RowLists(out, columns, rows, nnz, hot.fired)


def scan(counts: Tensor, offsets: Tensor, heavy: Tensor | None, room: int) -> None:
    """Writes the offsets, `[1 + M]`, of M lists that have `room` together, and which are longer, if that is asked."""
    m = counts.shape[0]
    meta = {"BLOCK": min(8192, max(256, launch.next_power_of_2(m)))}
    _ffn_row_offsets_kernel((1, 1, 1), (counts, offsets, heavy, m, room), meta, num_warps=16)


def column_lists(
    gate: Tensor, up: Tensor | None, columns: Tensor, offsets: Tensor, n: int, squared: bool
) -> ColumnLists:
    """gate, up: values of the entries, as `columns`; offsets: of rows."""
    m, room, device = offsets.shape[0] - 1, gate.shape[0], gate.device
    groups = launch.cdiv(m, GROUP.value)
    bits = torch.zeros(groups, n, dtype=torch.int32, device=device)
    before = torch.empty_like(bits)
    counts, column_offsets = (torch.empty(n + extra, dtype=torch.int32, device=device) for extra in (0, 1))
    rows = torch.empty(2, room, dtype=torch.int32, device=device)
    hidden = gate.new_empty(room)
    _ffn_column_bits_kernel((m, 1, 1), (columns, offsets, bits, n), {"BLOCK": 128}, num_warps=1)
    meta = {"BLOCK_G": 64, "BLOCK_N": 32}
    _ffn_column_sums_kernel((launch.cdiv(n, 32), 1, 1), (bits, before, counts, n, groups), meta, num_warps=4)
    scan(counts, column_offsets, None, room)
    args = (columns, offsets, bits, before, column_offsets, gate, up, rows[0], rows[1], hidden, n)
    _ffn_column_lists_kernel((m, 1, 1), args, {"BLOCK": 32, "SQUARED": squared}, num_warps=1)
    return ColumnLists(rows[0], rows[1], hidden, column_offsets)


EXAMPLES = {
    _ffn_row_counts_kernel: {
        "indices_ptr": "*u8", "counts_ptr": "*i16", "hot_ptr": "*i32", "slot_ptr": "*i32", "kept_ptr": "*i32",
        "BLOCK": 32, "num_warps": 1,
    },
    _ffn_row_offsets_kernel: {"kept_ptr": "*i32", "BLOCK": 8192, "num_warps": 16},
    _ffn_row_lists_kernel: {
        "indices_ptr": "*u8", "counts_ptr": "*i16", "hot_ptr": "*i32", "slot_ptr": "*i32", "kept_ptr": "*i32",
        "columns_ptr": "*i16", "BLOCK": 32, "num_warps": 1,
    },
    _ffn_column_bits_kernel: {"columns_ptr": "*i16", "BLOCK": 128, "num_warps": 1},
    _ffn_column_sums_kernel: {"BLOCK_G": 64, "BLOCK_N": 32},
    _ffn_column_lists_kernel: {"columns_ptr": "*i16", "BLOCK": 32, "SQUARED": False, "num_warps": 1},
}  # fmt: skip
