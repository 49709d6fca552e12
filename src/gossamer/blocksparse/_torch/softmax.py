"""Softmax along the rows of block-sparse matrices, on the CPU: rows of blocks are segments of lines of blocks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.blocksparse._torch.tensor import valid
from gossamer.blocksparse.elements import cut_among
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseSoftmax, BlocksparseSoftmaxBwd


def softmax(call: BlocksparseSoftmax) -> Tensor:
    values, mask, scale, lists = call.values, call.mask, call.scale, Lists(call.layout, call.form)
    z, rows, _, height, width, m, n, *_ = lists.form
    if lists.overflowed():
        return torch.full_like(values, float("nan"), memory_format=torch.contiguous_format)
    held, elements = int(lists.nnz), lists.elements
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    row, col = lists.row_indices[:held].long(), lists.col_indices[:held].long()
    part = valid(lists)[:held]
    if elements is not None:
        at, inside = cut_among(elements, torch.arange(held), (height, width))
        part = part.expand(held, height, width).index_put(at, part[at] & inside)
    if mask is not None:
        part = part & _of_blocks(mask, row, col, (m, n), (height, width))
    x = values[:held].to(torch.promote_types(values.dtype, torch.float32)) * scale
    most = x.new_full((z * rows, height), float("-inf"))
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


def softmax_bwd(call: BlocksparseSoftmaxBwd) -> Tensor:
    out, scale, lists = call.out, call.scale, Lists(call.layout, call.form)
    if lists.overflowed():
        return torch.full_like(out, float("nan"), memory_format=torch.contiguous_format)
    held, dtype = int(lists.nnz), torch.promote_types(out.dtype, torch.float32)
    row = lists.row_indices[:held].long()
    y, dy = out[:held].to(dtype), call.grad[:held].to(dtype)
    product = torch.where(y == 0, 0, y * dy)
    inner = y.new_zeros(lists.form.z * lists.form.rows, y.shape[1]).index_add_(0, row, product.sum(2))
    dx = torch.zeros_like(out, memory_format=torch.contiguous_format)
    dx[:held] = torch.where(y == 0, 0, scale * (product - y * inner[row][:, :, None]))
    return dx
