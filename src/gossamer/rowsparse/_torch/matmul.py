"""rows @ weight on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, stored

_CHUNK = 1 << 22


def bag(columns: Tensor, values: Tensor, row_offsets: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of value * weight row over each row's entries, accumulated in float32 at least, as [M, D] of `dtype`."""
    m, d = row_offsets.shape[0] - 1, weight.shape[1]
    if m == 0 or d == 0 or columns.numel() == 0:
        return torch.zeros(m, d, dtype=dtype)
    if weight.dtype in (torch.float32, torch.float64):
        out = F.embedding_bag(columns, weight, row_offsets[:-1], mode="sum", per_sample_weights=values.to(weight.dtype))
        return out.to(dtype)
    # embedding_bag rounds to the weight's dtype at every addition in half precision: gather in float32 by pieces.
    out = torch.zeros(m, d)
    step = max(1, _CHUNK // max(d, 1))
    rows = torch.repeat_interleave(torch.arange(m), row_offsets.diff())
    for first in range(0, columns.shape[0], step):
        piece = slice(first, first + step)
        out.index_add_(0, rows[piece], weight[columns[piece]].float() * values[piece].float()[:, None])
    return out.to(dtype)


def check_columns(operator: str, columns: Tensor, n: int) -> None:
    """Raises for an index past the weight; the kernels write NaN instead, because looking costs them a sync."""
    if columns.numel() and int(columns.max()) >= n:
        raise ValueError(f"{operator}: indices must lie in [0, N) with N = {n}, or be -1 for no entry, got {int(columns.max())}.")


def matmul(
    values: Tensor,
    indices: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Operator `matmul`."""
    dtype = out_dtype or weight.dtype
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    slots, rows = stored(indices, offsets)
    columns = indices.reshape(-1)[slots].long()
    check_columns("rowsparse.matmul", columns, weight.shape[0])
    m = indices.shape[0] if indices.dim() == 2 else offsets.shape[0] - 1
    row_offsets = torch.zeros(m + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(rows, minlength=m), 0, out=row_offsets[1:])
    out = bag(columns, values.reshape(-1)[slots], row_offsets, weight, working)
    if source is not None:
        over = overflowed_rows(indices, offsets)
        if over.numel():
            out[over] = (source[over] @ weight).to(working)
    return out if bias is None else (out + bias).to(dtype)


def matmul_bwd_weight(
    grad: Tensor,
    keys: Tensor,
    columns: Tensor,
    col_offsets: Tensor,
    values: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Operator `matmul_bwd_weight`: the weight gradient [N, D] from transposed entries."""
    nnz = int(col_offsets[-1])
    rows = keys[:nnz] >> 32
    starts = rows * values.shape[1] if values.dim() == 2 else offsets[rows]
    scale = values.reshape(-1)[starts + (keys[:nnz] & 0xFFFFFFFF)]
    out = bag(rows, scale, col_offsets, grad, torch.promote_types(dtype, torch.float32))
    if source is not None:
        over = (offsets > values.shape[1] if values.dim() == 2 else offsets[1:] > values.shape[0]).nonzero().squeeze(1)
        if over.numel():
            out += (source[over].t() @ grad[over]).to(out.dtype)
    return out.to(dtype)


