"""Rows of pre-activations to sorted lists of what is among the largest: a program a row.

Which keys a row keeps has been found (`select.row_kth`, `batchtopk.find`): every one above `kth`, and the first `need`
that equal it. This is for rows whose entries cannot come from a list of candidates: where they may have more entries
than slots, and where a batch's list had no room for them.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.limit import add_bias
from gossamer.rowsparse._triton.pack import chunk_columns, clear_slots, count_bits, pop_lowest, scan_tile, word_bits
from gossamer.sae._triton.encode_rows import GROUPS
from gossamer.sae._triton.select import SHIFT, load_pre, rank_key, settle_ties


@triton.jit
def keep_largest(
    z_ptr, bias_ptr, scale_ptr, kth, need, N, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Overwrites a row of z by what is among the largest."""
    seen = 0
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        z = load_pre(z_ptr, columns, N)
        pre = add_bias(z, bias_ptr, columns, columns < N)
        key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
        ties, seen = settle_ties(word_bits(key == kth, VEC), need, seen, VEC)
        tied = (ties[:, None] >> tl.arange(0, VEC)[None, :]) & 1
        tl.store(z_ptr + columns, tl.where((key > kth) | (tied != 0), pre, 0.0), mask=columns < N)


@triton.jit
def append_active(
    bits, counts, z_ptr, bias_ptr, values_ptr, indices_ptr, base, limit, start, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `pack.append_entries`, writing activations."""
    slot = base + tl.cumsum(counts, axis=0) - counts
    while tl.max(bits, axis=0) > 0:
        column, held, bits = pop_lowest(bits, start, BLOCK, VEC)
        mask = held & (slot < limit)
        value = add_bias(tl.load(z_ptr + column, mask=mask, other=0.0), bias_ptr, column, column < N)
        tl.store(values_ptr + slot, value, mask=mask)
        tl.store(indices_ptr + slot, column, mask=mask)
        slot += held.to(tl.int32)


@triton.jit
def append_largest(
    z_ptr, bias_ptr, scale_ptr, kth, need, values_ptr, indices_ptr, N, capacity,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Writes what of a row is among the largest to as many slots as there are; how many entries that is."""
    base = 0
    seen = 0
    z = load_pre(z_ptr, chunk_columns(0, BLOCK, VEC), N)
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
        bits = word_bits(key >= kth, VEC)
        counts = count_bits(bits)
        count = tl.sum(counts, axis=0)
        if count > 0:
            ties, seen = settle_ties(word_bits(key == kth, VEC), need, seen, VEC)
            bits = word_bits(key > kth, VEC) | ties
            counts = count_bits(bits)
            count = tl.sum(counts, axis=0)
            if base < capacity:
                append_active(
                    bits, counts, z_ptr, bias_ptr, values_ptr, indices_ptr, base, capacity, start, N, BLOCK, VEC
                )  # fmt: skip
        base += count
        z = following
    return base


@launch.kernel
def _ranked_row_kernel(
    z_ptr, bias_ptr, scale_ptr, kth_ptr, need_ptr, reach_ptr, values_ptr, indices_ptr, nnz_ptr, l0_ptr,
    length, N, capacity, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, MAY_OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Program (row), of an ELL. With `reach_ptr` only rows are done where that exceeds `length`."""
    row = tl.program_id(0).to(tl.int64)
    if reach_ptr is not None:
        if tl.load(reach_ptr + row) <= length:
            return
    z_ptr += row * N
    values_ptr += row * capacity
    indices_ptr += row * capacity
    kth = tl.load(kth_ptr + row)
    need = tl.load(need_ptr + row)
    count = append_largest(
        z_ptr, bias_ptr, scale_ptr, kth, need, values_ptr, indices_ptr, N, capacity, BLOCK, VEC, SHIFT
    )
    tl.store(l0_ptr + row, count)
    tl.store(nnz_ptr + row, count)
    clear_slots(values_ptr, indices_ptr, count, capacity, 256, 256)
    if MAY_OVERFLOW:
        if count > capacity:
            # A warp may still read what another is about to overwrite.
            tl.debug_barrier()
            keep_largest(z_ptr, bias_ptr, scale_ptr, kth, need, N, BLOCK, VEC, SHIFT)


@launch.kernel
def _ranked_row_csr_kernel(
    z_ptr, bias_ptr, scale_ptr, kth_ptr, need_ptr, reach_ptr, offsets_ptr, values_ptr, indices_ptr, l0_ptr, length, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program (row), of a CSR, which has a place for each entry: of rows whose reach exceeds `length`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(reach_ptr + row) > length:
        begin = tl.load(offsets_ptr + row)
        room = (tl.load(offsets_ptr + row + 1) - begin).to(tl.int32)
        count = append_largest(
            z_ptr + row * N, bias_ptr, scale_ptr, tl.load(kth_ptr + row), tl.load(need_ptr + row), values_ptr + begin,
            indices_ptr + begin, N, room, BLOCK, VEC, SHIFT,
        )  # fmt: skip
        tl.store(l0_ptr + row, count)


def ranked_rows(
    z: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    kept: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor | None, Tensor],
    may_overflow: bool,
    reach: Tensor | None = None,
    length: int = 0,
    offsets: Tensor | None = None,
) -> None:
    """Fills values, indices, nnz and l0 of the rows that keep what `kept`, kth and need [M], says; only of those where
    reach [M] exceeds length, if that is given. With the offsets of CSR there is no nnz."""
    m, n = z.shape
    # Few rows, each in the hands of one program: more warps keep more of it in flight.
    warps = 8 if m < 512 else 1
    meta = {**scan_tile(n, z.element_size(), GROUPS * warps), "SHIFT": SHIFT[z.dtype]}
    values, indices, nnz, l0 = out
    if offsets is not None:
        args = (z, bias, scale, *kept, reach, offsets, values, indices, l0, length, n)
        _ranked_row_csr_kernel((m, 1, 1), args, meta, num_warps=warps)
    else:
        args = (z, bias, scale, *kept, reach, values, indices, nnz, l0, length, n, values.shape[1])
        _ranked_row_kernel((m, 1, 1), args, meta | {"MAY_OVERFLOW": may_overflow}, num_warps=warps)


EXAMPLES = {
    _ranked_row_kernel: {"scale_ptr": None, "BLOCK": 1024, "VEC": 8, "SHIFT": 16, "MAY_OVERFLOW": True, "num_warps": 1},
    _ranked_row_csr_kernel: {"offsets_ptr": "*i64", "BLOCK": 1024, "VEC": 8, "SHIFT": 16, "num_warps": 1},
}
