"""Dense activations times decoder on the CPU, reading only the decoder rows that fire."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.matmul import bag, dense_product
from gossamer.rowsparse._torch.pack import ell_from_entries, entries


def decode(acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, out_dtype: torch.dtype | None) -> Tensor:
    """Operator `sae_decode`. A CPU has no overflow: the lists are as long as they need to be."""
    return _decode(entries(acts), acts, weight, bias, out_dtype)


def decode_lists(
    acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `sae_decode_lists`."""
    found = entries(acts)
    return _decode(found, acts, weight, bias, out_dtype), *ell_from_entries(*found, capacity)


def _decode(
    found: tuple[Tensor, Tensor, Tensor],
    acts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    dtype = out_dtype or weight.dtype
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    row_offsets, columns, values = found
    counts = row_offsets.diff()
    # A gathered row costs about as much as sixteen of a dense product. Row by row: no row's bits depend on another's.
    dense = counts > acts.shape[1] // 16
    if columns.numel() <= acts.shape[1] // 16 or not bool(dense.any()):
        out = bag(columns, values, row_offsets, weight, working)
    else:
        kept = ~dense.repeat_interleave(counts)
        row_offsets = torch.nn.functional.pad(torch.where(dense, 0, counts).cumsum(0), (1, 0))
        out = bag(columns[kept], values[kept], row_offsets, weight, working)
        out[dense] = dense_product(acts[dense], weight, working)
    return out if bias is None else (out + bias).to(dtype)
