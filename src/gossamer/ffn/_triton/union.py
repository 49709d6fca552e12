"""Neighbouring rows that share entries: up and down projection over the union of a group's columns, on tensor cores.

Gathering reads a weight row for each row of x that has its entry. Where neighbours have the same entries, a group of
GROUP rows reads it once: its union of columns is a short list, and up and down are two products over gathered weight
rows. `unite` marks the columns that a group has, counts them, and so knows what the group costs as a union and row by
row; where the union is cheaper it writes the list, ascending, and the entries' values as a dense [GROUP, union] with
zeros between. `up` multiplies them in place by x times the gathered rows of up, `down` multiplies the result by the
gathered rows of down. The list and the values have room for every column there is.

Marks go through memory that the program alone writes, between barriers. Programs of one tile each, which told columns
apart by a masked `tl.histogram`, took 150 us for 16,384 rows, and found too few columns on an H200 (Triton 3.6).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton._packed import SLOTS, TILE, Packed
from gossamer.ffn._triton.replay import Launched
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
def load_columns(indices_ptr, counts_ptr, rows, light, first, tiles, BLOCK_S: tl.constexpr):
    """(offsets of BLOCK_S of a row's slots, which of them hold an entry, its column), all [GROUP, BLOCK_S]."""
    slot = first + tl.arange(0, BLOCK_S)
    at = slot // SLOTS
    mask = light[:, None] & (at < tiles)[None, :]
    count = tl.load(counts_ptr + rows.to(tl.int64)[:, None] * tiles + at[None, :], mask=mask, other=0).to(tl.int32)
    place = rows.to(tl.int64)[:, None] * (tiles * SLOTS) + slot[None, :]
    held = (slot % SLOTS)[None, :] < count
    return place, held, tl.load(indices_ptr + place, mask=held, other=0).to(tl.int32) + (at * TILE)[None, :]


@launch.kernel(do_not_specialize=["limit", "tiles", "step", "M", "N"])
def _unite_kernel(
    values_ptr, indices_ptr, counts_ptr, ranks_ptr, sizes_ptr, columns_ptr, dense_ptr, union_ptr,
    limit, tiles, step, M, N, room, price,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """Program (one of every `step` groups): the size of its union, and with `dense_ptr` the list and the values where
    the group's entries are at least `price` times as many; union_ptr: the size, or 0. ranks_ptr: int32 of every column,
    first whether a row has it, then its place in the list. room: columns of `dense`, of the list and of the ranks."""
    group = tl.program_id(0)
    rows = group * step * GROUP + tl.arange(0, GROUP)
    light, total = light_rows(counts_ptr, rows, M, tiles, limit, BLOCK_T)
    ranks_ptr += group.to(tl.int64) * room
    n = tl.arange(0, BLOCK_N)
    for first in range(0, N, BLOCK_N):
        tl.store(ranks_ptr + first + n, tl.zeros([BLOCK_N], tl.int32), mask=first + n < N)
    tl.debug_barrier()
    for first in range(0, tiles * SLOTS, BLOCK_S):
        _, held, column = load_columns(indices_ptr, counts_ptr, rows, light, first, tiles, BLOCK_S)
        tl.store(ranks_ptr + column, tl.full([GROUP, BLOCK_S], 1, tl.int32), mask=held)
    tl.debug_barrier()
    size = 0
    for first in range(0, N, BLOCK_N):
        found = tl.load(ranks_ptr + first + n, mask=first + n < N, other=0)
        if dense_ptr is not None:
            rank = size + tl.cumsum(found, axis=0) - found
            tl.store(ranks_ptr + first + n, rank, mask=first + n < N)
            tl.store(columns_ptr + group.to(tl.int64) * room + rank, first + n, mask=found > 0)
        size += tl.sum(found, axis=0)
    tl.store(sizes_ptr + group, size)
    if dense_ptr is not None:
        entries = tl.sum(tl.where(light, total, 0), axis=0)
        pays = size * price <= entries.to(tl.float32)
        tl.store(union_ptr + group, tl.where(pays, size, 0))
        if pays:
            dense_rows = dense_ptr + rows.to(tl.int64)[:, None] * room
            # Up to a whole block there are zeros, so that the products need no masks.
            for first in range(0, size, PAD):
                zeros = tl.zeros([GROUP, PAD], dense_ptr.dtype.element_ty)
                tl.store(dense_rows + (first + tl.arange(0, PAD))[None, :], zeros, mask=(rows < M)[:, None])
            tl.debug_barrier()
            for first in range(0, tiles * SLOTS, BLOCK_S):
                place, held, column = load_columns(indices_ptr, counts_ptr, rows, light, first, tiles, BLOCK_S)
                value = tl.load(values_ptr + place, mask=held, other=0.0)
                if SQUARED:
                    value = (value.to(tl.float32) * value.to(tl.float32)).to(value.dtype)
                rank = tl.load(ranks_ptr + column, mask=held, other=0)
                tl.store(dense_rows + rank, value, mask=held)


@launch.kernel(do_not_specialize=["M"])
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


@launch.kernel(do_not_specialize=["limit", "tiles", "M"])
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


@dataclass(frozen=True)
class Choice:
    """The two products take `up` = (columns of the union, of x) and `down` = (columns of the union, of the result) at a
    time, with so many warps and stages; FLIP transposes the latter. `shares` programs share a group's union in the
    first. price: entries that are gathered one by one in the time of a union's column."""

    up: tuple[int, int] = (64, 128)
    up_launch: tuple[int, int] = (4, 3)
    down: tuple[int, int] = (32, 256)
    down_launch: tuple[int, int] = (8, 4)
    flip: bool = True
    shares: int = 8
    price: float = PRICE


CHOICE = Choice()


@dataclass(frozen=True)
class Unions:
    """sizes: int32 [groups], 0 where rows are gathered one by one; columns and values at them: [groups, room], int32,
    and [M, room]. These are what the launch writes."""

    sizes: Tensor
    columns: Tensor
    values: Tensor
    launched: Launched


def count(packed: Packed, limit: int, step: int, n: int, sizes: Tensor) -> None:
    """Fills sizes, int32 [groups], with how many columns the rows of one of every `step` groups have, not counting rows
    of more than `limit` entries."""
    ranks = sizes.new_empty(sizes.shape[0], _room(n))
    _launch_unite(packed, limit, step, n, (ranks, sizes, None, None, None), False, CHOICE)


def unite(packed: Packed, limit: int, n: int, squared: bool, sizes: Tensor | None, choice: Choice = CHOICE) -> Unions:
    """The unions of all groups, and the values at them; `sizes` is filled as by `count`."""
    (m, _, _), room = packed.values.shape, _room(n)
    groups = sampled_groups(m, 1)
    taken = torch.empty(groups, dtype=torch.int32, device=packed.values.device)
    ranks, columns = taken.new_empty(groups, room), taken.new_empty(groups, room)
    counted, values = torch.empty_like(taken) if sizes is None else sizes, packed.values.new_empty(m, room)
    memory = (ranks, counted, columns, values, taken)
    return Unions(taken, columns, values, _launch_unite(packed, limit, 1, n, memory, squared, choice))


def _room(n: int) -> int:
    return launch.cdiv(n, PAD.value) * PAD.value


def _launch_unite(
    packed: Packed, limit: int, step: int, n: int, memory: tuple[Any, ...], squared: bool, choice: Choice
) -> Launched:
    m, tiles, _ = packed.values.shape
    heads = (packed.values, packed.indices, packed.counts, *memory)
    args = (*heads, limit, tiles, step, m, n, _room(n), choice.price)
    meta = {**_meta(tiles), "BLOCK_S": 64, "BLOCK_N": 1024, "SQUARED": squared}
    return Launched(_unite_kernel((memory[0].shape[0], 1, 1), args, meta, num_warps=8, head=8), heads)


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
) -> list[Launched]:
    """Writes the light rows of `out` whose group has a union; overwrites the values of `unions`. x, up and down as in
    `gather`."""
    (m, room), tiles, d, (down_weight, down_bias) = unions.values.shape, packed.values.shape[1], out.shape[1], down
    groups, launched = unions.sizes.shape[0], []
    if up is not None:
        (weight, bias), k = up, x.shape[1]
        block_u, block_k = choice.up
        meta = {"GROUP": GROUP, "BLOCK_U": block_u, "BLOCK_K": block_k, "EVEN": k % block_k == 0}
        meta |= tuning.dot_precision(x, k)
        heads: tuple[Any, ...] = (x, weight, bias, unions.columns, unions.sizes, unions.values)
        shares = min(choice.shares, launch.cdiv(room, block_u))
        warps, stages = choice.up_launch
        options = {"num_warps": warps, "num_stages": stages}
        bound = _union_up_kernel((groups, shares, 1), (*heads, room, m, k), meta, head=6, **options)
        launched.append(Launched(bound, heads))
    block_u, block_d = choice.down
    meta = {**_meta(tiles), "BLOCK_U": block_u, "BLOCK_D": block_d, "FLIP": choice.flip}
    # As if sums were long, for the union may be.
    meta = {**meta, **tuning.dot_precision(down_weight, room)}
    meta = {name: meta[name] for name in ("GROUP", "BLOCK_U", "BLOCK_D", "BLOCK_T", "FLIP", "PRECISION", "UPCAST")}
    heads = (unions.values, down_weight, down_bias, unions.columns, unions.sizes, packed.counts, out)
    warps, stages = choice.down_launch
    grid = (groups, launch.cdiv(d, block_d), 1)
    options = {"num_warps": warps, "num_stages": stages}
    bound = _union_down_kernel(grid, (*heads, limit, tiles, room, m, d), meta, head=7, **options)
    return [*launched, Launched(bound, heads)]


EXAMPLES = {
    _unite_kernel: {
        "indices_ptr": "*u8", "counts_ptr": "*i16", "GROUP": GROUP, "BLOCK_T": 32, "BLOCK_S": 64, "BLOCK_N": 1024,
        "SQUARED": False, "num_warps": 8,
    },
    _union_up_kernel: {
        "up_bias_ptr": "*bf16", "GROUP": GROUP, "BLOCK_U": 64, "BLOCK_K": 128, "EVEN": True, "PRECISION": "ieee",
        "UPCAST": False, "num_stages": 3,
    },
    _union_down_kernel: {
        "counts_ptr": "*i16", "down_bias_ptr": "*bf16", "GROUP": GROUP, "BLOCK_U": 32, "BLOCK_D": 256, "BLOCK_T": 32,
        "FLIP": True, "PRECISION": "ieee", "UPCAST": False, "num_warps": 8, "num_stages": 4,
    },
}  # fmt: skip
