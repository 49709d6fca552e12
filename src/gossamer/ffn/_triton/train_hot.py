"""A sparse block's hot neurons in training: the neurons that many rows have, as dense products.

An entry of a list takes the time in which rows of weights are read. A neuron that more than about a hundredth of the
rows have takes less time as a column of a dense product: the activations of trained models have some hundred of these,
with half of all entries. `choose` counts the neurons of some rows, and gives the most frequent ones a slot each; they
stand in no list, but in `[M, H]`, one column for each slot. Every kernel reads on the device how many slots are in use,
and leaves the others out. A neuron without a slot is gathered, however many rows have it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton.entry_lists import RANKS, Hot, Weights, columns_at
from gossamer.ffn._triton.heavy import along, tile_dot, tile_for
from gossamer.ffn._triton.train_heavy import through

SAMPLED = 2048
"""Rows of which the neurons are counted, about."""
LEAST = 64
"""Rows that have a neuron, at least, before it is hot."""
SHARE = 1 / 64
"""Of rows, where their products are dense at the rates of an H200 in 16 bits; see `share_of`."""
PARTS = 4
"""Parts of the rows, at most, that the sums for a weight's gradient are made of: the tiles alone are too few for a GPU.
"""
WAYS = tl.constexpr(32)
"""Counts that a round of the search for the least one tries at once."""


@launch.kernel
def _ffn_hot_sample_kernel(indices_ptr, counts_ptr, fired_ptr, step, tiles, slots, tile, BLOCK: tl.constexpr):
    """Program (one of every `step` rows): counts its neurons."""
    row = tl.program_id(0).to(tl.int64) * step
    for first_tile in range(0, tiles, BLOCK):
        at = first_tile + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
        counts = tl.minimum(counts, slots)
        for first in range(0, tl.max(counts, axis=0), RANKS):
            held, column = columns_at(indices_ptr + row * tiles * slots, at, counts, first, slots, tile)
            tl.atomic_add(fired_ptr + column, 1, mask=held, sem="relaxed")


@launch.kernel
def _ffn_hot_choose_kernel(fired_ptr, hot_ptr, slot_ptr, N, rows, least, capacity, BLOCK: tl.constexpr):
    """One program: a slot for each neuron that more than `least` of the rows counted have, or more rows than that where
    these are too many, columns ascending."""
    high = rows
    low = tl.minimum(least, high)
    while low < high:
        # No more than `capacity` neurons exceed `high`.
        step = tl.cdiv(high - low, WAYS)
        bound = low + tl.arange(0, WAYS) * step
        over = tl.zeros([WAYS], tl.int32)
        for first in range(0, N, BLOCK):
            column = first + tl.arange(0, BLOCK)
            fired = tl.load(fired_ptr + column, mask=column < N, other=0)
            over += tl.sum((fired[:, None] > bound[None, :]).to(tl.int32), axis=0)
        beyond = tl.sum((over > capacity).to(tl.int32), axis=0)
        high = tl.minimum(high, low + beyond * step)
        low = tl.where(beyond == 0, high, low + (beyond - 1) * step + 1)
    used = 0
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        fired = tl.load(fired_ptr + column, mask=column < N, other=0)
        chosen = fired > high
        place = used + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(hot_ptr + 1 + place, column, mask=chosen)
        tl.store(slot_ptr + column, tl.where(chosen, place, -1), mask=column < N)
        used += tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(hot_ptr, used)


@launch.kernel
def _ffn_hot_up_kernel(
    hot_ptr, x_ptr, w_ptr, bias_ptr, values_ptr, hidden_ptr, l1_ptr, M, H, K,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile of slots, tile of rows): the up projection behind the gate's values, [2, M, H], the hidden
    activations [M, H], and what they add to each row's sum, [tiles of slots, M]. w_ptr: the rows of W_up by slots, [H, K]."""
    used = tl.load(hot_ptr)
    if tl.program_id(0) * BLOCK_H < used:
        slot = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = slot < used
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < M
        at = row.to(tl.int64)[:, None] * H + slot[None, :]
        mask = valid[:, None] & inside[None, :]
        if w_ptr is not None:
            up, w_rows = tl.zeros([BLOCK_M, BLOCK_H], tl.float32), w_ptr + slot[None, :] * K
            up = along(up, x_ptr + row.to(tl.int64)[:, None] * K, w_rows, 1, 1, K, valid, inside, BLOCK_K, DOT)
            if bias_ptr is not None:
                column = tl.load(hot_ptr + 1 + slot, mask=inside, other=0)
                up += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            up = up.to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + tl.cast(M, tl.int64) * H + at, up, mask=mask)
        gate = tl.load(values_ptr + at, mask=mask, other=0.0)
        hidden = gate.to(tl.float32)
        if SQUARED:
            hidden = (hidden * hidden).to(gate.dtype).to(tl.float32)
        if w_ptr is not None:
            # Zeros where nothing is active, whatever the other factor.
            hidden = tl.where(gate != 0, (hidden * up.to(tl.float32)).to(gate.dtype).to(tl.float32), 0.0)
        tl.store(hidden_ptr + at, hidden, mask=mask)
        tl.store(l1_ptr + tl.program_id(0).to(tl.int64) * M + row, tl.sum(tl.abs(hidden), axis=1), mask=valid)


