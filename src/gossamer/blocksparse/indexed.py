"""What gather and scatter share: the two operators, each of which is a part of the other's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import refuse_second, register, undispatched
from gossamer.blocksparse._torch.gather import gather as _gather_cpu
from gossamer.blocksparse._torch.gather import reach as _reach_cpu
from gossamer.blocksparse._torch.scatter_reduce import scatter_reduce as _scatter_cpu
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

_LAYOUTS = (
    "Tensor nnz, Tensor row_indices, Tensor col_indices, Tensor positions, Tensor index, Tensor index_nnz, "
    "Tensor index_rows, Tensor index_cols, Tensor index_row_offsets, Tensor index_col_offsets, Tensor index_order, "
    "Tensor index_positions, Tensor row_offsets, Tensor col_offsets, Tensor order, SymInt[] sizes"
)


@dataclass(frozen=True)
class Indexed:
    """Blocks of indices into the matrices of a layout, as the operators take them.

    Args:
        parts: the layout's nnz, row and column indices and positions; the indices, and their layout's nnz, row and
            column indices, row and column offsets, transpose order and positions; the layout's row and column offsets
            and transpose order.
        sizes: axis (0 a leading dimension, 1 rows, 2 columns); the product of the leading dimensions behind it, its
            length in index and in the layout; rows and columns of index, and of the layout, in elements.
    """

    parts: tuple[Tensor, ...]
    sizes: list[int]

    def gather(self, values: Tensor, strict: bool = False) -> Tensor:
        """Blocks of index's layout: the elements that the indices find in values, 0 for none. An index out of range
        is none, or an error with `strict`, which a GPU shows as NaN."""
        return undispatched(_gather, values, self.parts[4])(values, *self.parts, self.sizes, strict)

    def scatter(
        self, given: Tensor | None, src: Tensor | None, reduce: str, include_self: bool, dtype: torch.dtype
    ) -> Tensor:
        """Blocks of the layout: `src`, aligned with index, or ones if None, joined with what is given, or zeros."""
        call = undispatched(_scatter, given, src, self.parts[4])
        return call(given, src, *self.parts, self.sizes, reduce, include_self, dtype)

    def count(self) -> Tensor:
        """int32 blocks of the layout: how many indices point at each element."""
        return self.scatter(None, None, "sum", True, torch.int32)

    def order(self) -> Tensor:
        """int32 blocks of index's layout: each element's place along the dimension, from 1 on."""
        axis, inner, d_index, _, m_index, *_ = self.sizes
        index, _, rows, cols = self.parts[4:8]
        _, height, width = index.shape
        grid_rows = max(-(-m_index // height), 1)
        if axis == 0:
            # Sizes of 0 have no blocks, but a slot that is nobody's.
            place = (rows // max(grid_rows * inner, 1) % max(d_index, 1))[:, None, None]
        elif axis == 1:
            place = ((rows % grid_rows * height)[:, None] + torch.arange(height, device=rows.device))[:, :, None]
        else:
            place = ((cols * width)[:, None] + torch.arange(width, device=rows.device))[:, None, :]
        return (place + 1).int().expand(index.shape)


def indexed(operator: str, layout: Layout, dim: int, index: BlockSparseTensor) -> Indexed:
    """The indices of a public function, checked; `layout` is what they point into."""
    dims = len(layout.shape)
    dim = _check_index(operator, "index", index, dims, dim)
    other = index.layout
    checks.same_device(operator, "input", layout.device, index=index.values)
    if other.block_size != layout.block_size:
        raise ValueError(
            f"{operator}: index must have blocks of {layout.block_size[0]} x {layout.block_size[1]} like input, got "
            f"{other.block_size[0]} x {other.block_size[1]}. Use adapt_layout."
        )
    lead, lead_index = layout.dense_shape, other.dense_shape
    fits = len(lead) == len(lead_index) and all(
        k == dim or (b <= a if k >= dims - 2 else a == b) for k, (a, b) in enumerate(zip(lead, lead_index))
    )
    if not fits:
        raise ValueError(
            f"{operator}: but for dim {dim} index must have the leading dimensions of input, and at most its rows and "
            f"columns; input is {list(lead)}, index {list(lead_index)}."
        )
    parts = (
        *layout.places,
        index.values,
        other.row_offsets[-1:],
        other.row_indices,
        other.col_indices,
        other.row_offsets,
        other.col_offsets,
        other.transpose_order,
        other.positions,
        layout.row_offsets,
        layout.col_offsets,
        layout.transpose_order,
    )
    return Indexed(parts, [*_axis(dim, lead, lead_index), *other.size, *layout.size])


def layout_of(indices: BlockSparseTensor, dim: int, size: int, capacity: int | None) -> Layout:
    """`Layout.from_indices`."""
    operator = "blocksparse.Layout.from_indices"
    dim = _check_index(operator, "indices", indices, len(indices.shape), dim)
    checks.positive(operator, "size", size, "It is the size of the dimension into which indices point.")
    layout, shape = indices.layout, list(indices.shape)
    shape[dim] = size
    sizes = [*_axis(dim, shape, indices.shape), *layout.size, *shape[-2:], math.prod(shape[:-2])]
    mask = _reach(indices.values, *layout.places[:3], sizes)
    mask = mask.view(*shape[:-2], *mask.shape[1:])
    return Layout.from_mask(mask, layout.block_size, size=(shape[-2], shape[-1]), capacity=capacity)


def _check_index(operator: str, name: str, index: Any, dims: int, dim: int) -> int:
    """dim, from 0 on."""
    check_blocks(operator, **{name: index})
    checks.whole(operator, **{name: index.values})
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ValueError(f"{operator}: dim must be from {-dims} to {dims - 1}, got {dim}.")
    return dim % dims


def _axis(dim: int, shape: Sequence[int], index_shape: Sequence[int]) -> list[int]:
    """axis, the product of the leading dimensions behind it, and its length in index and in what it points into."""
    axis = max(0, dim - (len(shape) - 3))
    return [axis, math.prod(shape[dim + 1 : -2]), index_shape[dim], shape[dim]] if axis == 0 else [axis, 1, 1, 1]


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:16])
    ctx.sizes = list(inputs[16])


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = Indexed(tuple(ctx.saved_tensors), ctx.sizes)
    return (back.scatter(None, grad, "sum", True, grad.dtype), *[None] * 17)


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, src, *parts, _, ctx.reduce, ctx.include_self, _ = inputs
    ctx.sizes = list(inputs[17])
    kept = (given, src, output) if ctx.reduce in ("prod", "amax", "amin") else (None, None, None)
    ctx.save_for_backward(*parts, *kept)
    ctx.dtypes = [None if t is None else t.dtype for t in (given, src)]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *parts, given, src, out = ctx.saved_tensors
    back = Indexed(tuple(parts), ctx.sizes)
    grads: tuple[Tensor | None, Tensor]
    if ctx.reduce == "last":
        grads = _last_backward(back, grad)
    elif ctx.reduce == "sum":
        kept = grad if ctx.include_self else torch.where(back.count() == 0, grad, 0)
        grads = kept, back.gather(grad)
    elif ctx.reduce == "prod":
        grads = _product_backward(back, ctx.include_self, grad, given, src, out)
    else:
        grads = _extremum_backward(back, ctx.include_self, grad, given, src, out)
    wanted = zip(grads, ctx.dtypes, ctx.needs_input_grad)
    return (*[g.to(dtype) if needed and g is not None else None for g, dtype, needed in wanted], *[None] * 19)


def _last_backward(back: Indexed, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Each element's gradient goes to the one entry that it was taken from."""
    order = back.order()
    last = back.scatter(None, order, "amax", True, torch.int32)
    return torch.where(last == 0, grad, 0), torch.where(back.gather(last) == order, back.gather(grad), 0)


