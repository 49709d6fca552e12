"""What is wrong with block-sparse tensors and layouts, and what does not fit together."""

from __future__ import annotations

from typing import Any

import torch

from gossamer._core import checks
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.tensor import BlockSparseTensor


def validate(*operands: BlockSparseTensor | Layout, same_layout: bool = True, product: bool = False) -> None:
    """Raises an error that names everything that is wrong with operands, and that does not fit between them.

    Operators check what the host knows at each call. This asks the device as well, which costs syncs: it is for
    finding a mistake, and needs no switch.

    Args:
        operands: tensors or layouts. Each is looked at by itself: a layout must not have overflowed, and its parts must
            belong together. Then each is compared with the first: device, block size, shape, dtype of values, blocks;
            and of two tensors, whether they share one `Layout`, as arithmetic asks.
        same_layout: False takes layouts that store different blocks, or have different shapes, in blocks of one size.
        product: whether they are factors, `a @ b @ ...`. Each is compared with the one before it instead: its rows must
            be the columns of that, in blocks of the same size, and leading dimensions and devices must be equal.

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
        lines = _alone(layout)
        if k and product:
            lines += _behind(k - 1, layouts[k - 1], layout)
        elif k:
            lines += _beside(operands[0], operand, layouts[0], layout, same_layout)
        first = operands[0]
        if isinstance(operand, BlockSparseTensor) and isinstance(first, BlockSparseTensor):
            names = checks.name_of(operand.dtype), checks.name_of(first.dtype)
            lines += [f"its values are {names[0]}, those of operand 0 {names[1]}."] if names[0] != names[1] else []
        found += [f"operand {k}: {line}" for line in lines]
    if found:
        many = "1 thing is" if len(found) == 1 else f"{len(found)} things are"
        raise ValueError("\n- ".join([f"{operator}: {many} wrong.", *found]))


def _alone(layout: Layout) -> list[str]:
    """What is wrong with a layout."""
    nnz, room = int(layout.nnz), layout.capacity
    if nnz > room:
        return [f"{nnz} blocks are present, but there is room for {room}. Make the layout with capacity={nnz} or more."]
    anew = Layout.from_mask(layout.to_dense(), layout.block_size, size=layout.size, capacity=room)
    parts = "row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_order", "positions"
    wrong = ", ".join(name for name in parts if not torch.equal(getattr(layout, name), getattr(anew, name)))
    if not wrong:
        return []
    return [f"{wrong} of the layout do not belong to its blocks. Make it with Layout.from_mask, and keep it."]


def _behind(k: int, before: Layout, layout: Layout) -> list[str]:
    """What keeps operand k, `before`, from being multiplied with the next."""
    rows, columns, height, width = layout.size[0], before.size[1], layout.block_size[0], before.block_size[1]
    lines = {
        f"it is on {layout.device}, operand {k} on {before.device}. Move it with .to.": layout.device != before.device,
        f"it has {rows} rows, operand {k} {columns} columns. They meet in a product.": rows != columns,
        f"its blocks are {height} high, those of operand {k} {width} wide. Use adapt.": height != width,
        f"its leading dimensions are {list(layout.lead)}, those of operand {k} {list(before.lead)}. Use repeat.": (
            layout.lead != before.lead
        ),
    }
    return [line for line, wrong in lines.items() if wrong]


def _beside(one: Any, other: Any, first: Layout, layout: Layout, same_layout: bool) -> list[str]:
    """The differences between the layouts of the first operand and another one that keep them apart."""
    if layout.device != first.device:
        return [f"it is on {layout.device}, operand 0 on {first.device}. Move it with .to."]
    if layout.block_size != first.block_size:
        here, there = (f"{a} x {b}" for a, b in (layout.block_size, first.block_size))
        return [f"its blocks are {here}, those of operand 0 {there}. Use adapt; of factors say product=True."]
    if not same_layout:
        return []
    if layout.dense_shape != first.dense_shape:
        return [f"it is of {list(layout.dense_shape)} elements, operand 0 of {list(first.dense_shape)}."]
    more = layout.to_dense() & ~first.to_dense(), ~layout.to_dense() & first.to_dense()
    extra, missing = (int(mask.sum()) for mask in more)
    if extra or missing:
        return [f"it has {extra} blocks that operand 0 lacks, and lacks {missing} that operand 0 has. Use adapt."]
    if layout.is_same(first) or isinstance(one, Layout) or isinstance(other, Layout):
        return []
    way = "they are compared as objects. Give both one Layout, or use adapt."
    return [f"it has the blocks of operand 0, but a Layout of its own: {way}"]
