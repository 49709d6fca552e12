"""Block-sparse matrices repeated, split, joined, and laid out in other blocks: blocks, or parts of them, are moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import needs_gradient, register, undispatched
from gossamer.blocksparse import axes
from gossamer.blocksparse._torch.rearrange import rearrange as _cpu
from gossamer.blocksparse.axes import Axes, Axis, Moved
from gossamer.blocksparse.layout import Layout, check_layouts
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks


def repeat(x: BlockSparseTensor, sizes: Sequence[int], *, layout: Layout | None = None) -> BlockSparseTensor:
    """x repeated along its dimensions, as `torch.Tensor.repeat`.

    Args:
        x: `[..., M, N]`, of any dtype.
        sizes: how often along each dimension; more of them than dimensions make new leading ones.
        layout: of the result, where it is known: blocks that it lacks are left out. None makes it, without a sync, and
            with room for as many blocks as there can be.

    Returns:
        `BlockSparseTensor`, differentiable in x. Where M or N is repeated and not of whole blocks, blocks are cut anew.
        If a layout overflowed, every value is NaN.

    Raises:
        ValueError: there are fewer sizes than dimensions, one is below 0, or layout does not fit.
        TypeError: x is no `BlockSparseTensor`, or a size no int.

    Source: Schön and Tompits, blksprs, section 3.3; `torch.Tensor.repeat`.

    >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> repeat(x, (2, 1, 3)).shape
    (2, 32, 96)
    """
    operator = "blocksparse.repeat"
    check_blocks(operator, x=x)
    dims = len(x.shape)
    if len(sizes) < dims:
        raise ValueError(f"{operator}: sizes must name each of the {dims} dimensions of x, got {tuple(sizes)}.")
    for size in sizes:
        _check_times(operator, "sizes", size, "They say how often x is repeated along each dimension.")
    lead = (*[1] * (len(sizes) - dims), *x.shape[:-2])

    def make() -> tuple[Axes, tuple[int, ...]]:
        rows, cols = (axes.repeated(x.shape[k], sizes[k]) for k in (-2, -1))
        shape = tuple(a * b for a, b in zip((*lead, *x.shape[-2:]), sizes))
        return (axes.tiled(lead, sizes[:-2]), rows, cols), shape

    return _moved(operator, x, _move_of(x.layout, (operator, *sizes), make), layout)


def repeat_interleave(
    x: BlockSparseTensor, repeats: int, dim: int, *, layout: Layout | None = None
) -> BlockSparseTensor:
    """Each row, column or matrix of x repeated, as `torch.repeat_interleave`.

    Args:
        x: `[..., M, N]`, of any dtype.
        repeats: how often.
        dim: any dimension, a leading one too.
        layout: as in `repeat`.

    Returns:
        `BlockSparseTensor`, differentiable in x.

    Raises:
        ValueError: dim is none of x's, repeats is below 0, or layout does not fit.
        TypeError: x is no `BlockSparseTensor`, or repeats no int.

    Source: Schön and Tompits, blksprs, section 3.3; `torch.repeat_interleave`.

    >>> x = from_dense(torch.ones(2, 32, 32), Layout.from_mask(torch.eye(2).bool().expand(2, 2, 2), 16))
    >>> repeat_interleave(x, 4, 0).shape
    (8, 32, 32)
    """
    operator = "blocksparse.repeat_interleave"
    check_blocks(operator, x=x)
    dim = _dim(operator, x, dim)
    _check_times(operator, "repeats", repeats, "It says how often.")

    def make() -> tuple[Axes, tuple[int, ...]]:
        return _at(x, dim, axes.interleaved(x.shape[dim], repeats))

    return _moved(operator, x, _move_of(x.layout, (operator, repeats, dim), make), layout)


def split(
    x: BlockSparseTensor, split_size: int | Sequence[int], dim: int = 0, *, capacity: int | None = None
) -> tuple[BlockSparseTensor, ...]:
    """x in pieces, as `torch.split`.

    Args:
        x: `[..., M, N]`, of any dtype.
        split_size: of each piece along dim, the last may be shorter; or each piece's.
        dim: any dimension, a leading one too.
        capacity: how many blocks to make room for in each piece. None makes room for just those present, which
            costs one device-to-host sync.

    Returns:
        As many `BlockSparseTensor`, differentiable in x. A piece that does not begin with a block has its blocks cut
        anew.

    Raises:
        ValueError: dim is none of x's, or the sizes do not add up to it.
        TypeError: x is no `BlockSparseTensor`.
        NotImplementedError: `capacity=None` under CUDA-graph capture.

    Source: Schön and Tompits, blksprs, section 3.3; `torch.split`.

    >>> x = from_dense(torch.ones(32, 48), Layout.from_mask(torch.ones(2, 3).bool(), 16))
    >>> [piece.shape for piece in split(x, 32, dim=1)]
    [(32, 32), (32, 16)]
    """
    operator = "blocksparse.split"
    check_blocks(operator, x=x)
    dim = _dim(operator, x, dim)
    total = x.shape[dim]
    if isinstance(split_size, int):
        checks.positive(operator, "split_size", split_size, "It is the size of each piece.")
        sizes = [min(split_size, total - start) for start in range(0, max(total, 1), split_size)]
    else:
        sizes = list(split_size)
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise ValueError(f"{operator}: split_size must add up to {total}, the size of dim {dim}, got {sizes}.")
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    pieces = [_at(x, dim, axes.part(total, start, size)) for start, size in zip(starts, sizes)]
    block, source = x.layout.block_size, x.layout.places
    masks = [_reached(x.layout, moved, block) for moved, _ in pieces]
    room = [capacity] * len(pieces)
    if capacity is None:
        checks.no_sync(operator, "capacity=None", "Give a capacity; that of x is enough for pieces of whole blocks.")
        room = torch.stack([mask.sum() for mask in masks]).tolist()
    found = []
    for (moved, shape), mask, most in zip(pieces, masks, room):
        found.append(_pull(x.values, source, x.layout.size, _result(mask, shape, block, most), moved))
    return tuple(found)


def cat(tensors: Sequence[BlockSparseTensor], dim: int = 0, *, layout: Layout | None = None) -> BlockSparseTensor:
    """Tensors one after the other along a dimension, as `torch.cat`.

    Args:
        tensors: `[..., M, N]`, of one dtype and block size, and alike but for `dim`.
        dim: any dimension, a leading one too.
        layout: as in `repeat`.

    Returns:
        `BlockSparseTensor`, differentiable in the tensors. Where one ends within a block, blocks are cut anew.

    Raises:
        ValueError: there is none, shapes, blocks or devices do not fit, or layout does not.
        TypeError: one is no `BlockSparseTensor`, or dtypes differ.

    Source: Schön and Tompits, blksprs, section 3.3 (merge); `torch.cat`.

    >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> cat([x, x, x], dim=-1).shape
    (32, 96)
    """
    operator = "blocksparse.cat"
    for k, x in enumerate(tensors):
        check_blocks(operator, **{f"tensors[{k}]": x})
    return _cat(operator, tensors, dim, layout)


def _cat(operator: str, tensors: Sequence[BlockSparseTensor], dim: int, layout: Layout | None) -> BlockSparseTensor:
    if not tensors:
        raise ValueError(f"{operator}: tensors must hold at least one BlockSparseTensor, got none.")
    first = tensors[0]
    dim = _dim(operator, first, dim)
    for k, x in enumerate(tensors):
        _check_alike(operator, first, x, f"tensors[{k}]", dim)
    lengths = [x.shape[dim] for x in tensors]
    shape = (*first.shape[:dim], sum(lengths), *first.shape[dim + 1 :])
    return _joined(operator, first, _side_by_side(tensors, dim), shape, dim, lengths, layout)


def stack(tensors: Sequence[BlockSparseTensor], dim: int = 0, *, layout: Layout | None = None) -> BlockSparseTensor:
    """Tensors one after the other along a new leading dimension, as `torch.stack`.

    `stack(split(x, D, -1), 1)` makes heads `[B, H, T, D]` of `[B, T, H * D]`, and `merge` joins them again.

    Args:
        tensors: `[..., M, N]`, all alike but for which blocks are present.
        dim: the place of the new dimension among the leading ones.
        layout: as in `repeat`.

    Returns:
        `BlockSparseTensor`, differentiable in the tensors.

    Raises:
        ValueError: there is none, dim is no place for a leading dimension, or shapes, blocks, devices or layout do not
            fit.
        TypeError: one is no `BlockSparseTensor`, or dtypes differ.

    Source: Schön and Tompits, blksprs, section 3.3 (split, whose parts are stacked); `torch.stack`.

    >>> x = from_dense(torch.ones(2, 32, 64), Layout.from_mask(torch.ones(2, 2, 4).bool(), 16))
    >>> stack(split(x, 16, -1), 1).shape
    (2, 4, 32, 16)
    """
    operator = "blocksparse.stack"
    for k, x in enumerate(tensors):
        check_blocks(operator, **{f"tensors[{k}]": x})
    places = len(tensors[0].shape) - 1 if tensors else 1
    if not isinstance(dim, int) or not -places - 2 <= dim < places or not 0 <= dim % (places + 2) < places:
        raise ValueError(f"{operator}: dim must be a place for a leading dimension, from 0 to {places - 1}, got {dim}.")
    dim %= places + 2
    parts = []
    for x in tensors:
        shape = (*x.layout.shape[:dim], 1, *x.layout.shape[dim:])
        parts.append(BlockSparseTensor(x.values, replace(x.layout, shape=shape)))
    return _cat(operator, parts, dim, layout)


def merge(x: BlockSparseTensor, dim: int, into: int = -1, *, layout: Layout | None = None) -> BlockSparseTensor:
    """The matrices of a leading dimension one after the other along another one: of heads `[B, H, T, D]`, for instance,
    `[B, T, H * D]`.

    The result is that of `cat` on the slices of x along dim, in one step.

    Args:
        x: `[..., M, N]` with leading dimensions, of any dtype.
        dim: the leading dimension that goes.
        into: the dimension along which its slices stand then, of rows, of columns, or another leading one.
        layout: as in `repeat`.

    Returns:
        `BlockSparseTensor`, differentiable in x, of one dimension fewer. Where a slice ends within a block, blocks are
        cut anew.

    Raises:
        ValueError: dim is no leading dimension, is empty, or is into; into is none of x's; layout does not fit.
        TypeError: x is no `BlockSparseTensor`.

    Source: Schön and Tompits, blksprs, section 3.3 (merge).

    >>> heads = from_dense(torch.ones(2, 4, 32, 16), Layout.from_mask(torch.ones(2, 4, 2, 1).bool(), 16))
    >>> merge(heads, 1).shape
    (2, 32, 64)
    """
    operator = "blocksparse.merge"
    check_blocks(operator, x=x)
    dim, into = _dim(operator, x, dim), _dim(operator, x, into)
    if dim >= len(x.shape) - 2 or dim == into or x.shape[dim] == 0:
        raise ValueError(
            f"{operator}: dim must be a leading dimension of x that is not empty, and another one than into, got dim "
            f"{dim} and into {into} of {list(x.shape)}."
        )
    layout_of, times = x.layout, x.shape[dim]
    rest = [size for k, size in enumerate(x.shape) if k != dim]
    into -= into > dim
    lengths, rest[into] = [rest[into]] * times, rest[into] * times
    # The blocks as they are, in the places of the result's.
    grid = layout_of.positions.view(layout_of.shape).clamp(max=layout_of.capacity - 1)
    grid = torch.cat(grid.unbind(dim), into)
    cols = grid.shape[-1]
    place = torch.arange(grid.numel(), device=x.device)
    of_block = torch.full((layout_of.capacity + 1,), -1, dtype=torch.int64, device=x.device)
    of_block.scatter_(0, torch.where(grid >= 0, grid, layout_of.capacity).flatten().long(), place)
    at = of_block[:-1]
    rows, columns = (torch.where(at >= 0, part, -1).int() for part in (at // max(cols, 1), at % max(cols, 1)))
    source = layout_of.row_offsets[-1:], rows, columns, grid.int().reshape(-1)
    size = [layout_of.size[0], layout_of.size[1]]
    if into >= len(rest) - 2:
        axis = into - len(rest)
        size[axis] = grid.shape[axis] * layout_of.block_size[axis]
    return _joined(operator, x, (x.values, source, (size[0], size[1])), tuple(rest), into, lengths, layout)


def _joined(
    operator: str,
    like: BlockSparseTensor,
    side_by_side: tuple[Tensor, Source, tuple[int, int]],
    shape: tuple[int, ...],
    dim: int,
    lengths: list[int],
    layout: Layout | None,
) -> BlockSparseTensor:
    """Values and where they are, of tensors that stand side by side block by block, as what `shape` says, in which
    they stand side by side element by element: of these lengths along dim."""
    values, source, size = side_by_side
    block = like.layout.block_size
    ends = [axes.whole(shape[-2]), axes.whole(shape[-1])]
    if (axis := dim - len(shape)) >= -2:
        ends[axis] = axes.joined(lengths, block[axis])
    moved = axes.whole(math.prod(shape[:-2])), ends[0], ends[1]
    if layout is None:
        grid = math.prod(shape[:-2]), -(-size[0] // block[0]), -(-size[1] // block[1])
        mask = _reach((source[3] >= 0).view(grid), moved, block, block)
        room = values.shape[0] * ends[0].spread(block[0], block[0]) * ends[1].spread(block[1], block[1])
        layout = _result(mask, shape, block, min(room, mask.numel()))
    else:
        _check_result(operator, layout, shape, like)
    return _pull(values, source, size, layout, moved)


def adapt_layout(x: BlockSparseTensor, layout: Layout) -> BlockSparseTensor:
    """The same matrices in the blocks of another layout, of another size too.

    Args:
        x: `[..., M, N]`, of any dtype.
        layout: of the same shape in elements; `x.layout.adapt(block_size)` covers all of x.

    Returns:
        `BlockSparseTensor`, differentiable in x. Blocks that x lacks, and parts of them, are zero; elements for which
        layout has no block are left out. If a layout overflowed, every value is NaN.

    Raises:
        ValueError: layout has another shape or device.
        TypeError: x is no `BlockSparseTensor`, or layout no `Layout`.

    Source: Schön and Tompits, blksprs, section 3.3 (layout adaptation).

    >>> x = from_dense(torch.ones(64, 64), Layout.from_mask(torch.eye(4).bool(), 16))
    >>> adapt_layout(x, x.layout.adapt(32)).values.sum(dim=(1, 2)).tolist()
    [512.0, 512.0]
    """
    operator = "blocksparse.adapt_layout"
    check_blocks(operator, x=x)
    check_layouts(operator, layout=layout)
    if layout.dense_shape != x.shape:
        raise ValueError(
            f"{operator}: layout must be of {list(x.shape)} elements like x, got {list(layout.dense_shape)}."
        )
    checks.same_device(operator, "layout", layout.device, x=x.values)
    return realigned(x, layout)


def realigned(x: BlockSparseTensor, layout: Layout) -> BlockSparseTensor:
    """x in the blocks of another layout, which may have fewer rows and columns."""
    moved = axes.whole(layout.batch), axes.whole(layout.size[0]), axes.whole(layout.size[1])
    return _pull(x.values, x.layout.places, x.layout.size, layout, moved)


def adapted(layout: Layout, block: tuple[int, int], capacity: int | None) -> Layout:
    """The layout in blocks of another size that covers another."""
    moved = axes.whole(layout.batch), axes.whole(layout.size[0]), axes.whole(layout.size[1])
    mask = _reached(layout, moved, block)
    (height, width), (h, w) = layout.block_size, block
    if capacity is None and h <= height and w <= width:
        capacity = max(1, min(layout.capacity * (height // h) * (width // w), mask.numel()))
    return _result(mask, layout.dense_shape, block, capacity)


def _move_of(layout: Layout, key: tuple[Any, ...], make: Callable[[], tuple[Axes, tuple[int, ...]]]) -> Moved:
    """What `make` says of a layout's matrices, kept with the layout: what follows from it is made once."""
    if torch.compiler.is_compiling():
        return Moved(*make())
    kept = layout.__dict__.setdefault("_moves", {})
    if key not in kept:
        if len(kept) >= MOVES:
            kept.clear()
        kept[key] = Moved(*make())
    found: Moved = kept[key]
    return found


