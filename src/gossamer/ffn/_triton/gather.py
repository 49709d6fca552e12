"""The rest of a sparse feed-forward block in one pass: every program owns a row and gathers the weights of its entries.

A program reads how many entries each tile of its row has, and then takes BLOCK_E entries at a time, wherever in the
tiles they stand: it loads their rows of up and of down at once, multiplies the row of x, which stays in registers, by
the rows of up, and adds the products, times the entries, times the rows of down, to the row of the result, which stays
in registers as well, in float32. Nothing that is as wide as the block is written. A row costs (K + D) elements an
entry, out of the L2, and what counts is how many of them are on their way at once: so those of the next entries go to
shared memory, and registers are few enough for ten programs a multiprocessor. A warp takes 1,024 columns; more of them
would wait for each other at every entry.

Rows that overflowed their slots, or have more entries than pays, are left out and listed for `heavy`. The order of the
list is that of arrival, which nothing shows: a row's products do not depend on its neighbours.

With few rows the entries of one are shared by PARTS programs, whose float32 sums a second kernel adds in fixed order.
On Hopper programs take their places while the kernel before them runs, and wait for its end.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gossamer._core import launch, tuning
from gossamer.ffn import costs
from gossamer.ffn._triton.entry_lists import Weights
from gossamer.ffn._triton.heavy import LISTED

TILE, SLOTS = tl.constexpr(costs.TILE), tl.constexpr(costs.SLOTS)


@triton.jit
def locate(values_ptr, indices_ptr, entry, total, counts, ends, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """(column, value) of a row's entries by their numbers; `ends` are the running sums of its counts by tile."""
    before = ends[None, :] <= entry[:, None]
    at = tl.sum(before.to(tl.int32), axis=1)
    slot = entry - tl.sum(tl.where(before, counts[None, :], 0), axis=1)
    index = tl.load(indices_ptr + at * SLOTS + slot, mask=entry < total, other=0).to(tl.int32) + at * TILE
    return index, tl.load(values_ptr + at * SLOTS + slot, mask=entry < total, other=0.0).to(tl.float32)


