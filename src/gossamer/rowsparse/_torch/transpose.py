"""Entries regrouped by column, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import stored
from gossamer.rowsparse.formats import offsets_of


def transpose_keys(indices: Tensor, spans: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `transpose_keys`."""
    slots, rows = stored(indices, spans, n)
    columns = indices[slots].long()
    order = torch.sort(columns, stable=True).indices
    keys = torch.full((indices.numel(),), 0, dtype=torch.int64)
    sorted_columns = torch.full((indices.numel(),), -1, dtype=torch.int32)
    keys[: order.numel()] = ((rows << 32) | slots)[order]
    sorted_columns[: order.numel()] = columns[order].int()
    return offsets_of(torch.bincount(columns, minlength=n)), keys, sorted_columns
