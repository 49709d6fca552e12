"""How many rows each latent fires in, on the CPU."""

import torch
from torch import Tensor


def count_fired(values: Tensor, indices: Tensor, nnz: Tensor, source: Tensor | None, n: int) -> Tensor:
    """Operator `sae_count_fired` -> int64 [N]."""
    capacity = values.shape[1]
    over = nnz > capacity
    held = (torch.arange(capacity) < nnz[:, None]) & ~over[:, None] & (values != 0) & (indices >= 0)
    counts = torch.bincount(indices[held], minlength=n)
    return counts if source is None else counts + (source[over] != 0).sum(0)
