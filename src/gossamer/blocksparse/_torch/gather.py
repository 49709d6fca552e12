"""Elements taken through indices, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Form, Lists, lost
from gossamer.blocksparse.records import Axis, BlocksparseGather, BlocksparseGatherReach


def gather(call: BlocksparseGather) -> Tensor:
    """Operator `blocksparse_gather`, which always raises where an index is out of range."""
    values, index, lists = call.values, call.index, Lists(call.layout, call.form)
    names = Lists(call.index_layout, call.index_form)
    if lists.overflowed() or names.overflowed():
        return values.new_full(index.shape, lost(values.dtype))
    place = places(index, names, lists.form, lists.positions, Axis(*call.axis), "index of a gather")
    out = values.new_zeros(index.shape)
    if place.numel() and values.numel():
        found = values.reshape(-1).take(place.clamp(min=0))
        torch.where(place < 0, found.new_zeros(()), found, out=out[: len(place)])
    return out


def places(index: Tensor, names: Lists, form: Form, positions: Tensor, along: Axis, what: str) -> Tensor:
    """int64 `[nnz, height, width]`: which element of the indexed values, of this form, each index names, below 0 for
    none; `names` are the lists of the indices.

    Raises where an index is out of range; -1 is none.
    """
    axis, inner, d_index, d = along
    (_, rows_index, _, height, width, m_index, n_index, *_), (_, rows, cols, *_) = names.form, form
    m, n, area, bound = form.m, form.n, height * width, along.bound(form)
    held = min(int(names.nnz), index.shape[0])
    target, zr, c = index[:held].long(), names.row_indices[:held].long(), names.col_indices[:held].long()
    if held == 0:
        return target
    z, r = zr // rows_index, zr % rows_index
    if m_index % height or n_index % width:
        i = r[:, None] * height + torch.arange(height)
        j = c[:, None] * width + torch.arange(width)
        target = torch.where((i < m_index)[:, :, None] & (j < n_index)[:, None, :], target, -1)
    # With nothing to point into each index is none.
    low, high = target.aminmax()
    if low < -1 or high >= bound:
        wrong = int(low) if low < -1 else int(high)
        raise ValueError(f"blocksparse: each {what} must be -1, for none, or from 0 to {bound - 1}, got {wrong}.")
    if positions.numel() == 0:
        return target
    # Where the element begins that an index names, for each line that is indexed; one place more in front for -1.
    # What a block lacks stays below 0, whatever is added for the place within it.
    begins = torch.where(positions < 0, -1, positions).long().view(-1, rows, cols) * area
    within_i, within_j = torch.arange(height)[:, None], torch.arange(width)
    if axis == 2:
        at = torch.arange(n)
        lines = begins[:, :, at // width] + torch.where(begins[:, :, at // width] < 0, 0, at % width)
        line, within = z * rows + r, within_i * width
    elif axis == 1:
        at = torch.arange(m)
        lines = begins[:, at // height] + torch.where(begins[:, at // height] < 0, 0, (at % height * width)[:, None])
        lines, line, within = lines.transpose(1, 2), z * cols + c, within_j
    else:
        lines = begins.view(-1, d, inner, rows, cols).movedim(1, -1)
        line = ((z // (inner * d_index) * inner + z % inner) * rows + r) * cols + c
        within = within_i * width + within_j
    table = torch.nn.functional.pad(lines.reshape(-1, bound), (1, 0), value=-area)
    target = target + (line[:, None, None] * (bound + 1) + 1)
    return table.view(-1).take(target).add_(within)


def reach(call: BlocksparseGatherReach) -> Tensor:
    """Operator `blocksparse_gather_reach`."""
    form, along = Form(*call.target), Axis(*call.axis)
    # As if each block were stored, under its own number.
    cells = torch.arange(form.z * form.rows * form.cols, dtype=torch.int32)
    held = torch.where((call.index < 0) | (call.index >= along.bound(form)), -1, call.index)
    place = places(held, Lists(call.index_layout, call.index_form), form, cells, along, "index")
    mask = torch.zeros(form.z * form.rows * form.cols, dtype=torch.bool)
    mask[place[place >= 0] // (form.height * form.width)] = True
    return mask.view(form.z, form.rows, form.cols)
