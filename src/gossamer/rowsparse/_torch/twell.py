"""Tile-wise lists of entries on the CPU."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import bits_of, ell_from_entries, nonzero_positions


def positions_above(x: Tensor, threshold: Tensor | None) -> Tensor:
    """Flat positions, ascending, of what is not up to max(threshold, 0) in a contiguous x; NaN is not."""
    return nonzero_positions(~(x <= (0 if threshold is None else threshold.clamp(min=0))))


def pack_twell(x: Tensor, tile: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `pack_twell` -> (values, indices, nnz_per_tile) of what differs from 0."""
    return pack_positions(x.contiguous(), nonzero_positions, tile, slots)


def pack_positions(x: Tensor, find: Callable[[Tensor], Tensor], tile: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of what `find` finds in a contiguous x: its flat positions, ascending."""
    m, n = x.shape
    tiles = -(-n // tile)
    found = find(x)
    positions = found.numpy()
    rows = positions // n
    columns = positions - rows * n
    cell = rows * tiles + columns // tile
    counts = np.bincount(cell, minlength=m * tiles)
    # Entries of a cell follow each other.
    rank = np.arange(len(cell)) - np.repeat(np.cumsum(counts) - counts, counts)
    entries = bits_of(x.view(-1)[found])
    if len(rank) and rank.max() >= slots:
        fits = rank < slots
        cell, rank, columns, entries = cell[fits], rank[fits], columns[fits], entries[fits]
    values = np.zeros(m * tiles * slots, entries.dtype)
    indices = np.zeros(m * tiles * slots, np.uint8 if tile <= 256 else np.int16)
    at = cell * slots + rank
    values[at], indices[at] = entries, columns % tile
    shape = (m, tiles, slots)
    return (
        torch.from_numpy(values).view(x.dtype).view(shape),
        torch.from_numpy(indices).view(shape),
        torch.from_numpy(counts.astype(np.int16)).view(m, tiles),
    )


def twell_to_ell(
    values: Tensor, indices: Tensor, counts: Tensor, tile: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `twell_to_ell` -> (values, indices, nnz_per_row); a row that overflowed, here or there, has a count
    above `capacity` and no entries."""
    m, tiles, slots = values.shape
    held = counts.numpy().astype(np.int64).clip(min=0)
    total = held.sum(1)
    over = (held > slots).any(1) | (total > capacity)
    held[over] = 0
    flat = held.reshape(-1)
    cell = np.repeat(np.arange(m * tiles), flat)
    at = cell * slots + np.arange(len(cell)) - np.repeat(np.cumsum(flat) - flat, flat)
    inner = indices.contiguous().view(-1).numpy()[at].astype(np.int64)
    # An index outside its tile is no column of another: -2 is an error to all who read it.
    columns = np.where((inner >= 0) & (inner < tile), inner + cell % max(tiles, 1) * tile, -2)
    entries = torch.from_numpy(bits_of(values.contiguous().view(-1))[at]).view(values.dtype)
    offsets = np.concatenate(([0], np.cumsum(held.sum(1))))
    lists = ell_from_entries(torch.from_numpy(offsets), torch.from_numpy(columns), entries, capacity)
    lists[2].numpy()[over] = np.maximum(total[over], capacity + 1)
    return lists
