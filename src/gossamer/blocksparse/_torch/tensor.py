"""Dense to blocks and back, and transposed blocks, on the CPU; and which values stand for an element."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.blocksparse.lists import Lists, lost
from gossamer.blocksparse.records import BlocksparseFromDense, BlocksparseToDense, BlocksparseTranspose


def from_dense(call: BlocksparseFromDense) -> Tensor:
    x, lists = call.x, Lists(call.layout, call.form)
    z, rows, cols, height, width, m, n, capacity, *_ = lists.form
    if lists.overflowed():
        return x.new_full((capacity, height, width), lost(x.dtype))
    out = x.new_zeros(capacity, height, width)
    grid = pad(x, (0, cols * width - n, 0, rows * height - m)).view(z, rows, height, cols, width)
    held = int(lists.nnz)
    row, column = lists.row_indices[:held].long(), lists.col_indices[:held].long()
    out[:held] = grid[row // max(rows, 1), row % max(rows, 1), :, column]
    return out


def to_dense(call: BlocksparseToDense) -> Tensor:
    values, lists = call.values, Lists(call.layout, call.form)
    z, rows, cols, height, width, m, n, *_ = lists.form
    if lists.overflowed():
        return values.new_full((z, m, n), lost(values.dtype))
    positions = lists.positions
    present = (positions >= 0).nonzero().squeeze(1)
    grid = values.new_full((z * rows, cols, height, width), call.fill)
    grid.view(z * rows * cols, height, width)[present] = values[positions[present].long()]
    whole = grid.view(z, rows, cols, height, width).transpose(2, 3).reshape(z, rows * height, cols * width)
    # A copy even where nothing is cut: an operator's result is nobody's view.
    return whole[:, :m, :n].clone(memory_format=torch.contiguous_format)


def transpose(call: BlocksparseTranspose) -> Tensor:
    values, lists = call.values, Lists(call.layout, call.form)
    capacity, height, width = values.shape
    if lists.overflowed():
        return values.new_full((capacity, width, height), lost(values.dtype))
    out, held = values.new_zeros(capacity, width, height), int(lists.nnz)
    out[:held] = values.mT[lists.transpose_order[:held].long()]
    return out


def valid(lists: Lists, behind: bool = True, dims: tuple[int, ...] = (-1, -2)) -> Tensor:
    """Bool, broadcasting to `[capacity, height, width]`: which values stand for an element of a matrix. Without
    `behind`, blocks behind the last count as blocks; `dims` says along which dimensions the ends of matrices count."""
    (_, rows, _, height, width, m, n, *_), device = lists.form, lists.buffer.device
    row = lists.row_indices[:, None, None]
    parts = [row >= 0] if behind else []
    if m % height and -2 in dims:
        parts.append(row % max(rows, 1) * height + torch.arange(height, device=device)[:, None] < m)
    if n % width and -1 in dims:
        parts.append(lists.col_indices[:, None, None] * width + torch.arange(width, device=device) < n)
    return functools.reduce(torch.logical_and, parts)
