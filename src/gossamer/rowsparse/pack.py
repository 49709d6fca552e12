"""Dense to row-sparse and back."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.rowsparse._torch import pack as _cpu
from gossamer.rowsparse.entries import fitting, slots_of
from gossamer.rowsparse.formats import empty_slots
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.rowsparse.records import PackRows, Unpack
from gossamer.rowsparse.rows import MOST_SLOTS, Rows, check_container, unchecked


def pack(x: Tensor, *, capacity: int | str | None = None) -> Rows:
    """Packs the elements of x that differ from 0, NaN included, sorted by column.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        capacity: slots per row. None takes N / 64, at least 128, in steps of 32. A row with more entries stays exact:
            the container keeps x for it. `"exact"` gives the whole matrix as many slots as it has entries, one row
            right behind the other, and keeps no x; it waits for the device once.

    Returns:
        `Rows` of shape `(..., N)`. Gradients reach x at the stored entries and are zero elsewhere.

    Raises:
        TypeError: x is not floating, or capacity is no int.
        ValueError: x has no dimension, capacity is below 1 or another word, the entries are more than 2^30, or the
            slots of all rows are 2^32 or more.
        NotImplementedError: `capacity="exact"` under CUDA-graph capture.

    Source: the package jumprelu-sae-kernels, its exact and fixed allocation.

    >>> pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]]), capacity=2).indices.tolist()
    [1, -1, 0, 1]
    """
    operator = "rowsparse.pack"
    checks.floating(operator, x=x)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., N], got a scalar. Use x[None].")
    n = x.shape[-1]
    checks.columns(operator, "x", n)
    slots = check_capacity(operator, capacity, n)
    check_room(operator, math.prod(x.shape[:-1]), slots)
    flat = x.reshape(math.prod(x.shape[:-1]), n)
    values, indices, spans = pack_operator(PackRows(flat, slots))
    if slots is None or slots == n:
        source = None
    else:
        source = _EntriesOnly.apply(flat) if flat.requires_grad and torch.is_grad_enabled() else flat
    return unchecked(values, indices, spans, tuple(x.shape), source)


MOST_ENTRIES = 1 << 30
"""Entries that one call can list."""


def check_capacity(operator: str, capacity: int | str | None, n: int) -> int | None:
    """Slots per row, at most n, or None for as many as there are entries."""
    if capacity is None:
        return default_capacity(n)
    if isinstance(capacity, str):
        if capacity != "exact":
            raise ValueError(f'{operator}: capacity must be an int, None or "exact", got {capacity!r}.')
        checks.no_sync(operator, 'capacity="exact"', "Give the number of slots per row.")
        return None
    checks.positive(operator, "capacity", capacity, "It is the number of slots per row.")
    return min(capacity, n)


def check_room(operator: str, m: int, slots: int | None) -> None:
    """Raises where m rows of so many slots are more than a container has."""
    if m * (slots or 0) > MOST_SLOTS:
        raise ValueError(
            f"{operator}: the slots of all rows must be fewer than 2^32, got {m} rows of {slots}. Take fewer rows at a "
            "time, or fewer slots."
        )


def one_program_a_row(m: int, n: int) -> bool:
    """Whether rows alone fill the GPU, so that the scan needs no exchange between programs."""
    return m >= 512 or n <= 2048


def unpack(rows: Rows) -> Tensor:
    """`Rows.to_dense`"""
    dense: Tensor = unpack_operator(Unpack(*parts("rowsparse.Rows.to_dense", rows), rows.num_columns))
    return dense.reshape(rows.shape)


def default_capacity(n: int) -> int:
    """Slots per row where the caller names none: several times the entries of a usual row, and little memory."""
    return min(n, -(-max(128, n // 64) // 32) * 32)


def parts(operator: str, rows: Any, argument: str = "rows") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(values, indices, spans, source): the plain tensors that an operator takes; the source is dense."""
    check_container(operator, rows, argument)
    values, indices, spans, source = rows.packed
    if isinstance(source, LinearSource):
        source = source.dense(spans, values.shape[0], values.dtype)
    return values, indices, spans, source


class _EntriesOnly(torch.autograd.Function):
    """x as the source of its container: its gradient, like that of the slots, is zero where x has no entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x != 0, grad, 0)


def _fake_pack(call: PackRows) -> tuple[Tensor, Tensor, Tensor]:
    x, capacity = call
    m = x.shape[0]
    room: Any = torch.library.get_ctx().new_dynamic_size() if capacity is None else m * capacity
    return empty_slots(x, m, room)


def _keep(call: PackRows, results: Any) -> tuple[Any, ...]:
    return *results[1:], call.x.shape[1]


def _pack_backward(call: PackRows, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    indices, spans, n = kept
    # Rows that overflowed are read from the source, which has a gradient of its own.
    spans = fitting(spans, indices.shape[0])
    return {"x": unpack_operator(Unpack(grads[0], indices, spans, None, n))}


def _unpack_backward(call: Unpack, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    (grad,), indices, spans = grads, call.indices, call.spans
    room = indices.shape[0]
    if grad.numel() == 0:
        return {"values": grad.new_zeros(room), "source": grad if needs.source else None}
    row, held = slots_of(spans, room)
    held = held & (indices >= 0) & (indices < grad.shape[1])
    grad_values = torch.where(held, grad[row, torch.where(held, indices, 0)], 0)
    grad_source = None
    if needs.source:
        grad_source = torch.where((spans.sum(0) > room)[:, None], grad, 0)
    return {"values": grad_values, "source": grad_source}


@register(PackRows, cpu=_cpu.pack_rows, fake=_fake_pack, backward=_pack_backward, keep=_keep, repeats=True)
def pack_operator() -> Any:
    from gossamer.rowsparse._triton.list_entries import pack_rows

    return pack_rows


@register(
    Unpack,
    cpu=_cpu.unpack,
    fake=lambda call: call.values.new_empty(call.spans.shape[1], call.n),
    backward=_unpack_backward,
    saved=("indices", "spans"),
    repeats=True,
)
def unpack_operator() -> Any:
    from gossamer.rowsparse._triton.unpack import unpack

    return unpack
