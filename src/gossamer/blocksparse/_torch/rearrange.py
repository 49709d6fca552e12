"""Blocks and parts of blocks moved, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse.lists import Lists, lost
from gossamer.blocksparse.records import BlocksparseRearrange


def rearrange(call: BlocksparseRearrange) -> Tensor:
    values, source, result = call.values, Lists(call.layout, call.form), Lists(call.out_layout, call.out_form)
    z_count, rows, cols, h, w, m, n, *_ = source.form
    z_out, rows_out, _, height, width, m_out, n_out, capacity, *_ = result.form
    shape, (th, tw) = (capacity, height, width), call.tile
    if source.overflowed() or result.overflowed():
        return values.new_full(shape, lost(values.dtype))
    if 0 in (z_count * m * n, z_out * m_out * n_out):
        return values.new_zeros(shape)
    out_rows, out_cols, maps = result.row_indices, result.col_indices, (call.z_map, call.i_map, call.j_map)
    z_map, i_map, j_map = maps
    present = out_rows >= 0
    z, r, c = out_rows.long().clamp(min=0) // rows_out, out_rows.long().clamp(min=0) % rows_out, out_cols.long()
    # The first row and column of each tile of each block.
    i = r[:, None] * height + torch.arange(0, height, th)
    j = c.clamp(min=0)[:, None] * width + torch.arange(0, width, tw)
    numbers = source.positions.view(-1, rows, cols)
    total = None
    for k in range(max(1 if x is None else x.shape[1] for x in maps)):
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
