"""Neighbouring rows that share entries: up and down projection over the union of a group's columns, on tensor cores.

Gathering reads a weight row for each row of x that has its entry. Where neighbours have the same entries, a group of
GROUP rows reads it once: its union of columns is a short list, and up and down are two products over gathered weight
rows. `count` finds how many columns of each tile a group has in all. What the group costs as a union and row by row is
known then, so `fill` decides which, and where the union is cheaper writes its list, ascending, and the entries' values
as a dense [GROUP, union] with zeros between. `up` multiplies them in place by x times the gathered rows of up, `down`
multiplies the result by the gathered rows of down. The list and the values have room for every column there is.

A tile's columns are told apart by a histogram of as many bins, so programs need nothing but their tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton.packed import SLOTS, TILE, Packed
from gossamer.ffn.costs import GROUP, PRICE, sampled_groups
from gossamer.rowsparse._triton.overflow import dot

PAD = tl.constexpr(128)
"""Columns of a union that are computed together, at most."""


@triton.jit
def light_rows(counts_ptr, rows, M, tiles, limit, BLOCK_T: tl.constexpr):
    """(whether rows are there and not heavy, how many entries each has)."""
    t = tl.arange(0, BLOCK_T)
    mask = (rows < M)[:, None] & (t < tiles)[None, :]
    counts = tl.load(counts_ptr + rows.to(tl.int64)[:, None] * tiles + t[None, :], mask=mask, other=0).to(tl.int32)
    total = tl.sum(counts, axis=1)
    return (rows < M) & (tl.max(counts, axis=1) <= SLOTS) & (total <= limit), total


@triton.jit
def load_columns(indices_ptr, counts_ptr, rows, light, at, tiles):
    """(offsets of a tile's slots, which of them hold an entry, its column), all [GROUP, SLOTS]."""
    cell = rows.to(tl.int64) * tiles + at
    count = tl.load(counts_ptr + cell, mask=light, other=0).to(tl.int32)
    s = tl.arange(0, SLOTS)
    place = cell[:, None] * SLOTS + s[None, :]
    held = s[None, :] < count[:, None]
    return place, held, tl.load(indices_ptr + place, mask=held, other=0).to(tl.int32)


@triton.jit
def _union_count_kernel(
    indices_ptr, counts_ptr, sizes_ptr, limit, tiles, step, M, GROUP: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Program (one of every `step` groups, tile): how many columns of the tile the group's light rows have."""
    group, at = tl.program_id(0), tl.program_id(1)
    rows = group * step * GROUP + tl.arange(0, GROUP)
    light, _ = light_rows(counts_ptr, rows, M, tiles, limit, BLOCK_T)
    _, held, column = load_columns(indices_ptr, counts_ptr, rows, light, at, tiles)
    found = tl.histogram(tl.reshape(column, [GROUP * SLOTS]), TILE, mask=tl.reshape(held, [GROUP * SLOTS]))
    tl.store(sizes_ptr + group.to(tl.int64) * tiles + at, tl.sum((found > 0).to(tl.int32), axis=0))


@triton.jit
def _union_fill_kernel(
    values_ptr, indices_ptr, counts_ptr, sizes_ptr, columns_ptr, dense_ptr, union_ptr, limit, tiles, M, room, price,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (group, tile): the tile's share of the list and of the values. union_ptr: the size of a group's union, or
    0 where its entries are fewer than `price` times that, and rows are gathered one by one. room: columns of `dense`
    and of the list."""
    group, at = tl.program_id(0), tl.program_id(1)
    rows = group * GROUP + tl.arange(0, GROUP)
    light, total = light_rows(counts_ptr, rows, M, tiles, limit, BLOCK_T)
    t = tl.arange(0, BLOCK_T)
    sizes = tl.load(sizes_ptr + group.to(tl.int64) * tiles + t, mask=t < tiles, other=0)
    union = tl.sum(sizes, axis=0)
    entries = tl.sum(tl.where(light, total, 0), axis=0)
    pays = union.to(tl.float32) * price <= entries.to(tl.float32)
    if at == 0:
        tl.store(union_ptr + group, tl.where(pays, union, 0))
    size = tl.sum(tl.where(t == at, sizes, 0), axis=0)
    if pays & (size > 0):
        base = tl.sum(tl.where(t < at, sizes, 0), axis=0)
        place, held, column = load_columns(indices_ptr, counts_ptr, rows, light, at, tiles)
        value = tl.load(values_ptr + place, mask=held, other=0.0)
        if SQUARED:
            value = (value.to(tl.float32) * value.to(tl.float32)).to(value.dtype)
        flat = tl.reshape(column, [GROUP * SLOTS])
        found = tl.histogram(flat, TILE, mask=tl.reshape(held, [GROUP * SLOTS])) > 0
        rank = tl.cumsum(found.to(tl.int32), axis=0) - 1
        tl.store(columns_ptr + group.to(tl.int64) * room + base + rank, at * TILE + tl.arange(0, TILE), mask=found)
        start = rows.to(tl.int64)[:, None] * room + base
        for first in range(0, size, BLOCK):
            u = first + tl.arange(0, BLOCK)
            zeros = tl.zeros([GROUP, BLOCK], dense_ptr.dtype.element_ty)
            tl.store(dense_ptr + start + u[None, :], zeros, mask=(rows < M)[:, None] & (u < size)[None, :])
        tl.debug_barrier()
        slot = tl.reshape(tl.gather(rank, flat, axis=0), [GROUP, SLOTS])
        tl.store(dense_ptr + start + slot, value, mask=held)
    if pays & (at == 0):
        # Up to a whole block there are zeros, so that the products need no masks.
        u = union // PAD * PAD + tl.arange(0, PAD)
        here = dense_ptr + rows.to(tl.int64)[:, None] * room + u[None, :]
        zeros = tl.zeros([GROUP, PAD], dense_ptr.dtype.element_ty)
        tl.store(here, zeros, mask=(rows < M)[:, None] & (u >= union)[None, :])


@triton.jit
def _union_up_kernel(
    x_ptr, up_ptr, up_bias_ptr, columns_ptr, union_ptr, dense_ptr, room, M, K,
    GROUP: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (group, share of its union): the values times x @ up.T at BLOCK_U columns of the union, in place."""
    group = tl.program_id(0)
    union = tl.load(union_ptr + group)
    rows = group * GROUP + tl.arange(0, GROUP)
    exists = rows < M
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + tl.where(exists, rows, 0).to(tl.int64)[None, :] * K + k[:, None]
    for first in range(tl.program_id(1) * BLOCK_U, union, tl.num_programs(1) * BLOCK_U):
        u = first + tl.arange(0, BLOCK_U)
        column = tl.load(columns_ptr + group.to(tl.int64) * room + u, mask=u < union, other=0)
        up_rows = up_ptr + column.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_U, GROUP], tl.float32)
        for step in range(0, K, BLOCK_K):
            if EVEN:
                x = tl.load(x_rows + step)
                up = tl.load(up_rows + step)
            else:
                x = tl.load(x_rows + step, mask=(k < K - step)[:, None], other=0.0)
                up = tl.load(up_rows + step, mask=(k < K - step)[None, :], other=0.0)
            acc = dot(up, x, acc, PRECISION, UPCAST)
        if up_bias_ptr is not None:
            acc += tl.load(up_bias_ptr + column).to(tl.float32)[:, None]
        # What the list is filled up with is multiplied by 0.
        at = dense_ptr + rows.to(tl.int64)[None, :] * room + u[:, None]
        value = tl.load(at, mask=exists[None, :], other=0.0).to(tl.float32)
        tl.store(at, tl.where(value == 0, 0.0, acc * value), mask=exists[None, :])


@triton.jit
def _union_down_kernel(
    dense_ptr, down_ptr, down_bias_ptr, columns_ptr, union_ptr, counts_ptr, out_ptr, limit, tiles, room, M, D,
    GROUP: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, FLIP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (group, slice of the result's columns): the values times the gathered rows of down, at light rows."""
    group = tl.program_id(0)
    union = tl.load(union_ptr + group)
    if union > 0:
        rows = group * GROUP + tl.arange(0, GROUP)
        light, _ = light_rows(counts_ptr, rows, M, tiles, limit, BLOCK_T)
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = d < D
        row_start = rows.to(tl.int64) * room
        columns_ptr += group.to(tl.int64) * room
        if FLIP:
            acc = tl.zeros([BLOCK_D, GROUP], tl.float32)
        else:
            acc = tl.zeros([GROUP, BLOCK_D], tl.float32)
        u = tl.arange(0, BLOCK_U)
        for first in range(0, union, BLOCK_U):
            held = first + u < union
            column = tl.load(columns_ptr + first + u, mask=held, other=0).to(tl.int64)
            mask = held[:, None] & inside[None, :]
            down = tl.load(down_ptr + column[:, None] * D + d[None, :], mask=mask, other=0.0)
            p = tl.load(dense_ptr + row_start[:, None] + (first + u)[None, :], mask=light[:, None], other=0.0)
            if FLIP:
                acc = dot(tl.trans(down), tl.trans(p), acc, PRECISION, UPCAST)
            else:
                acc = dot(p, down, acc, PRECISION, UPCAST)
        if down_bias_ptr is not None:
            bias = tl.load(down_bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
            acc += bias[:, None] if FLIP else bias[None, :]
        if FLIP:
            at = rows.to(tl.int64)[None, :] * D + d[:, None]
            tl.store(out_ptr + at, acc, mask=light[None, :] & inside[:, None])
        else:
            at = rows.to(tl.int64)[:, None] * D + d[None, :]
            tl.store(out_ptr + at, acc, mask=light[:, None] & inside[None, :])


_union_count = launch.Kernel(_union_count_kernel)
_union_fill = launch.Kernel(_union_fill_kernel)
_union_up = launch.Kernel(_union_up_kernel)
_union_down = launch.Kernel(_union_down_kernel)


@dataclass(frozen=True)
class Choice:
    """The two products take `up` = (columns of the union, of x) and `down` = (columns of the union, of the result) at a
    time, with so many warps and stages; FLIP transposes the latter. `shares` programs share a group's union in the
    first. price: entries that are gathered one by one in the time of a union's column."""

    up: tuple[int, int] = (64, 128)
    up_launch: tuple[int, int] = (4, 3)
    down: tuple[int, int] = (32, 256)
    down_launch: tuple[int, int] = (8, 4)
    flip: bool = False
    shares: int = 8
    price: float = PRICE


CHOICE = Choice()


@dataclass(frozen=True)
class Unions:
    """sizes: int32 [groups], 0 where rows are gathered one by one; columns and values at them: [groups, room], int32,
    and [M, room]."""

    sizes: Tensor
    columns: Tensor
    values: Tensor


def count(packed: Packed, limit: int, step: int) -> Tensor:
    """How many columns of each tile the rows of one of every `step` groups have, int32 [groups, tiles]; not counting
    rows of more than `limit` entries."""
    m, tiles, _ = packed.values.shape
    found = torch.empty(sampled_groups(m, step), tiles, dtype=torch.int32, device=packed.values.device)
    args = (packed.indices, packed.counts, found, limit, tiles, step, m)
    _union_count(args[3:], (*found.shape, 1), args, _meta(tiles), num_warps=4)
    return found


def unite(packed: Packed, limit: int, found: Tensor, n: int, squared: bool, choice: Choice = CHOICE) -> Unions:
    """The unions of groups of rows, of which `count` found so many columns, and the values at them."""
    m, tiles, _ = packed.values.shape
    groups, room = found.shape[0], launch.cdiv(n + 1, PAD.value) * PAD.value
    unions = Unions(found.new_empty(groups), found.new_empty(groups, room), packed.values.new_empty(m, room))
    args = (packed.values, packed.indices, packed.counts, found, unions.columns, unions.values, unions.sizes)
    args += (limit, tiles, m, room, choice.price)
    key = (*args[7:], squared, packed.values.dtype)
    meta = {**_meta(tiles), "SQUARED": squared, "BLOCK": 32}
    _union_fill(key, (groups, tiles, 1), args, meta, num_warps=4)
    return unions


def _meta(tiles: int) -> dict[str, int]:
    return {"GROUP": GROUP, "BLOCK_T": launch.next_power_of_2(tiles)}


def project(
    unions: Unions,
    packed: Packed,
    limit: int,
    x: Tensor,
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    out: Tensor,
    choice: Choice = CHOICE,
) -> None:
    """Writes the light rows of `out` whose group has a union; overwrites the values of `unions`. x, up and down as in
    `gather`."""
    (m, room), tiles, d, (down_weight, down_bias) = unions.values.shape, packed.values.shape[1], out.shape[1], down
    groups = unions.sizes.shape[0]
    if up is not None:
        (weight, bias), k = up, x.shape[1]
        block_u, block_k = choice.up
        meta = {"GROUP": GROUP, "BLOCK_U": block_u, "BLOCK_K": block_k, "EVEN": k % block_k == 0}
        meta |= tuning.dot_precision(x, k)
        args = (x, weight, bias, unions.columns, unions.sizes, unions.values, room, m, k)
        key = (room, m, k, x.dtype, None if bias is None else bias.dtype, choice, meta["PRECISION"])
        shares = min(choice.shares, launch.cdiv(room, block_u))
        warps, stages = choice.up_launch
        _union_up(key, (groups, shares, 1), args, meta, num_warps=warps, num_stages=stages)
    block_u, block_d = choice.down
    meta = {**_meta(tiles), "BLOCK_U": block_u, "BLOCK_D": block_d, "FLIP": choice.flip}
    # As if sums were long, for the union may be.
    meta = {**meta, **tuning.dot_precision(down_weight, room)}
    meta = {name: meta[name] for name in ("GROUP", "BLOCK_U", "BLOCK_D", "BLOCK_T", "FLIP", "PRECISION", "UPCAST")}
    args = (unions.values, down_weight, down_bias, unions.columns, unions.sizes, packed.counts, out)
    args += (limit, tiles, room, m, d)
    key = (*args[7:], x.dtype, out.dtype, None if down_bias is None else down_bias.dtype, choice, meta["PRECISION"])
    warps, stages = choice.down_launch
    _union_down(key, (groups, launch.cdiv(d, block_d), 1), args, meta, num_warps=warps, num_stages=stages)


_LIGHT = {"counts_ptr": "*i16", **dict.fromkeys(("limit", "tiles", "M"), "i32")}
_LIST = {"columns_ptr": "*i32", "union_ptr": "*i32", "dense_ptr": "*bf16", "room": "i32"}
EXAMPLES = {
    _union_count_kernel: {
        "signature": {"indices_ptr": "*u8", "sizes_ptr": "*i32", "step": "i32", **_LIGHT},
        "constexprs": {"GROUP": GROUP, "BLOCK_T": 32},
        "num_warps": 4,
    },
    _union_fill_kernel: {
        "signature": {
            "values_ptr": "*bf16", "indices_ptr": "*u8", "sizes_ptr": "*i32", **_LIGHT, **_LIST, "price": "fp32",
        },
        "constexprs": {"GROUP": GROUP, "BLOCK_T": 32, "SQUARED": False, "BLOCK": 32},
        "num_warps": 4,
    },
    _union_up_kernel: {
        "signature": {
            "x_ptr": "*bf16", "up_ptr": "*bf16", "up_bias_ptr": "*bf16", **_LIST, **dict.fromkeys(("M", "K"), "i32"),
        },
        "constexprs": {
            "GROUP": GROUP, "BLOCK_U": 64, "BLOCK_K": 128, "EVEN": True, "PRECISION": "ieee", "UPCAST": False,
        },
        "num_warps": 4,
        "num_stages": 3,
    },
    _union_down_kernel: {
        "signature": {**_LIST, **_LIGHT, "down_ptr": "*bf16", "down_bias_ptr": "*bf16", "out_ptr": "*bf16", "D": "i32"},
        "constexprs": {
            "GROUP": GROUP, "BLOCK_U": 32, "BLOCK_D": 256, "BLOCK_T": 32, "FLIP": False, "PRECISION": "ieee",
            "UPCAST": False,
        },
        "num_warps": 8,
        "num_stages": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
