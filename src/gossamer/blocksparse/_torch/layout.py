"""Adjacency of a block mask, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Lists, length
from gossamer.blocksparse.records import BlocksparseLayout


def layout(call: BlocksparseLayout) -> Tensor:
    """Operator `blocksparse_layout`."""
    buffer = torch.full((length(call.form),), -1, dtype=torch.int32)
    rows, cells = Lists(buffer, call.form), []
    halves = rows, rows.mT
    for lists, mask in zip(halves, (call.mask, call.mask.mT)):
        lines, across = max(mask.shape[1], 1), max(mask.shape[2], 1)
        lists.row_offsets[0] = 0
        torch.cumsum(mask.sum(2).view(-1), 0, out=lists.row_offsets[1:])
        present = mask.reshape(-1).nonzero().squeeze(1)
        lists.positions[present] = torch.arange(present.numel(), dtype=torch.int32)
        held = present[: lists.form.capacity]
        row, column = held // across, held % across
        lists.col_indices[: held.numel()] = column
        lists.row_indices[: held.numel()] = row
        cells.append((row // lines * across + column) * lines + row % lines)
    for lists, cell in zip(halves, reversed(cells)):
        # Where there are more blocks than room nothing is right, but whoever follows the order stays inside.
        lists.transpose_order[: cell.numel()] = lists.positions[cell].clamp(max=lists.form.capacity - 1)
    return buffer