def _moved(operator: str, x: BlockSparseTensor, move: Moved, layout: Layout | None) -> BlockSparseTensor:
    """x rearranged, in blocks of the same size."""
    block, (z, rows, cols) = x.layout.block_size, move.axes

    def result() -> Layout:
        mask = _reached(x.layout, move.axes, block)
        room = x.layout.capacity * z.copies * rows.spread(block[0], block[0]) * cols.spread(block[1], block[1])
        return _result(mask, move.shape, block, min(room, mask.numel()))

    if layout is None:
        layout = move.once("layout", result)
    else:
        _check_result(operator, layout, move.shape, x)
    return _pull(x.values, x.layout.places, x.layout.size, layout, move)


def _result(mask: Tensor, shape: Sequence[int], block: tuple[int, int], capacity: int | None) -> Layout:
    """The layout of a mask `[Z, rows, cols]`, for a tensor of `shape`."""
    mask = mask.view(*shape[:-2], *mask.shape[1:])
    room = None if capacity is None else max(capacity, 1)
    return Layout.from_mask(mask, block, size=(shape[-2], shape[-1]), capacity=room)


def _reached(layout: Layout, moved: Axes, block: tuple[int, int]) -> Tensor:
    """Bool `[Z, rows, cols]`: blocks of the result that hold any of layout's."""
    grid = layout.batch, layout.rows, layout.cols
    return _reach((layout.positions >= 0).view(grid), moved, layout.block_size, block)


