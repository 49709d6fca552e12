"""Dense to row-sparse and back."""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import register, undispatched
from gossamer.rowsparse import twell
from gossamer.rowsparse._torch import pack as _cpu
from gossamer.rowsparse._torch.list_entries import list_entries as _cpu_list_entries
from gossamer.rowsparse._torch.twell import pack_twell as _cpu_pack_twell
from gossamer.rowsparse.container import LinearSource, unchecked
from gossamer.rowsparse.formats import CSR, ELL, Rows, TwELL, check_tile, empty_ell, empty_twell
from gossamer.rowsparse.linear_source import dense_rows


@overload
def pack(
    x: Tensor, *, format: Literal["ell"] = "ell", capacity: int | None = None, max_nnz: int | None = None
) -> ELL: ...
@overload
def pack(x: Tensor, *, format: Literal["csr"], capacity: int | None = None, max_nnz: int | None = None) -> CSR: ...
@overload
def pack(x: Tensor, *, format: Literal["twell"], tile: int = 256, slots: int | None = None) -> TwELL: ...
def pack(
    x: Tensor,
    *,
    format: str = "ell",
    capacity: int | None = None,
    max_nnz: int | None = None,
    tile: int = 256,
    slots: int | None = None,
) -> Rows:
    """Packs the elements of x that differ from 0, NaN included, sorted by column.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        format: `"ell"` gives every row the same number of slots; `"csr"` packs without gaps; `"twell"` gives every row
            the same number of slots in each tile of columns.
        capacity: slots per row of an ELL. None takes N / 64, at least 128, in steps of 32. A row with more entries
            stays exact: the container keeps x for it.
        max_nnz: length of a CSR's buffers. None takes the true count, which costs one device-to-host sync. An int
            costs none: rows that end beyond it stay exact, because the container keeps x for them.
        tile: columns per tile of a TwELL, 1 to 32,767.
        slots: slots per row and tile of a TwELL. None takes tile / 16, at least 1. A row with more entries in a tile
            stays exact: the container keeps x for it.

    Returns:
        `ELL`, `CSR` or `TwELL` of shape `(..., N)`. Gradients reach x at the stored entries and are zero elsewhere.

    Raises:
        TypeError: x is not floating, or capacity, tile or slots is not an int.
        ValueError: x has no dimension, an unknown format, or an argument that belongs to the other format.
        NotImplementedError: `max_nnz=None` under CUDA-graph capture.

    Source: the package jumprelu-sae-kernels, its exact (CSR) and fixed (ELL) allocation; Cetin et al., "Sparser,
        Faster, Lighter Transformer Language Models", section 3.1 (TwELL).

    >>> pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]]), capacity=2).indices.tolist()
    [[1, -1], [0, 1]]
    """
    operator = "rowsparse.pack"
    checks.floating(operator, x=x)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., N], got a scalar. Use x[None].")
    if format not in ("ell", "csr", "twell"):
        raise ValueError(f'{operator}: format must be "ell", "csr" or "twell", got {format!r}.')
    if format != "ell" and capacity is not None:
        raise ValueError(f'{operator}: capacity belongs to format="ell". A CSR takes max_nnz, a TwELL tile and slots.')
    if format != "csr" and max_nnz is not None:
        raise ValueError(f'{operator}: max_nnz belongs to format="csr". An ELL takes capacity, a TwELL tile and slots.')
    if format != "twell" and (slots is not None or tile != 256):
        raise ValueError(f'{operator}: tile and slots belong to format="twell". An ELL takes capacity, a CSR max_nnz.')
    n = x.shape[-1]
    checks.columns(operator, "x", n)
    flat = x.reshape(math.prod(x.shape[:-1]), n)
    source = _EntriesOnly.apply(flat) if flat.requires_grad and torch.is_grad_enabled() else flat
    if format == "twell":
        slots = tile_slots(operator, tile, slots)
        values, indices, counts = undispatched(_pack_twell, flat)(flat, tile, slots)
        return unchecked(TwELL, values, indices, counts, tuple(x.shape), None if slots == tile else source, tile)
    if format == "ell":
        if capacity is None:
            capacity = default_capacity(n)
        else:
            checks.positive(operator, "capacity", capacity, "It is the number of slots per row.")
            capacity = min(capacity, n)
        values, indices, nnz = undispatched(pack_ell_operator, flat)(flat, capacity)
        return unchecked(ELL, values, indices, nnz, tuple(x.shape), None if capacity == n else source)
    if max_nnz is None:
        values, indices, row_offsets = _exactly(operator, flat)
        source = None
    elif not isinstance(max_nnz, int) or not 0 <= max_nnz <= MOST_ENTRIES:
        raise ValueError(f"{operator}: max_nnz must be an int of at least 0 and at most 2^30, got {max_nnz!r}.")
    else:
        values, indices, row_offsets, _ = undispatched(list_entries_operator, flat)(flat, max_nnz)
    return unchecked(CSR, values, indices, row_offsets, tuple(x.shape), source)


