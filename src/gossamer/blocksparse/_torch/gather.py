"""Elements taken through indices, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.tensor import lost


def gather(
    values: Tensor,
    nnz: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    positions: Tensor,
    index: Tensor,
    index_nnz: Tensor,
    index_rows: Tensor,
    index_cols: Tensor,
    index_row_offsets: Tensor,
    index_col_offsets: Tensor,
    index_order: Tensor,
    index_positions: Tensor,
    row_offsets: Tensor,
    col_offsets: Tensor,
    order: Tensor,
    sizes: list[int],
    strict: bool,
) -> Tensor:
    """Operator `blocksparse_gather`, which always raises where an index is out of range."""
    if int(nnz) > values.shape[0] or int(index_nnz) > index.shape[0]:
        return values.new_full(index.shape, lost(values.dtype))
    place = places(positions, index, index_nnz, index_rows, index_cols, sizes, "index of a gather")
    out = values.new_zeros(index.shape)
    if place.numel() and values.numel():
        found = values.reshape(-1).take(place.clamp(min=0))
        torch.where(place < 0, found.new_zeros(()), found, out=out[: len(place)])
    return out


def places(
    positions: Tensor,
    index: Tensor,
    index_nnz: Tensor,
    index_rows: Tensor,
    index_cols: Tensor,
    sizes: list[int],
    what: str,
) -> Tensor:
    """int64 `[nnz, height, width]`: which element of the indexed values each index names, below 0 for none.

    Raises where an index is out of range; -1 is none.
    """
    axis, inner, d_index, d, m_index, n_index, m, n = sizes
    held, (_, height, width) = min(int(index_nnz), index.shape[0]), index.shape
    area, bound = height * width, (d, m, n)[axis]
    rows_index, rows, cols = (-(-a // b) for a, b in ((m_index, height), (m, height), (n, width)))
    target, zr, c = index[:held].long(), index_rows[:held].long(), index_cols[:held].long()
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


def reach(index: Tensor, index_nnz: Tensor, index_rows: Tensor, index_cols: Tensor, sizes: list[int]) -> Tensor:
    """Operator `blocksparse_gather_reach`."""
    axis, _, _, _, _, _, m, n, z = sizes
    _, height, width = index.shape
    rows, cols = -(-m // height), -(-n // width)
    # As if each block were stored, under its own number.
    cells = torch.arange(z * rows * cols, dtype=torch.int32)
    held = torch.where((index < 0) | (index >= (sizes[3], m, n)[axis]), -1, index)
    place = places(cells, held, index_nnz, index_rows, index_cols, sizes[:8], "index")
    mask = torch.zeros(z * rows * cols, dtype=torch.bool)
    mask[place[place >= 0] // (height * width)] = True
    return mask.view(z, rows, cols)
