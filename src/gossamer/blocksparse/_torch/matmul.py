"""Products of which operands or result are block-sparse, on the CPU: pairs of blocks, multiplied in batches.

A dense operand is a grid of blocks of which every one is present; where no block-sparse matrix cuts a dimension it is
a single block. Every present block of A is joined with the present blocks of B in the row that its column names. What
does not fall into the result is dropped before anything is multiplied.

Where only the result is block-sparse, each of its block rows is a plain product instead: of the rows of A there, and
of the columns of B that the result has in these rows.
"""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.blocksparse._torch.tensor import valid
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseMatmul

WORKSPACE = 1 << 18
"""Elements that are gathered at one time: they stay in the cache."""
_WIDE = 6
"""Columns of a block, times the share of the result's blocks that are present, from which block rows are faster than
pairs."""


def matmul(call: BlocksparseMatmul) -> Tensor:
    a, b, trans_a, trans_b = call.a, call.b, call.trans_a, call.trans_b
    (of_a, of_b, of_out), (z, m, k, n) = call.lists(), call.sizes
    bm, bk, bn = (width or max(size, 1) for width, size in zip(call.block, (m, k, n)))
    rows, cols = -(-m // bm), -(-n // bn)
    shape = (z, m, n) if of_out is None else (of_out.form.capacity, bm, bn)
    if any(lists is not None and lists.overflowed() for lists in (of_a, of_b, of_out)):
        return a.new_full(shape, float("nan"))
    # Few narrow columns of a dense matrix cost more to copy than a plain product saves.
    if of_a is None and of_b is None and of_out is not None and bn * of_out.density >= _WIDE:
        return _trimmed(_sampled(a, b, of_out, (bm, bn)), of_out).to(a.dtype)
    left, of_left = _blocks(a, of_a, trans_a, (z, m, k), (bm, bk))
    right, of_right = _blocks(b, of_b, trans_b, (z, k, n), (bk, bn))
    # 16-bit numbers are multiplied and added up in float32.
    wide = torch.promote_types(a.dtype, torch.float32)
    out = torch.zeros(z * rows * cols if of_out is None else shape[0], bm, bn, dtype=wide)
    step = max(1, WORKSPACE // (bm * bk + bk * bn + bm * bn))
    places = None if of_out is None else of_out.positions
    for first, second, to in zip(*(part.split(step) for part in _pairs(of_left, of_right, places, rows, cols))):
        out.index_add_(0, to, left[first].to(wide) @ right[second].to(wide))
    if of_out is not None:
        return _trimmed(out, of_out).to(a.dtype)
    whole = out.view(z, rows, cols, bm, bn).transpose(2, 3).reshape(z, rows * bm, cols * bn)
    return whole[:, :m, :n].to(a.dtype, memory_format=torch.contiguous_format, copy=True)


def _sampled(a: Tensor, b: Tensor, of_out: Lists, block: tuple[int, int]) -> Tensor:
    """The blocks of a layout of dense a `[Z, M, K]` times dense b `[Z, K, N]`, in the working dtype."""
    (bm, bn), (rows, cols), wide = block, of_out.form[1:3], torch.promote_types(a.dtype, torch.float32)
    left = pad(a.to(wide), (0, 0, 0, rows * bm - a.shape[1])).unflatten(1, (rows, bm))
    right = pad(b.to(wide), (0, cols * bn - b.shape[2])).unflatten(2, (cols, bn))
    out = torch.zeros(of_out.form.blocks, dtype=wide)
    offsets = of_out.row_offsets.tolist()
    for line, (first, last) in enumerate(itertools.pairwise(offsets)):
        if first == last:
            continue
        below = right[line // rows]
        if last - first < cols:
            below = below[:, of_out.col_indices[first:last].long()]
        product = left[line // rows, line % rows] @ below.flatten(1)
        out[first:last] = product.view(bm, last - first, bn).transpose(0, 1)
    return out


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
