"""Containers made of the values of others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse._torch.pack import overflow_error
from gossamer.rowsparse.container import unchecked
from gossamer.rowsparse.formats import CSR, Rows, TwELL
from gossamer.rowsparse.pack import check_container
from gossamer.rowsparse.settle import slots_of


def map_values(rows: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`RowSparse.map`"""
    operator = f"rowsparse.{type(rows).__name__}.map"
    values, indices, counts, _ = rows.settle().packed
    row, _, held, over = slots_of(rows)
    # Slots without an entry may hold anything, of which neither a value nor a gradient is to come out.
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
            at_zero = function(values.new_zeros(values.shape[:-1] + (1,)) if values.dim() > 1 else values.new_zeros(1))
            if bool((at_zero != 0).any()):
                raise ValueError(
                    f"{operator}: function(0) must be 0, for what has no entry stays 0, got "
                    f"{float(at_zero.flatten()[0])}. Take rows.to_dense() for other functions."
                )
    return rows.rebuilt(_held(operator, found, held, row, over), indices, counts, None)


def _held(operator: str, values: Tensor, held: Tensor, row: Tensor, over: Tensor) -> Tensor:
    """values where slots hold an entry, else 0. What overflowed without a source is nobody's zeros: that raises where
    the host computes, and is NaN elsewhere."""
    kept = torch.where(held, values, 0)
    if over.numel() == 0:
        return kept
    if not checks.host_computes(over):
        return torch.where(over[row.clamp(0, over.numel() - 1)], float("nan"), kept)
    if bool(over.any()):
        raise overflow_error(operator)
    return kept


def where(rows: Any, mask: Tensor) -> Any:
    """`RowSparse.where`"""
    operator = f"rowsparse.{type(rows).__name__}.where"
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        got = checks.name_of(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{operator}: mask must be a bool tensor, got {got}.")
    checks.same_device(operator, "rows", rows.device, mask=mask)
    try:
        mask = mask.expand(rows.shape)
    except RuntimeError:
        raise ValueError(
            f"{operator}: mask must broadcast to the shape of rows, {rows.shape}, got {list(mask.shape)}. "
            "What is to be chosen by value rows.map does."
        ) from None
    values, indices, counts, _ = rows.settle().packed
    row, column, held, over = slots_of(rows)
    kept = _held(operator, values, held, row, over)
    # An index that no mask has stays for the operator that refuses it, or makes NaN of it.
    held = held & (column >= 0) & (column < rows.num_columns)
    if values.numel() and mask.numel():
        leading: list[Tensor] = []
        for size in reversed(rows.shape[:-1]):
            leading.insert(0, torch.where(held, row % size, 0))
            row = torch.div(row, size, rounding_mode="floor")
        out = held & ~mask[(*leading, torch.where(held, column, 0))]
        kept = torch.where(out, 0, kept)
    return rows.rebuilt(kept, indices, counts, None)


def ablate(rows: Any, columns: Any) -> Any:
    """`RowSparse.ablate`"""
    operator = f"rowsparse.{type(rows).__name__}.ablate"
    named = torch.as_tensor(columns)
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
            raise ValueError(f"{operator}: columns must lie in [0, N) with N = {n}, got {low} to {high}.")
    mask = torch.ones(n, dtype=torch.bool, device=rows.device)
    mask[named.to(rows.device).reshape(-1).long()] = False
    return where(rows, mask)


def cat(rows: Sequence[Rows]) -> Rows:
    """Containers one after another, along the first of their leading dimensions; they settle first.

    Args:
        rows: containers of one format and dtype (and tile), whose shapes differ in the first dimension alone.

    Returns:
        A container of that format without a source, differentiable in the values.

    Raises:
        TypeError: something is no container, or formats or dtypes differ.
        ValueError: nothing to concatenate, shapes, tiles or devices do not fit, or a row of a CSR overflowed without a
            source (one of another format stays as it is, for the next operator to find).

    Source: this package; `torch.cat`.

    >>> cat([pack(torch.eye(2)), pack(torch.ones(1, 2))]).to_dense().tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    """
    operator, given = "rowsparse.cat", list(rows)
    if not given:
        raise ValueError(f"{operator}: rows must be at least one container, got none.")
    for one in given:
        check_container(operator, one)
    first = given[0]
    for one in given[1:]:
        if type(one) is not type(first) or one.dtype is not first.dtype:
            raise TypeError(
                f"{operator}: rows must have one format and dtype, got {type(first).__name__} of "
                f"{checks.name_of(first.dtype)} and {type(one).__name__} of {checks.name_of(one.dtype)}. "
                "rowsparse.convert and .to(dtype) make them alike."
            )
    tiles = {one.tile for one in given if isinstance(one, TwELL)}
    if len(first.shape) < 2 or len({one.shape[1:] for one in given}) > 1 or len(tiles) > 1:
        raise ValueError(
            f"{operator}: shapes must be (rows, ..., N) and differ in the first dimension alone"
            f"{', in tiles of one size' if tiles else ''}, got {', '.join(str(one.shape) for one in given)}."
        )
    for one in given[1:]:
        checks.same_device(operator, "the first of rows", first.device, rows=one.packed.values)
    settled = [one.settle().packed for one in given]
    shape = (sum(one.shape[0] for one in given), *first.shape[1:])
    if isinstance(first, CSR):
        return _cat_csr(settled, shape)
    size = max(part.values.shape[-1] for part in settled)
    pad = torch.nn.functional.pad
    values = torch.cat([pad(part.values, (0, size - part.values.shape[-1])) for part in settled])
    hole = 0 if tiles else -1
    indices = torch.cat([pad(part.indices, (0, size - part.indices.shape[-1]), value=hole) for part in settled])
    # What has overflowed without a source goes on saying so, in wider buffers too.
    counts = torch.cat(
        [
            torch.where(part.counts > part.values.shape[-1], part.counts.clamp(min=size + 1), part.counts)
            for part in settled
        ]
    )
    return unchecked(type(first), values, indices, counts, shape, None, *tiles)


def _cat_csr(settled: Sequence[Any], shape: tuple[int, ...]) -> CSR:
    """Without what stands behind the last entry of each."""
    sizes = torch.stack([part.counts[-1] for part in settled]).tolist()
    if any(size > part.values.shape[0] for part, size in zip(settled, sizes)):
        raise overflow_error("rowsparse.cat")
    offsets, base = [settled[0].counts[:1]], 0
    for part, size in zip(settled, sizes):
        offsets.append(part.counts[1:] + base)
        base += size
    values = torch.cat([part.values[:size] for part, size in zip(settled, sizes)])
    indices = torch.cat([part.indices[:size] for part, size in zip(settled, sizes)])
    return unchecked(CSR, values, indices, torch.cat(offsets), shape)
