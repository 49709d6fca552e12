"""Softmax along the rows of block-sparse matrices, on the CPU: rows of blocks are segments of lines of blocks."""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.tensor import from_dense, valid
from gossamer.blocksparse.elements import cut_among
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseFromDense, BlocksparseSoftmax, BlocksparseSoftmaxBwd


def softmax(call: BlocksparseSoftmax) -> Tensor:
    values, mask, scale, lists = call.values, call.mask, call.scale, Lists(call.layout, call.form)
    z, rows, _, height, width, m, n, *_ = lists.form
    if lists.overflowed():
        return torch.full_like(values, float("nan"), memory_format=torch.contiguous_format)
    held, elements = int(lists.nnz), lists.elements
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    row = lists.row_indices[:held].long()
    part = valid(lists)[:held]
    if elements is not None:
        at, inside = cut_among(elements, torch.arange(held), (height, width))
        part = part.expand(held, height, width).index_put(at, part[at] & inside)
    if mask is not None:
        # A dense mask by blocks, like values; a mask of blocks has one dimension more.
        dense = BlocksparseFromDense(mask.expand(z, m, n), *call[2:4]) if mask.dim() == 3 else None
        part = part & (mask[0] if dense is None else from_dense(dense))[:held]
    x = values[:held].to(torch.promote_types(values.dtype, torch.float32)) * scale
    most = x.new_full((z * rows, height), float("-inf"))
    lines = torch.where(part, x, float("-inf")).amax(2)
    most = most.scatter_reduce(0, row[:, None].expand_as(lines), lines, "amax")
    weights = torch.where(part, torch.exp(x - most[row][:, :, None]), 0)
    total = torch.zeros_like(most).index_add_(0, row, weights.sum(2))
    out[:held] = torch.where(part, weights / total[row][:, :, None], 0)
    return out


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
