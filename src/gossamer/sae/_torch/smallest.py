"""The smallest value of each row, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, refuse_overflow, stored
from gossamer.rowsparse.formats import threshold_dtype


def smallest(values: Tensor, indices: Tensor, spans: Tensor, source: Tensor | None, scale: Tensor | None) -> Tensor:
    """Operator `sae_smallest` -> [M], inf where a row has no value above 0."""
    room, wide = values.shape[0], threshold_dtype(values.dtype)
    if source is None:
        refuse_overflow("sae.smallest", spans, room)
    slots, rows = stored(indices, spans, torch.iinfo(torch.int32).max)
    scaled = values[slots].to(wide)
    if scale is not None:
        scaled = scaled * scale[indices[slots]].to(wide)
    out = torch.full((spans.shape[1],), torch.inf, dtype=wide)
    out.scatter_reduce_(0, rows, torch.where(scaled > 0, scaled, torch.inf), "amin")
    if source is not None:
        over = overflowed_rows(spans, room)
        dense = source[over].to(wide)
        dense = dense if scale is None else dense * scale.to(wide)
        out[over] = torch.where(dense > 0, dense, torch.inf).amin(1)
    return out
