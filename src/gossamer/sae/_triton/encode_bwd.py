"""Gradients of an encoder's pre-activations, bias and thresholds, from those of its entries.

The sums for the bias and the thresholds go by columns: a program takes a column's entries, in order of row, as
`rowsparse.transpose` has sorted them, so that no order of arrival shows. The part of overflowed rows is added by a
second kernel, a program a block of columns, which leaves at once where no row did: their dense activations say by -0.0
which entries of value 0 are stored. The gradient of such a row is dense, and written by a program for each chunk of it.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.overflow import list_overflowed, load_rows
from gossamer.rowsparse._triton.pack import row_span
from gossamer.sae.records import SaeEncodeBwdColumns, SaeEncodeBwdSource


@launch.kernel
def _encode_bwd_columns_kernel(
    keys_ptr, offsets_ptr, values_ptr, grad_ptr, grad_l0_ptr, threshold_ptr, out_bias_ptr, out_threshold_ptr,
    stride_g, stride_l, stride_t, radius, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (column): sums over its entries, in order of row."""
    column = tl.program_id(0)
    begin = tl.load(offsets_ptr + column)
    end = tl.load(offsets_ptr + column + 1)
    bias = tl.zeros([BLOCK], tl.float32)
    near = tl.zeros([BLOCK], tl.float32)
    threshold = 0.0
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + column * stride_t)
    for at in range(begin, end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        held = entry < end
        key = tl.load(keys_ptr + entry, mask=held, other=0)
        row = key >> 32
        slot = key & 0xFFFFFFFF
        value = tl.load(values_ptr + slot, mask=held, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + slot * stride_g, mask=held, other=0.0).to(tl.float32)
        bias += tl.where(value != 0, grad, 0.0)
        if threshold_ptr is not None:
            slope = threshold * grad + tl.load(grad_l0_ptr + row * stride_l, mask=held, other=0.0)
            near += tl.where(held & (value - threshold < radius), slope, 0.0)
    tl.store(out_bias_ptr + column, tl.sum(bias, axis=0))
    if threshold_ptr is not None:
        tl.store(out_threshold_ptr + column, tl.where(threshold < 0, 0.0, -0.5 / radius * tl.sum(near, axis=0)))


@launch.kernel
def _encode_bwd_columns_overflow_kernel(
    source_ptr, rows_ptr, grad_ptr, grad_l0_ptr, threshold_ptr, out_bias_ptr, out_threshold_ptr,
    stride_sm, stride_gm, stride_gn, stride_l, stride_t, radius, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of columns): adds the part of the overflowed rows, which are listed."""
    number = tl.load(rows_ptr)
    if number > 0:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        near = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        threshold = tl.zeros([BLOCK_N], tl.float32)
        if threshold_ptr is not None:
            threshold = tl.load(threshold_ptr + columns * stride_t, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, number, BLOCK_M):
            rows, listed = load_rows(rows_ptr, first, number, BLOCK_M)
            mask = listed[:, None] & inside[None, :]
            at = source_ptr + rows[:, None] * stride_sm + columns[None, :]
            value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            at = grad_ptr + rows[:, None] * stride_gm + columns.to(tl.int64)[None, :] * stride_gn
            grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            bias += tl.where(value != 0, grad, 0.0)
            if threshold_ptr is not None:
                stored = (value != 0) | (value.to(tl.int32, bitcast=True) < 0)
                grad_l0 = tl.load(grad_l0_ptr + rows * stride_l, mask=listed, other=0.0)
                slope = threshold[None, :] * grad + grad_l0[:, None]
                near += tl.where(mask & stored & (value - threshold[None, :] < radius), slope, 0.0)
        bias_ptrs = out_bias_ptr + columns
        tl.store(bias_ptrs, tl.load(bias_ptrs, mask=inside, other=0.0) + tl.sum(bias, axis=0), mask=inside)
        if threshold_ptr is not None:
            threshold_ptrs = out_threshold_ptr + columns
            slope = tl.where(threshold < 0, 0.0, -0.5 / radius * tl.sum(near, axis=0))
            tl.store(threshold_ptrs, tl.load(threshold_ptrs, mask=inside, other=0.0) + slope, mask=inside)


@launch.kernel
def _encode_bwd_source_kernel(
    grad_ptr, source_ptr, spans_ptr, grad_l0_ptr, threshold_ptr, out_ptr, stride_sm, stride_gm, stride_gn, stride_l,
    stride_t, radius, N, room, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the gradient of an overflowed row of pre-activations, with the straight-through estimate
    of a threshold that is given."""
    row = tl.program_id(0).to(tl.int64)
    if row_span(spans_ptr, row, tl.num_programs(0), room)[2]:
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0)
        grad = tl.load(grad_ptr + row * stride_gm + columns * stride_gn, mask=columns < N, other=0.0)
        flow = tl.where(value != 0, grad, 0.0).to(tl.float32)
        if threshold_ptr is not None:
            value = value.to(tl.float32)
            threshold = tl.load(threshold_ptr + columns * stride_t, mask=columns < N, other=-1.0)
            stored = (value != 0) | (value.to(tl.int32, bitcast=True) < 0)
            slope = threshold * grad.to(tl.float32) + tl.load(grad_l0_ptr + row * stride_l)
            flow += tl.where(stored & (value - threshold < radius) & (threshold >= 0), 0.5 / radius * slope, 0.0)
        tl.store(out_ptr + row * N + columns, flow, mask=columns < N)


