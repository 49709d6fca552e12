"""A dense matrix to one list of entries a row, each right behind that of the row before, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import entries


def list_entries(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `list_entries`."""
    starts, columns, found = entries(x)
    values, indices = x.new_zeros(room), torch.full((room,), -1, dtype=torch.int32)
    kept = min(room, columns.shape[0])
    values[:kept] = found[:kept]
    indices[:kept] = columns[:kept].int()
    return values, indices, starts, starts.diff().int()
