"""Rows and columns of block-sparse matrices: their sums and maxima, and vectors added to all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import register
from gossamer.blocksparse._torch import rows as _impl
from gossamer.blocksparse._torch.tensor import lost
from gossamer.blocksparse.held import filled
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.tensor import BlockSparseTensor, check_computed, check_floating


def sum(x: BlockSparseTensor, dim: int) -> Tensor:
    """`x.sum(dim)`."""
    return _reduced("sum", x, dim, "sum")


def mean(x: BlockSparseTensor, dim: int) -> Tensor:
    """`x.mean(dim)`."""
    check_floating("blocksparse.BlockSparseTensor.mean", x=x)
    return _reduced("mean", x, dim, "sum") / x.shape[dim]


def amax(x: BlockSparseTensor, dim: int) -> Tensor:
    """`x.amax(dim)`."""
    return _reduced("amax", x, dim, "max")


def with_vector(name: str, x: BlockSparseTensor, vector: Tensor) -> BlockSparseTensor:
    """x with a vector for its rows or columns added (`name` is __add__), subtracted (__sub__, __rsub__) or multiplied
    with (__mul__)."""
    operator = f"blocksparse.BlockSparseTensor.{name}"
    check_floating(operator, x=x)
    checks.floating(operator, other=vector)
    if name == "__mul__":
        # Values beyond the matrix must not reach the gradient of vector.
        return _with_vector(operator, x, filled(x.values, x.layout, 0.0, behind=False), vector, "mul")
    values = -x.values if name == "__rsub__" else x.values
    return _with_vector(operator, x, values, -vector if name == "__sub__" else vector, "add")


def _with_vector(operator: str, x: BlockSparseTensor, values: Tensor, vector: Tensor, how: str) -> BlockSparseTensor:
    """x of these values, with a vector for its rows or columns added to them or multiplied with."""
    checks.same_device(operator, "x", x.device, other=vector)
    m, n = x.layout.size
    vector = vector.to(x.dtype)
    if vector.dim() >= 2 and tuple(vector.shape[-2:]) == (m, 1):
        lines = _lines_of(operator, "other", vector[..., 0], x.layout, -1)
        return replace(x, values=_shifted(values, *lines, -1, how))
    if vector.dim() >= 1 and tuple(vector.shape[-2:]) in ((1, n), (n,)):
        vector = vector[..., 0, :] if vector.dim() > 1 else vector
        return replace(x, values=_shifted(values, *_lines_of(operator, "other", vector, x.layout, -2), -2, how))
    raise ValueError(
        f"{operator}: other must have shape [..., M, 1] with M = {m}, a number for each row, or [..., 1, N] with N = "
        f"{n}, one for each column, got {list(vector.shape)}. Blocks of a dense matrix are from_dense(other, x.layout)."
    )


def _lines(layout: Layout, dim: int) -> tuple[Tensor, Tensor, int, int]:
    """(each block's row of blocks, the blocks of rows of blocks, elements of the dimension, those of a block), or the
    same of columns."""
    z, rows, cols = layout.batch, layout.rows, layout.cols
    grid = layout.positions.view(z, rows, cols)
    if dim == -1:
        return layout.row_indices, grid.view(z * rows, cols), layout.size[0], layout.block_size[0]
    base = layout.row_indices.div(rows or 1, rounding_mode="floor") * cols
    column = torch.where(layout.row_indices < 0, -1, base + layout.col_indices)
    return column, grid.mT.reshape(z * cols, rows), layout.size[1], layout.block_size[1]


def _lines_of(operator: str, name: str, vector: Tensor, layout: Layout, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(a vector `[..., L]` of rows or columns as lines of blocks, in float32 at least; `_lines`' first two)."""
    index, grid, length, block = _lines(layout, dim)
    lead = layout.shape[:-2]
    own = (1,) * (len(lead) + 1 - vector.dim()) + tuple(vector.shape)
    if len(own) != len(lead) + 1 or own[-1] != length or any(n not in (1, m) for n, m in zip(own, lead)):
        raise ValueError(
            f"{operator}: {name} must broadcast to {[*lead, length]} like the layout, got {list(vector.shape)}."
        )
    flat = vector.expand(*lead, length).reshape(layout.batch, length)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, -length % block)).reshape(-1, block)
    return torch.where(layout.overflowed, torch.nan, padded), index, grid


