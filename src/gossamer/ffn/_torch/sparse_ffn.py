"""A feed-forward block whose gate is sparse, on the CPU: neighbouring rows share the products over their columns."""

import torch
from torch import Tensor

from gossamer.ffn.costs import sampled_groups
from gossamer.rowsparse._torch.linear_source import linear

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
    bound = 0 if threshold is None else threshold.clamp(min=0)
    span = max(_GROUP, _BLOCK // max(n, 1) // _GROUP * _GROUP)
    for start in range(0, m, span):
        block = slice(start, min(start + span, m))
        z = linear(x[block], gate_weight, gate_bias)
        kept = ~(z <= bound)
        nnz[block] = kept.sum(1, dtype=torch.int32)
        z = torch.where(kept, z, 0)
        if squared:
            z *= z
        for first in range(block.start, block.stop, _GROUP):
            rows = slice(first, min(first + _GROUP, block.stop))
            inner = slice(first - start, rows.stop - start)
            columns = kept[inner].any(0).nonzero().squeeze(1)
            if columns.numel() > _DENSE * n:
                out[rows] = _project(z[inner], x[rows], up_weight, up_bias, down_weight, down_bias)
                continue
            values = z[inner].index_select(1, columns)
            up = None if up_weight is None else up_weight.index_select(0, columns)
            bias = None if up_bias is None else up_bias[columns]
            # The dimension whose neighbours lie together is copied whole.
            if down_weight.stride(0) == 1:
                down = down_weight.t().index_select(0, columns).t()
            else:
                down = down_weight.index_select(1, columns)
            out[rows] = _project(values, x[rows], up, bias, down, down_bias)
    return out, nnz, nnz.new_zeros(sampled_groups(m, step))


def _project(
    values: Tensor,
    x: Tensor,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    hidden = values if up_weight is None else values * linear(x, up_weight, up_bias)
    return linear(hidden, down_weight, down_bias)