def _exactly(operator: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, row_offsets) of as many entries as x has. Lists them with room to spare, and only where they
    find none once more."""
    checks.no_sync(operator, 'format="csr" with max_nnz=None', "Give max_nnz, or pack an ELL.")
    m, n = x.shape
    values, indices, offsets, _ = list_entries_operator(x, min(m * default_capacity(n), MOST_ENTRIES))
    total = int(offsets[-1])
    if total > MOST_ENTRIES:
        raise ValueError(f"{operator}: a CSR holds at most 2^30 entries, got more. Pack fewer rows at a time.")
    if total > values.shape[0]:
        values, indices, offsets, _ = list_entries_operator(x, total)
    # Copies, for what is kept of a large batch is to be no larger than its entries.
    return values[:total].clone(), indices[:total].clone(), offsets


MOST_ENTRIES = 1 << 30
"""Entries that one call can list."""


def one_program_a_row(m: int, n: int) -> bool:
    """Whether rows alone fill the GPU, so that the scan needs no exchange between programs."""
    return m >= 512 or n <= 2048


def unpack(rows: Rows) -> Tensor:
    """The dense tensor of a container; repeated indices add up, overflowed rows come from the source.

    Args:
        rows: `ELL`, `CSR` or `TwELL` of shape `(..., N)`.

    Returns:
        `[..., N]` in the container's dtype, differentiable in values and source.

    Raises:
        TypeError: rows is not a container.

    Source: this package.

    >>> unpack(pack(torch.eye(2))).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    values, indices, offsets, source = parts("rowsparse.unpack", rows)
    call = undispatched(unpack_operator, values, source)
    return call(values, indices, offsets, source, rows.num_columns).reshape(rows.shape)


