"""Vectors of rows of blocks to each block and back, in plain PyTorch, which is bound by memory on the GPU as well.

`dim` -1 is for rows, -2 for columns. The vectors of rows of blocks are `[Z * rows, height]`, those of columns `[Z *
cols, width]`. A row's blocks are gathered and added up in order, so that nothing depends on timing.
"""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Lists, lost
from gossamer.blocksparse.records import BlocksparseReduced, BlocksparseShifted


def spread(vectors: Tensor, layout: Tensor, form: tuple[int, ...], dim: int) -> Tensor:
    """`[rows, b]` -> `[capacity, b]`: each block's vector, zeros behind the last block."""
    lists = Lists(layout, form)
    if not vectors.shape[0]:
        return vectors.new_zeros(lists.form.capacity, vectors.shape[1])
    index = lists.row_indices
    if dim == -2:
        matrix = index.div(max(lists.form.rows, 1), rounding_mode="floor")
        index = torch.add(lists.col_indices, matrix, alpha=lists.form.cols)
    return torch.where((index >= 0)[:, None], vectors[index.clamp(min=0).long()], 0)


def shifted(call: BlocksparseShifted) -> Tensor:
    at = spread(call.vectors, call.layout, call.form, call.dim).to(call.values.dtype).unsqueeze(call.dim)
    return call.values + at if call.how == "add" else call.values * at


def reduced(call: BlocksparseReduced) -> Tensor:
    values, dim, lists = call.values, call.dim, Lists(call.layout, call.form)
    if call.how == "sum":
        return _gathered(values.sum(dim, dtype=summed(values.dtype)), lists, dim, 0).sum(1)
    least = float("-inf") if values.is_floating_point() else lost(values.dtype)
    found = _gathered(values.amax(dim), lists, dim, least)
    return found.amax(1) if found.shape[1] else found.new_full((found.shape[0], found.shape[2]), least)


def summed(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64


def _gathered(parts: Tensor, lists: Lists, dim: int, absent: float | int) -> Tensor:
    """`[rows, blocks of a row, b]`; numbers beyond the capacity are nobody's."""
    z, rows, cols = lists.form[:3]
    grid = lists.positions.view(z, rows, cols)
    grid = grid.flatten(0, 1) if dim == -1 else grid.mT.reshape(z * cols, rows)
    held = (grid >= 0) & (grid < parts.shape[0])
    return torch.where(held[:, :, None], parts[grid.clamp(0, parts.shape[0] - 1).long()], absent)
