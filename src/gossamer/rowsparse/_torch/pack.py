"""Dense rows to lists of entries, on the CPU."""

import numpy as np
import torch
from torch import Tensor

from gossamer.rowsparse.records import PackRows, Unpack

_BLOCK, _SMALL = 64, 1 << 15
CHUNK = 1 << 22
"""Numbers that are gathered at one time."""

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nonzero_positions(x: Tensor) -> Tensor:
    """Flat positions, ascending, of the elements of a contiguous x that differ from 0: int64 [nnz].

    NumPy compares integers and finds booleans several times faster than `torch.nonzero`. Where few blocks hold any bit
    at all, two reductions at memory speed show which, and only those are looked at; they take longer to begin.
    """
    flat = x.reshape(-1)
    bits = flat.view(INTEGER[x.element_size()])
    if flat.numel() < _SMALL:
        return _without_negative_zero(torch.from_numpy(np.flatnonzero(bits.numpy())), flat)
    body = flat.numel() - flat.numel() % _BLOCK
    blocks = bits[:body].view(-1, _BLOCK)
    hit = np.flatnonzero((blocks.amax(1) | blocks.amin(1)).numpy() != 0) if body else np.empty(0, np.int64)
    if 8 * hit.size < blocks.shape[0]:
        inner = np.flatnonzero(blocks.numpy()[hit] != 0)
        tail = body + np.flatnonzero(bits[body:].numpy())
        positions = np.concatenate([hit[inner // _BLOCK] * _BLOCK + inner % _BLOCK, tail])
    else:
        positions = np.flatnonzero(bits.numpy() != 0)
    return _without_negative_zero(torch.from_numpy(positions), flat)


def _without_negative_zero(positions: Tensor, flat: Tensor) -> Tensor:
    """The bit pattern of -0.0 is not zero."""
    if not flat.is_floating_point():
        return positions
    nonzero = flat[positions] != 0
    return positions if bool(nonzero.all()) else positions[nonzero]


def row_offsets_of(positions: Tensor, m: int, n: int) -> Tensor:
    """Where each row of [m, n] begins among ascending flat positions: int64 [m + 1]."""
    return torch.from_numpy(positions.numpy().searchsorted(np.arange(m + 1) * n))


def entries(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row_offsets int64 [M + 1], columns int64 [nnz], values [nnz]) of dense x [M, N]."""
    m, n = x.shape
    x = x.contiguous()
    flat = nonzero_positions(x)
    return row_offsets_of(flat, m, n), flat % n, x.reshape(-1)[flat]


def buffers_of(
    row_offsets: Tensor, columns: Tensor, values: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans) of entries with `capacity` slots a row, or side by side with None. A row with more
    entries overflows, and its slots hold the first of them."""
    # In NumPy, whose operations begin in a fraction of the time.
    starts = row_offsets.numpy()
    m, counts = len(starts) - 1, np.diff(starts)
    spans = np.stack([starts[:-1], counts])
    if capacity is None:
        return values, columns.int(), torch.from_numpy(spans)
    out_values = np.zeros(m * capacity, bits_of(values).dtype)
    out_indices = np.full(m * capacity, -1, np.int32)
    spans[0] = np.arange(m) * capacity
    at = np.arange(len(columns)) + np.repeat(spans[0] - starts[:-1], counts)
    found, entries = columns.numpy(), bits_of(values)
    if m and counts.max() > capacity:
        fits = at < np.repeat(spans[0] + capacity, counts)
        at, found, entries = at[fits], found[fits], entries[fits]
        spans[0, counts > capacity] = m * capacity
    out_values[at] = entries
    out_indices[at] = found
    return torch.from_numpy(out_values).view(values.dtype), torch.from_numpy(out_indices), torch.from_numpy(spans)


def bits_of(values: Tensor) -> np.ndarray:
    """Contiguous values as integers, for NumPy does not know bfloat16."""
    return values.view(INTEGER[values.element_size()]).numpy()


def pack_rows(call: PackRows) -> tuple[Tensor, Tensor, Tensor]:
    """As its record says."""
    x, capacity = call
    return buffers_of(*entries(x), capacity)


def stored(indices: Tensor, spans: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Slots and rows (int64 [nnz]) of the entries of rows that did not overflow, in order of row and slot.

    Raises for an index outside [-1, n); the kernels write NaN instead, because looking costs them a sync.
    """
    starts, counts = spans
    counts = torch.where(starts + counts > indices.shape[0], 0, counts)
    rows = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    first = torch.cumsum(counts, 0) - counts
    slots = torch.arange(rows.shape[0]) - first[rows] + starts[rows]
    found = indices[slots]
    if found.numel():
        low, high = (int(bound) for bound in found.aminmax())
        if low < -1 or high >= n:
            raise ValueError(
                f"rowsparse: indices must lie in [0, N) with N = {n}, or be -1 for no entry, got "
                f"{low if low < -1 else high}. "
                "rows.validate() checks a container."
            )
        if low == -1:
            held = found >= 0
            return slots[held], rows[held]
    return slots, rows


def dot_entries(x: Tensor, rows: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """x[rows] times weight[columns], summed, in float32 at least: [nnz], some entries at a time."""
    working = torch.promote_types(x.dtype, torch.float32)
    products = torch.empty(rows.shape[0], dtype=working)
    step = max(1, CHUNK // max(x.shape[1], 1))
    for first in range(0, rows.shape[0], step):
        piece = slice(first, first + step)
        products[piece] = (x[rows[piece]].to(working) * weight[columns[piece]].to(working)).sum(1)
    return products


def overflowed_rows(spans: Tensor, room: int) -> Tensor:
    """int64 [k]: the rows whose spans end beyond the buffers."""
    return (spans.sum(0) > room).nonzero().squeeze(1)


def refuse_overflow(operator: str, spans: Tensor, room: int) -> None:
    """Raises where a row overflowed, and nothing is there to read it from; the kernels write NaN instead."""
    if bool((spans.sum(0) > room).any()):
        raise overflow_error(operator)


class Overflowed(ValueError):
    """Public functions raise it again in their own name: an operator of PyTorch is called by several."""


def overflow_error(operator: str) -> Overflowed:
    return Overflowed(
        f"{operator}: a row has more entries than slots, and the container no source to read them from. "
        "Pack the dense tensor again, or build the container with slots for all; rows.validate() names the row's count."
    )


def unpack(call: Unpack) -> Tensor:
    """Dense [M, N]; repeated indices add up in the order of their slots."""
    values, indices, spans, source, n = call
    m = spans.shape[1]
    if source is None:
        refuse_overflow("rowsparse.Rows.to_dense", spans, values.shape[0])
    slots, rows = stored(indices, spans, n)
    out = values.new_zeros(m * n)
    out.index_add_(0, rows * n + indices[slots], values[slots])
    out = out.view(m, n)
    if source is not None:
        over = overflowed_rows(spans, values.shape[0])
        out[over] = source[over].to(out.dtype)
    return out
