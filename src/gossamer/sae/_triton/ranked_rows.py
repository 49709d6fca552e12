"""Rows of pre-activations to sorted lists of what is among the largest: a program a row.

Which keys a row keeps has been found (`select.row_kth`, `batchtopk.find`): every one above `kth`, and the first `need`
that equal it. This is for rows whose entries cannot come from a list of candidates: where they may have more entries
than slots, and where a batch's list had no room for them.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.pack import chunk_columns, clear_slots, count_bits, scan_tile, word_bits
from gossamer.sae._triton._entries import GROUPS, append_active
from gossamer.sae._triton.select import SHIFT, add_bias, load_pre, rank_key, settle_ties


@triton.jit
def keep_largest(
    z_ptr, bias_ptr, scale_ptr, kth, need, N, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Overwrites a row of z by what is among the largest."""
    seen = 0
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        z = load_pre(z_ptr, columns, N)
        pre = add_bias(z, bias_ptr, columns, N)
        key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
        ties, seen = settle_ties(word_bits(key == kth, VEC), need, seen, VEC)
        tied = (ties[:, None] >> tl.arange(0, VEC)[None, :]) & 1
        tl.store(z_ptr + columns, tl.where((key > kth) | (tied != 0), pre, 0.0), mask=columns < N)


@triton.jit
def _ranked_row_kernel(
    z_ptr, bias_ptr, scale_ptr, kth_ptr, need_ptr, reach_ptr, offsets_ptr, values_ptr, indices_ptr, nnz_ptr, l0_ptr,
    length, N, capacity, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, MAY_OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Program (row). With `reach_ptr` only rows are done where that exceeds `length`, and with `offsets_ptr` their
    entries are those of CSR, which has a place for each."""
    row = tl.program_id(0).to(tl.int64)
    if reach_ptr is not None:
        if tl.load(reach_ptr + row) <= length:
            return
    z_ptr += row * N
    begin = row * capacity
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + row)
        capacity = (tl.load(offsets_ptr + row + 1) - begin).to(tl.int32)
    values_ptr += begin
    indices_ptr += begin
    kth = tl.load(kth_ptr + row)
    need = tl.load(need_ptr + row)
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
                    bits, counts, z_ptr, bias_ptr, None, 0, values_ptr, indices_ptr, base, capacity, start, N, BLOCK,
                    VEC, False,
                )  # fmt: skip
        base += count
        z = following
    tl.store(l0_ptr + row, base)
    if offsets_ptr is None:
        tl.store(nnz_ptr + row, base)
        clear_slots(values_ptr, indices_ptr, base, capacity, 256, 256)
    if MAY_OVERFLOW:
        if base > capacity:
            # A warp may still read what another is about to overwrite.
            tl.debug_barrier()
            keep_largest(z_ptr, bias_ptr, scale_ptr, kth, need, N, BLOCK, VEC, SHIFT)


_ranked_row = launch.Kernel(_ranked_row_kernel)


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
    capacity = -1 if offsets is not None else out[0].shape[1]
    # Few rows, each in the hands of one program: more warps keep more of it in flight.
    warps = 8 if m < 512 else 1
    meta = {**scan_tile(n, z.element_size(), GROUPS * warps), "SHIFT": SHIFT[z.dtype], "MAY_OVERFLOW": may_overflow}
    args = (z, bias, scale, *kept, reach, offsets, *out, length, n, capacity)
    _ranked_row((m, 1, 1), args, meta, num_warps=warps)


EXAMPLES = {
    _ranked_row_kernel: {
        "signature": {
            "z_ptr": "*bf16", "bias_ptr": "*fp32", "scale_ptr": None, "kth_ptr": "*i32", "need_ptr": "*i32",
            "reach_ptr": "*i32", "offsets_ptr": None, "values_ptr": "*bf16", "indices_ptr": "*i32", "nnz_ptr": "*i32",
            "l0_ptr": "*fp32",
        },
        "constexprs": {"BLOCK": 1024, "VEC": 8, "SHIFT": 16, "MAY_OVERFLOW": True},
        "num_warps": 1,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
