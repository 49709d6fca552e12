"""A linear layer and the packing of what it activates, block by block of rows."""

from functools import partial

import torch
from torch import Tensor

from gossamer.gemm.records import LinearPack
from gossamer.rowsparse._torch.linear_source import linear
from gossamer.rowsparse._torch.pack import ell_from_entries, row_offsets_of
from gossamer.rowsparse._torch.twell import pack_positions, positions_above

_BLOCK = 1 << 24
"""Pre-activations in memory at one time: few beside the weights, and enough rows for a fast product."""


def linear_pack(call: LinearPack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_tile, nnz), or with a capacity (values, indices, nnz_per_row, nnz), which needs no
    tiles here."""
    x, weight, bias, threshold, tile, slots, capacity, squared = call
    step = max(64, _BLOCK // max(weight.shape[0], 1))
    blocks = []
    for rows in x.split(step) if x.shape[0] > step else (x,):
        z = linear(rows, weight, bias)
        if capacity is None:
            packed = pack_positions(z, partial(positions_above, threshold=threshold), tile, slots)
            nnz = packed[2].sum(1, dtype=torch.int32)
        else:
            positions, (m, n) = positions_above(z, threshold), z.shape
            offsets = row_offsets_of(positions, m, n)
            packed = ell_from_entries(offsets, positions % max(n, 1), z.view(-1)[positions], capacity)
            nnz = packed[2].clone()
        if squared:
            packed[0].square_()
        blocks.append((*packed, nnz))
    if len(blocks) == 1:
        return blocks[0]
    values, indices, counts, nnz = (torch.cat(parts) for parts in zip(*blocks))
    return values, indices, counts, nnz
