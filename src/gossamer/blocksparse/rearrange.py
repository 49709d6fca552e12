"""Block-sparse matrices repeated, split, joined, and laid out in other blocks: blocks, or parts of them, are moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient
from gossamer.blocksparse import axes
from gossamer.blocksparse._torch.rearrange import rearrange as _cpu
from gossamer.blocksparse.axes import Axes, Axis
from gossamer.blocksparse.layout import BlockSize, Layout, check_block_size, check_layouts, room_for
from gossamer.blocksparse.lists import Form, half_of
from gossamer.blocksparse.records import BlocksparseRearrange
from gossamer.blocksparse.rows import fill_outside
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

MOST = 16
"""Repetitions of one layout that are kept."""
_repetitions: Any = WeakTensorKeyDictionary()
"""By the buffer of a layout: its repetitions, by their arguments. Tensors of one layout have repetitions of one layout,
which arithmetic asks for."""
Made = TypeVar("Made")
Maps = tuple[list[Tensor | None], list[Tensor | None]]
"""Maps of the three axes, and their inverses."""
Source = tuple[Tensor, Form]
"""The buffer of a layout, or its half of rows, and the form."""


def repeat(
    x: BlockSparseTensor, sizes: Sequence[int], *, interleave: bool = False, layout: Layout | None = None
) -> BlockSparseTensor:
    """x repeated along its dimensions, as `torch.Tensor.repeat`; with `interleave` each row, column and matrix follows
    itself, as in `torch.repeat_interleave`.

    Args:
        x: `[..., M, N]`, of any dtype.
        sizes: how often along each dimension; more of them than dimensions make new leading ones.
        layout: of the result, if it is known: blocks that it lacks are left out. None makes it, without a sync, with
            room for as many blocks as there can be.

    Returns:
        `BlockSparseTensor`, differentiable in x. Where M or N is repeated and not of whole blocks, blocks are cut anew.
        If a layout overflowed, every value is NaN.

    Raises:
        ValueError: there are fewer sizes than dimensions, one is below 0, or layout does not fit.
        TypeError: x is no `BlockSparseTensor`, or a size no int.

    Source: Schön and Tompits, blksprs, section 3.3.

    >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> repeat(x, (2, 1, 3)).shape, repeat(x, (2, 1), interleave=True).to_dense()[:3, 0].tolist()
    ((2, 32, 96), [1.0, 1.0, 1.0])
    """
    operator = "blocksparse.repeat"
    check_blocks(operator, x=x)
    _check_sequence(operator, "sizes", sizes, "ints")
    if len(sizes) < len(x.shape):
        raise ValueError(f"{operator}: sizes must name each of the {len(x.shape)} dimensions of x, got {tuple(sizes)}.")
    for size in sizes:
        if size != 0 or not isinstance(size, int) or isinstance(size, bool):
            checks.positive(operator, "sizes", size, "They say how often x is repeated along each dimension.")
    whole = (*[1] * (len(sizes) - len(x.shape)), *x.shape)
    shape = tuple(a * b for a, b in zip(whole, sizes))
    block, source = x.layout.block_size, x.layout

    def make() -> tuple[Axes, Maps, Layout]:
        rows, cols = (axes.repeated(length, times, interleave) for length, times in zip(whole[-2:], sizes[-2:]))
        moved = z, _, _ = axes.tiled(whole[:-2], sizes[:-2], interleave), rows, cols
        mask = _reached(source, moved, block)
        room = source.capacity * z.copies * rows.spread(block[0], block[0]) * cols.spread(block[1], block[1])
        maps = _maps(moved, source.form, shape, x.device, True)
        return moved, maps, _result(mask, shape, block, min(room, mask.numel()))

    moved, maps, made = _kept(source, (*sizes, interleave), make)
    if layout is not None:
        _check_result(operator, layout, shape, x)
    return _pull(x.values, (source.buffer, source.form), made if layout is None else layout, moved, maps)


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
        _check_sequence(operator, "split_size", split_size, "ints")
        sizes = list(split_size)
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"{operator}: split_size must be a list or tuple of ints, got {sizes}.")
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise ValueError(f"{operator}: split_size must add up to {total}, the size of dim {dim}, got {sizes}.")
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    pieces = [_at(x, dim, axes.part(total, start, size)) for start, size in zip(starts, sizes)]
    block = x.layout.block_size
    masks = [_reached(x.layout, moved, block) for moved, _ in pieces]
    room = [capacity] * len(pieces)
    if capacity is None:
        checks.no_sync(operator, "capacity=None", "Give a capacity; that of x is enough for pieces of whole blocks.")
        room = torch.stack([mask.sum() for mask in masks]).tolist()
    found = []
    for (moved, shape), mask, most in zip(pieces, masks, room):
        result = _result(mask, shape, block, most)
        found.append(_pull(x.values, (x.layout.buffer, x.layout.form), result, moved))
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
    _check_sequence(operator, "tensors", tensors, "BlockSparseTensors")
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
    grids, ahead, lengths = [], 0, [x.shape[dim] for x in tensors]
    for x in tensors:
        grid = x.layout.positions.view(x.layout.shape)
        grids.append(torch.where(grid >= 0, grid + ahead, -1) if ahead else grid)
        ahead += x.layout.capacity
    # A tensor that overflowed spoils all.
    lost = torch.stack([x.layout.overflowed for x in tensors]).any()
    shape = (*first.shape[:dim], sum(lengths), *first.shape[dim + 1 :])
    return _joined(operator, first, torch.cat([x.values for x in tensors]), grids, lost, shape, dim, lengths, layout)


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
    _check_sequence(operator, "tensors", tensors, "BlockSparseTensors")
    for k, x in enumerate(tensors):
        check_blocks(operator, **{f"tensors[{k}]": x})
    places = len(tensors[0].shape) - 1 if tensors else 1
    if not isinstance(dim, int) or not -places - 2 <= dim < places or not 0 <= dim % (places + 2) < places:
        raise ValueError(f"{operator}: dim must be a place for a leading dimension, from 0 to {places - 1}, got {dim}.")
    dim %= places + 2
    parts = []
    for x in tensors:
        lead = (*x.layout.lead[:dim], 1, *x.layout.lead[dim:])
        parts.append(BlockSparseTensor(x.values, replace(x.layout, lead=lead)))
    return _cat(operator, parts, dim, layout)


def merge(x: BlockSparseTensor, dim: int, into: int = -1, *, layout: Layout | None = None) -> BlockSparseTensor:
    """The matrices of a leading dimension one after the other along another one: of heads `[B, H, T, D]`, for instance,
    `[B, T, H * D]`. The result is that of `cat` on the slices of x along dim, in one step.

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
    given, times = x.layout, x.shape[dim]
    rest = [size for k, size in enumerate(x.shape) if k != dim]
    into -= into > dim
    lengths, rest[into] = [rest[into]] * times, rest[into] * times
    grids = given.positions.view(given.shape).unbind(dim)
    return _joined(operator, x, x.values, grids, given.overflowed, tuple(rest), into, lengths, layout)