@launch.kernel(do_not_specialize=["tiles"])
def _ffn_gather_kernel(
    values_ptr, indices_ptr, counts_ptr, x_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr, out_ptr, nnz_ptr,
    heavy_ptr, tiles, K, D,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, SQUARED: tl.constexpr,
    BLOCK_T: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, slice of the columns, part of its entries). Without `up_ptr` an entry is its own factor. heavy_ptr:
    the words before LISTED, then the rows that are listed. STAGES steps are on their way at once, all but one of them
    in shared memory."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    t = tl.arange(0, BLOCK_T)
    counts = tl.load(counts_ptr + row * tiles + t, mask=t < tiles, other=0).to(tl.int32)
    total = tl.sum(counts, axis=0)
    heavy = (tl.max(counts, axis=0) > SLOTS) | (total > tl.load(heavy_ptr + 1))
    first_program = (tl.program_id(1) == 0) & (part == 0)
    if first_program:
        tl.store(nnz_ptr + row, total)
    if heavy:
        if first_program:
            place = tl.atomic_add(heavy_ptr, 1, sem="relaxed")
            tl.store(heavy_ptr + LISTED + place, row.to(tl.int32))
    else:
        ends = tl.cumsum(counts, axis=0)
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        if up_ptr is not None:
            k = tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
        acc = tl.zeros([BLOCK_D], tl.float32)
        values_ptr += row * tiles * SLOTS
        indices_ptr += row * tiles * SLOTS
        entry = part * BLOCK_E + tl.arange(0, BLOCK_E)
        if STAGES == 1:
            index, value = locate(values_ptr, indices_ptr, entry, total, counts, ends, TILE, SLOTS)
        for _ in tl.range(part * BLOCK_E, total, PARTS * BLOCK_E, num_stages=STAGES):
            if STAGES > 1:
                index, value = locate(values_ptr, indices_ptr, entry, total, counts, ends, TILE, SLOTS)
            held = (entry < total)[:, None]
            at = index.to(tl.int64)
            down = tl.load(down_ptr + at[:, None] * D + d[None, :], mask=held & (d < D)[None, :], other=0.0)
            factor = value * value if SQUARED else value
            if up_ptr is not None:
                up = tl.load(up_ptr + at[:, None] * K + k[None, :], mask=held & (k < K)[None, :], other=0.0)
                if up_bias_ptr is not None:
                    bias = tl.load(up_bias_ptr + at, mask=entry < total, other=0.0).to(tl.float32)
            entry += PARTS * BLOCK_E
            if STAGES == 1:
                # Without stages the next entries are found while these weights are on their way.
                index, value = locate(values_ptr, indices_ptr, entry, total, counts, ends, TILE, SLOTS)
            if up_ptr is not None:
                product = tl.sum(up.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
                if up_bias_ptr is not None:
                    product += bias
                factor *= product
            acc += tl.sum(factor[:, None] * down.to(tl.float32), axis=0)
        if PARTS > 1:
            out_ptr += (row * PARTS + part) * D
        else:
            out_ptr += row * D
            if down_bias_ptr is not None:
                acc += tl.load(down_bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out_ptr + d, acc, mask=d < D)


@launch.kernel
def _ffn_sum_kernel(parts_ptr, bias_ptr, out_ptr, D, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """Program (row, slice of the columns): the sums of a row's parts, in their order."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(PARTS):
        acc += tl.load(parts_ptr + (row * PARTS + part) * D + d, mask=d < D, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, acc, mask=d < D)


WIDTH, STAGES, REGISTERS = 1024, 3, 96
"""Columns to a warp, stages, and registers of `costs.MANY` rows of 16 bits: with 96 ten programs find room on a
multiprocessor. Fewer rows would leave half of a second round empty."""
STAGED = 96 << 10
"""Bytes of shared memory that a program's stages may take."""
SLICE = 2048
"""Columns of the result that a program takes at most where it multiplies by no x."""


def gather(
    packed: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weights: Weights,
    down_bias: Tensor | None,
    out: Tensor,
    nnz: Tensor,
    heavy: Tensor,
    squared: bool,
) -> None:
    """Writes the rows of `out` that are not heavy, lists the others and counts all entries.

    packed: values and indices [M, T, SLOTS] and counts [M, T], as `empty_twell` has them. x is contiguous. heavy:
    the list, still empty.
    """
    (m, tiles, _), up = packed[0].shape, weights.up
    k, d = x.shape[1], out.shape[1]
    block_k = 1 if up is None else launch.next_power_of_2(k)
    # Without x to multiply by, slices of a row have nothing in common.
    block_d = launch.next_power_of_2(d) if up is not None else min(launch.next_power_of_2(d), SLICE)
    slices = launch.cdiv(d, block_d)
    warps = min(16, max(1, max(block_k, block_d) // WIDTH))
    stages, registers = stages_and_registers(0 if up is None else k, d, x.element_size(), warps)
    room = max(1, min(8, 8 * tuning.programs(x.device) // max(1, m * slices)))
    # A power of two: each number of parts is compiled.
    parts = 1 << (room.bit_length() - 1)
    follows = tuning.dependent_launch(x.device)
    meta = {
        "BLOCK_E": 1, "BLOCK_K": block_k, "BLOCK_D": block_d, "PARTS": parts,
        "SQUARED": squared, "BLOCK_T": launch.next_power_of_2(tiles), "STAGES": stages,
        "DEPENDENT": follows,
    }  # fmt: skip
    whole = out if parts == 1 else torch.empty(m, parts, d, dtype=torch.float32, device=x.device)
    heads = (*packed, x, *weights[3:], down_bias, whole, nnz, heavy)
    registers = registers if m >= costs.MANY else None
    options: dict[str, Any] = {"num_warps": warps, "maxnreg": registers, "launch_pdl": follows}
    _ffn_gather_kernel((m, slices, parts), (*heads, tiles, k, d), meta, **options)
    if parts > 1:
        block = min(1024, launch.next_power_of_2(d))
        grid = (m, launch.cdiv(d, block), 1)
        meta = {"BLOCK_D": block, "PARTS": parts}
        _ffn_sum_kernel(grid, (whole, down_bias, out, d), meta, num_warps=4)


def stages_and_registers(k: int, d: int, size: int, warps: int) -> tuple[int, int | None]:
    """Of rows of up and down of k and d elements of `size` bytes: rows of multiples of 16 elements are copied to shared
    memory as they come, where they are not too wide. It was measured of 16 bits."""
    staged = (launch.next_power_of_2(k) + launch.next_power_of_2(d)) * size * (STAGES - 1)
    if torch.version.hip is not None or size > 2 or (k | d) % 16 or staged > STAGED:
        return 1, None
    return STAGES, REGISTERS if max(k, d) <= WIDTH * warps else None


EXAMPLES = {
    _ffn_gather_kernel: {
        "indices_ptr": "*u8", "counts_ptr": "*i16", "up_bias_ptr": "*bf16", "down_bias_ptr": "*bf16", "BLOCK_E": 1,
        "BLOCK_K": 2048, "BLOCK_D": 2048, "PARTS": 1, "SQUARED": False, "BLOCK_T": 32, "STAGES": 3, "DEPENDENT": False,
        "num_warps": 2, "maxnreg": 96,
    },
    _ffn_sum_kernel: {"bias_ptr": "*bf16", "BLOCK_D": 1024, "PARTS": 8},
}  # fmt: skip
