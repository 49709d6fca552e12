"""The largest pre-activation of each group of latents, by PyTorch's operators on either backend."""

import torch
from torch import Tensor

from gossamer.rowsparse.formats import first_slots, linear, threshold_dtype
from gossamer.sae.records import SaeEncode

BLOCK = 1 << 27
"""Pre-activations in memory at once."""


def group_max(call: SaeEncode) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator `sae_encode` of GroupMax: (values, indices, spans, source [0, N], l0), k slots a row."""
    x, weight, bias, b_dec, _, _, k, *_ = call
    x, n = (x if b_dec is None else x - b_dec).to(weight.dtype), weight.shape[1]
    # Of equal numbers `max` returns the first, and NaN is its largest number.
    found = [linear(rows, weight.t(), bias).unflatten(1, (k, -1)).max(2) for rows in x.split(max(BLOCK // n, 1))]
    values, columns = (torch.cat(parts) for parts in zip(*found, strict=True))
    columns += torch.arange(0, n, n // k, device=x.device)
    values, indices, spans = first_slots(values, columns.int(), ~(values <= 0))
    return values, indices, spans, weight.new_empty(0, n), spans[1].to(threshold_dtype(weight.dtype))