@launch.kernel
def _ffn_hot_rows_kernel(
    hot_ptr, first_ptr, second_ptr, w_ptr, other_ptr, out_ptr, M, H, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, tile of rows) of out: adds first * W and, if there is one, second * another W,
    [H, D] by slots."""
    used = tl.load(hot_ptr)
    if used > 0:
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        valid = row < M
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        at = row.to(tl.int64)[:, None] * H
        acc = along(acc, first_ptr + at, w_ptr + d[None, :], 1, D, used, valid, d < D, BLOCK_K, DOT)
        if other_ptr is not None:
            acc = along(acc, second_ptr + at, other_ptr + d[None, :], 1, D, used, valid, d < D, BLOCK_K, DOT)
        to = out_ptr + row.to(tl.int64)[:, None] * D + d[None, :]
        mask = valid[:, None] & (d < D)[None, :]
        tl.store(to, tl.load(to, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)


@launch.kernel
def _ffn_hot_hidden_kernel(
    hot_ptr, grad_ptr, w_ptr, values_ptr, penalty_ptr, kept_ptr, sums_ptr, M, H, D,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Program (tile of slots, tile of rows): the hidden activations, and the gradients through the gate and the up
    projection, [2 or 3, M, H]; and of these the sums over the tile's rows, [tiles of rows, 2, H]."""
    used = tl.load(hot_ptr)
    if tl.program_id(0) * BLOCK_H < used:
        slot = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = slot < used
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < M
        at = row.to(tl.int64)[:, None] * H + slot[None, :]
        mask = valid[:, None] & inside[None, :]
        size = tl.cast(M, tl.int64) * H
        grad, w_rows = tl.zeros([BLOCK_M, BLOCK_H], tl.float32), w_ptr + slot[None, :] * D
        grad = along(grad, grad_ptr + row.to(tl.int64)[:, None] * D, w_rows, 1, 1, D, valid, inside, BLOCK_K, DOT)
        gate = tl.load(values_ptr + at, mask=mask, other=0.0)
        active = gate != 0
        up = None
        if GATED:
            up = tl.load(values_ptr + size + at, mask=mask, other=0.0).to(tl.float32)
        hidden, through_gate, through_up = through(grad, gate, active, up, penalty_ptr, SQUARED)
        sums = sums_ptr + tl.program_id(1).to(tl.int64) * 2 * H + slot
        tl.store(kept_ptr + at, hidden, mask=mask)
        tl.store(kept_ptr + size + at, through_gate, mask=mask)
        tl.store(sums, tl.sum(through_gate, axis=0), mask=inside)
        if GATED:
            tl.store(kept_ptr + 2 * size + at, through_up, mask=mask)
            tl.store(sums + H, tl.sum(through_up, axis=0), mask=inside)