def _reach(mask: Tensor, moved: Axes, source: tuple[int, int], block: tuple[int, int]) -> Tensor:
    z, rows, cols = moved
    if z.forward is not None:
        mask = mask[z.forward(mask.device)]
    return cols.reach(rows.reach(mask, 1, source[0], block[0]), 2, source[1], block[1])


def _check_times(operator: str, argument: str, value: int, hint: str) -> None:
    """A number of copies; with 0 the result is empty."""
    if value != 0 or not isinstance(value, int) or isinstance(value, bool):
        checks.positive(operator, argument, value, hint)


def _dim(operator: str, x: BlockSparseTensor, dim: int) -> int:
    dims = len(x.shape)
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ValueError(f"{operator}: dim must be from {-dims} to {dims - 1}, got {dim}.")
    return dim % dims


def _at(x: BlockSparseTensor, dim: int, axis: Axis) -> tuple[Axes, tuple[int, ...]]:
    """What happens to x, and its shape then, where `axis` happens to one dimension."""
    *lead, m, n = x.shape
    shape = (*x.shape[:dim], axis.length, *x.shape[dim + 1 :])
    if dim == len(lead):
        return (axes.whole(math.prod(lead)), axis, axes.whole(n)), shape
    if dim > len(lead):
        return (axes.whole(math.prod(lead)), axes.whole(m), axis), shape
    return (axes.along(lead, dim, axis), axes.whole(m), axes.whole(n)), shape