def _joined(
    operator: str,
    like: BlockSparseTensor,
    values: Tensor,
    grids: Sequence[Tensor],
    lost: Tensor,
    shape: tuple[int, ...],
    dim: int,
    lengths: list[int],
    layout: Layout | None,
) -> BlockSparseTensor:
    """Parts side by side, of `lengths` elements along `dim`, as one tensor of `shape`. A part is a grid `[..., rows,
    cols]` of the numbers of its blocks among `values`, -1 where one is absent; `lost` says whether blocks are missing.
    """
    capacity, block, axis = values.shape[0], like.layout.block_size, dim - len(shape)
    ends = [axes.whole(shape[-2]), axes.whole(shape[-1])]
    if axis >= -2:
        ends[axis] = axes.joined(lengths, block[axis])
    moved = axes.whole(math.prod(shape[:-2])), ends[0], ends[1]
    # The blocks stay in their order, in which a half of a buffer says where they stand: parts begin with blocks.
    grid = torch.cat(list(grids), dim)
    *lead, rows, cols = grid.shape
    form = Form(math.prod(lead), rows, cols, *block, ends[0].source, ends[1].source, capacity)
    # Where blocks are missing a number may be beyond all: places without a block go behind the last.
    number = torch.where(grid >= 0, grid, capacity).clamp(max=capacity).flatten().long()
    places = torch.arange(grid.numel(), dtype=torch.int32, device=grid.device)
    at = torch.full((capacity + 1,), -1, dtype=torch.int32, device=grid.device).scatter_(0, number, places)[:-1]
    lines, columns = at.div(max(cols, 1), rounding_mode="floor"), at % max(cols, 1)
    buffer = half_of(form, torch.where(lost, capacity + 1, 0).view(1), columns, lines, grid)
    if layout is None:
        mask = _reach((grid >= 0).view(form[:3]), moved, block, block)
        room = capacity * ends[0].spread(block[0], block[0]) * ends[1].spread(block[1], block[1])
        layout = _result(mask, shape, block, min(room, mask.numel()))
    else:
        _check_result(operator, layout, shape, like)
    return _pull(values, (buffer, form), layout, moved)


