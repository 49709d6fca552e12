"""Tile-wise lists of entries on the CPU."""

import numpy as np
import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import ell_from_entries, nonzero_positions
from gossamer.rowsparse.formats import tile_index_dtype


def pack_twell(
    x: Tensor, threshold: Tensor | None, above: bool, tile: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `pack_twell` -> (values, indices, nnz_per_tile) of what differs from 0, or with `above` of what is not
    up to max(threshold, 0)."""
    m, n = x.shape
    tiles = -(-n // tile)
    values = x.new_zeros(m * tiles, slots)
    indices = torch.zeros(m * tiles, slots, dtype=tile_index_dtype(tile))
    counts = torch.zeros(m * tiles, dtype=torch.int64)
    if x.numel():
        x = x.contiguous()
        bound = 0 if threshold is None else threshold.clamp(min=0)
        positions = nonzero_positions(~(x <= bound) if above else x)
        rows = torch.div(positions, n, rounding_mode="floor")
        columns = positions - rows * n
        cell = rows * tiles + torch.div(columns, tile, rounding_mode="floor")
        counts = torch.bincount(cell, minlength=m * tiles)
        rank = torch.arange(cell.shape[0]) - (counts.cumsum(0) - counts)[cell]
        fits = rank < slots
        cell, rank = cell[fits], rank[fits]
        values[cell, rank] = x.view(-1)[positions[fits]]
        indices[cell, rank] = (columns[fits] % tile).to(indices.dtype)
    return values.view(m, tiles, slots), indices.view(m, tiles, slots), counts.view(m, tiles).to(torch.int16)


def twell_to_ell(
    values: Tensor, indices: Tensor, counts: Tensor, tile: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `twell_to_ell` -> (values, indices, nnz_per_row); a row that overflowed, here or there, has a count
    above `capacity` and no entries."""
    m, tiles, slots = values.shape
    total = counts.sum(1)
    over = (counts > slots).any(1) | (total > capacity)
    held = (torch.arange(slots) < counts[..., None]) & ~over[:, None, None]
    flat = torch.from_numpy(np.flatnonzero(held.numpy()))
    cell = torch.div(flat, max(slots, 1), rounding_mode="floor")
    columns = indices.reshape(-1)[flat].long() + cell % max(tiles, 1) * tile
    row_offsets = torch.zeros(m + 1, dtype=torch.int64)
    torch.cumsum(torch.where(over, 0, total), 0, out=row_offsets[1:])
    out, columns, nnz = ell_from_entries(row_offsets, columns, values.reshape(-1)[flat], capacity)
    return out, columns, torch.where(over, total.clamp(min=capacity + 1), nnz).int()
