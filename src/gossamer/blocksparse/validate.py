"""What is wrong with block-sparse tensors and layouts, and what does not fit together."""

from __future__ import annotations

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
    found = []
    layouts = [x if isinstance(x, Layout) else x.layout for x in operands]
    for k, layout in enumerate(layouts):
        found += [f"operand {k}: {line}" for line in _alone(layout)]
    for k, operand in enumerate(operands[1:], 1):
        if product:
            found += [f"operand {k}: {line}" for line in _behind(k - 1, layouts[k - 1], layouts[k])]
        else:
            found += [f"operand {k}: {line}" for line in _beside(operands[0], operand, same_layout)]
        first = operands[0]
        if isinstance(operand, BlockSparseTensor) and isinstance(first, BlockSparseTensor):
            names = checks.name_of(operand.dtype), checks.name_of(first.dtype)
            if names[0] != names[1]:
                found.append(f"operand {k}: its values are {names[0]}, those of operand 0 {names[1]}.")
    if found:
        many = "1 thing is" if len(found) == 1 else f"{len(found)} things are"
        raise ValueError("\n- ".join([f"{operator}: {many} wrong.", *found]))


PARTS = ("row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_order", "positions")
"""The lists of a layout."""


def _alone(layout: Layout) -> list[str]:
    """What is wrong with a layout."""
    nnz, room = int(layout.nnz), layout.capacity
    if nnz > room:
        return [f"{nnz} blocks are present, but there is room for {room}. Make the layout with capacity={nnz} or more."]
    anew = Layout.from_mask(layout.to_dense(), layout.block_size, size=layout.size, capacity=room)
    wrong = [name for name in PARTS if not torch.equal(getattr(layout, name), getattr(anew, name))]
    if not wrong:
        return []
    return [
        f"{', '.join(wrong)} of the layout do not belong to its blocks. Make it with Layout.from_mask, and keep it."
    ]


def _behind(k: int, before: Layout, layout: Layout) -> list[str]:
    """What keeps operand k, `before`, from being multiplied with the next."""
    found = [_elsewhere(k, before, layout)] if layout.device != before.device else []
    if layout.size[0] != before.size[1]:
        found.append(f"it has {layout.size[0]} rows, operand {k} {before.size[1]} columns. They meet in a product.")
    if layout.block_size[0] != before.block_size[1]:
        found.append(
            f"its blocks are {layout.block_size[0]} high, those of operand {k} {before.block_size[1]} wide. Use adapt."
        )
    leads = layout.shape[:-2], before.shape[:-2]
    if leads[0] != leads[1]:
        found.append(f"its leading dimensions are {list(leads[0])}, those of operand {k} {list(leads[1])}. Use repeat.")
    return found


def _elsewhere(k: int, other: Layout, layout: Layout) -> str:
    return f"it is on {layout.device}, operand {k} on {other.device}. Move it with .to."


def _beside(one: BlockSparseTensor | Layout, other: BlockSparseTensor | Layout, same_layout: bool) -> list[str]:
    """What does not fit between the layouts of two operands."""
    first, layout = (x if isinstance(x, Layout) else x.layout for x in (one, other))
    if layout.device != first.device:
        return [_elsewhere(0, first, layout)]
    if layout.block_size != first.block_size:
        here, there = (f"{a} x {b}" for a, b in (layout.block_size, first.block_size))
        return [f"its blocks are {here}, those of operand 0 {there}. Use adapt; of factors say product=True."]
    if not same_layout:
        return []
    if layout.dense_shape != first.dense_shape:
        return [f"it is of {list(layout.dense_shape)} elements, operand 0 of {list(first.dense_shape)}."]
    more = layout.to_dense() & ~first.to_dense(), ~layout.to_dense() & first.to_dense()
    extra, missing = (int(mask.sum()) for mask in more)
    if not extra and not missing:
        if layout.is_same(first) or isinstance(one, Layout) or isinstance(other, Layout):
            return []
        return [
            "it has the blocks of operand 0, but a Layout of its own: they are compared as objects. Give both one "
            "Layout, or use adapt."
        ]
    return [f"it has {extra} blocks that operand 0 lacks, and lacks {missing} that operand 0 has. Use adapt."]
