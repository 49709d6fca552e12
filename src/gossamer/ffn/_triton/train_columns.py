"""A sparse block's products along columns: the gradients of weights, and those of hidden activations with them.

A program owns a neuron and a slice of the width. It takes the rows of x, or of the output's gradient, that have the
neuron, BLOCK_E at a time, SIDE of them in a load, and adds them up times one or two sets of values, in float32. Slices
are the slow axis of the grid: while all neurons work on one, it is that slice of x that the L2 has to hold. The
products of the rows with the neuron's own weight, which are the gradients of its hidden activations, are made of the
same loads, a part to a slice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton.entry_lists import ColumnLists, Tile, halves, load, offset_of, through, wide


@triton.jit
def add_entries(
    acc, other, total, other_total, rows_ptr, first_ptr, second_ptr, x_ptr, w, dots_ptr, entry, k, K,
    EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """acc and other [BLOCK_K] + the products of both sets of values with some entries' rows of x, total + the values;
    writes the products of the rows with w."""
    at = offset_of(tl.load(rows_ptr + entry), K)[:, None] + k[None, :]
    x = wide(load(x_ptr + at, (k < K)[None, :], EVEN), HALVES)
    first = tl.load(first_ptr + entry).to(tl.float32)
    acc += tl.sum(first[:, None] * x, axis=0)
    total += tl.sum(first, axis=0)
    if second_ptr is not None:
        second = tl.load(second_ptr + entry).to(tl.float32)
        other += tl.sum(second[:, None] * x, axis=0)
        other_total += tl.sum(second, axis=0)
    if dots_ptr is not None:
        tl.store(dots_ptr + entry, tl.sum(x * w[None, :], axis=1))
    return acc, other, total, other_total


@launch.kernel
def _ffn_train_weights_kernel(
    offsets_ptr, rows_ptr, first_ptr, second_ptr, x_ptr, w_ptr, dots_ptr, grad_first_ptr, grad_second_ptr, sums_ptr,
    room, N, K,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program (neuron, slice). `second_ptr` and `w_ptr` may be absent, with what belongs to them. sums_ptr, if any:
    [2, N], the sums of both sets of values."""
    column = tl.program_id(0)
    begin = tl.load(offsets_ptr + column)
    count = tl.load(offsets_ptr + column + 1) - begin
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at_weight = column.to(tl.int64) * K + k
    acc = tl.zeros([BLOCK_K], tl.float32)
    other = tl.zeros([BLOCK_K], tl.float32)
    total = 0.0
    other_total = 0.0
    w = acc
    if w_ptr is not None:
        w = wide(tl.load(w_ptr + at_weight, mask=k < K, other=0.0), HALVES)
        dots_ptr += tl.program_id(1).to(tl.int64) * room + begin
    rows_ptr += begin
    first_ptr += begin
    if second_ptr is not None:
        second_ptr += begin
    whole = count // BLOCK_E * BLOCK_E
    for start in range(0, whole, BLOCK_E):
        for step in tl.static_range(0, BLOCK_E, SIDE):
            acc, other, total, other_total = add_entries(
                acc, other, total, other_total, rows_ptr, first_ptr, second_ptr, x_ptr, w, dots_ptr,
                start + step + tl.arange(0, SIDE), k, K, EVEN, HALVES,
            )  # fmt: skip
    for start in range(whole, count):
        acc, other, total, other_total = add_entries(
            acc, other, total, other_total, rows_ptr, first_ptr, second_ptr, x_ptr, w, dots_ptr,
            start + tl.arange(0, 1), k, K, EVEN, HALVES,
        )  # fmt: skip
    tl.store(grad_first_ptr + at_weight, acc, mask=k < K, cache_modifier=".cs")
    if second_ptr is not None:
        tl.store(grad_second_ptr + at_weight, other, mask=k < K, cache_modifier=".cs")
    if sums_ptr is not None:
        if tl.program_id(1) == 0:
            tl.store(sums_ptr + column, total)
            tl.store(sums_ptr + N + column, other_total)


