"""How many rows each latent fires in, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, refuse_overflow, stored


def count_fired(values: Tensor, indices: Tensor, nnz: Tensor, source: Tensor | None, n: int) -> Tensor:
    """Operator `sae_count_fired` -> int64 [N]."""
    if source is None:
        refuse_overflow("sae.count_fired", values.shape[1], nnz)
    slots, _ = stored(indices, nnz, n)
    fired = slots[values.reshape(-1)[slots] != 0]
    counts = torch.bincount(indices.reshape(-1)[fired], minlength=n)
    return counts if source is None else counts + (source[overflowed_rows(indices, nnz)] != 0).sum(0)
