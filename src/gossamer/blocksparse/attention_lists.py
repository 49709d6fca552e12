"""The common part of the attention kernels of Triton and Gluon: configs, and the search of a layout's lists, all of it
on single numbers. Only kernel files import this module, which needs Triton."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from gossamer._core import launch
from gossamer.blocksparse.attention_path import Problem

INV_LN2 = 1.4426950408889634


class Tile(NamedTuple):
    """Queries and keys of a step, warps, stages of loads ahead, most registers of a thread (None: as many as it takes),
    and the depth of a ring of keys where it is not that of the values'."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    key_stages: int | None = None


@dataclass(frozen=True)
class Config:
    """The properties that the kernels of one attention are compiled for, as one constexpr.

    Blocks of the layout (`block_q` by `block_k`), the tile of a step, the widths of q and of values, whether layout
    and bias have a matrix of their own for each batch and head (and the bias a row for each query); the additions to
    the scores: a bias, and `terms` terms of relative positions of `window` numbers each.
    """

    block_q: int
    block_k: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None
    key_stages: int
    block_d: int
    block_v: int
    d: int
    dv: int
    causal: bool
    layout_batch: bool
    layout_head: bool
    bias: str = "none"
    bias_batch: bool = False
    bias_head: bool = False
    bias_query: bool = False
    terms: int = 0
    window: int = 0
    splits: int = 1
    precision: str = "ieee"
    upcast: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Of the launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def config_of(p: Problem, tile: Tile, *added: Any) -> Config:
    """The config of kernels for a problem; `added` are its fields from `bias` on."""
    keys = tile.stages if tile.key_stages is None else tile.key_stages
    wide = *(launch.next_power_of_2(max(d, 16)) for d in (p.d, p.dv)), p.d, p.dv
    fields: Any = (*p.block, *tile[:5], keys, *wide, p.causal, *p.own, *added)
    return Config(*fields)


@triton.jit
def matrix_of(batch, head, H, CONFIG: tl.constexpr):
    """Which matrix of the layout a batch and a head read."""
    z = head * 0
    if CONFIG.layout_head:
        z += head
        if CONFIG.layout_batch:
            z += batch * H
    elif CONFIG.layout_batch:
        z += batch
    return z


@triton.jit
def last_of(B, H, lines, CONFIG: tl.constexpr):
    """Where the offsets of a layout end, which is their total; `lines` are the rows or columns of a matrix."""
    if CONFIG.layout_head:
        lines *= H
    if CONFIG.layout_batch:
        lines *= B
    return lines


@triton.jit
def span(offsets_ptr, row, last, capacity):
    """(first entry, number of entries, whether the lists are incomplete) of a row; no entries where they are."""
    begin = tl.load(offsets_ptr + row)
    lost = tl.load(offsets_ptr + last) > capacity
    return begin, tl.where(lost, 0, tl.load(offsets_ptr + row + 1) - begin), lost


@triton.jit
def before(order_ptr, lines_ptr, begin, count, bound):
    """How many blocks of a list, in ascending order, stand before line `bound`. Without an order it is their own."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        block = begin + middle
        if order_ptr is not None:
            block = tl.load(order_ptr + block)
        less = tl.load(lines_ptr + block) < bound
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    return low


@triton.jit
def reached(lengths_ptr, batch, Tq, Tk):
    """(where a sequence's keys end, at which key the first query stands)."""
    limit = Tk
    if lengths_ptr is not None:
        limit = tl.minimum(tl.load(lengths_ptr + batch), Tk)
    return limit, tl.maximum(limit - Tq, tl.minimum(Tk - Tq, 0))


@triton.jit
def meeting(lines, limit, shift, lengths_ptr, Tq, CONFIG: tl.constexpr):
    """Which queries may meet a key: not one that, below a diagonal, stands in front of the first, or behind the keys of
    its sequence."""
    meet = lines < Tq
    if CONFIG.causal:
        meet = meet & (lines + shift >= 0)
        if lengths_ptr is not None:
            meet = meet & (lines + shift < limit)
    return meet


@triton.jit
def owner_of(program, Tq, CONFIG: tl.constexpr):
    """(tile of queries, head counted over batches) of a program. Below a diagonal the last queries meet most keys, and
    begin: a long row that began last would leave the GPU waiting."""
    tiles = tl.cdiv(Tq, CONFIG.block_q) * (CONFIG.block_q // CONFIG.block_m)
    tile = program % tiles
    if CONFIG.causal:
        tile = tiles - 1 - tile
    return tile, program // tiles


@triton.jit
def row_of(lists, lengths_ptr, tile, pair, sizes, CONFIG: tl.constexpr):
    """(first entry, entries, where the keys end, key of the first query, whether the lists are incomplete) of the row
    of blocks of a tile of queries, without the blocks that no query of the tile meets."""
    offsets_ptr, columns_ptr = lists
    B, H, _, Tq, Tk, capacity = sizes
    rows = tl.cdiv(Tq, CONFIG.block_q)
    row = matrix_of(pair // H, pair % H, H, CONFIG) * rows + tile * CONFIG.block_m // CONFIG.block_q
    begin, count, lost = span(offsets_ptr, row, last_of(B, H, rows, CONFIG), capacity)
    limit, shift = reached(lengths_ptr, pair // H, Tq, Tk)
    if CONFIG.causal or lengths_ptr is not None:
        end = limit
        if CONFIG.causal:
            end = tl.minimum(end, tl.maximum((tile + 1) * CONFIG.block_m + shift, 0))
        count = before(None, columns_ptr, begin, count, tl.cdiv(end, CONFIG.block_k))
    return begin, count, limit, shift, lost


@triton.jit
def column_of(lists, first, limit, shift, batch, head, sizes, CONFIG: tl.constexpr):
    """(first entry, entries, first row of blocks of the matrix, whether the lists are incomplete) of the column of
    blocks of a tile of keys from `first` on, without the blocks that none of them meets."""
    offsets_ptr, order_ptr, rows_ptr = lists
    B, H, _, Tq, Tk, capacity = sizes
    columns = tl.cdiv(Tk, CONFIG.block_k)
    z = matrix_of(batch, head, H, CONFIG)
    base = z * tl.cdiv(Tq, CONFIG.block_q)
    last = last_of(B, H, columns, CONFIG)
    begin, count, lost = span(offsets_ptr, z * columns + first // CONFIG.block_k, last, capacity)
    count = tl.where(first < limit, count, 0)
    if CONFIG.causal:
        # Block rows that end before these keys come first in the list, and meet none of them.
        past = before(order_ptr, rows_ptr, begin, count, base + tl.maximum(first - shift, 0) // CONFIG.block_q)
        begin += past
        count -= past
    return begin, count, base, lost