def default_capacity(n: int) -> int:
    """Slots per row where the caller names none: several times the entries of a usual row, and little memory."""
    return min(n, -(-max(128, n // 64) // 32) * 32)


def tile_slots(operator: str, tile: int, slots: int | None) -> int:
    """Slots per row and tile, checked together with the tile."""
    check_tile(operator, tile)
    if slots is None:
        return max(1, tile // 16)
    checks.positive(operator, "slots", slots, "It is the number of slots per row and tile.")
    return min(slots, tile)


def check_container(operator: str, rows: Any, argument: str = "rows") -> None:
    if not isinstance(rows, ELL | CSR | TwELL):
        raise TypeError(
            f"{operator}: {argument} must be an ELL, CSR or TwELL of rowsparse, got {type(rows).__name__}. "
            "Pack a dense tensor with rowsparse.pack first."
        )


def gathered(rows: Any) -> Any:
    """A TwELL as an ELL; any other container as it is."""
    if not isinstance(rows, TwELL):
        return rows
    # Without a source every entry needs a slot, also those of a user who repeats columns.
    values, _, _, source = rows.packed
    capacity = max(1, values.shape[1] * values.shape[2])
    return twell.to_ell(rows, capacity if source is None else min(capacity, default_capacity(rows.num_columns)))


def listed(operator: str, rows: Any, argument: str = "rows") -> ELL | CSR:
    """The container with one list of entries a row, and with a dense source if any."""
    check_container(operator, rows, argument)
    rows = gathered(rows)
    values, indices, counts, source = rows.packed
    if isinstance(source, LinearSource):
        dense = dense_rows(source, counts.contiguous(), values.shape[1]).to(values.dtype)
        return unchecked(ELL, values, indices, counts, rows.shape, dense)
    return rows


def parts(operator: str, rows: Any, argument: str = "rows") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(values, indices, offsets, source): the plain tensors an operator takes, contiguous but for the source."""
    values, indices, offsets, source = listed(operator, rows, argument).packed
    return values.contiguous(), indices.contiguous(), offsets.contiguous(), source


Lists = tuple[Tensor, Tensor, Tensor, Tensor | None]


def anonymous(operator: str, rows: Any) -> list[Lists]:
    """As `parts`, for what does not ask which row an entry is in: [L, slots] lists of any container, with their counts
    and a source, which together are its entries. A CSR's lists are as many as its rows, cut from the buffer of all
    entries wherever that is; rows that overflowed it are lists of their own, of a slot each and read from the source.
    """
    values, indices, counts, source = parts(operator, rows)
    if values.dim() == 2:
        return [(values, indices, counts, source)]
    m, size = counts.shape[0] - 1, values.shape[0]
    slots = max(1, -(-size // max(m, 1)))
    if m * slots != size:
        values, indices = (torch.nn.functional.pad(buffer, (0, m * slots - size)) for buffer in (values, indices))
    first = torch.arange(m, device=values.device) * slots
    if source is None:
        # Where the buffer is too short nothing restores what is missing, which the operator then says or shows.
        held = torch.where(counts[-1] > size, slots + 1, (counts[-1] - first).clamp(0, slots))
        return [(values.view(m, slots), indices.view(m, slots), held.int(), None)]
    over = counts > size
    held = (torch.where(over, 0, counts).amax() - first).clamp(0, slots)
    none = indices.new_zeros(m, 1)
    return [
        (values.view(m, slots), indices.view(m, slots), held.int(), None),
        (none.to(values.dtype), none, 2 * over[1:].int(), source),
    ]


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


def _pack_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, second, *_ = inputs
    _, indices, *counts = output
    ctx.mark_non_differentiable(indices, *counts)
    ctx.set_materialize_grads(False)
    # A TwELL's second input is its tile.
    ctx.save_for_backward(indices, *counts)
    ctx.n, ctx.tile = x.shape[1], second if indices.dim() == 3 else None


def _fake_list(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, counts = x.shape[0], x.new_empty(x.shape[0], dtype=torch.int32)
    return x.new_empty(room), x.new_empty(room, dtype=torch.int32), x.new_empty(m + 1, dtype=torch.int64), counts


def _list_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, indices, starts, counts = output
    ctx.mark_non_differentiable(indices, starts, counts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices, starts)
    ctx.n, ctx.tile = inputs[0].shape[1], None


def _pack_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    if grad is None:
        return None, *others
    indices, counts = ctx.saved_tensors
    if ctx.tile is None:
        lists = grad, indices, counts.clamp(max=indices.shape[-1])
    else:
        lists = twell.lists(grad, indices, counts, ctx.tile, ctx.n)
    return undispatched(unpack_operator, grad)(*lists, None, ctx.n), *others


def _unpack_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, indices, offsets, _, _ = inputs
    ctx.save_for_backward(indices, offsets)


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    indices, offsets = ctx.saved_tensors
    if grad.numel() == 0:
        return grad.new_zeros(indices.shape), None, None, grad if ctx.needs_input_grad[3] else None, None
    valid = (indices >= 0) & (indices < grad.shape[1])
    columns = torch.where(valid, indices, 0).long()
    grad_values = grad_source = None
    if indices.dim() == 2:
        flagged = offsets > indices.shape[1]
        valid = valid & (torch.arange(indices.shape[1], device=indices.device) < offsets[:, None]) & ~flagged[:, None]
        grad_values = torch.where(valid, grad.gather(1, columns), 0)
    else:
        flagged = offsets[1:] > indices.shape[0]
        slots = torch.arange(indices.shape[0], device=indices.device)
        rows = torch.searchsorted(offsets, slots, right=True) - 1
        valid = valid & (rows < grad.shape[0])
        rows = rows.clamp(max=grad.shape[0] - 1)
        grad_values = torch.where(valid & ~flagged[rows], grad[rows, columns], 0)
    if ctx.needs_input_grad[3]:
        grad_source = torch.where(flagged[:, None], grad, 0)
    return grad_values, None, None, grad_source, None


def _unpack_launcher() -> Any:
    from gossamer.rowsparse._triton.unpack import unpack

    return unpack


pack_ell_operator = register(
    "pack_ell(Tensor x, SymInt capacity) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu.pack_ell,
    strided=("x",),
    fake=lambda x, capacity: empty_ell(x, x.shape[0], capacity),
    setup_context=_pack_context,
    backward=_pack_backward,
)
list_entries_operator = register(
    "list_entries(Tensor x, SymInt room) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_list_entries,
    strided=("x",),
    fake=_fake_list,
    setup_context=_list_context,
    backward=_pack_backward,
)
unpack_operator = register(
    "unpack(Tensor values, Tensor indices, Tensor offsets, Tensor? source, SymInt n) -> Tensor",
    cpu=_cpu.unpack,
    strided=("source",),
    gpu=_unpack_launcher,
    fake=lambda values, indices, offsets, _, n: values.new_empty(offsets.shape[0] - int(indices.dim() == 1), n),
    setup_context=_unpack_context,
    backward=_unpack_backward,
)
_pack_twell = register(
    "pack_twell(Tensor x, int tile, int slots) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_pack_twell,
    strided=("x",),
    fake=lambda x, tile, slots: empty_twell(x, x.shape[0], x.shape[1], tile, slots),
    setup_context=_pack_context,
    backward=_pack_backward,
)
