"""Adjacency of a block mask, on the CPU."""

import torch
from torch import Tensor


def layout(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `blocksparse_layout`."""
    z, rows, cols = mask.shape
    row_offsets = torch.zeros(z * rows + 1, dtype=torch.int32)
    col_offsets = torch.zeros(z * cols + 1, dtype=torch.int32)
    torch.cumsum(mask.sum(2).reshape(-1), 0, out=row_offsets[1:])
    torch.cumsum(mask.sum(1).reshape(-1), 0, out=col_offsets[1:])
    flat = mask.reshape(-1)
    present = flat.nonzero().squeeze(1)
    positions = torch.full((flat.numel(),), -1, dtype=torch.int32)
    positions[present] = torch.arange(present.numel(), dtype=torch.int32)
    by_column = positions.view(z, rows, cols).transpose(1, 2).reshape(-1)
    found = (
        present % max(cols, 1),
        present // max(cols, 1),
        # Where there are more blocks than room nothing is right, but whoever follows the order stays inside.
        by_column[by_column >= 0].clamp(max=capacity - 1),
    )
    padded = [torch.full((capacity,), -1, dtype=torch.int32) for _ in found]
    for buffer, entries in zip(padded, found):
        held = entries[:capacity]
        buffer[: held.numel()] = held
    col_indices, row_indices, transpose_order = padded
    return row_offsets, col_indices, row_indices, col_offsets, transpose_order, positions


def layout_transpose(
    nnz: Tensor, col_indices: Tensor, row_indices: Tensor, transpose_order: Tensor, positions: Tensor, rows: int,
    cols: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Operator `blocksparse_layout_transpose`."""
    mask = positions.view(-1, rows, cols).transpose(1, 2) >= 0 if positions.numel() else positions.view(0, cols, rows)
    _, columns, lines, _, order, turned = layout(mask, col_indices.shape[0])
    return columns, lines, order, turned
