"""Blocks and parts of blocks moved, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.tensor import lost


def rearrange(
    values: Tensor,
    nnz: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    positions: Tensor,
    out_nnz: Tensor,
    out_rows: Tensor,
    out_cols: Tensor,
    out_positions: Tensor,
    z_map: Tensor | None,
    i_map: Tensor | None,
    j_map: Tensor | None,
    z_inverse: Tensor | None,
    i_inverse: Tensor | None,
    j_inverse: Tensor | None,
    sizes: list[int],
    block: list[int],
    tile: list[int],
) -> Tensor:
    """Operator `blocksparse_rearrange`."""
    m, n, m_out, n_out = sizes
    (height, width), (th, tw) = block, tile
    shape = (out_rows.shape[0], height, width)
    if int(nnz) > values.shape[0] or int(out_nnz) > shape[0]:
        return values.new_full(shape, lost(values.dtype))
    if 0 in (m, n, m_out, n_out, positions.numel(), out_positions.numel()):
        return values.new_zeros(shape)
    h, w = values.shape[1:]
    rows, cols, rows_out = -(-m // h), -(-n // w), -(-m_out // height)
    present = out_rows >= 0
    z, r, c = out_rows.long().clamp(min=0) // rows_out, out_rows.long().clamp(min=0) % rows_out, out_cols.long()
    # The first row and column of each tile of each block.
    i = r[:, None] * height + torch.arange(0, height, th)
    j = c.clamp(min=0)[:, None] * width + torch.arange(0, width, tw)
    numbers = positions.view(-1, rows, cols)
    total = None
    for k in range(max(1 if x is None else x.shape[1] for x in (z_map, i_map, j_map))):
        z_in = z if z_map is None else z_map[z, k]
        i_in, j_in = _sources(i_map, k, i, min(m, m_out)), _sources(j_map, k, j, min(n, n_out))
        found = (present & (z_in >= 0))[:, None, None] & (i_in >= 0)[:, :, None] & (j_in >= 0)[:, None, :]
        z_in, i_in, j_in = z_in.clamp(min=0), i_in.clamp(min=0), j_in.clamp(min=0)
        number = numbers[z_in[:, None, None], (i_in // h)[:, :, None], (j_in // w)[:, None, :]].long()
        found &= number >= 0
        # [blocks, tiles down, tiles across, th, tw]
        taken = _tiles(values, number.clamp(min=0), i_in % h // th, j_in % w // tw, th, tw)
        taken[~found] = 0
        if total is None:
            total = taken
        else:
            total = total.to(torch.promote_types(taken.dtype, torch.float32)) + taken
    assert total is not None
    if (th, tw) != (height, width):
        total = total.transpose(2, 3)
    return total.reshape(shape).to(values.dtype).contiguous()


def _tiles(values: Tensor, number: Tensor, down: Tensor, across: Tensor, th: int, tw: int) -> Tensor:
    """`[blocks, tiles down, tiles across, th, tw]`: copies of these tiles of these blocks."""
    capacity, h, w = values.shape
    if (th, tw) == (h, w):
        return values.index_select(0, number.view(-1)).view(*number.shape, th, tw)
    if (th, tw) == (1, 1):
        at = (number * h + down[:, :, None]) * w + across[:, None, :]
        return values.reshape(-1).take(at)[..., None, None]
    tiles = values.reshape(capacity, h // th, th, w // tw, tw)
    return tiles[number, down[:, :, None], :, across[:, None, :]]


def _sources(sources: Tensor | None, k: int, at: Tensor, most: int) -> Tensor:
    if sources is None:
        return torch.where(at < most, at, -1)
    chosen = sources[:, k]
    return torch.where(at < len(chosen), chosen[at.clamp(max=len(chosen) - 1)], -1)
