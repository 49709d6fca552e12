"""Which elements of a layout's blocks take part: bits of the blocks that are cut, and where each block's bits stand.

A buffer of elements is int32 `[capacity + P * words]`. Its first numbers say for each block where its words begin in
the buffer, 0 where every element takes part. A cut block has `height` lines of `ceil(width / 32)` words: bit j of word
w of a line is the element in column 32 w + j. Behind them stand the same bits of the transposed block, so that kernels
that own keys read whole lines as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gossamer.blocksparse.layout import Layout

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(matrix `[P, 1, 1]`, row `[P, height, 1]`, column `[P, 1, width]`) -> which of these elements take part, bool."""
_CHUNK = 1 << 22
"""Elements that are looked at together."""


def words_of(block: tuple[int, int]) -> int:
    """Words of a cut block."""
    (height, width) = block
    return height * -(-width // 32) + width * -(-height // 32)


def pack(inside: Tensor) -> Tensor:
    """Bool `[P, height, width]` -> int32 `[P, words]`."""
    return torch.cat([_lines(inside), _lines(inside.mT)], 1)


def _lines(inside: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(inside, (0, -inside.shape[2] % 32)).unflatten(2, (-1, 32))
    shifts = torch.arange(32, dtype=torch.int32, device=inside.device)
    # No two have a bit in common, so that their sum is exact, the sign's bit included.
    return (padded.to(torch.int32) << shifts).sum(3, dtype=torch.int32).flatten(1)


def unpack(words: Tensor, block: tuple[int, int]) -> Tensor:
    """int32 `[P, words]` -> bool `[P, height, width]`."""
    height, width = block
    lines = words[:, : height * -(-width // 32)].view(-1, height, -(-width // 32), 1)
    bits = lines >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(2)[:, :, :width] != 0


def build(cut: Tensor, room: int, block: tuple[int, int], words: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The buffer of a layout whose blocks `cut`, bool `[capacity]`, are cut, at most `room` of them; None of none.
    `words` makes those of some blocks, by their numbers."""
    capacity, size = cut.shape[0], words_of(block)
    if room == 0:
        return None
    if capacity + room * size >= 1 << 31:
        raise ValueError(
            f"blocksparse.Layout: the elements of at most {(1 << 31) // size} cut blocks can be stored, got {room}. "
            "Use larger blocks, or elements=False for whole ones."
        )
    slot = cut.cumsum(0) - 1
    number = torch.arange(capacity, device=cut.device)
    listed = number.new_zeros(room + 1).scatter(0, torch.where(cut, slot.clamp(max=room), room), number)[:room]
    step = max(1, _CHUNK // (block[0] * block[1]))
    parts = [words(some).flatten() for some in listed.split(step)]
    starts = torch.where(cut, capacity + slot * size, 0).to(torch.int32)
    return torch.cat([starts, *parts])


def of_rule(layout: Layout, cut: Tensor, room: int, rule: Rule) -> Tensor | None:
    """The buffer of a layout of which `cut`, bool `[..., rows, cols]`, are the blocks that a rule may cut."""
    (height, width), rows, device = layout.block_size, max(layout.rows, 1), layout.device

    def words(number: Tensor) -> Tensor:
        line, column = layout.row_indices[number].long().clamp(min=0), layout.col_indices[number].long().clamp(min=0)
        row = (line % rows * height)[:, None] + torch.arange(height, device=device)
        key = (column * width)[:, None] + torch.arange(width, device=device)
        inside = rule((line // rows)[:, None, None], row[:, :, None], key[:, None, :])
        return pack(inside.expand(len(number), height, width))

    return build(_at_blocks(layout, cut), room, layout.block_size, words)


def _at_blocks(layout: Layout, grid: Tensor) -> Tensor:
    """Bool `[capacity]`: what a grid `[..., rows, cols]` says of each block."""
    at = layout.row_indices.long() * layout.cols + layout.col_indices
    if grid.numel() == 0:
        return torch.zeros_like(at, dtype=torch.bool)
    return grid.reshape(-1)[at.clamp(min=0)] & (layout.row_indices >= 0)


def starts_of(layout: Layout) -> Tensor:
    """int32 `[..., rows, cols]`: where the words of each block begin; 0 of a whole block, -1 of an absent one."""
    number = layout.positions.view(layout.shape).clamp(max=layout.capacity - 1)
    if layout.elements is None:
        return number.clamp(max=0)
    return torch.where(number < 0, -1, layout.elements[number.clamp(min=0)])


def joined(layout: Layout, cut: Tensor, room: int, operands: tuple[Layout, ...], union: bool) -> Tensor | None:
    """The buffer of a union or an intersection, of which `cut` are the blocks that it may cut."""
    block, size = layout.block_size, words_of(layout.block_size)
    tables = [(starts_of(operand).expand(layout.shape).reshape(-1), operand.elements) for operand in operands]

    def words(number: Tensor) -> Tensor:
        at = (layout.row_indices[number].long() * layout.cols + layout.col_indices[number]).clamp(min=0)
        found = None
        for starts, elements in tables:
            start = starts[at][:, None].long()
            # All bits, also those beyond the width of a narrow block, which nothing reads.
            own = torch.where(start < 0, 0, -1).to(torch.int32).expand(-1, size)
            if elements is not None:
                stored = elements[(start + torch.arange(size, device=at.device)).clamp(0, elements.shape[0] - 1)]
                own = torch.where(start > 0, stored, own)
            found = own if found is None else found | own if union else found & own
        assert found is not None
        return found

    return build(_at_blocks(layout, cut), room, block, words)


def transposed(layout: Layout) -> Tensor | None:
    """The buffer of the transposed layout: its blocks in their own order, their bits with both halves exchanged."""
    if layout.elements is None:
        return None
    (height, width), capacity = layout.block_size, layout.capacity
    order = layout.transpose_order.long().clamp(min=0)
    starts = torch.where(layout.transpose_order < 0, 0, layout.elements[order])
    words = layout.elements[capacity:].view(-1, words_of(layout.block_size))
    own = height * -(-width // 32)
    return torch.cat([starts, torch.cat([words[:, own:], words[:, :own]], 1).flatten()])


def to_dense(layout: Layout) -> Tensor:
    """Bool `[Z * rows, cols, height, width]`: which elements take part."""
    block, grid = layout.block_size, starts_of(layout).view(-1, layout.cols)
    inside = (grid >= 0)[:, :, None, None].expand(*grid.shape, *block)
    if layout.elements is None:
        return inside
    at = grid.clamp(min=0).long()[:, :, None] + torch.arange(words_of(block), device=grid.device)
    at = at.clamp(max=layout.elements.shape[0] - 1)
    bits = unpack(layout.elements[at].flatten(0, 1), block).view(*grid.shape, *block)
    return torch.where((grid > 0)[:, :, None, None], bits, inside)
