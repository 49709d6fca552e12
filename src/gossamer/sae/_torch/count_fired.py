"""How many rows each latent fires in, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, refuse_overflow, stored
from gossamer.sae.records import SaeCountFired


def count_fired(call: SaeCountFired) -> Tensor:
    """Int64 [N]."""
    values, indices, spans, source, n = call
    room = values.shape[0]
    if source is None:
        refuse_overflow("sae.count_fired", spans, room)
    slots, _ = stored(indices, spans, n)
    counts = torch.bincount(indices[slots[values[slots] != 0]], minlength=n)
    return counts if source is None else counts + (source[overflowed_rows(spans, room)] != 0).sum(0)
