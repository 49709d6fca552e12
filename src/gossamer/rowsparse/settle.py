"""Rows that overflowed, taken from their source into the buffers."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse._torch.pack import overflow_error
from gossamer.rowsparse.container import LinearSource
from gossamer.rowsparse.formats import CSR, ELL, TwELL, check_indices, check_tile_indices, offsets_of, tile_index_dtype
from gossamer.rowsparse.linear_source import dense_rows


def settled(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, counts) of a container with a source that hold every entry; `RowSparse.settle` says more."""
    checks.no_wait(
        f"rowsparse.{type(rows).__name__}",
        "to look at the entries of a container with a source",
        "Give the container to an operator as it is, look at rows.packed, whose buffers lack rows that overflowed, or "
        "settle it outside.",
    )
    values, indices, counts, _ = rows.packed
    if not bool(rows.overflowed):
        return values, indices, counts
    # Whoever looks may have gradients off, and whoever differentiates later may not.
    with torch.inference_mode(values.is_inference()), torch.enable_grad():
        row, columns, values = entries(rows)
        m, n, what = rows.num_rows, rows.num_columns, "rowsparse.settle"
        if isinstance(rows, CSR):
            return values, columns.int(), offsets_of(torch.bincount(row, minlength=m))
        if isinstance(rows, ELL):
            return build_ell(what, row, columns, values, m, None)
        return build_twell(what, row, columns, values, m, n, rows.tile, None)


def entries(rows: Any, operator: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(rows int64, columns int64, values) of every entry, in order of row and slot; holes are left out.

    Rows that overflowed are read from the source, where every number but 0 is an entry. Raises where there is none, or
    for an index outside [0, N). Waits for the device.
    """
    values, _, counts, source = rows.packed
    operator = operator or f"rowsparse.{type(rows).__name__}"
    row, columns, held, over = slots_of(rows)
    if isinstance(rows, TwELL):
        check_tile_indices(operator, rows.packed.indices, held, rows.tile, rows.num_columns)
    row, columns, values = row[held], columns[held], values[held]
    check_indices(operator, columns, rows.num_columns)
    over = over.nonzero().squeeze(1)
    if not over.numel():
        return row, columns, values
    if source is None:
        raise overflow_error(operator)
    if isinstance(source, LinearSource):
        some = replace(source, x=source.x[over])
        dense = dense_rows(some, torch.ones_like(over, dtype=torch.int32), 0).to(values.dtype)
    else:
        dense = source[over]
    kept = dense != 0
    if not isinstance(rows, CSR | ELL):
        true = kept.sum(1)
    else:
        true = counts[over] if isinstance(rows, ELL) else counts.diff()[over]
    # -0.0 stands for an entry of value 0 where sae.encode wrote it, and is none in what somebody packed: counts tell.
    zeros = (dense == 0) & dense.signbit()
    kept = kept | (zeros & (kept.sum(1) + zeros.sum(1) == true)[:, None])
    at, found = kept.nonzero(as_tuple=True)
    row, order = torch.cat([row, over[at]]).sort(stable=True)
    return row, torch.cat([columns, found])[order], torch.cat([values, dense[at, found]])[order]


def slots_of(rows: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row, column, whether it holds an entry of a row that fits) of each slot, and which rows overflowed."""
    values, indices, counts, _ = rows.packed
    device = values.device
    if isinstance(rows, CSR):
        slots = torch.arange(values.shape[0], device=device)
        over = counts[1:] > values.shape[0]
        row = torch.searchsorted(counts, slots, right=True) - 1
        # Past the last offset the buffers hold nothing.
        held = (row >= 0) & (row < rows.num_rows)
        held = held & ~over[row.clamp(0, max(rows.num_rows - 1, 0))] if over.numel() else held
        return row, indices.long(), held & (indices != -1), over
    if isinstance(rows, ELL):
        over = counts > rows.capacity
        held = (torch.arange(rows.capacity, device=device) < counts[:, None]) & ~over[:, None]
        row = torch.arange(rows.num_rows, device=device)[:, None].expand_as(held)
        return row, indices.long(), held & (indices != -1), over
    over = (counts > rows.slots).any(1)
    held = (torch.arange(rows.slots, device=device) < counts[..., None]) & ~over[:, None, None]
    row = torch.arange(rows.num_rows, device=device)[:, None, None].expand_as(held)
    tiles = torch.arange(counts.shape[1], device=device)[:, None]
    return row, indices.long() + tiles * rows.tile, held, over


def build_ell(
    operator: str, row: Tensor, columns: Tensor, values: Tensor, m: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_row)"""
    counts, place, capacity = _places(operator, row, m, "capacity", capacity)
    at = row * capacity + place
    indices = torch.full((m * capacity,), -1, dtype=torch.int32, device=values.device)
    indices[at] = columns.int()
    packed = values.new_zeros(m * capacity).index_put((at,), values)
    return packed.view(m, capacity), indices.view(m, capacity), counts.int()


def build_twell(
    operator: str, row: Tensor, columns: Tensor, values: Tensor, m: int, n: int, tile: int, slots: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_tile)"""
    tiles = -(-n // tile)
    cell = row * tiles + torch.div(columns, tile, rounding_mode="floor")
    # Rows are in order; a user's columns may not be.
    cell, order = cell.sort(stable=True)
    columns, values = columns[order], values[order]
    counts, place, slots = _places(operator, cell, m * tiles, "slots", slots)
    if slots > 32767:
        raise ValueError(f"{operator}: a row's tile must have at most 32767 entries, got {slots}. Take smaller tiles.")
    at = cell * slots + place
    inner = torch.zeros(m * tiles * slots, dtype=tile_index_dtype(tile), device=values.device)
    inner[at] = (columns % tile).to(inner.dtype)
    packed = values.new_zeros(m * tiles * slots).index_put((at,), values)
    shape = (m, tiles, slots)
    return packed.view(shape), inner.view(shape), counts.to(torch.int16).view(m, tiles)


def _places(operator: str, cell: Tensor, cells: int, name: str, size: int | None) -> tuple[Tensor, Tensor, int]:
    """(entries of each cell, place of each entry within its cell, the size that all of them fit in)."""
    counts = torch.bincount(cell, minlength=cells)
    most = int(counts.max()) if counts.numel() else 0
    if size is None:
        size = max(most, 1)
    elif size < most:
        raise ValueError(f"{operator}: {name} must be at least {most}, the entries of the fullest, got {size}.")
    start = counts.cumsum(0) - counts
    return counts, torch.arange(cell.shape[0], device=cell.device) - start[cell], size
