"""Dense activations times decoder on the CPU, reading only the decoder rows that fire."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.rowsparse._torch.matmul import bag, batch_product
from gossamer.rowsparse._torch.pack import buffers_of, entries
from gossamer.sae.records import SaeDecode, SaeDecodeLists

_SAMPLES = 128

Lists = tuple[Tensor, Tensor, Tensor]
"""(row_offsets int64 [M + 1], columns int64 [nnz], values [nnz])."""


def decode(call: SaeDecode) -> Tensor:
    """A CPU has no overflow: lists are as long as they need to be, if not as good as dense."""
    acts, weight, bias, capacity, out_dtype = call
    lists, dense = _split(acts, _look_dense(acts, capacity), capacity)
    return _product(lists, dense, acts, weight, bias, out_dtype)


def decode_lists(call: SaeDecodeLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`decode`, and (values, indices, spans) of its lists."""
    acts, weight, bias, capacity, out_dtype = call
    lists, dense = _split(acts, torch.zeros(acts.shape[0], dtype=torch.bool), capacity)
    return _product(lists, dense, acts, weight, bias, out_dtype), *buffers_of(*lists, capacity)


def _look_dense(acts: Tensor, capacity: int) -> Tensor:
    """bool [M]: rows of which a sample says that they have more entries than `capacity`.

    To find the entries of such rows would cost as much as their product. Whether a row counts as one depends on that
    row alone, so that no row's bits depend on another's.
    """
    m, n = acts.shape
    if n < 1024 or 4 * capacity >= n:
        return torch.zeros(m, dtype=torch.bool)
    sample = acts[:, :: max(8, n // _SAMPLES)]
    expected = capacity * sample.shape[1] / n
    return (sample != 0).sum(1) > expected + expected**0.5


def _split(acts: Tensor, dense: Tensor, capacity: int) -> tuple[Lists, Tensor]:
    """The entries of the rows that are not `dense`, and which rows are better multiplied densely."""
    m, n = acts.shape
    flagged = int(dense.sum())
    if 2 * flagged < m:
        # To look at a few rows in vain costs less than to copy all the others.
        row_offsets, columns, values = entries(acts)
        counts = row_offsets.diff()
    elif flagged == m:
        return (torch.zeros(m + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int64), acts.new_empty(0)), dense
    else:
        found, columns, values = entries(acts[~dense])
        counts = torch.zeros(m, dtype=torch.int64)
        counts[~dense] = found.diff()
        row_offsets = F.pad(counts.cumsum(0), (1, 0))
    # Once it is found, gathering an entry costs about as much as sixteen rows of a dense product.
    most = max(capacity, n // 16)
    return (row_offsets, columns, values), dense | (counts > most) if columns.numel() > most else dense


def _product(
    lists: Lists, dense: Tensor, acts: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    dtype = out_dtype or weight.dtype
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    row_offsets, columns, values = lists
    if not bool(dense.any()):
        out = bag(columns, values, row_offsets, weight, working)
    elif bool(dense.all()):
        out = batch_product(acts, weight, working)
    else:
        counts = row_offsets.diff()
        kept = ~dense.repeat_interleave(counts)
        row_offsets = F.pad(torch.where(dense, 0, counts).cumsum(0), (1, 0))
        out = bag(columns[kept], values[kept], row_offsets, weight, working)
        out[dense] = batch_product(acts[dense], weight, working)
    return out if bias is None else (out + bias).to(dtype)