@overload
def adapt(
    x: BlockSparseTensor, to: Layout | BlockSize, *, prune: bool = False, capacity: int | None = None
) -> BlockSparseTensor: ...


@overload
def adapt(x: Layout, to: BlockSize, *, capacity: int | None = None) -> Layout: ...


def adapt(x: Any, to: Any, *, prune: bool = False, capacity: int | None = None) -> Any:
    """The same matrices in other blocks.

    Args:
        x: a `BlockSparseTensor` `[..., M, N]` of any dtype, or a `Layout`.
        to: a block size, 16, 32, 64 or 128, or `(height, width)`, for blocks that cover all of x; or for a tensor a
            `Layout` of the same shape in elements.
        prune: whether the result of a tensor has only those blocks that hold anything but zeros; NaN is kept.
        capacity: as in `Layout.from_mask`, for a block size, or with `prune`. For smaller blocks None makes room for
            all that there can be, and costs no sync.

    Returns:
        `BlockSparseTensor`, differentiable in x, or a `Layout`. Blocks that x lacks, and parts of them, are zero;
        elements for which a given layout has no block are left out. If a layout overflowed, every value is NaN.

    Raises:
        ValueError: the layout has another shape or device, or there are no blocks of such a size.
        TypeError: x is neither.

    Source: Schön and Tompits, blksprs, section 3.3 (layout adaptation).

    >>> x = from_dense(torch.ones(64, 64), Layout.from_mask(torch.eye(4).bool(), 16))
    >>> adapt(x, 32).values.sum(dim=(1, 2)).tolist(), adapt(x.layout, 64).shape
    ([512.0, 512.0], (1, 1))
    """
    operator = "blocksparse.adapt"
    if isinstance(x, Layout):
        return _adapted(x, check_block_size(operator, to), capacity)
    check_blocks(operator, x=x)
    if isinstance(to, int | tuple):
        to = _adapted(x.layout, check_block_size(operator, to), None if prune else capacity)
    check_layouts(operator, to=to)
    if to.dense_shape != x.shape:
        raise ValueError(f"{operator}: to must be of {list(x.shape)} elements like x, got {list(to.dense_shape)}.")
    checks.same_device(operator, "to", to.device, x=x.values)
    out = realigned(x, to)
    if not prune:
        return out
    held = (fill_outside(out.values, to, 0) != 0).flatten(1).any(1)
    mask = ((to.positions >= 0) & held[to.positions.clamp(0, to.capacity - 1)]).view(to.form[:3])
    room, _, filled = room_for(operator, mask, None, capacity)
    # No more room than there was: where blocks are missing, the result says so.
    pruned = _result(mask, x.shape, to.block_size, min(room, to.capacity) if capacity is None else room)
    return realigned(out, replace(pruned, filled=filled))


def realigned(x: BlockSparseTensor, layout: Layout) -> BlockSparseTensor:
    """x in the blocks of another layout, which may have fewer rows and columns."""
    return _pull(x.values, (x.layout.buffer, x.layout.form), layout, _unmoved(layout))


def _unmoved(layout: Layout) -> Axes:
    return axes.whole(layout.batch), axes.whole(layout.size[0]), axes.whole(layout.size[1])


