"""Rows of pre-activations to sorted lists of the elements that exceed a threshold, in slots.

The lister writes them. A row that has more entries than slots is overwritten by its activation afterwards, so that the
pre-activations serve as the container's source. There -0.0 stands for an entry of value 0, +0.0 for none.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.limit import add_bias, load_threshold
from gossamer.rowsparse._triton.list_entries import Limit, list_slots
from gossamer.rowsparse._triton.pack import chunk_columns, even_length, is_even, scan_tile
from gossamer.sae._triton.select import load_pre

GROUPS = 128
"""Words of a chunk: half as many as of `pack`, for thresholds take registers."""


@triton.jit
def activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, N, WINDOW: tl.constexpr):
    """What exceeds the threshold, and a mark for what lies in the window."""
    pre = add_bias(z, bias_ptr, columns, columns < N)
    threshold = load_threshold(threshold_ptr, stride_t, columns, columns < N)
    out = tl.where(pre <= threshold, 0.0, pre)
    if WINDOW:
        # A literal -0.0 would become +0.0 on its way through the compiler.
        minus_zero = tl.full([], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        out = tl.where((pre <= threshold) & (pre > threshold - radius), minus_zero, out)
    return out


@triton.jit
def activate_row(
    z_ptr, bias_ptr, threshold_ptr, stride_t, radius, begin, end, BLOCK: tl.constexpr, VEC: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Overwrites a row of z, from column `begin` on and before `end`, by what it activates to."""
    z = load_pre(z_ptr, chunk_columns(begin, BLOCK, VEC), end)
    for start in range(begin, end, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        # Ahead of the store, behind which the compiler would leave it.
        following = load_pre(z_ptr, columns + BLOCK, end)
        out = activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, end, WINDOW)
        tl.store(z_ptr + columns, out, mask=columns < end)
        z = following


@launch.kernel
def _activate_rows_kernel(
    z_ptr, bias_ptr, threshold_ptr, nnz_ptr, stride_t, radius, N, capacity, shares, span,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (row, share of `span` columns), of rows with more entries than `capacity`."""
    row, N = (tl.program_id(0) // shares).to(tl.int64), even_length(N, VEC, EVEN)
    if tl.load(nnz_ptr + row) > capacity:
        begin = tl.program_id(0) % shares * span
        end = tl.minimum(begin + span, N)
        activate_row(z_ptr + row * N, bias_ptr, threshold_ptr, stride_t, radius, begin, end, BLOCK, VEC, WINDOW)


def encode_rows(
    z: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    capacity: int,
    bandwidth: float,
    may_overflow: bool,
    l0: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz); fills l0, which starts as zeros where there is a bandwidth."""
    m, n = z.shape
    values, indices, nnz = list_slots(z, capacity, Limit(bias, threshold, bandwidth / 2), l0)
    if may_overflow:
        sizes = scan_tile(n, z.element_size(), GROUPS)
        # Few rows are shared by programs; where no row overflowed they only look.
        blocks = launch.cdiv(n, sizes["BLOCK"])
        span = launch.cdiv(blocks, max(1, min(blocks, 1024 // m))) * sizes["BLOCK"]
        shares = launch.cdiv(n, span)
        meta = {**sizes, "WINDOW": bandwidth > 0, "EVEN": is_even(n, z.element_size())}
        stride_t = 0 if threshold is None else threshold.stride(0)
        args = (z, bias, threshold, nnz, stride_t, bandwidth / 2, n, capacity, shares, span)
        _activate_rows_kernel((m * shares, 1, 1), args, meta, num_warps=1)
    return values, indices, nnz


EXAMPLES = {_activate_rows_kernel: {"BLOCK": 1024, "VEC": 8, "WINDOW": True, "EVEN": False, "num_warps": 1}}
