"""Overflowed rows of a linear layer, computed again on the CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.rowsparse._torch.matmul import batch_product, multiply
from gossamer.rowsparse._torch.pack import overflowed_rows
from gossamer.rowsparse.records import LinearRows, MatmulLinear

_BLOCK = 256
"""Rows that are computed again at one time."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in the dtype of weight; a bias of another dtype is added in float32 at least."""
    if bias is None or bias.dtype is weight.dtype:
        # Strides of a bias change which product cuBLAS makes, and so its rounding.
        return F.linear(x, weight, None if bias is None else bias.contiguous())
    return (F.linear(x, weight) + bias).to(weight.dtype)


def activate_(z: Tensor, threshold: Tensor | None) -> Tensor:
    """0 in z wherever it is up to max(threshold, 0)."""
    return z.masked_fill_(z <= (0 if threshold is None else threshold.clamp(min=0)), 0)


def linear_source(call: LinearRows) -> Tensor:
    """[M, N], written at rows whose spans end beyond `room`."""
    x, weight, bias, threshold, spans, room = call
    out = x.new_empty(x.shape[0], weight.shape[0])
    over = overflowed_rows(spans, room)
    if over.numel():
        out[over] = activate_(linear(x[over], weight, bias), threshold)
    return out


def matmul_linear(call: MatmulLinear) -> Tensor:
    """Rows times weight, with overflowed rows from a linear source."""
    values, indices, spans, x, source_weight, source_bias, threshold, weight, bias, out_dtype = call
    out = multiply(values, indices, spans, None, weight, bias, out_dtype, alone=False)
    over = overflowed_rows(spans, values.shape[0])
    wide = out.dtype if bias is None else torch.promote_types(out.dtype, torch.float32)
    for rows in over.split(_BLOCK) if over.numel() else ():
        source = activate_(linear(x[rows], source_weight, source_bias), threshold)
        product = batch_product(source, weight, wide)
        out[rows] = (product if bias is None else product + bias).to(out.dtype)
    return out