def _adapted(layout: Layout, block: tuple[int, int], capacity: int | None) -> Layout:
    """The layout in blocks of another size that covers another."""
    mask = _reached(layout, _unmoved(layout), block)
    (height, width), (h, w) = layout.block_size, block
    if capacity is None and h <= height and w <= width:
        capacity = max(1, min(layout.capacity * (height // h) * (width // w), mask.numel()))
    return _result(mask, layout.dense_shape, block, capacity)


def _kept(layout: Layout, key: Hashable, make: Callable[[], Made]) -> Made:
    """The result of `make`, kept for the layout; one inside of a graph is not kept, as only a replay computes it."""
    if torch.compiler.is_compiling() or type(layout.buffer) is not Tensor:
        return make()
    kept = _repetitions.setdefault(layout.buffer, {})
    key = layout.lead, layout.form, key
    if key in kept:
        found: Made = kept[key]
        return found
    # A gradient may ask later for what inference made first.
    with torch.inference_mode(False):
        made = make()
    if not checks.capturing():
        if len(kept) >= MOST:
            kept.clear()
        kept[key] = made
    return made


def _maps(moved: Axes, form: Form, shape: Sequence[int], device: torch.device, differentiable: bool) -> Maps:
    """Sources, and where they go. Operators read no map where source or result has no elements."""
    if not (form.z * form.m * form.n and math.prod(shape)):
        return [None] * 3, [None] * 3
    return axes.maps(moved, device), axes.inverses(moved, device) if differentiable else [None] * 3


def _result(mask: Tensor, shape: Sequence[int], block: tuple[int, int], capacity: int | None) -> Layout:
    """The layout of a mask `[Z, rows, cols]`, for a tensor of `shape`."""
    mask = mask.view(*shape[:-2], *mask.shape[1:])
    room = None if capacity is None else max(capacity, 1)
    return Layout.from_mask(mask, block, size=(shape[-2], shape[-1]), capacity=room)


def _reached(layout: Layout, moved: Axes, block: tuple[int, int]) -> Tensor:
    """Bool `[Z, rows, cols]`: blocks of the result that hold any of layout's."""
    return _reach((layout.positions >= 0).view(layout.form[:3]), moved, layout.block_size, block)


def _reach(mask: Tensor, moved: Axes, source: tuple[int, int], block: tuple[int, int]) -> Tensor:
    z, rows, cols = moved
    if z.forward is not None:
        mask = mask[z.forward(mask.device)]
    return cols.reach(rows.reach(mask, 1, source[0], block[0]), 2, source[1], block[1])


def _check_sequence(operator: str, argument: str, given: Any, members: str) -> None:
    if not isinstance(given, Sequence):
        raise TypeError(f"{operator}: {argument} must be a list or tuple of {members}, got {type(given).__name__}.")


def _dim(operator: str, x: BlockSparseTensor, dim: int) -> int:
    dims = len(x.shape)
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ValueError(f"{operator}: dim must be from {-dims} to {dims - 1}, got {dim}.")
    return dim % dims


def _at(x: BlockSparseTensor, dim: int, axis: Axis) -> tuple[Axes, tuple[int, ...]]:
    """The axes of x, and its shape, after `axis` happened to one dimension."""
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


def _pull(values: Tensor, source: Source, layout: Layout, moved: Axes, maps: Maps | None = None) -> BlockSparseTensor:
    """`layout`'s blocks, each element from where the axes say."""
    (buffer, form), block = source, layout.block_size
    tile = moved[1].tile(values.shape[1], block[0]), moved[2].tile(values.shape[2], block[1])
    if maps is None:
        maps = _maps(moved, form, layout.dense_shape, values.device, needs_gradient(values))
    given: Any = layout.form, *maps[0], *maps[1], tile
    call = BlocksparseRearrange(values, buffer, form, layout.buffer, *given)
    return BlockSparseTensor(_rearrange(call), layout)


def _backward(call: BlocksparseRearrange, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    """The same with source and result exchanged; a source that was taken several times gets a sum."""
    maps, inverses = call[5:8], call[8:11]
    ends = call.out_layout, call.out_form, call.layout, call.form
    return {"values": _rearrange(BlocksparseRearrange(grads[0], *ends, *inverses, *maps, call.tile))}


@register(
    BlocksparseRearrange,
    cpu=_cpu,
    fake=lambda call: call.values.new_empty(Form(*call.out_form).blocks),
    backward=_backward,
    saved=("layout", "out_layout", "z_map", "i_map", "j_map", "z_inverse", "i_inverse", "j_inverse"),
    repeats=True,
)
def _rearrange() -> Any:
    from gossamer.blocksparse._triton.rearrange import rearrange

    return rearrange