def _check_result(operator: str, layout: Layout, shape: tuple[int, ...], x: BlockSparseTensor) -> None:
    check_layouts(operator, layout=layout)
    if layout.dense_shape != shape or layout.block_size != x.layout.block_size:
        raise ValueError(
            f"{operator}: layout must be of {list(shape)} elements in blocks of {x.layout.block_size}, got "
            f"{list(layout.dense_shape)} in blocks of {layout.block_size}."
        )
    checks.same_device(operator, "layout", layout.device, x=x.values)


def _check_alike(operator: str, first: BlockSparseTensor, x: BlockSparseTensor, name: str, dim: int) -> None:
    shapes = [[size for k, size in enumerate(t.shape) if k != dim] for t in (first, x)]
    if len(x.shape) != len(first.shape) or shapes[0] != shapes[1] or x.layout.block_size != first.layout.block_size:
        raise ValueError(
            f"{operator}: {name} must be like tensors[0] but for dim {dim}, {list(first.shape)} in blocks of "
            f"{first.layout.block_size}, got {list(x.shape)} in blocks of {x.layout.block_size}."
        )
    if x.dtype != first.dtype:
        names = checks.name_of(first.dtype), checks.name_of(x.dtype)
        raise TypeError(f"{operator}: {name} must be {names[0]} like tensors[0], got {names[1]}.")
    checks.same_device(operator, "tensors[0]", first.device, **{name: x.values})