@launch.kernel
def _ffn_train_hidden_kernel(
    offsets_ptr, places_ptr, dots_ptr, gate_ptr, up_ptr, penalty_ptr, by_row_ptr, by_column_ptr, room, N,
    BLOCK: tl.constexpr, SLICES: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK entries of the columns' lists): their gradients through the gate and, with `up_ptr`, through the
    up projection, [2, room] by rows and by columns. To the gradient of a hidden activation comes that of the L1
    penalty, with the activation's sign."""
    total = tl.load(offsets_ptr + N)
    first = tl.program_id(0) * BLOCK
    if first < total:
        entry = first + tl.arange(0, BLOCK)
        held = entry < total
        place = tl.load(places_ptr + entry, mask=held, other=0)
        grad = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(SLICES):
            grad += tl.load(dots_ptr + tl.cast(part, tl.int64) * room + entry, mask=held, other=0.0)
        gate = tl.load(gate_ptr + place, mask=held, other=0.0)
        up = None
        if up_ptr is not None:
            up = tl.load(up_ptr + place, mask=held, other=0.0).to(tl.float32)
        _, through_gate, through_up = through(grad, gate, held, up, penalty_ptr, SQUARED)
        tl.store(by_row_ptr + place, through_gate, mask=held)
        tl.store(by_column_ptr + entry, through_gate, mask=held)
        if up_ptr is not None:
            tl.store(by_row_ptr + room + place, through_up, mask=held)
            tl.store(by_column_ptr + room + entry, through_up, mask=held)


DOWN = Tile(8, 1024, together=True)
GATE_UP = Tile(8)


def weight_gradients(
    lists: ColumnLists,
    values: tuple[Tensor, Tensor | None],
    x: Tensor,
    like: Tensor,
    *,
    product: bool = False,
    sums: Tensor | None = None,
    tile: Tile = GATE_UP,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(for each set of values, `[room]`, the gradient of a weight `[N, K]`, the second or None; with `product` the
    products of rows of `x` with the weight `like` at the entries, by columns, in parts of K: float32 `[parts, room]`).

    sums: float32 `[2, N]`, takes the sums of the values of neurons."""
    (room,), (n, k), size = values[0].shape, like.shape, x.element_size()
    block = tile.width // size
    slices = launch.cdiv(k, block)
    first, second = torch.empty_like(like), None if values[1] is None else torch.empty_like(like)
    dots = torch.empty(slices, room, dtype=torch.float32, device=x.device) if product else None
    args = (lists.offsets, lists.rows, *values, x, like if product else None, dots, first, second, sums, room, n, k)
    side = tile.entries if tile.together else 1
    meta = {"BLOCK_E": tile.entries, "BLOCK_K": block, "SIDE": side, "EVEN": k % block == 0}
    meta["HALVES"] = halves(x)
    registers = tile.registers if size == 2 else None
    _ffn_train_weights_kernel((n, slices, 1), args, meta, num_warps=1, maxnreg=registers)
    return first, second, dots


def hidden_gradients(
    lists: ColumnLists, dots: Tensor, gate: Tensor, up: Tensor | None, penalty: Tensor | None, squared: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the gate's pre-activations and of the up projection at the entries, `[2 or 1, room]`, by rows and by
    columns. penalty: the gradient of the L1 penalty for an activation above 0, float32 `[1]`."""
    slices, room = dots.shape
    n = lists.offsets.shape[0] - 1
    by_row = gate.new_empty(1 if up is None else 2, room)
    by_column = torch.empty_like(by_row)
    args = (lists.offsets, lists.places, dots, gate, up, penalty, by_row, by_column, room, n)
    meta = {"BLOCK": 512, "SLICES": slices, "SQUARED": squared}
    _ffn_train_hidden_kernel((launch.cdiv(room, 512), 1, 1), args, meta, num_warps=4)
    return by_row, by_column


EXAMPLES = {
    _ffn_train_weights_kernel: {
        "w_ptr": None, "dots_ptr": None, "BLOCK_E": 8, "BLOCK_K": 256, "SIDE": 1, "EVEN": True,
        "HALVES": False, "num_warps": 1,
    },
    _ffn_train_hidden_kernel: {"BLOCK": 512, "SLICES": 4, "SQUARED": False},
}  # fmt: skip
