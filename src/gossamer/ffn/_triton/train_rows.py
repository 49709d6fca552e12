"""A sparse block's products along rows: the up projection at the gate's entries, the down projection, and the gradient
of x.

The up projection takes a program a row, of as few warps as hold the row of x: the rows of the weight are on their way
STAGES at a time, all but one in shared memory. The others take a program a row and slice of 256 columns, BLOCK_E rows
of the weight at once: of so narrow slices, which are the slow axis of the grid, a part of the rows is found in the L1.
Sums stay in registers, in float32, in the order of the entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton.entry_lists import RowLists, Tile, Weights, halves, hidden_of, load, offset_of, wide, widened


@launch.kernel
def _ffn_train_up_kernel(
    offsets_ptr, columns_ptr, gate_ptr, up_values_ptr, hidden_ptr, l1_ptr, x_ptr, up_ptr, up_bias_ptr, K,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SQUARED: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Program (row): the up projection at its entries, the hidden activations, and the sum of these without signs.
    Without `up_ptr` an entry is its own factor."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - start
    if up_ptr is not None:
        k = tl.arange(0, BLOCK_K)
        x = wide(tl.load(x_ptr + row * K + k, mask=k < K, other=0.0), HALVES)
    l1 = tl.zeros([BLOCK_E], tl.float32)
    for first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        entry = first + tl.arange(0, BLOCK_E)
        held = entry < count
        gate = tl.load(gate_ptr + start + entry, mask=held, other=0.0)
        factor = None
        if up_ptr is not None:
            at = widened(tl.load(columns_ptr + start + entry, mask=held, other=0))
            mask = held[:, None] & (k < K)[None, :]
            up = load(up_ptr + offset_of(at, K)[:, None] + k[None, :], mask, EVEN)
            factor = tl.sum(wide(up, HALVES) * x[None, :], axis=1)
            if up_bias_ptr is not None:
                factor += tl.load(up_bias_ptr + at, mask=held, other=0.0).to(tl.float32)
            factor = factor.to(gate.dtype).to(tl.float32)
            tl.store(up_values_ptr + start + entry, factor, mask=held)
        hidden = hidden_of(gate, factor, SQUARED)
        tl.store(hidden_ptr + start + entry, hidden, mask=held)
        l1 += tl.where(held, tl.abs(hidden), 0.0)
    tl.store(l1_ptr + row, tl.sum(l1, axis=0))


@triton.jit
def add_products(
    acc, columns_ptr, first_ptr, second_ptr, w_ptr, other_ptr, entry, d, D, EVEN: tl.constexpr, HALVES: tl.constexpr
):
    """acc + the products of an entry with its rows."""
    at = offset_of(widened(tl.load(columns_ptr + entry)), D) + d
    acc += tl.load(first_ptr + entry).to(tl.float32) * wide(load(w_ptr + at, d < D, EVEN), HALVES)
    if other_ptr is not None:
        acc += tl.load(second_ptr + entry).to(tl.float32) * wide(load(other_ptr + at, d < D, EVEN), HALVES)
    return acc


@launch.kernel
def _ffn_train_rows_kernel(
    offsets_ptr, columns_ptr, first_ptr, second_ptr, w_ptr, other_ptr, bias_ptr, out_ptr, D,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program (row, slice of the columns): the sum over its entries of first * W and, if there is one, second * another
    W."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - start
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    columns_ptr += start
    first_ptr += start
    if other_ptr is not None:
        second_ptr += start
    whole = count // BLOCK_E * BLOCK_E
    for begin in range(0, whole, BLOCK_E):
        for step in tl.static_range(BLOCK_E):
            acc = add_products(
                acc, columns_ptr, first_ptr, second_ptr, w_ptr, other_ptr, begin + step, d, D, EVEN, HALVES
            )  # fmt: skip
    for entry in range(whole, count):
        acc = add_products(acc, columns_ptr, first_ptr, second_ptr, w_ptr, other_ptr, entry, d, D, EVEN, HALVES)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, acc, mask=d < D)


UP = Tile(1, 4096, 96, 3)
DOWN = Tile(8)
DX = Tile(4)


def forward(
    lists: RowLists,
    x: Tensor,
    weights: Weights,
    down_bias: Tensor | None,
    squared: bool,
    up_tile: Tile = UP,
    tile: Tile = DOWN,
) -> tuple[Tensor, Tensor]:
    """(out `[M, D]`, float32 `[M]`: the sums of |hidden| of rows) of x `[M, K]`; puts the up projection at the entries
    into `lists.values`. A row without entries becomes the bias."""
    (m, k), size, up = x.shape, x.element_size(), weights.up
    out, l1 = x.new_empty(m, weights.down.shape[1]), torch.empty(m, dtype=torch.float32, device=x.device)
    gate, values, hidden = lists.values[0], None if up is None else lists.values[1], torch.empty_like(lists.values[0])
    block = 1 if up is None else launch.next_power_of_2(k)
    # Other rows than these are not read 16 bytes at a time, and not ahead.
    even = size == 2 and k % 8 == 0
    stages, registers = (up_tile.stages, up_tile.registers) if even else (1, None)
    meta = {"BLOCK_E": up_tile.entries if up is not None else 64, "BLOCK_K": block, "STAGES": stages}
    meta |= {"SQUARED": squared, "EVEN": k == block, "HALVES": halves(x)}
    args = (lists.offsets, lists.columns, gate, values, hidden, l1, x, up, weights.up_bias, k)
    warps = min(16, max(1, block * size // up_tile.width))
    _ffn_train_up_kernel((m, 1, 1), args, meta, num_warps=warps, maxnreg=registers)
    multiply_rows(lists.columns, lists.offsets, (hidden, weights.down), None, down_bias, out, tile)
    return out, l1


def multiply_rows(
    columns: Tensor,
    offsets: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile = DX,
) -> None:
    """out `[M, D]`: of each row the sum of its entries times rows of a weight `[N, D]`, for one or two sets of values
    and weights."""
    (m, d), size = out.shape, out.element_size()
    block = min(launch.next_power_of_2(d), tile.width // size)
    meta = {"BLOCK_E": tile.entries, "BLOCK_D": block, "EVEN": d % block == 0, "HALVES": halves(out)}
    values, other = second or (None, None)
    args = (offsets, columns, first[0], values, first[1], other, bias, out, d)
    grid, registers = (m, launch.cdiv(d, block), 1), tile.registers
    _ffn_train_rows_kernel(grid, args, meta, num_warps=1, maxnreg=registers)


EXAMPLES = {
    _ffn_train_up_kernel: {
        "columns_ptr": "*i16", "up_bias_ptr": None, "BLOCK_E": 1, "BLOCK_K": 2048, "STAGES": 3, "SQUARED": False,
        "EVEN": True, "HALVES": False, "num_warps": 1, "maxnreg": 96,
    },
    _ffn_train_rows_kernel: {
        "columns_ptr": "*i16", "bias_ptr": None, "BLOCK_E": 4, "BLOCK_D": 256, "EVEN": True, "HALVES": False,
        "num_warps": 1,
    },
}  # fmt: skip