MOVES = 16
"""Of how many repetitions a layout keeps what follows from them."""
Source = tuple[Tensor, Tensor, Tensor, Tensor]
"""nnz `[1]`, each block's row and column, and the number of each place's block."""


def _side_by_side(tensors: Sequence[BlockSparseTensor], dim: int) -> tuple[Tensor, Source, tuple[int, int]]:
    """(values, where they are, size) of tensors whose grids of blocks stand side by side, their blocks as they were."""
    layouts = [x.layout for x in tensors]
    first = layouts[0]
    values = torch.cat([x.values for x in tensors])
    grids, rows, cols, ahead, places = [], [], [], 0, 0
    total = sum(layout.shape[dim] for layout in layouts)
    inner = math.prod(first.shape[dim + 1 : -1])
    for layout in layouts:
        grid, at = layout.positions.view(layout.shape), layout.row_indices
        grids.append(torch.where(grid >= 0, grid.clamp(max=layout.capacity - 1) + ahead, -1))
        if dim == len(first.shape) - 1:
            rows.append(at)
            cols.append(torch.where(at >= 0, layout.col_indices + places, -1))
        else:
            # A row's number changes with those that stand before it.
            step = layout.shape[dim] * inner
            there = at // max(step, 1) * (total * inner) + at % max(step, 1) + places * inner
            rows.append(torch.where(at >= 0, there, -1))
            cols.append(layout.col_indices)
        ahead, places = ahead + layout.capacity, places + layout.shape[dim]
    # One that overflowed spoils all.
    lost = torch.stack([layout.overflowed for layout in layouts]).any()
    nnz = torch.where(lost, ahead + 1, 0).int().view(1)
    size = [first.size[0], first.size[1]]
    if dim >= len(first.shape) - 2:
        axis = dim - len(first.shape)
        size[axis] = total * first.block_size[axis]
    source = nnz, torch.cat(rows).int(), torch.cat(cols).int(), torch.cat(grids, dim).int().reshape(-1)
    return values, source, (size[0], size[1])


