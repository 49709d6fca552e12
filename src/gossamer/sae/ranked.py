"""The largest pre-activations among zeros, for the dense ways of TopK and BatchTopK on either backend."""

from collections.abc import Callable

import torch
from torch import Tensor


def ranked(
    x: Tensor, weight: Tensor, bias: Tensor | None, b_dec: Tensor | None, activation: str, k: int, scale: Tensor | None,
    call: Callable[..., tuple[Tensor, ...]],
) -> Tensor:  # fmt: skip
    """The k largest of each row, or k * M of the batch, among zeros; `call` implements the operator `sae_encode`."""
    m, n = x.shape[0], weight.shape[1]
    csr = activation == "batchtopk"
    capacity = None if csr else k
    values, indices, counts, _, _ = call(x, weight, bias, b_dec, None, activation, k, 0.0, capacity, False, scale)
    if csr:
        slots = torch.arange(values.shape[0], device=x.device)
        rows = torch.searchsorted(counts, slots, right=True) - 1
    else:
        rows = torch.arange(m, device=x.device)[:, None].expand_as(indices).reshape(-1)
    columns = indices.reshape(-1).long()
    # Columns of a row are distinct. One element more takes what the padding holds.
    acts = values.new_zeros(m * n + 1)
    acts.scatter_(0, torch.where(columns < 0, m * n, rows * n + columns), values.reshape(-1))
    return acts[:-1].view(m, n)
