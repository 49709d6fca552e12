"""Mistakes in block-sparse tensors and layouts, and differences that keep them apart."""

from __future__ import annotations

from typing import Any

import torch

from gossamer._core import checks
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.tensor import BlockSparseTensor


def validate(*operands: BlockSparseTensor | Layout) -> None:
    """Raises an error that names everything that is wrong with operands, and that keeps them from sharing a layout.

    Operators check what the host knows at each call. This asks the device as well, which costs syncs: it is for
    finding a mistake, and needs no switch.

    Args:
        operands: tensors or layouts. Each is looked at by itself: a layout must not have overflowed, and its parts must
            belong together. Then each is compared with the first: device, block size, shape, dtype of values, blocks;
            and of two tensors, whether they share one `Layout`, as arithmetic asks.

    Raises:
        ValueError: something is wrong; one line each.
        TypeError: an operand is neither a `BlockSparseTensor` nor a `Layout`.

    Source: Schön and Tompits, blksprs, section 3.3 (validation).

    >>> validate(Layout.from_mask(torch.ones(2, 2).bool(), 16, capacity=3))
    Traceback (most recent call last):
    ValueError: blocksparse.validate: 1 thing is wrong.
    - operand 0: 4 blocks are present, but there is room for 3. Make the layout with capacity=4 or more.
    """
    operator = "blocksparse.validate"
    for k, operand in enumerate(operands):
        if not isinstance(operand, BlockSparseTensor | Layout):
            raise TypeError(
                f"{operator}: operand {k} must be a BlockSparseTensor or a Layout, got {type(operand).__name__}."
            )
    found, layouts = [], [x if isinstance(x, Layout) else x.layout for x in operands]
    for k, (operand, layout) in enumerate(zip(operands, layouts)):
        lines = _alone(layout) + (_beside(operands[0], operand, layouts[0], layout) if k else [])
        found += [f"operand {k}: {line}" for line in lines]
    if found:
        many = "1 thing is" if len(found) == 1 else f"{len(found)} things are"
        raise ValueError("\n- ".join([f"{operator}: {many} wrong.", *found]))


def _alone(layout: Layout) -> list[str]:
    """The mistakes in a layout."""
    nnz, room = int(layout.nnz), layout.capacity
    if nnz > room:
        return [f"{nnz} blocks are present, but there is room for {room}. Make the layout with capacity={nnz} or more."]
    anew = Layout.from_mask(layout.to_dense(), layout.block_size, size=layout.size, capacity=room)
    parts = "row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_order", "positions"
    wrong = ", ".join(name for name in parts if not torch.equal(getattr(layout, name), getattr(anew, name)))
    if not wrong:
        return []
    return [f"{wrong} of the layout do not belong to its blocks. Make it with Layout.from_mask, and keep it."]


def _beside(one: Any, other: Any, first: Layout, layout: Layout) -> list[str]:
    """The reason why the first operand and another one do not share a layout."""
    tensors = isinstance(one, BlockSparseTensor) and isinstance(other, BlockSparseTensor)
    if layout.device != first.device:
        return [f"it is on {layout.device}, operand 0 on {first.device}. Move it with .to."]
    if layout.block_size != first.block_size:
        here, there = (f"{a} x {b}" for a, b in (layout.block_size, first.block_size))
        return [f"its blocks are {here}, those of operand 0 {there}. Use adapt."]
    if layout.dense_shape != first.dense_shape:
        return [f"it is of {list(layout.dense_shape)} elements, operand 0 of {list(first.dense_shape)}."]
    if tensors and one.dtype != other.dtype:
        return [f"its values are {checks.name_of(other.dtype)}, those of operand 0 {checks.name_of(one.dtype)}."]
    more = layout.to_dense() & ~first.to_dense(), ~layout.to_dense() & first.to_dense()
    extra, missing = (int(mask.sum()) for mask in more)
    if extra or missing:
        return [f"it has {extra} blocks that operand 0 lacks, and lacks {missing} that operand 0 has. Use adapt."]
    if tensors and not layout.is_same(first):
        return ["it has the blocks of operand 0, but a Layout of its own: give both one Layout, or use adapt."]
    return []
