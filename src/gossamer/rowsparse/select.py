"""Rows of a container by their leading dimensions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflow_error
from gossamer.rowsparse.container import LinearSource, unchecked_source
from gossamer.rowsparse.formats import CSR, offsets_of


def select(rows: Any, key: Any) -> Any:
    """`RowSparse.__getitem__`"""
    leading = rows.shape[:-1]
    key = _whole_rows(key if isinstance(key, tuple) else (key,), len(leading))
    try:
        which = torch.arange(rows.num_rows, device=rows.device).view(leading)[key]
    except IndexError as error:
        raise IndexError(
            f"rowsparse.{type(rows).__name__}: {error}. Rows are indexed by their leading dimensions, {leading}; "
            "columns stay whole: rows.where(mask) and rows.ablate(columns) choose among them."
        ) from None
    shape = (*which.shape, rows.num_columns)

    def pick(part: Tensor) -> Tensor:
        picked = part.reshape(*leading, *part.shape[1:])[key]
        return picked.reshape(which.numel(), *part.shape[1:])

    if isinstance(rows, CSR):
        # How many entries such rows have, and whether one occurs twice, only the device knows.
        waits = any(_lists_integers(part) for part in key)
        return _select_csr(rows.settle() if waits else rows, which.reshape(-1), pick, shape, waits)
    values, indices, counts, source = rows.packed
    if isinstance(source, LinearSource):
        source = unchecked_source(**{**vars(source), "x": pick(source.x)})
    elif source is not None:
        source = pick(source)
    return rows.rebuilt(pick(values), pick(indices), pick(counts), source, shape)


def _whole_rows(key: tuple[Any, ...], dimensions: int) -> tuple[Any, ...]:
    """The key with its `...` written out: buffers have other dimensions behind those of the rows."""
    places = [at for at, part in enumerate(key) if part is Ellipsis]
    if not places:
        return key
    named = sum(
        part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1
        for part in key
        if part is not Ellipsis and part is not None
    )
    at = places[0]
    return (*key[:at], *[slice(None)] * (dimensions - named), *key[at + 1 :])


def _lists_integers(part: Any) -> bool:
    return isinstance(part, list | range) or (isinstance(part, Tensor) and part.dtype is not torch.bool)


def _select_csr(rows: CSR, which: Tensor, pick: Callable[[Tensor], Tensor], shape: tuple[int, ...], waits: bool) -> CSR:
    values, indices, offsets, source = rows.packed
    nnz = values.shape[0]
    over = (offsets[1:] > nnz)[which]
    counts = torch.where(over, 0, offsets.diff()[which])
    picked = offsets_of(counts)
    if waits:
        size, missing = torch.stack([picked[-1], over.any()]).tolist()
        if missing:
            raise overflow_error("rowsparse.CSR")
    slots = torch.arange(size if waits else nnz, device=offsets.device)
    held, at = slots < picked[-1], slots
    if which.numel():
        row = (torch.searchsorted(picked, slots, right=True) - 1).clamp(max=which.shape[0] - 1)
        at = torch.where(held, offsets[which[row]] + slots - picked[row], 0)
    if not waits:
        # Rows were picked in order: those that overflowed are the last, and end behind the buffer again.
        picked = torch.cat([picked[:1], torch.where(over, nnz + 1, picked[1:])])
        source = None if source is None else pick(source)
    return rows.rebuilt(torch.where(held, values[at], 0), torch.where(held, indices[at], -1), picked, source, shape)
