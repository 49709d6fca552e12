"""A sparse block's hot neurons in training: the neurons that many rows have, as dense products.

An entry of a list takes the time in which rows of weights are read. A neuron that more than one row in 64 has takes
less time as a column of a dense product: the activations of trained models have some hundred of these, with half of all
entries. `choose` counts the neurons of some rows, and gives the most frequent ones a slot each; they stand in no list,
but in `[M, H]`, a column for each slot, whose products are PyTorch's. Which neurons these are only the device knows. A
neuron without a slot is gathered, however many rows have it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton.entry_lists import RANKS, Hot, Weights, columns_at, through
from gossamer.ffn.costs import hot_bound
from gossamer.rowsparse.formats import sums_over_rows

SAMPLED = 2048
"""Rows of which the neurons are counted, about."""
LEAST = 64
"""Rows that have a neuron, at least, before it is hot."""


@launch.kernel
def _ffn_hot_sample_kernel(indices_ptr, counts_ptr, fired_ptr, step, tiles, slots, tile, limit, BLOCK: tl.constexpr):
    """Program (one of every `step` rows): counts its neurons, unless it goes through dense tiles as a whole."""
    row = tl.program_id(0).to(tl.int64) * step
    total = 0
    most = 0
    for first_tile in range(0, tiles, BLOCK):
        at = first_tile + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
        most = tl.maximum(most, tl.max(counts, axis=0))
        total += tl.sum(counts, axis=0)
    if (most <= slots) & (total <= limit):
        for first_tile in range(0, tiles, BLOCK):
            at = first_tile + tl.arange(0, BLOCK)
            counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
            for first in range(0, tl.max(counts, axis=0), RANKS):
                held, column = columns_at(indices_ptr + row * tiles * slots, at, counts, first, slots, tile)
                tl.atomic_add(fired_ptr + column, 1, mask=held, sem="relaxed")


@triton.jit
def how_many(counts_ptr, bound, N, BLOCK: tl.constexpr):
    """Of N counts, how many are above a bound."""
    total = 0
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        total += tl.sum((tl.load(counts_ptr + n, mask=n < N, other=0) > bound).to(tl.int32), axis=0)
    return total


@launch.kernel
def _ffn_hot_choose_kernel(counts_ptr, listed_ptr, slot_ptr, N, least, rows, H, BLOCK: tl.constexpr):
    """One program: the neurons with more than `least` counts of `rows` get slots, in ascending order; of more than H
    the most frequent, and of neurons that are equally frequent the first. Leaves the counts at 0."""
    total = how_many(counts_ptr, least, N, BLOCK)
    used = tl.minimum(total, H)
    # The lowest bound above which there are no more than have slots.
    low, high = least, rows
    if total <= H:
        high = least
    while low < high:
        middle = (low + high) // 2
        if how_many(counts_ptr, middle, N, BLOCK) <= H:
            high = middle
        else:
            low = middle + 1
    left = used - how_many(counts_ptr, high, N, BLOCK)
    taken = 0
    seen = 0
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + n, mask=n < N, other=-1)
        equal = (count == high).to(tl.int32)
        take = (count > high) | ((equal > 0) & (seen + tl.cumsum(equal, axis=0) <= left))
        place = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(slot_ptr + n, tl.where(take, place, -1), mask=n < N)
        tl.store(listed_ptr + 2 + place, n, mask=take)
        tl.store(counts_ptr + n, tl.zeros([BLOCK], tl.int32), mask=n < N)
        taken += tl.sum(take.to(tl.int32), axis=0)
        seen += tl.sum(equal, axis=0)
    tl.store(listed_ptr, used)
    tl.store(listed_ptr + 1, total)
    for first in range(0, H, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(listed_ptr + 2 + slot, tl.zeros([BLOCK], tl.int32), mask=(slot >= used) & (slot < H))


@launch.kernel
def _ffn_hot_rows_kernel(listed_ptr, weight_ptr, rows_ptr, K, BLOCK: tl.constexpr, BACK: tl.constexpr):
    """Program (slot, BLOCK columns): the row of its neuron, [N, K], into [H, K], where slots that are not in use have
    zeros; or with BACK out of that."""
    slot = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = slot < tl.load(listed_ptr)
    of_neuron = weight_ptr + tl.load(listed_ptr + 2 + slot).to(tl.int64) * K + k
    of_slot = rows_ptr + slot.to(tl.int64) * K + k
    if BACK:
        tl.store(of_neuron, tl.load(of_slot, mask=k < K), mask=(k < K) & used)
    else:
        tl.store(of_slot, tl.load(of_neuron, mask=(k < K) & used, other=0.0), mask=k < K)


@launch.kernel
def _ffn_hot_hidden_kernel(
    values_ptr, bias_ptr, through_hidden_ptr, penalty_ptr, hidden_ptr, through_ptr, l1_ptr, M, H,
    BLOCK: tl.constexpr, SQUARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Program (row): its H activations. Forward: adds the bias [H], if any, to the up projection that stands behind the
    gate in values_ptr, writes the hidden activations, and adds these without signs to l1_ptr. Backward, with the
    gradients of the hidden activations: those through the gate and the up projection, too, [M, 1 or 2, H]."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    held = h < H
    at = row * H + h
    z = tl.load(values_ptr + at, mask=held, other=0.0)
    active = z != 0
    up = None
    if GATED:
        up_at = values_ptr + tl.cast(M, tl.int64) * H + at
        up = tl.load(up_at, mask=held, other=0.0)
        if bias_ptr is not None:
            up = (up.to(tl.float32) + tl.load(bias_ptr + h, mask=held, other=0.0).to(tl.float32)).to(z.dtype)
            tl.store(up_at, up, mask=held)
        up = up.to(tl.float32)
    if through_ptr is None:
        hidden = z.to(tl.float32)
        if SQUARED:
            hidden = (hidden * hidden).to(z.dtype).to(tl.float32)
        if GATED:
            # Zeros where nothing is active, whatever the other factor.
            hidden = tl.where(active, (hidden * up).to(z.dtype).to(tl.float32), 0.0)
        tl.store(l1_ptr + row, tl.load(l1_ptr + row) + tl.sum(tl.abs(hidden), axis=0))
    else:
        grad = tl.load(through_hidden_ptr + at, mask=held, other=0.0).to(tl.float32)
        hidden, through_gate, through_up = through(grad, z, active, up, penalty_ptr, SQUARED)
        to = through_ptr + row * (2 * H if GATED else H) + h
        tl.store(to, through_gate, mask=held)
        if GATED:
            tl.store(to + H, through_up, mask=held)
    tl.store(hidden_ptr + at, hidden, mask=held)


def choose(packed: tuple[Tensor, Tensor, Tensor], tile: int, n: int, limit: int, gated: bool, capacity: int) -> Hot:
    """packed and limit: as `entry_lists.row_lists` takes them. Slots that are not in use name neuron 0: their values
    are zeros, and so are their rows of weights."""
    values, indices, counts = packed
    m, tiles, slots = values.shape
    listed, slot = (torch.empty(k, dtype=torch.int32, device=values.device) for k in (2 + capacity, n))
    # Zeros of this call: a call that ends between the two launches leaves its counts to no other.
    fired, step = torch.zeros(n, dtype=torch.int32, device=values.device), m // SAMPLED | 1
    rows, block = launch.cdiv(m, step), min(max(launch.next_power_of_2(tiles), 16), 64)
    args = (indices, counts, fired, step, tiles, slots, tile, limit)
    _ffn_hot_sample_kernel((rows, 1, 1), args, {"BLOCK": block}, num_warps=1)
    least = min(rows, max(int(hot_bound(rows, values.element_size(), values.device)), launch.cdiv(LEAST, step)))
    meta = {"BLOCK": min(8192, launch.next_power_of_2(max(n, 256)))}
    _ffn_hot_choose_kernel((1, 1, 1), (fired, listed, slot, n, least, rows, capacity), meta, num_warps=16)
    shape = 2 if gated else 1, m, capacity
    return Hot(listed, slot, values.new_zeros(shape) if capacity else values.new_empty(shape), fired)


def rows_of(listed: Tensor, weight: Tensor, rows: Tensor, back: bool = False) -> Tensor:
    """Writes rows `[H, ...]`, those of hot neurons of a weight `[N, ...]`; or with `back` out of these into it."""
    k = weight[0].numel()
    block = min(1024, launch.next_power_of_2(k))
    meta = {"BLOCK": block, "BACK": back}
    _ffn_hot_rows_kernel((rows.shape[0], launch.cdiv(k, block), 1), (listed, weight, rows, k), meta, num_warps=4)
    return rows


def activations(
    values: Tensor, bias: Tensor | None, l1: Tensor | None, grad: Tensor | None, penalty: Tensor | None, squared: bool
) -> tuple[Tensor, Tensor | None]:
    """values: of `Hot`. (hidden activations `[M, H]`; with the gradients of these, those through gate and up, `[M, (1
    or 2) H]`). Without gradients, the sums of |.| of the rows are added to l1 `[M]`."""
    gates, m, capacity = values.shape
    hidden, through = values.new_empty(m, capacity), None if grad is None else values.new_empty(m, gates * capacity)
    args = (values, bias, grad, penalty, hidden, through, l1, m, capacity)
    meta = {"BLOCK": launch.next_power_of_2(capacity), "SQUARED": squared, "GATED": gates == 2}
    _ffn_hot_hidden_kernel((m, 1, 1), args, meta, num_warps=1)
    return hidden, through


def forward(hot: Hot, x: Tensor, weights: Weights, out: Tensor, l1: Tensor, squared: bool) -> None:
    """Adds the hot neurons' products to out `[M, D]` and their |hidden| to l1 `[M]`, and puts the up projection into
    hot.values."""
    capacity = hot.values.shape[2]
    if not capacity:
        return
    bias = None
    if weights.up is not None:
        up = rows_of(hot.listed, weights.up, x.new_empty(capacity, x.shape[1]))
        torch.mm(x, up.t(), out=hot.values[1])
        if weights.up_bias is not None:
            bias = rows_of(hot.listed, weights.up_bias, weights.up_bias.new_empty(capacity))
    hidden, _ = activations(hot.values, bias, l1, None, None, squared)
    out.addmm_(hidden, rows_of(hot.listed, weights.down, x.new_empty(capacity, out.shape[1])))


def backward(
    listed: Tensor,
    values: Tensor,
    x: Tensor,
    weights: Weights,
    grad: Tensor,
    penalty: Tensor | None,
    dx: Tensor,
    grads: tuple[Tensor, Tensor, Tensor | None],
    sums: Tensor | None,
    squared: bool,
) -> None:
    """Adds the hot neurons' part to dx, and writes it into the gradients of W_down, W_gate and W_up, and into sums `[2,
    N]`. values: of `Hot`."""
    gates, _, capacity = values.shape
    if not capacity:
        return
    down = rows_of(listed, weights.down, x.new_empty(capacity, grad.shape[1]))
    hidden, through = activations(values, None, None, grad @ down.t(), penalty, squared)
    assert through is not None
    inner = x.new_empty(gates, capacity, x.shape[1])
    for weight, rows in zip((weights.gate, weights.up), inner, strict=False):
        if weight is not None:
            rows_of(listed, weight, rows)
    dx.addmm_(through, inner.flatten(0, 1))
    found = (hidden.t() @ grad, *(through.t() @ x).chunk(gates))
    for to, part in zip(grads, found, strict=False):
        if to is not None:
            rows_of(listed, to, part, back=True)
    if sums is not None:
        for to, part in zip(sums, sums_over_rows(through, sums.dtype).chunk(gates), strict=False):
            rows_of(listed, to, part, back=True)


EXAMPLES = {
    _ffn_hot_sample_kernel: {"indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 32, "num_warps": 1},
    _ffn_hot_choose_kernel: {"listed_ptr": "*i32", "slot_ptr": "*i32", "BLOCK": 8192, "num_warps": 16},
    _ffn_hot_rows_kernel: {"listed_ptr": "*i32", "rows_ptr": "*bf16", "BLOCK": 1024, "BACK": False},
    _ffn_hot_hidden_kernel: {"bias_ptr": None, "BLOCK": 512, "SQUARED": False, "GATED": True, "num_warps": 1},
}  # fmt: skip
