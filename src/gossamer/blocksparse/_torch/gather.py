"""Elements taken through indices, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.dense import lost


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
    sizes: list[int],
) -> Tensor:
    """Operator `blocksparse_gather`."""
    if int(nnz) > values.shape[0] or int(index_nnz) > index.shape[0]:
        return values.new_full(index.shape, lost(values.dtype))
    out = values.new_zeros(index.shape)
    place, at = places(positions, values.shape[0], index, index_nnz, index_rows, index_cols, sizes, "index of a gather")
    out.view(-1)[at] = values.reshape(-1)[place]
    return out


def places(
    positions: Tensor,
    capacity: int,
    index: Tensor,
    index_nnz: Tensor,
    index_rows: Tensor,
    index_cols: Tensor,
    sizes: list[int],
    what: str,
) -> tuple[Tensor, Tensor]:
    """(element of the indexed values, element of index) of each index that meets a stored element, in index's order.

    Raises where an index is out of range; -1 is none.
    """
    axis, inner, d_index, d, m_index, n_index, m, n = sizes
    held, (_, height, width) = int(index_nnz), index.shape
    rows_index, rows, cols = (-(-a // b) for a, b in ((m_index, height), (m, height), (n, width)))
    target = index[:held].long()
    i = (index_rows[:held].long() % max(rows_index, 1))[:, None] * height + torch.arange(height)
    j = index_cols[:held].long()[:, None] * width + torch.arange(width)
    inside = (i < m_index)[:, :, None] & (j < n_index)[:, None, :]
    bound = (d, m, n)[axis]
    wrong = inside & ((target < -1) | (target >= bound))
    if wrong.any():
        raise ValueError(
            f"blocksparse: each {what} must be -1, for none, or from 0 to {bound - 1}, got {int(target[wrong][0])}."
        )
    at = (inside & (target >= 0)).view(-1).nonzero().squeeze(1)
    target = target.reshape(-1)[at]
    block, inner_i, inner_j = at // (height * width), at // width % height, at % width
    z, r, c = index_rows[block].long() // rows_index, index_rows[block] % rows_index, index_cols[block].long()
    if axis == 0:
        z = (z // (inner * d_index) * d + target) * inner + z % inner
    elif axis == 1:
        r, inner_i = target // height, target % height
    else:
        c, inner_j = target // width, target % width
    number = positions[(z * rows + r) * cols + c].long()
    stored = number >= 0
    place = (number * height + inner_i) * width + inner_j
    return place[stored], at[stored]


def reach(index: Tensor, index_nnz: Tensor, index_rows: Tensor, index_cols: Tensor, sizes: list[int]) -> Tensor:
    """Operator `blocksparse_gather_reach`."""
    axis, _, _, _, _, _, m, n, z = sizes
    _, height, width = index.shape
    rows, cols = -(-m // height), -(-n // width)
    # As if each block were one element, and had its own number.
    cells = torch.arange(z * rows * cols, dtype=torch.int32)
    held = torch.where((index < 0) | (index >= (sizes[3], m, n)[axis]), -1, index)
    room = min(int(index_nnz), index.shape[0])
    place, _ = places(cells, len(cells), held, torch.tensor(room), index_rows, index_cols, sizes[:8], "index")
    mask = torch.zeros(z * rows * cols, dtype=torch.bool)
    mask[place // (height * width)] = True
    return mask.view(z, rows, cols)
