"""Rows and columns of block-sparse matrices: their sums and maxima, and vectors added to all of them; and values that
stand for no element, behind the last block, or beyond the matrix in a block that it cuts.

The functions take values and their layout, and are the methods of `BlockSparseTensor`. Values of no element take no
part, NaN included, and their gradient is 0. The derivative of a root or a logarithm at 0 is infinite, and times a
gradient of 0 it is NaN: functions of single elements get another number in their place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.blocksparse._torch import rows as _impl
from gossamer.blocksparse._torch.tensor import valid
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.lists import Form, lost
from gossamer.blocksparse.records import BlocksparseReduced, BlocksparseShifted


def check_floats(operator: str, argument: str, values: Tensor) -> None:
    """The values of a block-sparse tensor are floats that kernels compute with."""
    if not values.is_floating_point():
        raise TypeError(
            f"{operator}: {argument} must be float32, float16 or bfloat16 (float64 on the CPU), got "
            f"{checks.name_of(values.dtype)}. Convert it with {argument}.to(torch.float32)."
        )
    checks.floating(operator, **{f"{argument}.values": values})


def fill_outside(
    values: Tensor, layout: Layout, fill: float, behind: bool = True, dims: tuple[int, ...] = (-1, -2)
) -> Tensor:
    """Values with `fill` where they stand for no element, and a gradient of 0 there; the values themselves where the
    host knows that all of them stand for elements.

    Without `behind` blocks behind the last count as blocks, for operators that do not read these; `dims` are the
    dimensions beyond whose ends the operator would read.
    """
    cut = any(layout.size[dim] % layout.block_size[dim] for dim in dims)
    if not (cut or (behind and not layout.filled)):
        return values
    return torch.where(valid(layout.lists, behind, dims), values, values.new_full((), fill))


def reduced(operator: str, values: Tensor, layout: Layout, dim: int | None, how: str) -> Tensor:
    """The sum or the maximum ("max") of each row or column, or of all."""
    if dim not in (None, -1, -2):
        raise ValueError(
            f"{operator}: dim must be -1, a number for each row, -2, one for each column, or None, one for all, got "
            f"{dim}."
        )
    dtype, exact = values.dtype, not values.is_floating_point()
    # A Python int leaves integers what they are, a float would not.
    absent = 0 if how == "sum" else lost(dtype) if exact else -math.inf
    values = fill_outside(values, layout, absent, dim is None, (-1, -2) if dim is None else (dim,))
    if dim is None:
        out = values.sum(dtype=_impl.summed(dtype)) if how == "sum" else values.amax()
    else:
        out = _reduced(BlocksparseReduced(values, layout.buffer, layout.form, dim, how))
        length, block = layout.size[dim + 1], layout.block_size[dim + 1]
        out = out.view(layout.batch, -(-length // block) * block)[:, :length].reshape(*layout.lead, length)
    out = torch.where(layout.overflowed, lost(out.dtype), out)
    return out.to(out.dtype if exact else dtype)


def with_vector(name: str, values: Tensor, layout: Layout, vector: Tensor) -> Tensor:
    """Values with a vector for their rows or columns added (`name` is __add__), subtracted (__sub__, __rsub__) or
    multiplied with (__mul__)."""
    operator = f"blocksparse.BlockSparseTensor.{name}"
    exact = not values.is_floating_point() and values.dtype is not torch.bool
    if exact and torch.promote_types(values.dtype, vector.dtype) is not values.dtype:
        raise TypeError(
            f"{operator}: other must hold integers like x, {checks.name_of(values.dtype)} or narrower, got "
            f"{checks.name_of(vector.dtype)}. Convert x with x.to(other.dtype)."
        )
    if not exact:
        check_floats(operator, "x", values)
        checks.floating(operator, other=vector)
    checks.same_device(operator, "x", values.device, other=vector)
    m, n = layout.size
    vector = vector.to(values.dtype)
    if vector.dim() >= 2 and tuple(vector.shape[-2:]) == (m, 1):
        dim, vector = -1, vector[..., 0]
    elif vector.dim() >= 1 and tuple(vector.shape[-2:]) in ((1, n), (n,)):
        dim, vector = -2, vector[..., 0, :] if vector.dim() > 1 else vector
    else:
        raise ValueError(
            f"{operator}: other must have shape [..., M, 1] with M = {m}, a number for each row, or [..., 1, N] with N "
            f"= {n}, one for each column, got {list(vector.shape)}. Blocks of a dense matrix are from_dense(other, "
            "x.layout)."
        )
    if name == "__mul__":
        # Values beyond the matrix must not reach the gradient of the vector.
        how, values = "mul", fill_outside(values, layout, 0.0, behind=False)
    else:
        how, values = "add", -values if name == "__rsub__" else values
        vector = -vector if name == "__sub__" else vector
    lines = _lines_of(operator, vector, layout, dim)
    made: Tensor = _shifted(BlocksparseShifted(values, lines, layout.buffer, layout.form, dim, how))
    return torch.where(layout.overflowed, lost(made.dtype), made) if exact else made


def _lines_of(operator: str, vector: Tensor, layout: Layout, dim: int) -> Tensor:
    """A vector `[..., L]` of rows or columns as lines of blocks, in float32 at least."""
    length, block, lead = layout.size[dim + 1], layout.block_size[dim + 1], layout.lead
    checks.broadcast(operator, "other", vector.shape, (*lead, length), "the layout's ")
    flat = vector.expand(*lead, length).reshape(layout.batch, length)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32)) if flat.is_floating_point() else flat
    padded = torch.nn.functional.pad(wide, (0, -length % block)).reshape(-1, block)
    return torch.where(layout.overflowed, lost(wide.dtype), padded)


def _shifted_backward(call: BlocksparseShifted, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """The gradient of the vector is summed in its own dtype, float32 at least, over all blocks."""
    (grad,), lists = grads, (call.layout, call.form, call.dim)
    along, towards = grad, grad
    if call.how == "mul":
        values, vectors = kept
        along, towards = grad * values, _shifted(call._replace(values=grad, vectors=vectors))
    summed = _reduced(BlocksparseReduced(along, *lists, "sum")) if needs.vectors else None
    return {"values": towards, "vectors": summed}


def _reduced_backward(call: BlocksparseReduced, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    (grad,), (dtype, values, found), lists = grads, kept, (call.layout, call.form, call.dim)
    if values is None:
        share, best = grad, None
    else:
        # Equal maxima share the gradient.
        best = values == _impl.spread(found, *lists).unsqueeze(call.dim)
        share = grad / _reduced(BlocksparseReduced(best.to(dtype), *lists, "sum"))
    made = _impl.spread(share.to(dtype), *lists).unsqueeze(call.dim)
    return {"values": made.expand(Form(*call.form).blocks) if best is None else torch.where(best, made, 0)}


def _fake_reduced(call: BlocksparseReduced) -> Tensor:
    z, *counts = call.form[:3]
    dtype = _impl.summed(call.values.dtype) if call.how == "sum" else call.values.dtype
    return call.values.new_empty(z * counts[call.dim + 1], call.form[3:5][call.dim + 1], dtype=dtype)


@register(
    BlocksparseReduced,
    cpu=_impl.reduced,
    fake=_fake_reduced,
    backward=_reduced_backward,
    saved=("layout",),
    keep=lambda call, found: (call.values.dtype, *((call.values, found) if call.how == "max" else (None, None))),
)
def _reduced() -> Any:
    return _impl.reduced


@register(
    BlocksparseShifted,
    cpu=_impl.shifted,
    fake=lambda call: torch.empty_like(call.values, memory_format=torch.contiguous_format),
    backward=_shifted_backward,
    saved=("layout",),
    keep=lambda call, _: (call.values, call.vectors) if call.how == "mul" else (),
)
def _shifted() -> Any:
    return _impl.shifted
