"""Scatter along any dimension of block-sparse matrices, with and without a reduction."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse.indexed import Indexed, indexed
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.rearrange import realigned
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def scatter(
    input: BlockSparseTensor | Layout,
    dim: int,
    index: BlockSparseTensor,
    src: BlockSparseTensor,
    reduce: Literal["sum", "mean", "amax", "amin", "prod"] | None = None,
    *,
    include_self: bool = True,
) -> BlockSparseTensor:
    """Puts elements of `src` where indices say, as `torch.scatter`: `out[z, i, index[z, i, j]] = src[z, i, j]` for
    `dim=-1`; or joins them, as `torch.scatter_reduce`. The order is fixed: the same input gives the same bits.

    Args:
        input: `[..., M, N]`, the elements before, or a `Layout`: zeros of src's dtype, which take no part. Elements for
            blocks that its layout lacks are left out.
        dim: any dimension, a leading one too.
        index: `[..., M', N']`, int8, int16, int32 or int64, in blocks of the same size, and but for `dim` at most as
            long as input along each dimension. Where its layout has no block there are no entries; -1 is none. Any
            other index that is out of range raises on the CPU; on a GPU it is none.
        src: `[..., M'', N'']` of input's dtype, with M'' >= M' and N'' >= N' and the leading dimensions of index; where
            it lacks a block, zeros. Sharing index's `Layout` spares a copy.
        reduce: "sum", "mean", "amax", "amin" or "prod"; bool has the last three, and "mean" is for floats. None takes
            the last along `dim` of several for one place.
        include_self: with a reduction, False leaves out input's own value where there are entries.

    Returns:
        `BlockSparseTensor` of input's layout and dtype, differentiable in input and src. If a layout overflowed,
        every value is NaN.

    Raises:
        ValueError: shapes, blocks or devices do not fit, `reduce` is none of these, or on the CPU an index is out of
            range.
        TypeError: index holds no such integers, dtypes differ, or an argument is no `BlockSparseTensor`.

    Source: Schön and Tompits, blksprs, section 3.2.5; `torch.scatter`, `torch.scatter_reduce`.

    >>> layout = Layout.from_mask(torch.eye(2).bool(), 16)
    >>> src, index = from_dense(torch.ones(32, 32), layout), from_dense(torch.full((32, 32), 3), layout)
    >>> scatter(layout, 0, index, src, "sum").to_dense()[3, :2].tolist()
    [16.0, 16.0]
    """
    operator = "blocksparse.scatter"
    at, given, values, dtype = _operands(operator, input, dim, index, src)
    layout = input if isinstance(input, Layout) else input.layout
    if reduce is None:
        return BlockSparseTensor(at.scatter(given, values, "last", True, dtype), layout)
    if reduce not in REDUCTIONS:
        raise ValueError(f"{operator}: reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}.")
    if reduce == "mean" and not dtype.is_floating_point:
        raise TypeError(f'{operator}: reduce="mean" needs a floating dtype, got {checks.name_of(dtype)}.')
    if dtype is torch.bool and reduce == "sum":
        raise TypeError(f'{operator}: reduce="sum" needs numbers, got bool. Use "amax", or src.values.int().')
    include_self = include_self and given is not None
    if reduce != "mean":
        return BlockSparseTensor(at.scatter(given, values, reduce, include_self, dtype), layout)
    total = at.scatter(given, values, "sum", include_self, torch.promote_types(dtype, torch.float32))
    count = at.count() + int(include_self)
    return BlockSparseTensor((total / count.clamp(min=1)).to(dtype), layout)


def _operands(
    operator: str, input: BlockSparseTensor | Layout, dim: int, index: BlockSparseTensor, src: BlockSparseTensor
) -> tuple[Indexed, Tensor | None, Tensor, torch.dtype]:
    """(indices, what is there before, values of src aligned with index, dtype), checked."""
    check_blocks(operator, "computed", src=src)
    if isinstance(input, Layout):
        layout, given = input, None
    else:
        check_blocks(operator, "computed", input=input)
        layout, given = input.layout, input.values
        if input.dtype != src.dtype:
            names = checks.name_of(input.dtype), checks.name_of(src.dtype)
            raise TypeError(f"{operator}: src must have the dtype of input, {names[0]}, got {names[1]}.")
    at = indexed(operator, layout, dim, index)
    checks.same_device(operator, "input", layout.device, src=src.values)
    if src.layout.is_same(index.layout):
        return at, given, src.values, src.dtype
    (*lead, m, n), (*lead_src, m_src, n_src) = index.shape, src.shape
    if lead != lead_src or m_src < m or n_src < n:
        raise ValueError(
            f"{operator}: src must have the leading dimensions of index, and at least its rows and columns; index is "
            f"{list(index.shape)}, src {list(src.shape)}."
        )
    return at, given, realigned(src, index.layout).values, src.dtype
