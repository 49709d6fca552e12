"""Overflowed rows of a linear layer, computed again, and their product with a weight.

The dense matrix of such a source never existed, and which of its rows are wanted only the device knows. So the kernel
is always launched and leaves at once where a block of rows has none. To multiply them, blocks of rows take turns in a
buffer of an eighth of the matrix, or 64 MiB: the rows are computed there, and `overflow` multiplies them from there.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.limit import load_threshold
from gossamer.rowsparse._triton.matmul import launch_matmul
from gossamer.rowsparse._triton.overflow import Overflow, dot, summed_apart
from gossamer.rowsparse._triton.spans import overflowed
from gossamer.rowsparse.records import LinearRows, MatmulLinear


@launch.kernel
def _linear_source_kernel(
    x_ptr, w_ptr, bias_ptr, threshold_ptr, spans_ptr, out_ptr, room, stride_xm, stride_xk, stride_wn, stride_wk,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row block, share of the column tiles): max(x @ w + bias, 0), or 0 up to the threshold, at rows that
    overflowed. PARTIAL products at a time are summed on their own, or 0 for all: as exact in float32 as the library's
    dense product. EVEN says that K needs no mask. Rows beyond the last read the first, and are not stored."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    flagged = overflowed(spans_ptr, rows, M, room)
    if tl.max(flagged.to(tl.int32), axis=0) > 0:
        inner = tl.arange(0, BLOCK_K)
        x_first = x_ptr + tl.where(rows < M, rows, 0).to(tl.int64)[:, None] * stride_xm
        x_first += inner.to(tl.int64)[None, :] * stride_xk
        for tile in range(tl.program_id(1), tl.cdiv(N, BLOCK_N), tl.num_programs(1)):
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = columns < N
            w_ptrs = w_ptr + columns.to(tl.int64)[None, :] * stride_wn
            w_ptrs += inner.to(tl.int64)[:, None] * stride_wk
            x_ptrs = x_first
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            # The rows of a transposed weight may lie 2^25 apart.
            step = tl.full([], BLOCK_K, tl.int64)
            for first in range(0, K, BLOCK_K):
                if EVEN:
                    x = tl.load(x_ptrs)
                    w = tl.load(w_ptrs, mask=inside[None, :], other=0.0)
                else:
                    x = tl.load(x_ptrs, mask=(inner < K - first)[None, :], other=0.0)
                    w = tl.load(w_ptrs, mask=(inner < K - first)[:, None] & inside[None, :], other=0.0)
                x_ptrs += step * stride_xk
                w_ptrs += step * stride_wk
                acc = dot(x, w, acc, PRECISION, UPCAST)
                if PARTIAL > 0:
                    acc, total = summed_apart(acc, total, (first + BLOCK_K) % PARTIAL == 0)
            if PARTIAL > 0:
                acc += total
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            z = acc.to(out_ptr.dtype.element_ty)
            threshold = tl.zeros([BLOCK_N], tl.float32)
            if threshold_ptr is not None:
                threshold = load_threshold(threshold_ptr, 1, columns, columns < N)
            z = tl.where(z.to(tl.float32) <= threshold[None, :], 0.0, z)
            at = rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(out_ptr + at, z, mask=flagged[:, None] & inside[None, :])


def tile_of(m: int, weight: Tensor) -> launch.Tile:
    if weight.element_size() != 2:
        # Of 8 warps, so that two sums fit the registers.
        return launch.Tile({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, 8, 3)
    if m <= 64:
        return launch.Tile({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32}, 4, 3)
    return launch.Tile({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64 if tuning.hopper(weight.device) else 32}, 8, 3)


def linear_source(call: LinearRows) -> Tensor:
    """As its record says."""
    x, weight, bias, threshold, spans, room = call
    out = x.new_empty(x.shape[0], weight.shape[0])
    launch_linear_source(x, weight, bias, threshold, spans, room, out)
    return out


def launch_linear_source(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None, spans: Tensor, room: int, out: Tensor
) -> None:
    (m, n), k = out.shape, x.shape[1]
    if m == 0 or n == 0:
        return
    tile = tile_of(m, weight)
    meta = {
        **tile.sizes,
        "PARTIAL": overflow.SUMMED if weight.element_size() != 2 and not tuning.tf32() else 0,
        "EVEN": k % tile.sizes["BLOCK_K"] == 0,
    }
    meta |= tuning.dot_precision(weight, k)
    strides = (*x.stride(), *weight.stride())
    args = (x, weight, bias, threshold, spans, out, room, *strides, m, n, k)
    row_blocks = launch.cdiv(m, meta["BLOCK_M"])
    share = min(launch.cdiv(n, meta["BLOCK_N"]), max(launch.cdiv(2 * tuning.programs(x.device), row_blocks), 16))
    _linear_source_kernel((row_blocks, share, 1), args, meta, **tile.options)


def matmul_linear(call: MatmulLinear) -> Tensor:
    """Rows times weight, with overflowed rows from a linear source."""
    values, indices, spans, x, source_weight, source_bias, threshold, weight, bias, out_dtype = call
    weight = rows_contiguous(weight)
    m, n, room = spans.shape[1], weight.shape[0], values.shape[0]
    out = weight.new_empty((m, weight.shape[1]), dtype=out_dtype)
    launch_matmul(values, indices, spans, None, weight, bias, out)
    if m == 0 or n == 0 or out.shape[1] == 0:
        return out
    # Few blocks, for each costs two launches, and of those no more than an eighth of the matrix where that is large.
    blocks = min(8, launch.cdiv(m * n * x.element_size(), 64 << 20))
    block = min(m, max(256, launch.cdiv(launch.cdiv(m, blocks), 128) * 128))
    source = x.new_empty(block, n)
    for first in range(0, m, block):
        rows = slice(first, min(first + block, m))
        part, held = source[: rows.stop - first], spans[:, rows].contiguous()
        launch_linear_source(x[rows], source_weight, source_bias, threshold, held, room, part)
        overflow.forward(Overflow(part, held, room), weight, bias, out[rows])
    return out


EXAMPLES = {
    _linear_source_kernel: {
        "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "PARTIAL": 0, "EVEN": True, "PRECISION": "ieee", "UPCAST": False,
        "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
