"""Dtypes, empty buffers, and sums and products that several rooms share."""

import torch
from torch import Tensor
from torch.nn import functional as F

PART = 256
"""Rows of which a sum over many takes the sum at first."""


def threshold_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of thresholds and statistics beside weights of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def sums_over_rows(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """rows.sum(0) as `dtype`, float32 or wider by default, in parts of PART rows: PyTorch's sum over many rows takes a
    buffer larger than these."""
    dtype = dtype or threshold_dtype(rows.dtype)
    count = rows.shape[0]
    if count <= PART:
        return rows.sum(0, dtype=dtype)
    whole = count // PART * PART
    parts = rows[:whole].unflatten(0, (count // PART, PART)).sum(1, dtype=dtype)
    return parts.sum(0) + rows[whole:].sum(0, dtype=dtype)


def column_dtype(n: int) -> torch.dtype:
    """Of columns in a list that a block keeps in training: 16 bits, without a sign, where these hold N of them."""
    return torch.int16 if n <= 65536 else torch.int32


def empty_slots(like: Tensor, m: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans) of m rows that share `room` slots, not yet written, of the dtype and on the device of
    `like`."""
    indices = like.new_empty(room, dtype=torch.int32)
    return like.new_empty(room), indices, like.new_empty(2, m, dtype=torch.int64)


def empty_twell(like: Tensor, m: int, n: int, tile: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, counts) of tile-wise lists: the columns are cut into tiles, and each row has `slots` slots in
    each tile. values `[M, T, slots]`; indices, columns within the tile, in uint8 for tiles of up to 256 columns and
    else int16; counts `[M, T]`, int16, above `slots` where the entries of a tile did not fit."""
    tiles = (n + tile - 1) // tile
    values, counts = like.new_empty(m, tiles, slots), like.new_empty(m, tiles, dtype=torch.int16)
    return values, torch.empty_like(values, dtype=torch.uint8 if tile <= 256 else torch.int16), counts


def offsets_of(counts: Tensor) -> Tensor:
    """Where lists of so many entries begin, one behind the other, and where the last ends: int64 `[M + 1]`."""
    offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def spans_of(counts: Tensor) -> Tensor:
    """The spans of lists of so many entries, one behind the other: int64 `[2, M]`."""
    counts = counts.long()
    return torch.stack([counts.cumsum(0) - counts, counts])


def equal_spans(counts: Tensor, slots: int) -> Tensor:
    """The spans of rows with `slots` slots each; a row with more entries ends beyond all of them."""
    m = counts.shape[0]
    first = torch.arange(0, m * max(slots, 1), max(slots, 1), device=counts.device) if slots else counts.new_zeros(m)
    counts = counts.long()
    return torch.stack([torch.where(counts > slots, m * slots, first), counts])


def first_slots(values: Tensor, indices: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans) of rows [M, slots] whose kept slots move to the front, in their order."""
    counts, slots = kept.sum(1), kept.shape[1]
    order = (~kept).to(torch.uint8).sort(dim=1, stable=True).indices
    filled = torch.arange(slots, device=kept.device) < counts[:, None]
    values = torch.where(filled, values.gather(1, order), 0)
    indices = torch.where(filled, indices.gather(1, order), -1)
    return values.flatten(), indices.flatten(), equal_spans(counts, slots)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in the dtype of weight; a bias of another dtype is added in float32 at least."""
    if bias is None or bias.dtype is weight.dtype:
        # Strides of a bias change which product cuBLAS makes, and so its rounding.
        return F.linear(x, weight, None if bias is None else bias.contiguous())
    return (F.linear(x, weight) + bias).to(weight.dtype)
