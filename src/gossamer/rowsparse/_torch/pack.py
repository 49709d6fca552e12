"""Dense rows to lists of entries, on the CPU."""

import numpy as np
import torch
from torch import Tensor

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nonzero_positions(x: Tensor) -> Tensor:
    """Flat positions, ascending, of the elements of a contiguous x that differ from 0: int64 [nnz].

    `torch.nonzero` spends over a nanosecond an element. Here NumPy compares at memory speed and the booleans are
    looked at eight at a time, which in a sparse matrix leaves almost nothing to do.
    """
    bits = x.reshape(-1).view(_INTEGER[x.element_size()])
    fired = bits.numpy() != 0
    body = fired.size & ~7
    words = np.flatnonzero(fired[:body].view(np.int64))
    inner = np.flatnonzero(fired[:body].reshape(-1, 8)[words])
    positions = (words[inner >> 3] << 3) + (inner & 7)
    if body < fired.size:
        positions = np.concatenate([positions, body + np.flatnonzero(fired[body:])])
    flat = torch.from_numpy(positions)
    # The bit pattern of -0.0 is not zero.
    nonzero = x.reshape(-1)[flat] != 0
    return flat if bool(nonzero.all()) else flat[nonzero]


def entries(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row_offsets int64 [M + 1], columns int64 [nnz], values [nnz]) of dense x [M, N]."""
    m, n = x.shape
    x = x.contiguous()
    row_offsets = torch.zeros(m + 1, dtype=torch.int64)
    if x.numel() == 0:
        return row_offsets, row_offsets.new_empty(0), x.new_empty(0)
    flat = nonzero_positions(x)
    rows = torch.div(flat, n, rounding_mode="floor")
    torch.cumsum(torch.bincount(rows, minlength=m), 0, out=row_offsets[1:])
    return row_offsets, flat - rows * n, x.reshape(-1)[flat]


def ell_from_entries(
    row_offsets: Tensor, columns: Tensor, values: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_row) with `capacity` slots a row; entries past them are left out."""
    m = row_offsets.shape[0] - 1
    counts = row_offsets.diff()
    rows = torch.repeat_interleave(torch.arange(m), counts)
    slots = torch.arange(columns.shape[0]) - row_offsets[:-1].repeat_interleave(counts)
    fits = slots < capacity
    out_values = values.new_zeros(m, capacity)
    out_indices = torch.full((m, capacity), -1, dtype=torch.int32)
    out_values[rows[fits], slots[fits]] = values[fits]
    out_indices[rows[fits], slots[fits]] = columns[fits].int()
    return out_values, out_indices, counts.int()


def pack_ell(x: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `pack_ell`."""
    return ell_from_entries(*entries(x), capacity)


def count_rows(x: Tensor) -> Tensor:
    """Operator `count_rows`."""
    return entries(x)[0].diff().int()


def pack_csr(x: Tensor, row_offsets: Tensor, max_nnz: int) -> tuple[Tensor, Tensor]:
    """Operator `pack_csr`."""
    _, columns, found = entries(x)
    values = x.new_zeros(max_nnz)
    indices = torch.full((max_nnz,), -1, dtype=torch.int32)
    kept = min(max_nnz, columns.shape[0])
    values[:kept] = found[:kept]
    indices[:kept] = columns[:kept].int()
    return values, indices


def stored(indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Flat slots and rows (int64 [nnz]) of the entries of rows that did not overflow, in order of row and slot.

    `indices` is [M, capacity] with offsets = nnz_per_row (ELL), or [max_nnz] with offsets = row_offsets (CSR).
    """
    if indices.dim() == 2:
        m, capacity = indices.shape
        counts = torch.where(offsets > capacity, 0, offsets).long()
        starts = torch.arange(m) * capacity
    else:
        counts = torch.where(offsets[1:] > indices.shape[0], 0, offsets.diff())
        starts = offsets[:-1]
    rows = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    first = torch.cumsum(counts, 0) - counts
    slots = torch.arange(rows.shape[0]) - first[rows] + starts[rows]
    held = indices.reshape(-1)[slots] >= 0
    return (slots, rows) if bool(held.all()) else (slots[held], rows[held])


def overflowed_rows(indices: Tensor, offsets: Tensor) -> Tensor:
    """int64 [k]: the rows with more entries than the buffer holds."""
    flagged = offsets > indices.shape[1] if indices.dim() == 2 else offsets[1:] > indices.shape[0]
    return flagged.nonzero().squeeze(1)


def unpack(values: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None, n: int) -> Tensor:
    """Operator `unpack`: dense [M, N]; repeated indices add up in the order of their slots."""
    m = indices.shape[0] if indices.dim() == 2 else offsets.shape[0] - 1
    slots, rows = stored(indices, offsets)
    out = values.new_zeros(m * n)
    out.index_add_(0, rows * n + indices.reshape(-1)[slots], values.reshape(-1)[slots])
    out = out.view(m, n)
    if source is not None:
        over = overflowed_rows(indices, offsets)
        out[over] = source[over].to(out.dtype)
    return out