@triton.jit
def added_up(parts_ptr, parts, stride, mask, BLOCK_H: tl.constexpr):
    """The sum of vectors, in their order."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for part in range(0, parts):
        total += tl.load(parts_ptr + part * stride, mask=mask, other=0.0)
    return total


@launch.kernel
def _ffn_hot_weights_kernel(
    hot_ptr, kept_ptr, grad_ptr, x_ptr, grads, partial_ptr, arrived_ptr, tile_sums_ptr, sums_ptr, M, N, H, K, D, rows, tiles_m,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile of a weight's gradient, `rows` of the rows, weight): of the hot neurons alone. The last to arrive
    adds up the parts, in their order. Weights: down [N, D], gate and up [N, K]; sums_ptr: [2, N]."""
    used = tl.load(hot_ptr)
    which = tl.program_id(2)
    tiles_h = tl.cdiv(H, BLOCK_H)
    tile_h = tl.program_id(0) % tiles_h
    tile_k = tl.program_id(0) // tiles_h
    width, from_ptr, to_ptr = D, grad_ptr, grads[0]
    if which > 0:
        width, from_ptr, to_ptr = K, x_ptr, grads[1]
    if grads[2] is not None:
        if which == 2:
            to_ptr = grads[2]
    if (tile_h * BLOCK_H < used) & (tile_k * BLOCK_D < width):
        slot = tile_h * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = slot < used
        column = tl.load(hot_ptr + 1 + slot, mask=inside, other=0)
        k = tile_k * BLOCK_D + tl.arange(0, BLOCK_D)
        values_ptr = kept_ptr + tl.cast(which, tl.int64) * M * H
        first_row = tl.program_id(1) * rows
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for first in range(first_row, tl.minimum(first_row + rows, M), BLOCK_K):
            row = first + tl.arange(0, BLOCK_K)
            at = row.to(tl.int64)
            a = tl.load(values_ptr + at[None, :] * H + slot[:, None], mask=inside[:, None] & (row < M)[None, :], other=0.0)
            b = tl.load(
                from_ptr + at[:, None] * width + k[None, :], mask=(row < M)[:, None] & (k < width)[None, :], other=0.0
            )  # fmt: skip
            acc = tile_dot(a, b, acc, DOT)
        mask = inside[:, None] & (k < width)[None, :]
        to = to_ptr + column.to(tl.int64)[:, None] * width + k[None, :]
        parts = tl.num_programs(1)
        tile = which * tl.num_programs(0) + tl.program_id(0)
        size = BLOCK_H * BLOCK_D
        in_tile = tl.arange(0, BLOCK_H)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        partial = partial_ptr + tl.cast(tile, tl.int64) * parts * size + in_tile
        tl.store(partial + tl.program_id(1) * size, acc, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == parts - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
            for part in range(0, parts):
                total += tl.load(partial + part * size, mask=mask, other=0.0)
            tl.store(to, total, mask=mask)
        if (tl.program_id(1) == 0) & (tile_k == 0) & (which > 0):
            sums = added_up(tile_sums_ptr + (which - 1) * H + slot, tiles_m, 2 * H, inside, BLOCK_H)
            tl.store(sums_ptr + (which - 1) * N + column, sums, mask=inside)


def share_of(size: int) -> float:
    """The share of the rows from which on a neuron of all of them takes less time: gathered weights for dense
    products."""
    rates = tuning.rates(0) if torch.cuda.is_available() else None
    if rates is None or size == 2:
        return SHARE
    half = rates.half * 2
    return SHARE * half / ((rates.tf32 if tuning.tf32() else rates.ieee) * size)


def choose(packed: tuple[Tensor, Tensor, Tensor], tile: int, n: int, gated: bool, capacity: int) -> Hot:
    """packed: as `entry_lists.row_lists` takes it."""
    values, indices, counts = packed
    m, tiles, slots = values.shape
    step = m // SAMPLED | 1
    rows, share = launch.cdiv(m, step), share_of(values.element_size())
    ints = {"dtype": torch.int32, "device": values.device}
    fired, listed, slot = torch.zeros(n, **ints), torch.zeros(1 + capacity, **ints), torch.empty(n, **ints)
    block = min(max(launch.next_power_of_2(tiles), 16), 64)
    args = (indices, counts, fired, step, tiles, slots, tile)
    _ffn_hot_sample_kernel((rows, 1, 1), args, {"BLOCK": block}, num_warps=1)
    least = min(rows, max(int(share * rows), launch.cdiv(LEAST, step)))
    args = (fired, listed, slot, n, rows, least, capacity)
    _ffn_hot_choose_kernel((1, 1, 1), args, {"BLOCK": 1024}, num_warps=8)
    return Hot(listed, slot, values.new_zeros(2 if gated else 1, m, capacity), int(1024 * share))


TILES = (128, 128, 128)
"""Rows, slots and columns of a tile in 16 bits."""


def tiles_for(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, int]]:
    """(rows, slots and columns of tiles; other sizes; options of a launch)"""
    meta, options = tile_for(x, False)
    block = meta["BLOCK"]
    tiles = TILES if block == 128 else (block,) * 3
    return tiles, {"BLOCK_K": meta["BLOCK_K"], "DOT": meta["DOT"]}, options


def by_slots(weight: Tensor | None, listed: Tensor) -> Tensor | None:
    """The rows of the neurons that have slots, `[H, ...]`, and any others behind them."""
    return None if weight is None else weight.index_select(0, listed[1:])


def forward(hot: Hot, x: Tensor, weights: Weights, out: Tensor, squared: bool) -> Tensor:
    """Adds the hot neurons' products to out `[M, D]`, and puts the up projection into hot.values. Returns the sum of
    their |hidden|."""
    (m, k), capacity = x.shape, hot.values.shape[2]
    (block_m, block_h, _), meta, options = tiles_for(x)
    tiles_h, tiles_m = launch.cdiv(capacity, block_h), launch.cdiv(m, block_m)
    hidden, l1 = x.new_empty(m, capacity), torch.zeros(tiles_h, m, dtype=torch.float32, device=x.device)
    args = (hot.listed, x, by_slots(weights.up, hot.listed), weights.up_bias, hot.values, hidden, l1, m, capacity, k)
    meta = {"BLOCK_M": block_m, "BLOCK_H": block_h, "BLOCK_K": meta["BLOCK_K"], "SQUARED": squared, "DOT": meta["DOT"]}
    _ffn_hot_up_kernel((tiles_h, tiles_m, 1), args, meta, **options)
    add_rows(hot.listed, hidden, None, by_slots(weights.down, hot.listed), None, out)
    return l1.sum()


