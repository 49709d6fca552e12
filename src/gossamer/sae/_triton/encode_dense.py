"""Dense latents: one pass over the pre-activations after the product and one over the latents' gradients, in place.

A program owns a block of COLUMNS columns and a run of rows. It loads the columns' bias and threshold once, goes down
the rows ROWS at a time, and keeps sums over its rows in registers: that is why it takes columns and not rows, for a
threshold for each number would be twice the reading of the numbers themselves. Sums over the runs of rows are partial
and added up after it in order. A warp has whole rows of the tile, 16 bytes a thread: a sum over a row's columns
never leaves the warp, and sums over rows stay apart, a sum for each row of the tile, until the run ends.
The rows that come next are on their way, STAGES deep: other rows than are written.
l0, which sums over the blocks of columns, is a whole number below 2^24, and no order of atomic additions shows. An
element in the window below its threshold becomes -0.0: nothing to a product, and enough for the backward pass.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.list_entries import load_threshold
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae._triton.encode import encode
from gossamer.sae.ranked import ranked
from gossamer.sae.records import SaeEncodeDense, SaeEncodeDenseBwd

FORWARD = launch.Tile({"ROWS": 8, "COLUMNS": 256, "STAGES": 3})
BACKWARD = launch.Tile({"ROWS": 8, "COLUMNS": 256, "STAGES": 3})
PROGRAMS = 16
"""A multiprocessor, at least: so many that the last ones do not leave others idle for long."""


@launch.kernel
def _encode_dense_kernel(
    z_ptr, bias_ptr, threshold_ptr, l0_ptr, nnz_ptr, fired_ptr, radius, M, N, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, run of `length` rows): z by its activation, in place."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    run = tl.program_id(1)
    threshold = load_threshold(threshold_ptr, 1, columns, columns < N)
    bias = tl.zeros([COLUMNS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    fired = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in tl.range(run * length, min(M, run * length + length), ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        at = z_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        z = tl.load(at, mask=inside, other=0.0)
        # Rounded as the other ways round it, and compared as it is stored.
        z = (z.to(tl.float32) + bias[None, :]).to(z.dtype).to(tl.float32)
        below = z <= threshold
        out = tl.where(below, 0.0, z)
        fires = (~below & inside).to(tl.int32)
        fired += fires
        if WINDOW:
            # A literal -0.0 would become +0.0 on its way through the compiler.
            minus_zero = tl.full([], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
            near = below & (z > threshold - radius) & inside
            out = tl.where(near, minus_zero, out)
            # Both counts in one sum: neither passes COLUMNS.
            both = tl.sum(fires + ((fires + near.to(tl.int32)) << 16), axis=1)
            active, stored = both & 0xFFFF, both >> 16
        else:
            active = tl.sum(fires, axis=1)
            stored = active
        tl.atomic_add(nnz_ptr + rows, stored, mask=rows < M, sem="relaxed")
        tl.atomic_add(l0_ptr + rows, active.to(tl.float32), mask=rows < M, sem="relaxed")
        tl.store(at, out.to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(fired_ptr + run * N + columns, tl.sum(fired, axis=0), mask=columns < N)


@launch.kernel
def _encode_dense_bwd_kernel(
    grad_ptr, acts_ptr, grad_l0_ptr, threshold_ptr, sums_ptr, stride_l, radius, M, N, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, TO_INPUT: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, run of `length` rows): the gradient of the pre-activations, in place, and its sums
    over the run; behind these, with thresholds, the sums of theirs."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    run = tl.program_id(1)
    threshold = tl.zeros([COLUMNS], tl.float32)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + columns, mask=columns < N, other=-1.0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    slopes = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(run * length, min(M, run * length + length), ROWS, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        place = rows[:, None] * N + columns[None, :]
        act = tl.load(acts_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        flow = tl.where(act != 0, grad, 0.0)
        if threshold_ptr is not None:
            stored = (act != 0) | (act.to(tl.int32, bitcast=True) < 0)
            near = stored & inside & (act - threshold[None, :] < radius) & (threshold >= 0)[None, :]
            grad_l0 = tl.load(grad_l0_ptr + rows * stride_l, mask=rows < M, other=0.0)
            slope = tl.where(near, (threshold[None, :] * grad + grad_l0[:, None]) * (0.5 / radius), 0.0)
            slopes += slope
            if TO_INPUT:
                flow += slope
        sums += flow
        tl.store(grad_ptr + place, flow.to(grad_ptr.dtype.element_ty), mask=inside)
    sums_ptr += run * N + columns
    tl.store(sums_ptr, tl.sum(sums, axis=0), mask=columns < N)
    if threshold_ptr is not None:
        tl.store(sums_ptr + tl.num_programs(1) * N, -tl.sum(slopes, axis=0), mask=columns < N)


def encode_dense(call: SaeEncodeDense) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(acts, l0, fired, nnz)."""
    x, weight, bias, b_dec, threshold, activation, k, bandwidth, scale, *_ = call
    m, n = x.shape[0], weight.shape[1]
    if activation in ("topk", "batchtopk"):
        acts = ranked(x, weight, bias, b_dec, activation, k, scale, encode)
        bias = threshold = None
    else:
        acts = (x if b_dec is None else x - b_dec).to(weight.dtype) @ weight
    # How many fire, and with those in the window.
    l0 = torch.zeros(m, dtype=torch.float32, device=x.device)
    nnz = torch.zeros(m, dtype=torch.int32, device=x.device)
    length, grid = _runs(m, n, acts, FORWARD)
    fired = torch.empty(grid[1], n, dtype=torch.int32, device=x.device)
    if acts.numel():
        args = (acts, bias, threshold, l0, nnz, fired, bandwidth / 2, m, n, length)
        _encode_dense_kernel(grid, args, {**FORWARD.sizes, "WINDOW": bandwidth > 0}, num_warps=FORWARD.warps)
    else:
        fired.zero_()
    return acts, l0, fired.sum(0), nnz


