"""Entries regrouped by column, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import stored
from gossamer.rowsparse.formats import offsets_of
from gossamer.rowsparse.records import TransposeKeys


def transpose_keys(call: TransposeKeys) -> tuple[Tensor, Tensor, Tensor]:
    """As its record says."""
    indices, spans, n = call
    slots, rows = stored(indices, spans, n)
    columns = indices[slots].long()
    order = torch.sort(columns, stable=True).indices
    keys = torch.full((indices.numel(),), 0, dtype=torch.int64)
    sorted_columns = torch.full((indices.numel(),), -1, dtype=torch.int32)
    keys[: order.numel()] = ((rows << 32) | slots)[order]
    sorted_columns[: order.numel()] = columns[order].int()
    return offsets_of(torch.bincount(columns, minlength=n)), keys, sorted_columns
