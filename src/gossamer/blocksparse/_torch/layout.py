"""Adjacency of a block mask, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Lists, length
from gossamer.blocksparse.records import BlocksparseLayout


def layout(call: BlocksparseLayout) -> Tensor:
    buffer = torch.full((length(call.form),), -1, dtype=torch.int32)
    rows, cells = Lists(buffer, call.form), []
    halves, capacity = (rows, rows.mT), rows.form.capacity
    for lists, mask in zip(halves, (call.mask, call.mask.mT)):
        _, lines, across = mask.shape
        z, line, column = mask.nonzero().unbind(1)
        row, positions, offsets = z * lines + line, lists.positions, lists.row_offsets
        offsets[0] = 0
        torch.cumsum(mask.sum(2).view(-1), 0, out=offsets[1:])
        positions[row * across + column] = torch.arange(len(z), dtype=torch.int32)
        held = min(len(z), capacity)
        lists.col_indices[:held], lists.row_indices[:held] = column[:held], row[:held]
        cells.append(((z * across + column) * lines + line)[:held])
    for lists, cell in zip(halves, reversed(cells)):
        # Where there are more blocks than room nothing is right, but whoever follows the order stays inside.
        lists.transpose_order[: len(cell)] = lists.positions[cell].clamp(max=capacity - 1)
    return buffer
