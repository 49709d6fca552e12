"""A feed-forward block whose gate is sparse, on the CPU: neighbouring rows share the products over their columns."""

import torch
from torch import Tensor

from gossamer.ffn.costs import sampled_groups
from gossamer.rowsparse._torch.linear_source import activate_, linear

_BLOCK = 1 << 24
"""Pre-activations in memory at one time."""
_GROUP = 16
"""Rows that share a union: weights are copied for a product once a group, and a product of few rows is slow."""
_DENSE = 0.5
"""Share of the columns from which on nothing is copied."""


def sparse_ffn(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    threshold: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    squared: bool,
    united: bool,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `sparse_ffn` -> (out [M, D], entries of each row [M], zeros for groups of rows)."""
    m, n = x.shape[0], gate_weight.shape[0]
    out, nnz = x.new_empty(m, down_weight.shape[0]), torch.empty(m, dtype=torch.int32)
    # Columns of a weight are as far apart as its rows are long: of many groups, all of them take no longer.
    strided = down_weight.stride(0) != 1 and m > _GROUP
    span = max(_GROUP, _BLOCK // max(n, 1) // _GROUP * _GROUP)
    for start in range(0, m, span):
        block = slice(start, min(start + span, m))
        z = activate_(linear(x[block], gate_weight, gate_bias), threshold)
        torch.sum(z != 0, 1, dtype=torch.int32, out=nnz[block])
        if squared:
            z *= z
        dense = []
        for first in range(0, z.shape[0], _GROUP):
            inner = slice(first, min(first + _GROUP, z.shape[0]))
            columns = (z[inner].amax(0) != 0).nonzero().squeeze(1)
            if columns.numel() > _DENSE * n:
                dense.append(torch.arange(inner.start, inner.stop))
                continue
            rows = slice(start + inner.start, start + inner.stop)
            hidden = z[inner].index_select(1, columns)
            if up_weight is not None:
                bias = None if up_bias is None else up_bias[columns]
                hidden = hidden * linear(x[rows], up_weight.index_select(0, columns), bias)
            if strided:
                z[inner].index_copy_(1, columns, hidden)
            elif down_weight.stride(0) == 1:
                # The dimension whose neighbours lie together is copied whole.
                out[rows] = linear(hidden, down_weight.t().index_select(0, columns).t(), down_bias)
            else:
                out[rows] = linear(hidden, down_weight.index_select(1, columns), down_bias)
        if dense and up_weight is not None:
            rows = torch.cat(dense)
            z[rows] = z[rows] * linear(x[start + rows], up_weight, up_bias)
        if strided:
            out[block] = linear(z, down_weight, down_bias)
        elif dense:
            rows = torch.cat(dense)
            out[start + rows] = linear(z[rows], down_weight, down_bias)
    return out, nnz, nnz.new_zeros(sampled_groups(m, step))
