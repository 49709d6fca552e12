"""Elements taken through indices, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Form, Lists, lost
from gossamer.blocksparse.records import BlocksparseGather, BlocksparseGatherReach, Direction


def gather(call: BlocksparseGather) -> Tensor:
    """Operator `blocksparse_gather`, which always raises where an index is out of range."""
    values, index, lists = call.values, call.index, Lists(call.layout, call.form)
    names = Lists(call.index_layout, call.index_form)
    if lists.overflowed() or names.overflowed():
        return values.new_full(index.shape, lost(values.dtype))
    place = places(index, names, lists, Direction(*call.axis), "index of a gather")
    out = values.new_zeros(index.shape)
    if place.numel() and values.numel():
        found = values.reshape(-1).take(place.clamp(min=0))
        torch.where(place < 0, found.new_zeros(()), found, out=out[: len(place)])
    return out


def places(index: Tensor, names: Lists, lists: Lists, along: Direction, what: str) -> Tensor:
    """int64 `[nnz, height, width]`: which element of the values of `lists` each index names, below 0 for none; `names`
    are the lists of the indices.

    Raises where an index is out of range; -1 is none.
    """
    form, positions, bound = lists.form, lists.positions, along.bound(lists.form)
    held = min(int(names.nnz), index.shape[0])
    target, cell, element = named(index[:held], names, form, along)
    # With nothing to point into each index is none.
    low, high = target.aminmax() if held else (-1, -1)
    if low < -1 or high >= bound:
        wrong = int(low) if low < -1 else int(high)
        raise ValueError(f"blocksparse: each {what} must be -1, for none, or from 0 to {bound - 1}, got {wrong}.")
    if positions.numel() == 0:
        return target
    number = positions.take(torch.where(target < 0, 0, cell))
    return torch.where((target < 0) | (number < 0), -1, number * (form.height * form.width) + element)


def named(index: Tensor, names: Lists, form: Form, along: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """(indices in int64, -1 for those of no element; cell of the grid of matrices of a form, element of the block) of
    the first blocks of indices. An index out of range names any block."""
    axis, inner, d_index, d = along
    _, rows_index, _, height, width, m_index, n_index, *_ = names.form
    line, column = (x[: len(index), None, None].long() for x in (names.row_indices, names.col_indices))
    z, r = line // max(rows_index, 1), line % max(rows_index, 1)
    i, j = torch.arange(height)[:, None], torch.arange(width)
    inside = (r * height + i < m_index) & (column * width + j < n_index) & (line >= 0)
    at = torch.where(inside, index.long(), -1)
    # Sizes of blocks are powers of two.
    if axis == 0:
        grid = (z // max(inner * d_index, 1) * d + at) * inner + z % max(inner, 1)
        return at, grid * (form.rows * form.cols) + (r * form.cols + column), i * width + j
    if axis == 1:
        cell = (z * form.rows + (at >> (height.bit_length() - 1))) * form.cols + column
        return at, cell, (at & (height - 1)) * width + j
    cell = (z * form.rows + r) * form.cols + (at >> (width.bit_length() - 1))
    return at, cell, i * width + (at & (width - 1))


def reach(call: BlocksparseGatherReach) -> Tensor:
    form, along = Form(*call.target), Direction(*call.axis)
    cells = form.z * form.rows * form.cols
    target, cell, _ = named(call.index, Lists(call.index_layout, call.index_form), form, along)
    mask = torch.zeros(cells + 1, dtype=torch.bool)
    mask[torch.where((target >= 0) & (target < along.bound(form)), cell, cells)] = True
    return mask[:-1].view(form.z, form.rows, form.cols).clone()
