"""Dense to blocks and back, on the CPU."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer._core import checks


def lost(dtype: torch.dtype) -> float | int:
    """What stands for a value that is not there for want of room: NaN, or the lowest of integers."""
    return float("nan") if dtype in checks.FLOATS else False if dtype is torch.bool else torch.iinfo(dtype).min


def from_dense(
    x: Tensor, nnz: Tensor, row_indices: Tensor, col_indices: Tensor, positions: Tensor, height: int, width: int
) -> Tensor:
    """Operator `blocksparse_from_dense`."""
    z, m, n = x.shape
    rows, cols, capacity = -(-m // height), -(-n // width), col_indices.shape[0]
    if int(nnz) > capacity:
        return x.new_full((capacity, height, width), lost(x.dtype))
    out = x.new_zeros(capacity, height, width)
    grid = pad(x, (0, cols * width - n, 0, rows * height - m)).view(z, rows, height, cols, width)
    held = row_indices[: int(nnz)].long()
    out[: held.shape[0]] = grid[held // max(rows, 1), held % max(rows, 1), :, col_indices[: held.shape[0]].long()]
    return out


def to_dense(
    values: Tensor,
    nnz: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    positions: Tensor,
    z: int,
    m: int,
    n: int,
    fill: float,
) -> Tensor:
    """Operator `blocksparse_to_dense`."""
    capacity, height, width = values.shape
    rows, cols = -(-m // height), -(-n // width)
    if int(nnz) > capacity:
        return values.new_full((z, m, n), lost(values.dtype))
    present = (positions >= 0).nonzero().squeeze(1)
    grid = values.new_full((z * rows, cols, height, width), fill)
    grid.view(z * rows * cols, height, width)[present] = values[positions[present].long()]
    whole = grid.view(z, rows, cols, height, width).transpose(2, 3).reshape(z, rows * height, cols * width)
    # A copy even where nothing is cut: an operator's result is nobody's view.
    return whole[:, :m, :n].clone(memory_format=torch.contiguous_format)
