"""Tile-wise lists of entries, and how they become one list a row."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.rowsparse._torch import twell as _cpu
from gossamer.rowsparse.container import unchecked
from gossamer.rowsparse.formats import ELL, TwELL, empty_ell


def to_ell(rows: TwELL, capacity: int) -> ELL:
    """The same rows with `capacity` slots each; what has more entries is marked, and read from the source."""
    *parts, source = rows.packed
    values, indices, nnz = undispatched(twell_to_ell, *parts)(*parts, rows.tile, capacity)
    return unchecked(ELL, values, indices, nnz, rows.shape, source)


def lists(values: Tensor, indices: Tensor, counts: Tensor, tile: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_row) of every entry that has a slot, also in rows that overflowed."""
    _, tiles, slots = values.shape
    return twell_to_ell(values, indices, counts.clamp(max=slots), tile, max(1, min(n, tiles * slots)))


def _to_ell_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, counts, _, ctx.capacity = inputs
    _, indices, nnz = output
    ctx.mark_non_differentiable(indices, nnz)
    ctx.set_materialize_grads(False)
    ctx.slots = inputs[0].shape[2]
    ctx.save_for_backward(counts, nnz)


def _to_ell_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    counts, nnz = ctx.saved_tensors
    counts = counts.long()
    slots = torch.arange(ctx.slots, device=grad.device)
    place = (counts.cumsum(1) - counts)[..., None] + slots
    held = (slots < counts[..., None]) & (nnz <= ctx.capacity)[:, None, None]
    flat = place.clamp(max=ctx.capacity - 1).flatten(1)
    return torch.where(held, grad.gather(1, flat).view(place.shape), 0), *(None,) * 4


twell_to_ell = register(
    "twell_to_ell(Tensor values, Tensor indices, Tensor counts, int tile, SymInt capacity) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu.twell_to_ell,
    fake=lambda values, indices, counts, tile, capacity: empty_ell(values, values.shape[0], capacity),
    setup_context=_to_ell_context,
    backward=_to_ell_backward,
)
