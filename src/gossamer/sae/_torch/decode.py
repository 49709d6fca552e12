"""Dense activations times decoder on the CPU, reading only the decoder rows that fire."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.matmul import bag
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
    row_offsets, columns, values = found
    # A gathered row costs about as much as a tenth of a dense one: rows that are denser than that go dense.
    working = dtype if bias is None else torch.promote_types(dtype, torch.float32)
    if columns.numel() > acts.numel() // 16:
        out = (acts @ weight).to(working)
    else:
        out = bag(columns, values, row_offsets, weight, working)
    return out if bias is None else (out + bias).to(dtype)
