"""Dense activations times decoder on the CPU, reading only the decoder rows that fire."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.rowsparse._torch.matmul import bag, batch_product
from gossamer.rowsparse._torch.pack import buffers_of, entries
from gossamer.sae.records import SaeDecode, SaeDecodeLists


def decode(call: SaeDecode) -> Tensor:
    """As its record says."""
    return _decoded(SaeDecodeLists(*call))[0]


def decode_lists(call: SaeDecodeLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`decode`, and (values, indices, spans) of its lists."""
    out, lists = _decoded(call)
    return out, *buffers_of(*lists, call.capacity)


def _decoded(call: SaeDecodeLists) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The result, and the entries that `entries` finds. A CPU has no overflow: lists are as long as they need to be, if
    not as good as dense. Whether a row is multiplied densely depends on that row alone, so that no row's bits depend on
    another's."""
    acts, weight, bias, capacity, out_dtype = call
    dtype = out_dtype or weight.dtype
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    lists = row_offsets, columns, values = entries(acts)
    counts = row_offsets.diff()
    # Once it is found, gathering an entry costs about as much as sixteen rows of a dense product.
    dense = counts > max(capacity, acts.shape[1] // 16)
    if not bool(dense.any()):
        out = bag(columns, values, row_offsets, weight, working)
    elif bool(dense.all()):
        out = batch_product(acts, weight, working)
    else:
        kept = ~dense.repeat_interleave(counts)
        row_offsets = F.pad(torch.where(dense, 0, counts).cumsum(0), (1, 0))
        out = bag(columns[kept], values[kept], row_offsets, weight, working)
        out[dense] = batch_product(acts[dense], weight, working)
    return out if bias is None else (out + bias).to(dtype), lists
