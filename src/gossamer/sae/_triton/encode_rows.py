"""Rows of pre-activations to sorted lists of what exceeds a threshold: a program a row.

It walks its row in chunks and loads one ahead. Where rows do not fill the GPU see `encode_chunks`.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton import pack
from gossamer.rowsparse._triton.limit import add_bias, limits_of, load_limit, load_threshold
from gossamer.sae._triton._entries import GROUPS, activate_row, append_active
from gossamer.sae._triton.select import load_pre


@launch.kernel
def _encode_row_kernel(
    z_ptr, bias_ptr, threshold_ptr, limits_ptr, values_ptr, indices_ptr, nnz_ptr, l0_ptr, stride_t, radius, N, capacity,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr, MAY_OVERFLOW: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Program (row): what exceeds the threshold, or with WINDOW what lies less than `radius` below it as well.
    `limits_ptr` may stand in for both (see `limits_of`)."""
    row, N = tl.program_id(0).to(tl.int64), pack.even_length(N, VEC, EVEN)
    z_ptr += row * N
    values_ptr += row * capacity
    indices_ptr += row * capacity
    base = 0
    active = 0
    z = load_pre(z_ptr, pack.chunk_columns(0, BLOCK, VEC), N)
    for start in range(0, N, BLOCK):
        columns = pack.chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        pre = add_bias(z, bias_ptr, columns, columns < N)
        limit = load_limit(limits_ptr, threshold_ptr, stride_t, radius, columns, columns < N, WINDOW)
        bits = pack.word_bits(~(pre <= limit) & (columns < N), VEC)
        counts = pack.count_bits(bits)
        count = tl.sum(counts, axis=0)
        if count > 0:
            if base < capacity:
                found = append_active(
                    bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, capacity,
                    start, N, BLOCK, VEC, WINDOW,
                )  # fmt: skip
                if WINDOW:
                    active += tl.sum(found, axis=0)
            elif WINDOW:
                above = ~(pre <= load_threshold(threshold_ptr, stride_t, columns, columns < N))
                active += tl.sum((above & (columns < N)).to(tl.int32))
        base += count
        z = following
    tl.store(l0_ptr + row, active if WINDOW else base)
    tl.store(nnz_ptr + row, base)
    pack.clear_slots(values_ptr, indices_ptr, base, capacity, 256, 256)
    if MAY_OVERFLOW:
        if base > capacity:
            # A warp may still read what another is about to overwrite.
            tl.debug_barrier()
            activate_row(z_ptr, bias_ptr, threshold_ptr, stride_t, radius, 0, N, BLOCK, VEC, WINDOW)


def encode_rows(
    z: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    bandwidth: float,
    may_overflow: bool,
) -> None:
    """Fills values, indices, nnz and l0."""
    (m, n), capacity = z.shape, out[0].shape[1]
    stride_t = 0 if threshold is None else threshold.stride(0)
    meta = {**pack.scan_tile(n, z.element_size(), GROUPS), "WINDOW": bandwidth > 0, "MAY_OVERFLOW": may_overflow}
    meta["EVEN"] = pack.is_even(n, z.element_size())
    args = (z, bias, threshold, limits_of(z, threshold, bandwidth / 2), *out, stride_t, bandwidth / 2, n, capacity)
    _encode_row_kernel((m, 1, 1), args, meta, num_warps=1)


EXAMPLES = {
    _encode_row_kernel: {
        "limits_ptr": None, "BLOCK": 1024, "VEC": 8, "WINDOW": True, "MAY_OVERFLOW": True, "EVEN": False,
        "num_warps": 1,
    },
}  # fmt: skip
