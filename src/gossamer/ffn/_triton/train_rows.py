"""A sparse block's products along rows: up and down of the forward pass, and the gradient of x.

A program owns a row and a slice of the result's columns. It takes BLOCK_E of the row's entries at a time: the rows of
two weights that belong to them are on their way at once, STAGES steps of them, all but one in shared memory, and sums
stay in registers, in float32, in the order of the entries.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gossamer._core import launch
from gossamer.ffn._triton.entry_lists import RowLists, Weights, widened


@launch.kernel
def _ffn_train_fwd_kernel(
    offsets_ptr, columns_ptr, gate_ptr, up_values_ptr, l1_ptr, x_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr,
    out_ptr, K, D,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """Program (row, slice of the columns): the up projection at its entries, their products with the gate, and those
    times W_down. Without `up_ptr` an entry is its own factor. A row without entries becomes the bias."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - start
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if up_ptr is not None:
        k = tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    l1 = tl.zeros([BLOCK_E], tl.float32)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    columns_ptr += start
    gate_ptr += start
    for first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        entry = first + tl.arange(0, BLOCK_E)
        held = entry < count
        at = widened(tl.load(columns_ptr + entry, mask=held, other=0)).to(tl.int64)
        gate = tl.load(gate_ptr + entry, mask=held, other=0.0).to(tl.float32)
        down = tl.load(down_ptr + at[:, None] * D + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
        hidden = gate
        if SQUARED:
            hidden = (gate * gate).to(dtype).to(tl.float32)
        if up_ptr is not None:
            up = tl.load(up_ptr + at[:, None] * K + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0)
            factor = tl.sum(up.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
            if up_bias_ptr is not None:
                factor += tl.load(up_bias_ptr + at, mask=held, other=0.0).to(tl.float32)
            factor = factor.to(dtype)
            tl.store(up_values_ptr + start + entry, factor, mask=held)
            # Rounded, as a dense product would find it, and as the weight's gradient has it.
            hidden = (hidden * factor.to(tl.float32)).to(dtype).to(tl.float32)
        l1 += tl.where(held, tl.abs(hidden), 0.0)
        acc += tl.sum(hidden[:, None] * down.to(tl.float32), axis=0)
    if tl.program_id(1) == 0:
        tl.store(l1_ptr + row, tl.sum(l1, axis=0))
    if down_bias_ptr is not None:
        acc += tl.load(down_bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, acc, mask=d < D)


@launch.kernel
def _ffn_train_up_kernel(
    offsets_ptr, columns_ptr, gate_ptr, up_values_ptr, hidden_ptr, x_ptr, up_ptr, up_bias_ptr, K,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """Program (row): the up projection at its entries, and its products with the gate."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - start
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    columns_ptr += start
    for first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        entry = first + tl.arange(0, BLOCK_E)
        held = entry < count
        at = widened(tl.load(columns_ptr + entry, mask=held, other=0)).to(tl.int64)
        up = tl.load(up_ptr + at[:, None] * K + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0)
        factor = tl.sum(up.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        if up_bias_ptr is not None:
            factor += tl.load(up_bias_ptr + at, mask=held, other=0.0).to(tl.float32)
        factor = factor.to(dtype)
        tl.store(up_values_ptr + start + entry, factor, mask=held)
        gate = tl.load(gate_ptr + start + entry, mask=held, other=0.0).to(tl.float32)
        hidden = gate
        if SQUARED:
            hidden = (gate * gate).to(dtype).to(tl.float32)
        tl.store(hidden_ptr + start + entry, hidden * factor.to(tl.float32), mask=held)


@launch.kernel
def _ffn_train_dx_kernel(
    offsets_ptr, columns_ptr, first_ptr, second_ptr, gate_ptr, up_ptr, dx_ptr, K,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Program (row, slice of the columns): the sum over its entries of first * W_gate and second * W_up, which is left
    out without `up_ptr`. With BESIDE the kernel before it may still run: it ends after that."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - start
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_K], tl.float32)
    columns_ptr += start
    first_ptr += start
    if up_ptr is not None:
        second_ptr += start
    for begin in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        entry = begin + tl.arange(0, BLOCK_E)
        held = entry < count
        at = widened(tl.load(columns_ptr + entry, mask=held, other=0)).to(tl.int64)[:, None] * K + k[None, :]
        mask = held[:, None] & (k < K)[None, :]
        first = tl.load(first_ptr + entry, mask=held, other=0.0).to(tl.float32)
        acc += tl.sum(first[:, None] * tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32), axis=0)
        if up_ptr is not None:
            second = tl.load(second_ptr + entry, mask=held, other=0.0).to(tl.float32)
            acc += tl.sum(second[:, None] * tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32), axis=0)
    tl.store(dx_ptr + row * K + k, acc, mask=k < K)
    if BESIDE:
        gdc_wait()


class RowTile(NamedTuple):
    """Entries at a time, columns to a program at most, columns to a warp, stages, registers of a thread."""

    entries: int = 1
    slice: int = 16384
    width: int = 1024
    stages: int = 3
    registers: int | None = None

    def options(self, length: int) -> tuple[int, int, int]:
        """(columns to a program, slices, warps) of rows of `length`."""
        block = min(launch.next_power_of_2(length), self.slice)
        return block, launch.cdiv(length, block), min(16, max(1, block // self.width))


FORWARD = RowTile(registers=96)
DX = RowTile(registers=96)


def forward(
    lists: RowLists,
    x: Tensor,
    weights: Weights,
    down_bias: Tensor | None,
    squared: bool,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(out `[M, D]`, the up projection's values at the entries or None, float32 `[M]`: the sums of |hidden| of rows) of
    x `[M, K]`."""
    (m, k), d = x.shape, weights.down.shape[1]
    tile = tile or FORWARD
    out, l1 = x.new_empty(m, d), torch.empty(m, dtype=torch.float32, device=x.device)
    up = weights.up
    values = None if up is None else torch.empty_like(lists.values)
    wide = tile if up is None else tile._replace(slice=1 << 30)
    block_d, slices, warps = wide.options(d)
    block_k = 1 if up is None else launch.next_power_of_2(k)
    warps = max(warps, wide.options(block_k)[2])
    meta = {"BLOCK_E": tile.entries, "BLOCK_K": block_k, "BLOCK_D": block_d, "STAGES": tile.stages, "SQUARED": squared}
    args = (lists.offsets, lists.columns, lists.values, values, l1, x, up)
    args += (weights.up_bias, weights.down, down_bias, out, k, d)
    _ffn_train_fwd_kernel((m, slices, 1), args, meta, num_warps=warps, maxnreg=tile.registers)
    return out, values, l1


UP = RowTile(width=2048)
DOWN = RowTile(registers=96)


def forward_apart(
    lists: RowLists,
    x: Tensor,
    weights: Weights,
    down_bias: Tensor | None,
    squared: bool,
    tile: RowTile | None = None,
    down_tile: RowTile | None = None,
    both: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    m, k = x.shape
    values, hidden = torch.empty_like(lists.values), torch.empty_like(lists.values)
    tile = tile or UP
    block, _, warps = tile._replace(slice=1 << 30).options(k)
    meta = {"BLOCK_E": tile.entries, "BLOCK_K": block, "STAGES": tile.stages, "SQUARED": squared}
    args = (lists.offsets, lists.columns, lists.values, values, hidden, x, weights.up, weights.up_bias, k)
    _ffn_train_up_kernel((m, 1, 1), args, meta, num_warps=warps, maxnreg=tile.registers)
    if not both:
        return hidden, values, hidden
    out, _, l1 = forward(
        lists._replace(values=hidden), x, weights._replace(up=None, up_bias=None), down_bias, False, down_tile or DOWN
    )
    return out, values, l1


def input_gradient(
    columns: Tensor,
    offsets: Tensor,
    first: Tensor,
    second: Tensor | None,
    weights: Weights,
    out: Tensor,
    beside: bool = False,
    tile: RowTile | None = None,
) -> None:
    """The gradient of x, `[M, K]`: gradients of the entries, by rows, times rows of the weights `[N, K]`. With `beside`
    while the kernel launched last runs, which must let others begin, and touch none of these."""
    m, k = offsets.shape[0] - 1, weights.gate.shape[1]
    tile = tile or DX
    block, slices, warps = tile.options(k)
    meta = {"BLOCK_E": tile.entries, "BLOCK_K": block, "STAGES": tile.stages, "BESIDE": beside}
    args = (offsets, columns, first, second, weights.gate, weights.up, out, k)
    options = {"num_warps": warps, "maxnreg": tile.registers, "launch_pdl": beside}
    _ffn_train_dx_kernel((m, slices, 1), args, meta, **options)


EXAMPLES = {
    _ffn_train_fwd_kernel: {
        "columns_ptr": "*i16", "l1_ptr": "*fp32", "up_bias_ptr": None, "down_bias_ptr": None, "BLOCK_E": 1,
        "BLOCK_K": 2048, "BLOCK_D": 2048, "STAGES": 3, "SQUARED": False, "num_warps": 2, "maxnreg": 96,
    },
    _ffn_train_dx_kernel: {
        "columns_ptr": "*i16", "BLOCK_E": 1, "BLOCK_K": 2048, "STAGES": 3, "BESIDE": False, "num_warps": 2,
        "maxnreg": 96,
    },
}  # fmt: skip