def _pull(
    values: Tensor, source: Source, size: tuple[int, int], layout: Layout, moved: Axes | Moved
) -> BlockSparseTensor:
    """`layout`'s blocks, each element from where the axes say."""
    block, device = layout.block_size, values.device
    move = moved if isinstance(moved, Moved) else Moved(moved)
    tile = [move.axes[1].tile(values.shape[1], block[0]), move.axes[2].tile(values.shape[2], block[1])]
    maps, inverses = [None] * 3, [None] * 3
    # Operators read no map where source or result has no elements.
    if 0 not in (*size, *layout.dense_shape, source[3].numel()):
        maps = move.once("maps", lambda: move.maps(device))
        inverses = move.once("inverses", lambda: move.inverses(device)) if needs_gradient(values) else inverses
    sizes = [*size, *layout.size]
    call = undispatched(_rearrange, values)
    out = call(values, *source, *layout.places, *maps, *inverses, sizes, list(block), tile)
    return BlockSparseTensor(out, layout)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:15])
    ctx.sizes, ctx.tile = list(inputs[15]), list(inputs[17])
    ctx.block = list(inputs[0].shape[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same with source and result exchanged; what a source became several times is added."""
    kept = ctx.saved_tensors
    source, result, maps, inverses = kept[:4], kept[4:8], kept[8:11], kept[11:14]
    m, n, m_out, n_out = ctx.sizes
    sizes = [m_out, n_out, m, n]
    call = undispatched(_rearrange, grad)
    return (call(grad, *result, *source, *inverses, *maps, sizes, ctx.block, ctx.tile), *[None] * 17)


_PARTS = "Tensor {0}nnz, Tensor {0}rows, Tensor {0}cols, Tensor {0}positions"
_rearrange = register(
    f"blocksparse_rearrange(Tensor values, {_PARTS.format('')}, {_PARTS.format('out_')}, Tensor? z_map, Tensor? i_map, "
    "Tensor? j_map, Tensor? z_inverse, Tensor? i_inverse, Tensor? j_inverse, SymInt[] sizes, SymInt[] block, "
    "SymInt[] tile) -> Tensor",
    cpu=_cpu,
    fake=lambda values, *rest: values.new_empty(rest[5].shape[0], *rest[15]),
    setup_context=_keep,
    backward=_backward,
)
