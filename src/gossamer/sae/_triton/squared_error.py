"""The squared distance of each row to its reconstruction, and its gradient.

A program takes a row: x and y are read once, their difference is never in memory, and backward reads them again.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae.records import SaeSquaredError, SaeSquaredErrorBwd


@launch.kernel
def _squared_error_fwd_kernel(x_ptr, y_ptr, out_ptr, stride_xm, stride_ym, D, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    wide = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], wide)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_xm + columns, mask=columns < D, other=0.0).to(wide)
        residual = x - tl.load(y_ptr + row * stride_ym + columns, mask=columns < D, other=0.0).to(wide)
        total += residual * residual
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@launch.kernel
def _squared_error_bwd_kernel(
    grad_ptr, x_ptr, y_ptr, out_ptr, stride_g, stride_xm, stride_ym, D, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row): -2 * grad * (x - y)."""
    row = tl.program_id(0).to(tl.int64)
    grad = 2 * tl.load(grad_ptr + row * stride_g)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_xm + columns, mask=columns < D).to(grad.dtype)
        y = tl.load(y_ptr + row * stride_ym + columns, mask=columns < D).to(grad.dtype)
        tl.store(out_ptr + row * D + columns, (grad * (y - x)).to(out_ptr.dtype.element_ty), mask=columns < D)


def squared_error(call: SaeSquaredError) -> Tensor:
    """[M]."""
    x, y = call
    m, d = x.shape
    out = torch.empty(m, dtype=threshold_dtype(torch.promote_types(x.dtype, y.dtype)), device=x.device)
    if m:
        x, y = rows_contiguous(x), rows_contiguous(y)
        strides = x.stride(0), y.stride(0)
        tile = _tile(d)
        _squared_error_fwd_kernel((m, 1, 1), (x, y, out, *strides, d), tile.sizes, **tile.options)
    return out


def bwd(call: SaeSquaredErrorBwd) -> Tensor:
    """The gradient [M, D] of y."""
    grad, x, y = call
    m, d = x.shape
    out = torch.empty(m, d, dtype=y.dtype, device=y.device)
    if out.numel():
        x, y = rows_contiguous(x), rows_contiguous(y)
        strides = grad.stride(0), x.stride(0), y.stride(0)
        tile = _tile(d)
        _squared_error_bwd_kernel((m, 1, 1), (grad, x, y, out, *strides, d), tile.sizes, **tile.options)
    return out


def _tile(d: int) -> launch.Tile:
    """A thread loads 16 bytes of 16-bit numbers at a time."""
    block = min(1024, launch.next_power_of_2(d))
    return launch.Tile({"BLOCK": block}, max(1, block // 256))


EXAMPLES = {
    _squared_error_fwd_kernel: {"out_ptr": "*fp32", "BLOCK": 1024},
    _squared_error_bwd_kernel: {"grad_ptr": "*fp32", "BLOCK": 1024},
}
