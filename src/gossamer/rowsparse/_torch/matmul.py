"""rows @ weight on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.rowsparse._torch.pack import CHUNK, dot_entries, overflowed_rows, refuse_overflow, stored
from gossamer.rowsparse.formats import offsets_of
from gossamer.rowsparse.records import Matmul, MatmulBwd

_RUN = 64
_BATCH = 4


def bag(columns: Tensor, values: Tensor, row_offsets: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of value * weight row over each row's entries, accumulated in float32 at least, as [M, D] of `dtype`."""
    m, d = row_offsets.shape[0] - 1, weight.shape[1]
    if m == 0 or d == 0 or columns.numel() == 0:
        return torch.zeros(m, d, dtype=dtype)
    counts = row_offsets.diff()
    if int(counts.max()) <= _RUN:
        return _bag(columns, values, row_offsets, weight).to(dtype)
    # Entries are added one after another, whose error grows with the row: sum runs, then their sums.
    runs = (counts + _RUN - 1) // _RUN
    run_offsets = offsets_of(runs)
    place = torch.arange(int(run_offsets[-1])) - run_offsets[:-1].repeat_interleave(runs)
    starts = row_offsets[:-1].repeat_interleave(runs) + place * _RUN
    partial = _bag(columns, values, torch.cat([starts, row_offsets[-1:]]), weight)
    every = torch.arange(partial.shape[0])
    return bag(every, torch.ones(partial.shape[0], dtype=partial.dtype), run_offsets, partial, dtype)


def _bag(columns: Tensor, values: Tensor, row_offsets: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        values = values.to(weight.dtype)
        return F.embedding_bag(columns, weight, row_offsets[:-1], mode="sum", per_sample_weights=values)
    # embedding_bag rounds to the weight's dtype at every addition in half precision: gather in float32 by pieces.
    m, d = row_offsets.shape[0] - 1, weight.shape[1]
    out = torch.zeros(m, d, dtype=torch.float32)
    step = max(1, CHUNK // max(d, 1))
    rows = torch.repeat_interleave(torch.arange(m), row_offsets.diff())
    for first in range(0, columns.shape[0], step):
        piece = slice(first, first + step)
        out.index_add_(0, rows[piece], weight[columns[piece]].float() * values[piece].float()[:, None])
    return out


def batch_product(a: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ weight as `dtype`, in float32 at least where the result is not the operands' own half."""
    if dtype is not weight.dtype:
        working = torch.promote_types(torch.promote_types(dtype, weight.dtype), torch.float32)
        a, weight = a.to(working), weight.to(working)
    rows = a.shape[0]
    if rows < _BATCH:
        # Few rows would be summed as vectors, one long chain each, less exactly than the product of a whole batch.
        a = torch.cat([a, a.new_zeros(_BATCH - rows, a.shape[1])])
    return (a @ weight)[:rows].to(dtype)


def matmul(call: Matmul) -> Tensor:
    """[M, D]"""
    values, indices, spans, source, weight, bias, out_dtype = call
    if source is None:
        refuse_overflow("rowsparse.matmul", spans, values.shape[0])
    dtype = out_dtype or weight.dtype
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    slots, rows = stored(indices, spans, weight.shape[0])
    row_offsets = offsets_of(torch.bincount(rows, minlength=spans.shape[1]))
    out = bag(indices[slots].long(), values[slots], row_offsets, weight, working)
    if source is not None:
        over = overflowed_rows(spans, values.shape[0])
        if over.numel():
            out[over] = batch_product(source[over], weight, working)
    return out if bias is None else (out + bias).to(dtype)


def matmul_bwd(call: MatmulBwd) -> tuple[Tensor, Tensor]:
    """(weight gradient [N, D], float32 gradient of values), from transposed entries."""
    grad, _, keys, col_offsets, values, spans, source, weight, dtype, mask = call
    nnz = int(col_offsets[-1])
    rows, slots = keys[:nnz] >> 32, keys[:nnz] & 0xFFFFFFFF
    out = bag(rows, values[slots], col_offsets, grad, torch.promote_types(dtype, torch.float32))
    if source is not None:
        over = overflowed_rows(spans, values.shape[0])
        if over.numel():
            working = torch.promote_types(source.dtype, grad.dtype)
            held = source[over] if mask is None else torch.where(mask[over] != 0, source[over], 0)
            out += (held.t().to(working) @ grad[over].to(working)).to(out.dtype)
    working = torch.promote_types(grad.dtype, torch.float32)
    products = torch.zeros(0 if weight is None else values.numel(), dtype=working)
    if weight is not None:
        columns = torch.repeat_interleave(torch.arange(weight.shape[0]), col_offsets.diff())
        products[slots] = dot_entries(grad, rows, weight, columns)
    return out.to(dtype), products