def _reduced(name: str, x: BlockSparseTensor, dim: int, how: str) -> Tensor:
    operator = f"blocksparse.BlockSparseTensor.{name}"
    check_computed(operator, x=x)
    if dim not in (-1, -2):
        raise ValueError(f"{operator}: dim must be -1, a number for each row, or -2, one for each column, got {dim}.")
    layout = x.layout
    index, grid, length, block = _lines(layout, dim)
    lead = layout.shape[:-2]
    exact = not x.dtype.is_floating_point
    # A Python int leaves integers what they are, a float would not.
    absent = 0 if how == "sum" else lost(x.dtype) if exact else -math.inf
    values = filled(x.values, layout, absent, behind=False)
    if not exact:
        values = values.to(torch.promote_types(x.dtype, torch.float32))
    if how == "sum":
        out = _collect(values.sum(dim), index, grid)
    else:
        out = _most(values, index, grid, dim)
    spoilt = lost(out.dtype)
    out = torch.where(layout.overflowed, spoilt, out.view(layout.batch, -(-length // block) * block)[:, :length])
    return out.reshape(*lead, length).to(out.dtype if exact else x.dtype)


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _collect(grad, *ctx.saved_tensors), None, None


def _collect_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _spread(grad, *ctx.saved_tensors), None, None


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _shifted_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, vectors, index, grid, ctx.dim, ctx.how = inputs
    kept = (values, vectors) if ctx.how == "mul" else (None, None)
    ctx.save_for_backward(index, grid, *kept)


def _shifted_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the vector is summed in its own dtype, float32 at least, over all blocks."""
    index, grid, values, vectors = ctx.saved_tensors
    along, towards = grad, grad
    if ctx.how == "mul":
        along, towards = grad * values, _shifted(grad, vectors, index, grid, ctx.dim, "mul")
    summed = None
    if ctx.needs_input_grad[1]:
        summed = _collect(along.sum(ctx.dim, dtype=torch.promote_types(grad.dtype, torch.float32)), index, grid)
    return towards, summed, None, None, None, None


def _most_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output)
    ctx.dim = inputs[3]


def _most_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, index, grid, most = ctx.saved_tensors
    best = values == _spread(most, index, grid).unsqueeze(ctx.dim)
    share = grad / _collect(best.to(grad.dtype).sum(ctx.dim), index, grid)
    return torch.where(best, _spread(share, index, grid).unsqueeze(ctx.dim), 0), None, None, None


_spread = register(
    "blocksparse_spread(Tensor vectors, Tensor index, Tensor grid) -> Tensor",
    cpu=_impl.spread,
    strided=("vectors", "index", "grid"),
    gpu=lambda: _impl.spread,
    fake=lambda vectors, index, grid: vectors.new_empty(index.shape[0], vectors.shape[1]),
    setup_context=_context,
    backward=_spread_backward,
)
_collect = register(
    "blocksparse_collect(Tensor parts, Tensor index, Tensor grid) -> Tensor",
    cpu=_impl.collect,
    strided=("parts", "index", "grid"),
    gpu=lambda: _impl.collect,
    fake=lambda parts, index, grid: parts.new_empty(grid.shape[0], parts.shape[1]),
    setup_context=_context,
    backward=_collect_backward,
)
_shifted = register(
    "blocksparse_shifted(Tensor values, Tensor vectors, Tensor index, Tensor grid, int dim, str how) -> Tensor",
    cpu=_impl.shifted,
    gpu=lambda: _impl.shifted,
    fake=lambda values, *rest: torch.empty_like(values, memory_format=torch.contiguous_format),
    setup_context=_shifted_context,
    backward=_shifted_backward,
)
_most = register(
    "blocksparse_most(Tensor values, Tensor index, Tensor grid, int dim) -> Tensor",
    cpu=_impl.most,
    strided=("values", "index", "grid"),
    gpu=lambda: _impl.most,
    fake=lambda values, index, grid, dim: values.new_empty(grid.shape[0], values.shape[-3 - dim]),
    setup_context=_most_context,
    backward=_most_backward,
)