def add_rows(
    listed: Tensor, first: Tensor, second: Tensor | None, weight: Tensor | None, other: Tensor | None, out: Tensor
) -> None:
    """out `[M, D]` += first `[M, H]` times the weight `[H, D]`, and second times the other."""
    (m, d), capacity = out.shape, first.shape[1]
    (block_m, _, block_d), meta, options = tiles_for(out)
    meta = {"BLOCK_M": block_m, "BLOCK_D": block_d} | meta
    grid = (launch.cdiv(d, block_d), launch.cdiv(m, block_m), 1)
    _ffn_hot_rows_kernel(grid, (listed, first, second, weight, other, out, m, capacity, d), meta, **options)


def backward(
    listed: Tensor,
    values: Tensor,
    x: Tensor,
    weights: Weights,
    grad: Tensor,
    penalty: Tensor | None,
    dx: Tensor,
    grads: tuple[Tensor, Tensor, Tensor | None],
    sums: Tensor,
    squared: bool,
) -> None:
    """Adds to dx, and writes the hot neurons' rows of the gradients of W_down, W_gate and W_up and of sums `[2, N]`.
    values: of `Hot`."""
    (gates, m, capacity), (n, d), k = values.shape, weights.down.shape, x.shape[1]
    (block_m, block_h, block_d), meta, options = tiles_for(grad)
    inner, dot = meta["BLOCK_K"], meta["DOT"]
    tiles_h, tiles_m = launch.cdiv(capacity, block_h), launch.cdiv(m, block_m)
    kept = values.new_empty(1 + gates, m, capacity)
    tile_sums = torch.empty(tiles_m, 2, capacity, dtype=torch.float32, device=x.device)
    args = (listed, grad, by_slots(weights.down, listed), values, penalty, kept, tile_sums, m, capacity, d)
    meta = {"BLOCK_M": block_m, "BLOCK_H": block_h, "BLOCK_K": inner, "SQUARED": squared, "DOT": dot}
    _ffn_hot_hidden_kernel((tiles_h, tiles_m, 1), args, meta | {"GATED": gates == 2}, **options)
    second = None if gates == 1 else kept[2]
    add_rows(listed, kept[1], second, by_slots(weights.gate, listed), by_slots(weights.up, listed), dx)
    tiles = tiles_h * launch.cdiv(max(k, d), block_d)
    rows = inner * launch.cdiv(m, inner * PARTS)
    parts = launch.cdiv(m, rows)
    partial = torch.empty((1 + gates) * tiles * parts * block_h * block_d, dtype=torch.float32, device=x.device)
    arrived = torch.zeros((1 + gates) * tiles, dtype=torch.int32, device=x.device)
    args = (listed, kept, grad, x, grads, partial, arrived, tile_sums, sums, m, n, capacity, k, d, rows, tiles_m)
    meta = {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_K": inner, "DOT": dot}
    _ffn_hot_weights_kernel((tiles, parts, 1 + gates), args, meta, **options)


EXAMPLES = {
    _ffn_hot_sample_kernel: {"indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 32, "num_warps": 1},
    _ffn_hot_choose_kernel: {"hot_ptr": "*i32", "slot_ptr": "*i32", "BLOCK": 1024, "num_warps": 8},
    _ffn_hot_up_kernel: {
        "hot_ptr": "*i32", "bias_ptr": None, "BLOCK_M": 128, "BLOCK_H": 128, "BLOCK_K": 64, "SQUARED": False,
        "DOT": "ieee", "num_warps": 8, "num_stages": 3,
    },
    _ffn_hot_rows_kernel: {
        "hot_ptr": "*i32", "BLOCK_M": 128, "BLOCK_D": 128, "BLOCK_K": 64, "DOT": "ieee", "num_warps": 8, "num_stages": 3,
    },
    _ffn_hot_hidden_kernel: {
        "hot_ptr": "*i32", "BLOCK_M": 128, "BLOCK_H": 128, "BLOCK_K": 64, "SQUARED": False, "DOT": "ieee",
        "GATED": True, "num_warps": 8, "num_stages": 3,
    },
    _ffn_hot_weights_kernel: {
        "hot_ptr": "*i32", "arrived_ptr": "*i32", "grads": ("*bf16", "*bf16", "*bf16"), "BLOCK_H": 128,
        "BLOCK_D": 128, "BLOCK_K": 64, "DOT": "ieee", "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
