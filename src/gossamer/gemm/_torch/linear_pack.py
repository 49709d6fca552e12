"""A linear layer and the packing of its activations, block by block of rows."""

import torch
from torch import Tensor

from gossamer.gemm.records import LinearPack
from gossamer.rowsparse._torch.pack import buffers_of, nonzero_positions, row_offsets_of
from gossamer.rowsparse.formats import equal_spans, linear

_BLOCK = 1 << 24
"""Pre-activations in memory at one time: few beside the weights, and enough rows for a fast product."""


def linear_pack(call: LinearPack) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans)."""
    x, weight, bias, threshold, capacity, squared = call
    step = max(64, _BLOCK // max(weight.shape[0], 1))
    blocks = []
    for rows in x.split(step) if x.shape[0] > step else (x,):
        z = linear(rows, weight, bias)
        kept = ~(z <= (0 if threshold is None else threshold.clamp(min=0)))
        positions, (m, n) = nonzero_positions(kept), z.shape
        offsets = row_offsets_of(positions, m, n)
        packed = buffers_of(offsets, positions % max(n, 1), z.view(-1)[positions], capacity)
        if squared:
            packed[0].square_()
        blocks.append(packed)
    if len(blocks) == 1:
        return blocks[0]
    values, indices, spans = zip(*blocks)
    return torch.cat(values), torch.cat(indices), equal_spans(torch.cat(spans, 1)[1], capacity)
