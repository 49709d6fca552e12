"""Vectors of rows of blocks to each block and back, in plain PyTorch, which is bound by memory on the GPU as well.

`index` `[capacity]` is the row of blocks that each block stands in, -1 behind the last, and `grid` `[rows, E]` the
blocks of each row, -1 for none. A row's blocks are gathered and added up in order, so that nothing depends on timing.
"""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.tensor import lost


def spread(vectors: Tensor, index: Tensor, grid: Tensor) -> Tensor:
    """Operator `blocksparse_spread`: `[rows, b]` -> `[capacity, b]`, zeros behind the last block."""
    if not vectors.shape[0]:
        return vectors.new_zeros(index.shape[0], vectors.shape[1])
    return torch.where((index >= 0)[:, None], vectors[index.clamp(min=0).long()], 0)


def shifted(values: Tensor, vectors: Tensor, index: Tensor, grid: Tensor, dim: int, how: str) -> Tensor:
    """Operator `blocksparse_shifted`: values with the vectors of their lines added or multiplied, in values' dtype."""
    at = spread(vectors, index, grid).to(values.dtype).unsqueeze(dim)
    return values + at if how == "add" else values * at


def collect(parts: Tensor, index: Tensor, grid: Tensor) -> Tensor:
    """Operator `blocksparse_collect`: `[capacity, b]` -> `[rows, b]`, their sums."""
    return _gathered(parts, grid, 0).sum(1)


def most(values: Tensor, index: Tensor, grid: Tensor, dim: int) -> Tensor:
    """Operator `blocksparse_most`: the maxima of values `[capacity, height, width]` along `dim` of whole rows."""
    least = float("-inf") if values.is_floating_point() else lost(values.dtype)
    found = _gathered(values.amax(dim), grid, least)
    return found.amax(1) if grid.shape[1] else found.new_full((grid.shape[0], found.shape[2]), least)


def _gathered(parts: Tensor, grid: Tensor, absent: float | int) -> Tensor:
    """`[rows, E, b]`; numbers beyond the capacity are nobody's."""
    held = (grid >= 0) & (grid < parts.shape[0])
    return torch.where(held[:, :, None], parts[grid.clamp(0, parts.shape[0] - 1).long()], absent)
