"""Products of which operands or result are block-sparse, on the CPU: pairs of blocks, multiplied in batches.

A dense operand is a grid of blocks of which every one is present; where no block-sparse matrix cuts a dimension it is
a single block. Every present block of A is joined with the present blocks of B in the row that its column names. What
does not fall into the result is dropped before anything is multiplied, unless most of a dense product is asked for.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.blocksparse._torch.tensor import valid
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseMatmul

WORKSPACE = 1 << 18
"""Elements that are gathered at one time: they stay in the cache."""
LARGE = 1 << 16
"""Multiplications of two blocks from which each product is added where it stands: a batch of these would be copied."""


def matmul(call: BlocksparseMatmul) -> Tensor:
    a, b, trans_a, trans_b = call.a, call.b, call.trans_a, call.trans_b
    (of_a, of_b, of_out), (z, m, k, n) = call.lists(), call.sizes
    bm, bk, bn = (width or max(size, 1) for width, size in zip(call.block, (m, k, n)))
    rows, cols = -(-m // bm), -(-n // bn)
    shape = (z, m, n) if of_out is None else (of_out.form.capacity, bm, bn)
    if any(lists is not None and lists.overflowed() for lists in (of_a, of_b, of_out)):
        return a.new_full(shape, float("nan"))
    # 16-bit numbers are multiplied and added up in float32.
    wide = torch.promote_types(a.dtype, torch.float32)
    listed = 0 if of_a or of_b or of_out is None else int(of_out.nnz)
    # The pairs of many small blocks take longer than a dense product, of which the other blocks are dropped.
    if of_out is not None and listed > (0.25 + (bm + bn) / 128) * z * rows * cols:
        there = of_out.positions >= 0
        whole, _ = _blocks(a.to(wide) @ b.to(wide), None, False, (z, m, n), (bm, bn))
        out = torch.zeros(shape, dtype=wide)
        out[of_out.positions[there].long()] = whole[there]
        return _trimmed(out, of_out).to(a.dtype)
    left, of_left = _blocks(a.to(wide), of_a, trans_a, (z, m, k), (bm, bk))
    right, of_right = _blocks(b.to(wide), of_b, trans_b, (z, k, n), (bk, bn))
    out = torch.zeros(z * rows * cols if of_out is None else shape[0], bm, bn, dtype=wide)
    step = max(1, WORKSPACE // (bm * bk + bk * bn + bm * bn))
    places = None if of_out is None else of_out.positions
    pairs = _pairs(of_left, of_right, places, rows, cols)
    if bm * bk * bn >= LARGE:
        for first, second, to in zip(*(part.tolist() for part in pairs)):
            out[to].addmm_(left[first], right[second])
    else:
        for first, second, to in zip(*(part.split(step) for part in pairs)):
            out.index_add_(0, to, left[first] @ right[second])
    if of_out is not None:
        return _trimmed(out, of_out).to(a.dtype)
    whole = out.view(z, rows, cols, bm, bn).transpose(2, 3).reshape(z, rows * bm, cols * bn)
    return whole[:, :m, :n].to(a.dtype, memory_format=torch.contiguous_format, copy=True)


def _blocks(
    x: Tensor, lists: Lists | None, transposed: bool, size: tuple[int, int, int], block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(blocks `[*, height, width]`, their numbers `[Z, rows, cols]`, -1 where one is absent) of an operand."""
    (z, m, n), (height, width) = size, block
    rows, cols = -(-m // height), -(-n // width)
    if lists is None:
        grid = pad(x, (0, cols * width - n, 0, rows * height - m)).view(z, rows, height, cols, width).transpose(2, 3)
        return grid.reshape(z * rows * cols, height, width), torch.arange(z * rows * cols).view(z, rows, cols)
    blocks, positions = _trimmed(x, lists), lists.positions.long()
    if transposed:
        return blocks.mT, positions.view(z, cols, rows).mT
    return blocks, positions.view(z, rows, cols)


def _trimmed(x: Tensor, lists: Lists) -> Tensor:
    """Stored blocks with zeros beyond the matrix."""
    form = lists.form
    return torch.where(valid(lists, behind=False), x, 0) if form.m % form.height or form.n % form.width else x


def _pairs(left: Tensor, right: Tensor, out: Tensor | None, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of the left and of the right operand that meet, and where their product goes to, in a fixed order."""
    batch, row, k = (left >= 0).nonzero().unbind(1)
    _, _, second = (right >= 0).nonzero().unbind(1)
    per_row = (right >= 0).sum(2)
    starts = (per_row.flatten().cumsum(0) - per_row.flatten()).view_as(per_row)
    counts = per_row[batch, k]
    entry = torch.arange(len(batch)).repeat_interleave(counts)
    batch, row, k = batch[entry], row[entry], k[entry]
    within = torch.arange(len(entry)) - (counts.cumsum(0) - counts)[entry]
    col = second[starts[batch, k] + within]
    to = (batch * rows + row) * cols + col
    if out is not None:
        to = out.long()[to]
        kept = to >= 0
        batch, row, k, col, to = batch[kept], row[kept], k[kept], col[kept], to[kept]
    return left[batch, row, k], right[batch, k, col], to
