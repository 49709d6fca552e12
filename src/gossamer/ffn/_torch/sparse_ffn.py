"""A feed-forward block whose gate is sparse, on the CPU: neighbouring rows share the products over their columns."""

import torch
from torch import Tensor

from gossamer._core.ranges import span
from gossamer.ffn.costs import CPU_DENSE, CPU_GROUP
from gossamer.ffn.records import SparseFfn
from gossamer.rowsparse._torch.linear_source import activate_
from gossamer.rowsparse.formats import linear

_BLOCK = 1 << 24
"""Pre-activations in memory at one time."""
_CHUNK = 128
"""Rows of a weight that one of several products takes, in which few rows of x are multiplied: of a whole weight the
product copies all before it begins, and takes up to twice as long."""


def sparse_ffn(call: SparseFfn) -> tuple[Tensor, Tensor]:
    """(out [M, D], entries of each row [M], or [0])"""
    x, gate_weight, gate_bias, threshold, up_weight, up_bias, down_weight, down_bias, squared, counted = call
    m, n = x.shape[0], gate_weight.shape[0]
    out = x.new_empty(m, down_weight.shape[0])
    nnz = torch.empty(m if counted else 0, dtype=torch.int32)
    step = max(CPU_GROUP, _BLOCK // max(n, 1) // CPU_GROUP * CPU_GROUP)
    for start in range(0, m, step):
        block = slice(start, min(start + step, m))
        z = _gate(x[block], gate_weight, gate_bias)
        z = torch.relu_(z) if threshold is None else activate_(z, threshold)
        if counted:
            torch.sum(z != 0, 1, dtype=torch.int32, out=nnz[block])
        if squared:
            z *= z
        if _is_dense(z):
            with span("gossamer::ffn/dense"):
                if up_weight is not None:
                    z *= linear(x[block], up_weight, up_bias)
                out[block] = linear(z, down_weight, down_bias)
            continue
        for first in range(0, z.shape[0], CPU_GROUP):
            inner = slice(first, min(first + CPU_GROUP, z.shape[0]))
            rows = slice(start + inner.start, start + inner.stop)
            columns = _columns(z[inner])
            hidden = z[inner].index_select(1, columns)
            if up_weight is not None:
                bias = None if up_bias is None else up_bias[columns]
                hidden *= linear(x[rows], up_weight.index_select(0, columns), bias)
            out[rows] = linear(hidden, _columns_of(down_weight, columns), down_bias)
    return out, nnz


def _gate(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    (m, k), chunks = x.shape, weight.shape[0] // _CHUNK
    if not (1 < m <= CPU_GROUP and chunks > 1 and k and x.dtype is torch.float32 and weight.is_contiguous()):
        return linear(x, weight, bias)
    whole = chunks * _CHUNK
    parts = weight[:whole].view(chunks, _CHUNK, k).transpose(1, 2)
    out = torch.bmm(x.expand(chunks, m, k), parts).transpose(0, 1).reshape(m, whole)
    if whole < weight.shape[0]:
        out = torch.cat((out, x @ weight[whole:].t()), 1)
    return out if bias is None else out.add_(bias)


def _columns_of(weight: Tensor, columns: Tensor) -> Tensor:
    """Columns of a weight, by rows where it lies by rows: `index_select` would go through all of it for each column."""
    if weight.stride(0) == 1:
        return weight.t().index_select(0, columns).t()
    return weight.gather(1, columns.expand(weight.shape[0], -1))


def _columns(z: Tensor) -> Tensor:
    """The columns, ascending, in which any row differs from 0."""
    return (z.amax(0) != 0).nonzero().squeeze(1)


def _is_dense(z: Tensor) -> bool:
    """Whether most of a few groups are dense. The others are then not worth a look."""
    groups = -(-z.shape[0] // CPU_GROUP)
    some = range(0, groups, -(-groups // 4))
    dense = [_columns(z[g * CPU_GROUP : (g + 1) * CPU_GROUP]).numel() > CPU_DENSE * z.shape[1] for g in some]
    return 2 * sum(dense) >= len(dense)