def bwd_columns(call: SaeEncodeBwdColumns) -> tuple[Tensor, Tensor]:
    """Float32 (grad_bias [N], grad_threshold [N], or [0] without a threshold)."""
    grad_values, grad_source, grad_l0, col_offsets, keys, _, values, spans, source, threshold, bandwidth = call
    n = col_offsets.shape[0] - 1
    bias_out = torch.zeros(n, dtype=torch.float32, device=values.device)
    threshold_out = torch.zeros(0 if threshold is None else n, dtype=torch.float32, device=values.device)
    if n == 0 or spans.shape[1] == 0:
        return bias_out, threshold_out
    stride_t = 0 if threshold is None else threshold.stride(0)
    tail = (grad_l0.stride(0), stride_t, bandwidth / 2)
    args = (keys, col_offsets, values, grad_values, grad_l0, threshold, bias_out, threshold_out)
    args += (grad_values.stride(0), *tail)
    _encode_bwd_columns_kernel((n, 1, 1), args, {"BLOCK": 128}, num_warps=1)
    if source.shape[0]:
        source = rows_contiguous(source)
        rows = list_overflowed(spans, values.shape[0])
        args = (source, rows, grad_source, grad_l0, threshold, bias_out, threshold_out)
        args += (source.stride(0), *grad_source.stride(), *tail, n)
        meta = {"BLOCK_M": 16, "BLOCK_N": 128}
        _encode_bwd_columns_overflow_kernel((launch.cdiv(n, 128), 1, 1), args, meta, num_warps=4)
    return bias_out, threshold_out


def bwd_source(call: SaeEncodeBwdSource) -> Tensor:
    """[M, N], written at overflowed rows alone."""
    grad, source, spans, room, grad_l0, threshold, bandwidth = call
    m, n = source.shape
    out = torch.empty(m, n, dtype=source.dtype, device=source.device)
    if m and n:
        source = rows_contiguous(source)
        strides = (
            source.stride(0),
            *grad.stride(),
            *(0 if t is None or threshold is None else t.stride(0) for t in (grad_l0, threshold)),
        )
        args = (grad, source, spans, None if threshold is None else grad_l0, threshold, out, *strides, bandwidth / 2)
        _encode_bwd_source_kernel((m, launch.cdiv(n, 4096), 1), (*args, n, room), {"BLOCK": 4096}, num_warps=4)
    return out


EXAMPLES = {
    _encode_bwd_columns_kernel: {"offsets_ptr": "*i64", "BLOCK": 128, "num_warps": 1},
    _encode_bwd_columns_overflow_kernel: {"BLOCK_M": 16, "BLOCK_N": 128},
    _encode_bwd_source_kernel: {"BLOCK": 4096},
}
