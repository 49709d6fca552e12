"""Which elements of a layout's blocks take part: bits of the blocks that are cut, and the offset of each block's bits.

`Lists.elements` begins with an offset for each block, where its words begin, 0 where every element takes part. A cut
block has `height` lines of `ceil(width / 32)` words: bit j of word w of a line is the element in column 32 w + j.
Behind them stand the same bits of the transposed block, for kernels that own keys. The buffer of a layout stores
`[offsets | offsets for the transposed | words of the block, of the transposed block, and of the block once more]`, so
that the transposed layout reads its own words behind offsets of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.blocksparse.lists import aligned

if TYPE_CHECKING:
    from gossamer.blocksparse.layout import Layout

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(matrix `[P, 1, 1]`, row `[P, height, 1]`, column `[P, 1, width]`) -> which of these elements take part, bool."""
_CHUNK = 1 << 22
"""Elements that are looked at together."""


def own_words(block: tuple[int, int]) -> int:
    """Words of the lines of a block."""
    return block[0] * -(-block[1] // 32)


def words_of(block: tuple[int, int]) -> int:
    """Words of a cut block and of its transpose."""
    return own_words(block) + own_words(block[::-1])


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
    lines = words[:, : own_words(block)].view(-1, height, -(-width // 32), 1)
    bits = lines >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(2)[:, :, :width] != 0


def cut_among(elements: Tensor, entry: Tensor, block: tuple[int, int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """(the indices in `entry`, int, of blocks that are cut; the elements of these that take part, bool)."""
    starts = elements[entry].long()
    at = starts.nonzero(as_tuple=True)
    return at, unpack(elements[starts[at][:, None] + torch.arange(words_of(block))], block)


def with_elements(layout: Layout, grid: Tensor, room: int, words: Callable[[Tensor], Tensor]) -> Layout:
    """A new layout with the words of its cut blocks: of those that `grid`, bool `[..., rows, cols]`, names, at most
    `room`. `words` makes those of some blocks, by their numbers."""
    lists, block = layout.lists, layout.block_size
    (capacity, own), stored = (layout.capacity, own_words(block)), own_words(block) + words_of(block)
    if room == 0:
        return layout
    assert not layout.form.turned and not layout.form.cut
    head = aligned(capacity)
    if 2 * head + room * stored >= 1 << 31:
        raise ValueError(
            f"blocksparse.Layout: the elements of at most {(1 << 31) // stored} cut blocks can be stored, got {room}. "
            "Use larger blocks, or elements=False for whole ones."
        )
    row_indices = lists.row_indices
    at = row_indices.long() * layout.cols + lists.col_indices
    cut = row_indices < 0 if grid.numel() == 0 else grid.reshape(-1)[at.clamp(min=0)] & (row_indices >= 0)
    slot = cut.cumsum(0) - 1
    number = torch.arange(capacity, device=cut.device)
    listed = number.new_zeros(room + 1).scatter(0, torch.where(cut, slot.clamp(max=room), room), number)[:room]
    parts = []
    for some in listed.split(max(1, _CHUNK // (block[0] * block[1]))):
        made = words(some)
        parts.append(torch.cat([made, made[:, :own]], 1).flatten())
    offsets = torch.where(cut, 2 * head + slot * stored, 0).to(torch.int32)
    order = lists.transpose_order
    turned = torch.where(order < 0, 0, offsets[order.long().clamp(min=0)])
    turned = torch.where(turned > 0, turned - head + own, 0)
    padded = [torch.nn.functional.pad(x, (0, head - capacity)) for x in (offsets, turned)]
    buffer = torch.cat([layout.buffer, *padded, *parts])
    return replace(layout, buffer=buffer, form=layout.form._replace(cut=room))


def of_rule(layout: Layout, cut: Tensor, room: int, rule: Rule) -> Layout:
    """A layout with the elements of which `cut`, bool `[..., rows, cols]`, are the blocks that a rule may cut."""
    lists, (height, width), rows, device = layout.lists, layout.block_size, max(layout.rows, 1), layout.device

    def words(number: Tensor) -> Tensor:
        line, column = (part[number].long().clamp(min=0) for part in (lists.row_indices, lists.col_indices))
        row = (line % rows * height)[:, None] + torch.arange(height, device=device)
        key = (column * width)[:, None] + torch.arange(width, device=device)
        inside = rule((line // rows)[:, None, None], row[:, :, None], key[:, None, :])
        return pack(inside.expand(len(number), height, width))

    return with_elements(layout, cut, room, words)


def starts_of(layout: Layout) -> Tensor:
    """int32 `[..., rows, cols]`: where the words of each block begin; 0 of a whole block, -1 of an absent one."""
    number, elements = layout.positions.view(layout.shape).clamp(max=layout.capacity - 1), layout.elements
    return number.clamp(max=0) if elements is None else torch.where(number < 0, -1, elements[number.clamp(min=0)])


def joined(layout: Layout, cut: Tensor, room: int, operands: tuple[Layout, ...], union: bool) -> Layout:
    """A union or an intersection with its elements, of which `cut` are the blocks that it may cut."""
    size, lists = words_of(layout.block_size), layout.lists
    tables = [(starts_of(operand).expand(layout.shape).reshape(-1), operand.elements) for operand in operands]

    def of(start: Tensor, elements: Tensor | None) -> Tensor:
        # All bits, also those beyond the width of a narrow block, which nothing reads.
        own = torch.where(start < 0, 0, -1).to(torch.int32).expand(-1, size)
        if elements is None:
            return own
        stored = elements[(start + torch.arange(size, device=start.device)).clamp(0, elements.shape[0] - 1)]
        return torch.where(start > 0, stored, own)

    def words(number: Tensor) -> Tensor:
        at = (lists.row_indices[number].long() * layout.cols + lists.col_indices[number]).clamp(min=0)
        join = torch.bitwise_or if union else torch.bitwise_and
        return functools.reduce(join, [of(starts[at][:, None].long(), elements) for starts, elements in tables])

    return with_elements(layout, cut, room, words)


def to_dense(layout: Layout) -> Tensor:
    """Bool `[Z * rows, cols, height, width]`: which elements take part."""
    block, grid, elements = layout.block_size, starts_of(layout).view(-1, layout.cols), layout.elements
    inside = (grid >= 0)[:, :, None, None].expand(*grid.shape, *block)
    if elements is None:
        return inside
    at = grid.clamp(min=0).long()[:, :, None] + torch.arange(words_of(block), device=grid.device)
    bits = unpack(elements[at.clamp(max=elements.shape[0] - 1)].flatten(0, 1), block).view(*grid.shape, *block)
    return torch.where((grid > 0)[:, :, None, None], bits, inside)
