"""Containers made of others: of their values, of some of their rows, or of several one after another."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse.entries import listed, slots_of
from gossamer.rowsparse.formats import spans_of
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.rowsparse.pack import check_room
from gossamer.rowsparse.rows import Rows, check_container, unchecked


def map_values(rows: Rows, function: Callable[[Tensor], Tensor]) -> Rows:
    """`Rows.map`"""
    operator = "rowsparse.Rows.map"
    if not callable(function):
        raise TypeError(f"{operator}: function must be a function of a tensor, got {type(function).__name__}.")
    values, indices, spans, _ = rows.complete().packed
    _, held = slots_of(spans, values.shape[0])
    held = held & (indices != -1)
    # A slot without an entry may hold anything; neither a value nor a gradient may come of it.
    found = function(torch.where(held, values, 0))
    if not isinstance(found, Tensor) or found.dtype not in checks.FLOATS:
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"{operator}: function must return a floating tensor, got {got}.")
    if found.shape != values.shape:
        raise ValueError(
            f"{operator}: function must be elementwise, got shape {list(found.shape)} from {list(values.shape)}."
        )
    if not torch.compiler.is_compiling() and not checks.capturing():
        with torch.no_grad():
            at_zero = function(values.new_zeros(1))
            if bool((at_zero != 0).any()):
                raise ValueError(
                    f"{operator}: function(0) must be 0, for an element without an entry stays 0, got "
                    f"{float(at_zero[0])}. Take rows.to_dense() for other functions."
                )
    return unchecked(torch.where(held, found, 0), indices, spans, rows.shape)


def where(rows: Rows, mask: Tensor) -> Rows:
    """`Rows.where`"""
    operator = "rowsparse.Rows.where"
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        got = checks.name_of(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{operator}: mask must be a bool tensor, got {got}.")
    checks.same_device(operator, "rows", rows.device, mask=mask)
    try:
        mask = mask.expand(rows.shape)
    except RuntimeError:
        raise ValueError(
            f"{operator}: mask must broadcast to the shape of rows, {rows.shape}, got {list(mask.shape)}. "
            "rows.map chooses by value."
        ) from None
    values, indices, spans, _ = rows.complete().packed
    row, held = slots_of(spans, values.shape[0])
    # An index that no mask has stays for the operator that refuses it, or makes NaN of it.
    inside = held & (indices >= 0) & (indices < rows.num_columns)
    if values.numel() and mask.numel():
        leading: list[Tensor] = []
        for size in reversed(rows.shape[:-1]):
            leading.insert(0, torch.where(inside, row % size, 0))
            row = torch.div(row, size, rounding_mode="floor")
        held = held & ~(inside & ~mask[(*leading, torch.where(inside, indices, 0).long())])
    return unchecked(torch.where(held & (indices != -1), values, 0), indices, spans, rows.shape)


def ablate(rows: Rows, columns: Any) -> Rows:
    """`Rows.ablate`"""
    operator = "rowsparse.Rows.ablate"
    try:
        named = torch.as_tensor(columns)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{operator}: columns must be an int, a list of ints or an integer tensor, got {columns!r}. Name columns "
            "by their numbers, as rows.ablate([3, 5])."
        ) from None
    if named.numel() == 0 and not isinstance(columns, Tensor):
        named = named.long()
    if named.is_floating_point() or named.is_complex() or named.dtype is torch.bool:
        raise TypeError(
            f"{operator}: columns must be whole numbers, got {checks.name_of(named.dtype)}. rows.where takes masks."
        )
    n = rows.num_columns
    if named.numel():
        low, high = (int(bound) for bound in named.aminmax())
        if low < 0 or high >= n:
            raise ValueError(
                f"{operator}: columns must lie in [0, N) with N = {n}, got {low if low < 0 else high}. They are "
                "counted from 0, and from the front alone."
            )
    mask = torch.ones(n, dtype=torch.bool, device=rows.device)
    mask[named.to(rows.device).reshape(-1).long()] = False
    return where(rows, mask)


def select(rows: Rows, key: Any) -> Rows:
    """`Rows.__getitem__`"""
    leading = rows.shape[:-1]
    key = key if isinstance(key, tuple) else (key,)
    try:
        which = torch.arange(rows.num_rows, device=rows.device).view(leading)[key]
    except (IndexError, TypeError) as error:
        raise type(error)(
            f"rowsparse.Rows: {error}. Rows are indexed by their leading dimensions, {leading}; "
            "columns stay whole: rows.where(mask) and rows.ablate(columns) choose among them."
        ) from None
    shape = (*which.shape, rows.num_columns)
    which = which.reshape(-1)
    if any(_may_repeat(part) for part in key):
        checks.no_wait("rowsparse.Rows", "to take rows by integers of a tensor", "Take rows by slices.")
        return _copied(rows, which, shape)
    values, indices, spans, source = rows.packed
    if source is not None:
        source = source.of_rows(which) if isinstance(source, LinearSource) else _rows_of(source, leading, key)
    return unchecked(values, indices, spans[:, which], shape, source)


def _rows_of(source: Tensor, leading: tuple[int, ...], key: Any) -> Tensor:
    """The selected rows, a view where the key is slices: a dense source is large."""
    places = [at for at, part in enumerate(key) if part is Ellipsis]
    if places:
        # The source has one dimension more, which an ellipsis must not take.
        key = (*key, slice(None))
    return source.reshape(*leading, source.shape[1])[key].reshape(-1, source.shape[1])


def _may_repeat(part: Any) -> bool:
    return isinstance(part, list | range) or (isinstance(part, Tensor) and part.dtype is not torch.bool)


def _copied(rows: Rows, which: Tensor, shape: tuple[int, ...]) -> Rows:
    row, columns, values = listed(rows)
    counts = torch.bincount(row, minlength=rows.num_rows)
    begins, spans = counts.cumsum(0) - counts, spans_of(counts[which])
    place = torch.arange(int(spans[1].sum()), device=which.device)
    to = torch.repeat_interleave(torch.arange(which.shape[0], device=which.device), spans[1])
    at = begins[which][to] + place - spans[0][to]
    return unchecked(values[at], columns[at].int(), spans, shape)


def cat(rows: Sequence[Rows]) -> Rows:
    """Containers one after another, along the first of their leading dimensions; they are completed first.

    Args:
        rows: containers of one dtype, whose shapes differ in the first dimension alone.

    Returns:
        A container without a source, differentiable in the values.

    Raises:
        TypeError: an element is no container, or dtypes differ.
        ValueError: nothing to concatenate, or shapes or devices do not fit.

    Source: this package; `torch.cat`.

    >>> cat([pack(torch.eye(2)), pack(torch.ones(1, 2))]).to_dense().tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    """
    operator = "rowsparse.cat"
    if isinstance(rows, Rows) or not isinstance(rows, Iterable):
        raise TypeError(f"{operator}: rows must be a list of containers, got {type(rows).__name__}. Use cat([rows]).")
    given = list(rows)
    if not given:
        raise ValueError(f"{operator}: rows must be at least one container, got none.")
    for one in given:
        check_container(operator, one)
    first = given[0]
    for one in given[1:]:
        if one.dtype is not first.dtype:
            raise TypeError(
                f"{operator}: rows must have one dtype, got {checks.name_of(first.dtype)} and "
                f"{checks.name_of(one.dtype)}. Convert one with .to(dtype)."
            )
    if len(first.shape) < 2 or len({one.shape[1:] for one in given}) > 1:
        raise ValueError(
            f"{operator}: shapes must be (rows, ..., N) and differ in the first dimension alone, got "
            f"{', '.join(str(one.shape) for one in given)}."
        )
    for one in given[1:]:
        checks.same_device(operator, "the first of rows", first.device, rows=one.packed.values)
    whole = [one.complete().packed for one in given]
    room, base, spans = sum(part.values.shape[0] for part in whole), 0, []
    check_room(operator, 1, room)
    for part in whole:
        starts, counts = part.spans
        # A row that overflowed without a source goes on doing so, in longer buffers too.
        over = starts + counts > part.values.shape[0]
        spans.append(torch.stack([torch.where(over, room + 1, starts + base), counts]))
        base += part.values.shape[0]
    values, indices = torch.cat([part.values for part in whole]), torch.cat([part.indices for part in whole])
    return unchecked(values, indices, torch.cat(spans, 1), (sum(one.shape[0] for one in given), *first.shape[1:]))
