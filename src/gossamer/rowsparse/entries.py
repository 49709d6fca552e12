"""The entries of a container: which slots hold them, and those of rows that overflowed taken from the source."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse._torch.pack import overflow_error
from gossamer.rowsparse.formats import spans_of
from gossamer.rowsparse.linear_source import LinearSource

if TYPE_CHECKING:
    from gossamer.rowsparse.rows import Rows


def slots_of(spans: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """(row int64, whether the slot is in the span of that row, which did not overflow) of each of `room` slots.
    Waits for nothing. Spans of two rows must not overlap."""
    starts, counts = spans
    slots = torch.arange(room, device=spans.device)
    if not spans.shape[1]:
        return torch.zeros_like(slots), torch.zeros_like(slots, dtype=torch.bool)
    # A row without a slot begins behind all others, so that it hides none.
    starts = torch.where((counts > 0) & (starts + counts <= room), starts, room)
    ordered, rows = starts.sort(stable=True)
    row = rows[(torch.searchsorted(ordered, slots, right=True) - 1).clamp(min=0)]
    first = starts[row]
    return row, (slots >= first) & (slots < first + counts[row])


def fitting(spans: Tensor, room: int) -> Tensor:
    """Spans by which rows that overflowed hold no entry."""
    return torch.where(spans.sum(0) > room, 0, spans)


def listed(rows: "Rows", operator: str = "rowsparse.Rows") -> tuple[Tensor, Tensor, Tensor]:
    """(rows int64, columns int64, values) of every entry, in order of row and slot; slots with an index of -1 are left
    out. Rows that overflowed are read from the source, where every number but 0 is an entry. Waits for the device.

    Raises:
        ValueError: a row overflowed and there is no source, or an index is outside [0, N).
    """
    values, indices, spans, source = rows.packed
    row, held = slots_of(spans, values.shape[0])
    held = held & (indices != -1)
    row, columns, values = row[held], indices[held].long(), values[held]
    check_indices(operator, columns, rows.num_columns)
    over = (spans.sum(0) > rows.packed.values.shape[0]).nonzero().squeeze(1)
    if over.numel():
        if source is None:
            raise overflow_error(operator)
        if isinstance(source, LinearSource):
            # Spans of one entry each, in buffers without a slot.
            spans = torch.ones(2, over.shape[0], dtype=torch.int64, device=over.device)
            dense = source.of_rows(over).dense(spans, 0, values.dtype)
        else:
            dense = source[over]
        kept = dense != 0
        # -0.0 is an entry of value 0 where sae.encode wrote it, and none in a matrix of the user: counts tell.
        zeros = (dense == 0) & dense.signbit()
        kept = kept | (zeros & (kept.sum(1) + zeros.sum(1) == rows.counts[over])[:, None])
        at, found = kept.nonzero(as_tuple=True)
        row, columns = torch.cat([row, over[at]]), torch.cat([columns, found])
        values = torch.cat([values, dense[at, found]])
    row, order = row.sort(stable=True)
    return row, columns[order], values[order]


def completed(rows: "Rows") -> "Rows":
    """`Rows.complete` of a container with a source."""
    from gossamer.rowsparse.rows import unchecked

    checks.no_wait(
        "rowsparse.Rows",
        "to complete a container with a source",
        "Give the container to an operator as it is, or look at rows.packed, whose buffers lack rows that overflowed.",
    )
    values, indices, spans, _ = rows.packed
    if not bool(rows.overflowed):
        return unchecked(values, indices, spans, rows.shape, None, rows._l0)
    # Gradients may be off where somebody looks, and on where somebody differentiates later.
    with torch.inference_mode(values.is_inference()), torch.enable_grad():
        row, columns, values = listed(rows)
        counts = torch.bincount(row, minlength=rows.num_rows)
        return unchecked(values, columns.int(), spans_of(counts), rows.shape, None, rows._l0)


def count_nonzero(rows: "Rows") -> Tensor:
    """How many values of each row differ from 0: `[M]`, in float32 at least."""
    from gossamer.rowsparse.matmul import multiply
    from gossamer.rowsparse.rows import unchecked

    values, indices, spans, source = rows.detach().packed
    wide = torch.promote_types(rows.dtype, torch.float32)
    if isinstance(source, LinearSource):
        source = source.dense(spans, values.shape[0], rows.dtype)
    fired = unchecked(
        (values != 0).to(wide), indices, spans, rows.shape, None if source is None else (source != 0).to(wide)
    )
    ones = values.new_ones(rows.num_columns, 1, dtype=wide)
    return multiply("rowsparse.Rows.l0", fired, ones, None, None).squeeze(1)


def validate(rows: "Rows") -> None:
    """`Rows.validate`"""
    operator = "rowsparse.Rows"
    values, indices, spans, source = rows.packed
    room = values.shape[0]
    if spans.numel() and bool((spans < 0).any()):
        raise ValueError(f"{operator}: spans must be at least 0, got {int(spans.min())}.")
    if source is None and bool(rows.overflowed):
        raise ValueError(
            f"{operator}: spans must end at most at P = {room} without a source, got {int(spans.sum(0).max())}. "
            "Give the source or longer buffers."
        )
    row, held = slots_of(spans, room)
    check_indices(operator, indices[held], rows.num_columns)
    held = held & (indices >= 0)
    # One row after another, each far above the one before.
    row, order = torch.where(held, row, -1).sort(stable=True)
    columns = torch.where(row < 0, -1, indices[order] + row * (checks.MAX_COLUMNS + 1))
    if columns.numel() and bool((columns < columns.cummax(0).values).any()):
        raise ValueError(f"{operator}: indices must ascend within a row. Sort them, with their values.")


def check_indices(operator: str, indices: Tensor, n: int) -> None:
    """Raises where a column is outside [0, n) and not -1. Waits for the device."""
    if indices.numel() == 0:
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < -1 or high >= n:
        raise ValueError(
            f"{operator}: indices must lie in [0, N) with N = {n}, or be -1 for no entry, got "
            f"{low if low < -1 else high}. Count columns from 0."
        )