def encode_dense_bwd_(call: SaeEncodeDenseBwd) -> tuple[Tensor, Tensor]:
    """Grad becomes that of the pre-activations -> (its sums, gradient of the
    threshold)."""
    grad, acts, grad_l0, threshold, bandwidth, ste_to_input = call
    (m, n), wide = acts.shape, threshold_dtype(acts.dtype)
    length, grid = _runs(m, n, acts, BACKWARD)
    sums = torch.empty(1 if threshold is None else 2, grid[1], n, dtype=torch.float32, device=acts.device)
    if acts.numel():
        args = (grad, acts, grad_l0, threshold, sums, grad_l0.stride(0), bandwidth / 2, m, n, length)
        _encode_dense_bwd_kernel(grid, args, {**BACKWARD.sizes, "TO_INPUT": ste_to_input}, num_warps=BACKWARD.warps)
    else:
        sums.zero_()
    total = sums.sum(1).to(wide)
    # No two results of an operator may share memory.
    return total[0], total[1].clone() if len(total) == 2 else total.new_empty(0)


def _runs(m: int, n: int, acts: Tensor, tile: launch.Tile) -> tuple[int, tuple[int, int, int]]:
    """(rows of a run, grid)"""
    blocks, rows = launch.cdiv(n, tile.sizes["COLUMNS"]), launch.cdiv(max(m, 1), tile.sizes["ROWS"])
    runs = min(rows, launch.cdiv(PROGRAMS * tuning.programs(acts.device), max(blocks, 1)))
    length = launch.cdiv(rows, runs) * tile.sizes["ROWS"]
    return length, (blocks, launch.cdiv(max(m, 1), length), 1)


EXAMPLES = {
    _encode_dense_kernel: {**FORWARD.sizes, "WINDOW": True},
    _encode_dense_bwd_kernel: {**BACKWARD.sizes, "TO_INPUT": False},
}
