"""One container to another."""

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse.formats import CSR, ELL, Rows, TwELL, check_indices, check_tile, tile_index_dtype
from gossamer.rowsparse.pack import check_container, pack, unpack


def convert(rows: Rows, format: str, *, capacity: int | None = None, tile: int = 256, slots: int | None = None) -> Rows:
    """The same entries in another format, every one of them stored; holes are left out.

    The operators of this package take every container as it is: this is for what needs one format, and costs a
    device-to-host sync.

    Args:
        rows: `ELL`, `CSR` or `TwELL`.
        format: `"ell"`, `"csr"` or `"twell"`.
        capacity: slots per row of an ELL; None takes what the fullest row needs.
        tile: columns per tile of a TwELL, 1 to 32,767.
        slots: slots per row and tile of a TwELL; None takes what the fullest tile of a row needs.

    Returns:
        A container without a source, differentiable in the values. If a row overflowed, all of them are read dense, and
        explicit zeros and repetitions are gone.

    Raises:
        TypeError: rows is not a container, or capacity, tile or slots is not an int.
        ValueError: an unknown format, an argument that belongs to another one, entries that capacity or slots leave no
            room for, more than 32,767 of them in a row's tile, or a TwELL with an index outside its tile.
        NotImplementedError: under CUDA-graph capture.

    Source: the seed on sparse feed-forward blocks, section 3.1, for the conversion of tiles to one list a row.

    >>> convert(pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]])), "csr").row_offsets.tolist()
    [0, 1, 3]
    """
    operator = "rowsparse.convert"
    check_container(operator, rows)
    if format not in ("ell", "csr", "twell"):
        raise ValueError(f'{operator}: format must be "ell", "csr" or "twell", got {format!r}.')
    if format != "ell" and capacity is not None:
        raise ValueError(f'{operator}: capacity belongs to format="ell". A TwELL takes tile and slots, a CSR neither.')
    if format != "twell" and (slots is not None or tile != 256):
        raise ValueError(f'{operator}: tile and slots belong to format="twell". An ELL takes capacity, a CSR neither.')
    check_tile(operator, tile)
    for name, size in (("capacity", capacity), ("slots", slots)):
        if size is not None:
            checks.positive(operator, name, size, "None takes what is needed.")
    checks.no_sync(operator, "a conversion", "Give the container to the operator as it is.")
    if rows.source is not None and bool(rows.overflowed):
        rows = pack(unpack(rows), format="csr")
    m, n = rows.num_rows, rows.num_columns
    row, columns, values = _entries(rows)
    if format == "csr":
        offsets = torch.zeros(m + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(torch.bincount(row, minlength=m), 0, out=offsets[1:])
        return CSR(offsets, columns.int(), values, rows.shape)
    if format == "ell":
        counts, place, capacity = _places(operator, row, m, "capacity", capacity)
        at = row * capacity + place
        indices = torch.full((m * capacity,), -1, dtype=torch.int32, device=values.device)
        indices[at] = columns.int()
        packed = values.new_zeros(m * capacity).index_put((at,), values)
        return ELL(packed.view(m, capacity), indices.view(m, capacity), counts.int(), rows.shape)
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
    return TwELL(packed.view(shape), inner.view(shape), counts.to(torch.int16).view(m, tiles), rows.shape, tile)


def _entries(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """(rows int64, columns int64, values) of every entry, in order of row and slot."""
    device = rows.device
    if isinstance(rows, CSR):
        # Past the last offset the buffers hold nothing.
        held = torch.arange(rows.max_nnz, device=device) < rows.row_offsets[-1]
        row = torch.searchsorted(rows.row_offsets, torch.arange(rows.max_nnz, device=device), right=True) - 1
        columns = rows.indices.long()
    elif isinstance(rows, ELL):
        held = torch.arange(rows.capacity, device=device) < rows.nnz_per_row[:, None]
        row = torch.arange(rows.num_rows, device=device)[:, None].expand_as(held)
        columns = rows.indices.long()
    else:
        rows.validate()
        tiles = torch.arange(rows.values.shape[1], device=device)[:, None]
        held = torch.arange(rows.slots, device=device) < rows.nnz_per_tile[..., None]
        row = torch.arange(rows.num_rows, device=device)[:, None, None].expand_as(held)
        columns = rows.indices.long() + tiles * rows.tile
    held = held & (columns != -1)
    columns = columns[held]
    check_indices("rowsparse.convert", columns, rows.num_columns)
    return row[held], columns, rows.values[held]


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
