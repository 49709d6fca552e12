"""A linear layer and the packing of what it activates, block by block of rows."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.linear_source import linear
from gossamer.rowsparse._torch.twell import pack_twell, twell_to_ell

_BLOCK = 1 << 24
"""Pre-activations in memory at one time: few beside the weights, and enough rows for a fast product."""


def linear_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    tile: int,
    slots: int,
    capacity: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `linear_pack` -> (values, indices, nnz_per_tile, nnz), or with a capacity (values, indices,
    nnz_per_row, nnz)."""
    step = max(64, _BLOCK // max(weight.shape[0], 1))
    blocks = []
    for rows in x.split(step) if x.shape[0] else (x,):
        packed = pack_twell(linear(rows, weight, bias), threshold, True, tile, slots)
        nnz = packed[2].sum(1, dtype=torch.int32)
        blocks.append((*(packed if capacity is None else twell_to_ell(*packed, tile, capacity)), nnz))
    if len(blocks) == 1:
        return blocks[0]
    values, indices, counts, nnz = (torch.cat(parts) for parts in zip(*blocks))
    return values, indices, counts, nnz