def _extremum_backward(
    back: Indexed, include_self: bool, grad: Tensor, given: Tensor | None, src: Tensor, out: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Equal extrema share the gradient, as in PyTorch; NaN are equal."""
    found = back.gather(out)
    ties = ((src == found) | (src.isnan() & found.isnan())).float()
    share = back.scatter(None, ties, "sum", True, torch.float32)
    kept = None
    if given is not None and include_self:
        tie = ((given == out) | (given.isnan() & out.isnan())).float()
        share = share + tie
        kept = grad * tie / share.clamp(min=1)
    elif given is not None:
        kept = torch.where(share == 0, grad, 0)
    return kept, back.gather(grad / share.clamp(min=1)) * ties


def _product_backward(
    back: Indexed, include_self: bool, grad: Tensor, given: Tensor | None, src: Tensor, out: Tensor
) -> tuple[Tensor | None, Tensor]:
    """What a factor is multiplied by: the product divided by it, or without it where it is the only zero."""
    refuse_second("blocksparse.scatter_reduce")
    wide = torch.promote_types(out.dtype, torch.float32)
    grad, out = grad.to(wide), out.to(wide)
    zero = src == 0
    zeros = back.scatter(None, zero.float(), "sum", True, torch.float32)
    alone = zero & (back.gather(zeros) == 1)
    others = back.scatter(given, torch.where(alone, 1, src), "prod", include_self, wide)
    divided = back.gather(grad * out) / torch.where(zero, 1, src)
    kept = None
    if given is not None and include_self:
        kept = grad * back.scatter(torch.ones_like(given), src, "prod", True, wide)
    elif given is not None:
        kept = torch.where(back.count() == 0, grad, 0)
    # A factor may be NaN where no index is: beyond the matrix, and behind the last block.
    entry = back.gather(torch.ones_like(grad)) != 0
    return kept, torch.where(entry, torch.where(alone, back.gather(grad * others), divided), 0)


def _fake_scatter(given: Tensor | None, src: Tensor | None, *rest: Any) -> Tensor:
    return rest[4].new_empty(rest[1].shape[0], *rest[4].shape[1:], dtype=rest[-1])


_gather = register(
    f"blocksparse_gather(Tensor values, {_LAYOUTS}, bool strict) -> Tensor",
    cpu=_gather_cpu,
    fake=lambda values, *rest: values.new_empty(rest[4].shape),
    setup_context=_keep_gather,
    backward=_gather_backward,
)
_scatter = register(
    f"blocksparse_scatter_reduce(Tensor? given, Tensor? src, {_LAYOUTS}, str reduce, bool include_self, "
    "ScalarType dtype) -> Tensor",
    cpu=_scatter_cpu,
    fake=_fake_scatter,
    setup_context=_keep_scatter,
    backward=_scatter_backward,
)
_reach = register(
    "blocksparse_gather_reach(Tensor index, Tensor index_nnz, Tensor index_rows, Tensor index_cols, SymInt[] sizes) "
    "-> Tensor",
    cpu=_reach_cpu,
    fake=lambda index, nnz, rows, cols, sizes: index.new_empty(
        sizes[8], -(-sizes[6] // index.shape[1]), -(-sizes[7] // index.shape[2]), dtype=torch.bool
    ),
)
