"""The smallest value of each row, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, refuse_overflow
from gossamer.rowsparse.formats import threshold_dtype


def smallest(values: Tensor, indices: Tensor, nnz: Tensor, source: Tensor | None, scale: Tensor | None) -> Tensor:
    """Operator `sae_smallest` -> [M], inf where a row has no value above 0."""
    if source is None:
        refuse_overflow("sae.smallest", values.shape[1], nnz)
    wide = threshold_dtype(values.dtype)
    held = (torch.arange(values.shape[1]) < nnz[:, None]) & (nnz <= values.shape[1])[:, None] & (indices >= 0)
    scaled = values.to(wide)
    if scale is not None:
        scaled = scaled * scale[indices.clamp(min=0)].to(wide)
    found = torch.where(held & (scaled > 0), scaled, torch.inf)
    out = found.amin(1) if found.shape[1] else torch.full(nnz.shape, torch.inf, dtype=wide)
    if source is not None:
        over = overflowed_rows(indices, nnz)
        dense = source[over].to(wide)
        dense = dense if scale is None else dense * scale.to(wide)
        out[over] = torch.where(dense > 0, dense, torch.inf).amin(1)
    return out
