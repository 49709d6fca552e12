"""The smallest value that a batch keeps, which the threshold of a BatchTopK SAE follows."""

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse import Rows
from gossamer.rowsparse._torch.pack import refuse_overflow
from gossamer.rowsparse.entries import slots_of
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import parts


@torch.no_grad()
def smallest(rows: Rows, scale: Tensor | None = None) -> Tensor:
    """The smallest value above 0 in rows, without a host sync; inf where there is none.

    Args:
        rows: `Rows` of shape `(..., d_sae)`; rows that overflowed are computed from the source.
        scale: `[d_sae]`, a factor for each value, or None.

    Returns:
        `[]` in float32, float64 if rows is, without a gradient.

    Raises:
        TypeError: rows is no container.
        ValueError: on the CPU, a row that overflowed without a source; on a GPU the result is NaN then.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders", for the threshold that is estimated from it.

    >>> from gossamer import rowsparse
    >>> smallest(rowsparse.pack(torch.tensor([[0.0, 3.0], [2.0, 4.0]]))).item()
    2.0
    """
    values, indices, spans, source = parts("sae.smallest", rows)
    room, wide, over = values.shape[0], threshold_dtype(rows.dtype), spans.sum(0) > values.shape[0]
    if source is None and checks.host_computes(values):
        refuse_overflow("sae.smallest", spans, room)
    _, held = slots_of(spans, room)
    held = held & (indices >= 0)
    value = torch.where(held, values, 0).to(wide)
    if scale is not None and scale.numel():
        value = value * scale[torch.where(held, indices, 0)].to(wide)
    found = torch.where(value > 0, value, torch.inf).amin() if room else value.new_full((), torch.inf)
    if source is None:
        return torch.where(over.any(), torch.nan, found)
    dense = source.to(wide) if scale is None else source.to(wide) * scale.to(wide)
    if dense.numel():
        # A source may hold anything in rows that did not overflow.
        found = torch.minimum(found, torch.where(over[:, None] & (dense > 0), dense, torch.inf).amin())
    return found
