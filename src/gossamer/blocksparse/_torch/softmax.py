"""Softmax along the rows of block-sparse matrices, on the CPU: rows of blocks are segments of lines of blocks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.blocksparse.elements import unpack, words_of


def softmax(
    values: Tensor,
    mask: Tensor | None,
    row_offsets: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    elements: Tensor | None,
    m: int,
    n: int,
    scale: float,
) -> Tensor:
    """Operator `blocksparse_softmax`; a mask of blocks has a dimension more than a dense one."""
    capacity, height, width = values.shape
    held = int(row_offsets[-1])
    if held > capacity:
        return torch.full_like(values, float("nan"), memory_format=torch.contiguous_format)
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    row, col = row_indices[:held].long(), col_indices[:held].long()
    line = row % max(-(-m // height), 1)
    inside = (line[:, None] * height + torch.arange(height) < m, col[:, None] * width + torch.arange(width) < n)
    part = inside[0][:, :, None] & inside[1][:, None, :]
    if elements is not None:
        starts = elements[:held].long()
        at = starts.nonzero().squeeze(1)
        words = elements[starts[at][:, None] + torch.arange(words_of((height, width)))]
        part = part.index_put((at,), part[at] & unpack(words, (height, width)))
    if mask is not None:
        part = part & _of_blocks(mask, row, col, (m, n), (height, width))
    x = values[:held].to(torch.promote_types(values.dtype, torch.float32)) * scale
    most = x.new_full((len(row_offsets) - 1, height), float("-inf"))
    lines = torch.where(part, x, float("-inf")).amax(2)
    most = most.scatter_reduce(0, row[:, None].expand_as(lines), lines, "amax")
    weights = torch.where(part, torch.exp(x - most[row][:, :, None]), 0)
    total = torch.zeros_like(most).index_add_(0, row, weights.sum(2))
    out[:held] = torch.where(part, weights / total[row][:, :, None], 0)
    return out


def _of_blocks(mask: Tensor, row: Tensor, col: Tensor, size: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The blocks of a mask, `[*, height, width]` or 1 where it is broadcast."""
    if mask.dim() == 4:
        return mask[0, : len(row)]
    (m, n), (height, width) = size, block
    rows = max(-(-m // height), 1)
    index = [row // rows, row % rows, col]
    grid, lengths = mask, []
    for axis, (count, length) in enumerate(((m, height), (n, width)), 1):
        if mask.shape[axis] == 1:
            index[axis] = torch.zeros_like(row)
            lengths += [1, 1]
        else:
            amount = -(-count // length)
            grid = pad(grid, (0, 0) * (2 - axis) + (0, amount * length - count))
            lengths += [amount, length]
    if mask.shape[0] == 1:
        index[0] = torch.zeros_like(row)
    blocks = grid.reshape(mask.shape[0], *lengths).transpose(2, 3)
    return blocks[index[0], index[1], index[2]]


def softmax_bwd(grad: Tensor, out: Tensor, row_offsets: Tensor, row_indices: Tensor, n: int, scale: float) -> Tensor:
    """Operator `blocksparse_softmax_bwd`: what is 0 in the result gets no gradient."""
    held = int(row_offsets[-1])
    if held > out.shape[0]:
        return torch.full_like(out, float("nan"), memory_format=torch.contiguous_format)
    row = row_indices[:held].long()
    dtype = torch.promote_types(out.dtype, torch.float32)
    y, dy = out[:held].to(dtype), grad[:held].to(dtype)
    product = torch.where(y == 0, 0, y * dy)
    inner = y.new_zeros(len(row_offsets) - 1, y.shape[1]).index_add_(0, row, product.sum(2))
    dx = torch.zeros_like(out, memory_format=torch.contiguous_format)
    dx[:held] = torch.where(y == 0, 0, scale * (product - y * inner[row][:, :, None]))
    return dx
