"""The largest pre-activations among zeros, for the dense ways of TopK and BatchTopK on either backend."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.rowsparse.entries import slots_of
from gossamer.sae.records import SaeEncode


def ranked(
    x: Tensor, weight: Tensor, bias: Tensor | None, b_dec: Tensor | None, activation: str, k: int, scale: Tensor | None,
    call: Callable[[SaeEncode], tuple[Tensor, ...]],
) -> Tensor:  # fmt: skip
    """The k largest of each row, or k * M of the batch, among zeros; `call` implements the operator `sae_encode`."""
    m, n = x.shape[0], weight.shape[1]
    values, indices, spans, _, _ = call(SaeEncode(x, weight, bias, b_dec, None, activation, k, 0.0, None, scale, False))
    rows, held = slots_of(spans, values.shape[0])
    # Columns of a row are distinct. One element more takes the padding.
    acts = values.new_zeros(m * n + 1)
    acts.scatter_(0, torch.where(held, rows * n + indices, m * n), values)
    return acts[:-1].view(m, n)
