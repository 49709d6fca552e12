"""A smooth count of latents that fire: a row's entries, or the whole of a row that has more entries than slots."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.pack import row_span
from gossamer.sae.records import SaeTanhL0, SaeTanhL0Bwd


@triton.jit
def tanh(x):
    """In float32, to a few units in the last place: near 0 a series, for the exponential's form cancels there."""
    magnitude = tl.minimum(tl.abs(x), 20.0)
    square = magnitude * magnitude
    near = magnitude * (
        1 + square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.02186949)))
    )
    far = 1 - 2 / (tl.exp(2 * magnitude) + 1)
    out = tl.where(magnitude < 0.2, near, far)
    out = tl.where(x < 0, -out, out)
    return tl.where(x == x, out, x)


@triton.jit
def tanh_slope(x):
    """1 - tanh(x)^2, to a few units in the last place: that difference would lose all digits of a large x."""
    small = tl.exp(-2 * tl.abs(x))
    return 4 * small / ((1 + small) * (1 + small))


@triton.jit
def load_slots(values_ptr, indices_ptr, scale_ptr, start, first, count, N, BLOCK: tl.constexpr):
    """(value, scale) of BLOCK slots of a row that begins at `start`, 0 where there is no entry; an index outside [0, N)
    is NaN."""
    slots = first + tl.arange(0, BLOCK)
    at = start + slots
    index = tl.load(indices_ptr + at, mask=slots < count, other=-1)
    held = (index >= 0) & (index < N)
    value = tl.load(values_ptr + at, mask=held, other=0.0).to(tl.float32)
    value = tl.where((index < -1) | (index >= N), float("nan"), value)
    return value, tl.load(scale_ptr + index, mask=held, other=0.0)


@triton.jit
def load_columns(source_ptr, scale_ptr, row, stride_sm, first, N, BLOCK: tl.constexpr):
    """(value, scale) of BLOCK columns of a dense row."""
    columns = first + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0).to(tl.float32)
    return value, tl.load(scale_ptr + columns, mask=columns < N, other=0.0)


@launch.kernel
def _tanh_l0_fwd_kernel(
    values_ptr, indices_ptr, spans_ptr, source_ptr, scale_ptr, out_ptr, stride_sm, N, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    start, count, over = row_span(spans_ptr, row, tl.num_programs(0), room)
    total = tl.zeros([BLOCK], tl.float32)
    if not over:
        for first in range(0, count, BLOCK):
            value, scale = load_slots(values_ptr, indices_ptr, scale_ptr, start, first, count, N, BLOCK)
            total += tanh(value * scale)
    elif source_ptr is not None:
        for first in range(0, N, BLOCK):
            value, scale = load_columns(source_ptr, scale_ptr, row, stride_sm, first, N, BLOCK)
            total += tanh(value * scale)
    else:
        # Nothing restores a row that overflowed.
        total += float("nan")
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@launch.kernel
def _tanh_l0_bwd_kernel(
    grad_ptr, values_ptr, indices_ptr, spans_ptr, source_ptr, scale_ptr, grad_values_ptr, grad_source_ptr, slope_ptr,
    slope_source_ptr, stride_g, stride_sm, N, room, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the gradient of each value, and its part in that of scale."""
    row = tl.program_id(0).to(tl.int64)
    start, count, over = row_span(spans_ptr, row, tl.num_programs(0), room)
    grad = tl.load(grad_ptr + row * stride_g).to(tl.float32)
    if not over:
        for first in range(0, count, BLOCK):
            value, scale = load_slots(values_ptr, indices_ptr, scale_ptr, start, first, count, N, BLOCK)
            flow = grad * tanh_slope(value * scale)
            slots = first + tl.arange(0, BLOCK)
            tl.store(grad_values_ptr + start + slots, flow * scale, mask=slots < count)
            tl.store(slope_ptr + start + slots, flow * value, mask=slots < count)
    if source_ptr is not None:
        if over:
            for first in range(0, N, BLOCK):
                value, scale = load_columns(source_ptr, scale_ptr, row, stride_sm, first, N, BLOCK)
                flow = grad * tanh_slope(value * scale)
                columns = first + tl.arange(0, BLOCK)
                tl.store(grad_source_ptr + row * N + columns, flow * scale, mask=columns < N)
                tl.store(slope_source_ptr + row * N + columns, flow * value, mask=columns < N)


def tanh_l0(call: SaeTanhL0) -> Tensor:
    """Float32 [M]."""
    values, indices, spans, source, scale = call
    m, room, n = spans.shape[1], values.shape[0], scale.shape[0]
    out = torch.empty(m, dtype=torch.float32, device=values.device)
    if m:
        source = None if source is None else rows_contiguous(source)
        stride = 0 if source is None else source.stride(0)
        args = (values, indices, spans, source, scale, out, stride, n, room)
        _tanh_l0_fwd_kernel((m, 1, 1), args, {"BLOCK": 256}, num_warps=2)
    return out


def tanh_l0_bwd(call: SaeTanhL0Bwd) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of values and source, and in the dtype of scale the terms of its own."""
    grad, values, indices, spans, source, scale = call
    m, room, n = spans.shape[1], values.shape[0], scale.shape[0]
    grad_values, slope = torch.zeros_like(values), torch.zeros_like(values, dtype=scale.dtype)
    # Zero in all other rows, for gradients of one source are added up.
    dense = values.new_zeros(0 if source is None else m, n)
    slope_source = torch.empty_like(dense, dtype=scale.dtype)
    if m:
        source = None if source is None else rows_contiguous(source)
        stride = 0 if source is None else source.stride(0)
        args = (grad, values, indices, spans, source, scale, grad_values, dense, slope, slope_source)
        _tanh_l0_bwd_kernel((m, 1, 1), (*args, grad.stride(0), stride, n, room), {"BLOCK": 256}, num_warps=2)
    return grad_values, dense, slope, slope_source


EXAMPLES = {
    _tanh_l0_fwd_kernel: {"scale_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": 256, "num_warps": 2},
    _tanh_l0_bwd_kernel: {
        "grad_ptr": "*fp32", "scale_ptr": "*fp32", "slope_source_ptr": "*fp32", "BLOCK": 256, "num_warps": 2,
    },
}  # fmt: skip
