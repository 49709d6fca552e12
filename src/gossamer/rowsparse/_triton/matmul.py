"""rows @ weight: every program gathers one row's weights, a slice of columns at a time.

One program owns a row and BLOCK_D columns of the output. It takes BLOCK_E entries at once as a [BLOCK_E, BLOCK_D] tile
of gathered weight rows, so that many independent 16-byte loads are in flight, and keeps a tile of float32 partial sums
that it folds once at the end: no exchange between warps inside the loop, and one fixed order of addition.
Column slices are the slow axis of the grid: while all rows work on one slice, the L2 has to hold the weight's
slice (65,536 x 256 bfloat16 = 34 MB), not the whole weight. Rows that overflowed are left to `overflow`.

Both gradients come from the transposed entries at once, for both read the same rows of the output's gradient: a warp
owns a weight row. Times the values, they add up to the row's gradient; times the row itself, folded along D, they are
the gradients of its values. So gradient rows cross from the L2 once, and the weight is read once, in its order. Rows
with many entries, which would hold everybody up at the end, are shared among larger programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.matmul_dense import matmul_dense
from gossamer.rowsparse._triton.overflow import Overflow
from gossamer.rowsparse._triton.pack import row_span
from gossamer.rowsparse.matmul_path import choose_path, gather_tile
from gossamer.rowsparse.records import Matmul, MatmulBwd

LONG = 64
"""Entries up to which a weight row is one warp's work, whatever others have. Where all 65,536 had 84, the larger
programs took an H200 37 ms."""


@triton.jit
def gather_partial(
    values_ptr, indices_ptr, begin, count, w_ptr, stride_wn, columns, inside, N,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of value * weight row over entries begin to count, a lane of BLOCK_E each: float32 [BLOCK_E, BLOCK_D]."""
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    entry = begin + tl.arange(0, BLOCK_E)
    index = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
    value = tl.load(values_ptr + entry, mask=entry < count, other=0.0).to(tl.float32)
    for _ in range(begin, count, BLOCK_E):
        valid = (index >= 0) & (index < N)
        w = tl.load(
            w_ptr + index.to(tl.int64)[:, None] * stride_wn + columns[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        # -1 is no entry, whatever stands in its value; an index past the weight must not vanish silently.
        here = tl.where(valid, value, tl.where(index == -1, 0.0, float("nan")))
        entry += BLOCK_E
        index = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
        value = tl.load(values_ptr + entry, mask=entry < count, other=0.0).to(tl.float32)
        acc += here[:, None] * w
    return acc


@triton.jit
def gather_rows(
    values_ptr, indices_ptr, count, w_ptr, stride_wn, columns, inside, N,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Sum over a list's first `count` entries of value * weight row, at the given columns: float32 [BLOCK_D].

    With PARTIAL, that many entries at a time are summed on their own: in float32 one running sum over a long row rounds
    worse than a dense product does.
    """
    if PARTIAL > 0:
        acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        for begin in range(0, count, PARTIAL):
            end = tl.minimum(begin + PARTIAL, count)
            acc += gather_partial(
                values_ptr, indices_ptr, begin, end, w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D
            )  # fmt: skip
    else:
        acc = gather_partial(values_ptr, indices_ptr, 0, count, w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D)
    return tl.sum(acc, axis=0)


@launch.kernel
def _matmul_fwd_kernel(
    values_ptr, indices_ptr, spans_ptr, w_ptr, bias_ptr, out_ptr, stride_wn, N, D, room,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr,
    LAUNCH_DEPENDENTS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Program (row, column slice). ALONE says that nobody computes rows that overflowed: they become NaN."""
    if LAUNCH_DEPENDENTS:
        # The kernel for overflowed rows may start as soon as every program here has: it waits for our results itself.
        gdc_launch_dependents()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    if not overflowed:
        out = gather_rows(
            values_ptr + start, indices_ptr + start, count, w_ptr, stride_wn, columns, inside, N,
            BLOCK_E, BLOCK_D, PARTIAL,
        )  # fmt: skip
        if bias_ptr is not None:
            out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row.to(tl.int64) * D + columns, out, mask=inside)
    elif ALONE:
        nothing = tl.full([BLOCK_D], float("nan"), tl.float32)
        tl.store(out_ptr + row.to(tl.int64) * D + columns, nothing, mask=inside)


@triton.jit
def load_entries(keys_ptr, at, count, BLOCK_E: tl.constexpr):
    """(rows, slots in the buffer of values, which are there) of BLOCK_E of a column's `count` entries from `at` on."""
    entry = at + tl.arange(0, BLOCK_E)
    held = entry < count
    key = tl.load(keys_ptr + entry, mask=held, other=0)
    return key >> 32, key & 0xFFFFFFFF, held


@triton.jit
def load_gradients(grad_ptr, row, held, columns, D):
    """The rows of the output's gradient that entries belong to, a slice of columns: float32 [BLOCK_E, BLOCK_D]."""
    mask = held[:, None] & (columns < D)[None, :]
    return tl.load(grad_ptr + row[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_weights(w_ptr, column, stride_wn, columns, D):
    """A slice of one weight row, float32 [BLOCK_D], which no other program reads."""
    w_ptr += column.to(tl.int64) * stride_wn
    return tl.load(w_ptr + columns, mask=columns < D, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def fold(products, VEC: tl.constexpr):
    """[BLOCK_E, BLOCK_D] to [BLOCK_E, BLOCK_D / VEC]: sums of the neighbours that one thread holds."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // VEC, VEC]), axis=2)


@launch.kernel
def _matmul_bwd_kernel(
    keys_ptr, offsets_ptr, values_ptr, grad_ptr, w_ptr, grad_w_ptr, grad_values_ptr, sums_ptr, long_ptr, found_ptr,
    stride_wn, D,
    BLOCK_E: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Program (column). keys are (row << 32 | slot of the buffer), sorted by column, then row.

    A column with more than LONG entries, and four times those of a usual one, is only noted down, for
    `_matmul_bwd_long_kernel`: it would keep its warp when others are done.
    """
    column = tl.program_id(0)
    begin, nnz = tl.load(offsets_ptr + column), tl.load(offsets_ptr + tl.num_programs(0))
    count = (tl.load(offsets_ptr + column + 1) - begin).to(tl.int32)
    keys_ptr += begin
    out_ptr = grad_w_ptr + column.to(tl.int64) * D
    if count == 0:
        for first in range(0, D, BLOCK_D):
            columns = first + tl.arange(0, BLOCK_D)
            tl.store(out_ptr + columns, tl.zeros([BLOCK_D], tl.float32), mask=columns < D, cache_modifier=".cs")
    elif count <= BLOCK_E:
        row, place, held = load_entries(keys_ptr, 0, count, BLOCK_E)
        value = tl.load(values_ptr + place, mask=held, other=0.0).to(tl.float32)
        product = tl.zeros([BLOCK_E, BLOCK_D // VEC], tl.float32)
        for first in range(0, D, BLOCK_D):
            columns = first + tl.arange(0, BLOCK_D)
            grad = load_gradients(grad_ptr, row, held, columns, D)
            if w_ptr is not None:
                w = load_weights(w_ptr, column, stride_wn, columns, D)
                product += fold(grad * w[None, :], VEC)
            total = tl.sum(value[:, None] * grad, axis=0)
            tl.store(out_ptr + columns, total, mask=columns < D, cache_modifier=".cs")
        if w_ptr is not None:
            # Places are found again, from the L1: registers limit how many columns are in flight.
            row, place, held = load_entries(keys_ptr, 0, count, BLOCK_E)
            tl.store(grad_values_ptr + place, tl.sum(product, axis=1), mask=held)
    elif (count <= LONG) | (count.to(tl.int64) * tl.num_programs(0) <= 4 * nnz):
        for first in range(0, D, BLOCK_D):
            columns = first + tl.arange(0, BLOCK_D)
            total = tl.zeros([BLOCK_D], tl.float32)
            if w_ptr is not None:
                w = load_weights(w_ptr, column, stride_wn, columns, D)
            for at in range(0, count, STEP):
                row, place, held = load_entries(keys_ptr, at, count, STEP)
                value = tl.load(values_ptr + place, mask=held, other=0.0).to(tl.float32)
                grad = load_gradients(grad_ptr, row, held, columns, D)
                total += tl.sum(value[:, None] * grad, axis=0)
                if w_ptr is not None:
                    # Between slices the sums wait side by side, in the entries' order.
                    waiting = sums_ptr + begin + at + tl.arange(0, STEP)
                    product = tl.load(waiting, mask=held & (first > 0), other=0.0)
                    product += tl.sum(grad * w[None, :], axis=1)
                    tl.debug_barrier()
                    if first + BLOCK_D < D:
                        tl.store(waiting, product, mask=held)
                    else:
                        tl.store(grad_values_ptr + place, product, mask=held)
            tl.store(out_ptr + columns, total, mask=columns < D, cache_modifier=".cs")
    else:
        # In order of arrival, which nothing shows: each column is summed by itself.
        tl.store(long_ptr + tl.atomic_add(found_ptr, 1, sem="relaxed"), column)


@launch.kernel
def _matmul_bwd_long_kernel(
    keys_ptr, offsets_ptr, values_ptr, grad_ptr, w_ptr, grad_w_ptr, grad_values_ptr, long_ptr, found_ptr, stride_wn, D,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Programs share (noted column, role): a slice of the weight row's gradient, or a share of the values' gradient."""
    slices = tl.cdiv(D, BLOCK_D)
    roles = slices if w_ptr is None else 2 * slices
    for item in range(tl.program_id(0), tl.load(found_ptr) * roles, tl.num_programs(0)):
        column = tl.load(long_ptr + item // roles)
        role = item % roles
        begin = tl.load(offsets_ptr + column)
        count = (tl.load(offsets_ptr + column + 1) - begin).to(tl.int32)
        if role < slices:
            columns = role * BLOCK_D + tl.arange(0, BLOCK_D)
            total = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
            for at in range(0, count, BLOCK_E):
                row, place, held = load_entries(keys_ptr + begin, at, count, BLOCK_E)
                value = tl.load(values_ptr + place, mask=held, other=0.0).to(tl.float32)
                total += value[:, None] * load_gradients(grad_ptr, row, held, columns, D)
            out_ptr = grad_w_ptr + column.to(tl.int64) * D
            tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=columns < D)
        elif w_ptr is not None:
            for at in range((role - slices) * BLOCK_E, count, slices * BLOCK_E):
                row, place, held = load_entries(keys_ptr + begin, at, count, BLOCK_E)
                product = tl.zeros([BLOCK_E, BLOCK_D // VEC], tl.float32)
                for first in range(0, D, BLOCK_D):
                    columns = first + tl.arange(0, BLOCK_D)
                    w = load_weights(w_ptr, column, stride_wn, columns, D)
                    product += fold(load_gradients(grad_ptr, row, held, columns, D) * w[None, :], VEC)
                tl.store(grad_values_ptr + place, tl.sum(product, axis=1), mask=held)


def bwd_tile(element_size: int) -> launch.Tile:
    """Tile of the gradients of a row gather: a warp reads 512 bytes of up to eight rows at once.

    80 registers make room for three warps in place of two, and spill nothing.
    """
    sizes = {"BLOCK_E": 8, "STEP": 4, "BLOCK_D": 512 // element_size, "VEC": 16 // element_size}
    return launch.Tile(sizes, warps=1, registers=80)


def matmul(call: Matmul) -> Tensor:
    """Operator `rowsparse.matmul`."""
    values, indices, spans, source, weight, bias, out_dtype = call
    m = spans.shape[1]
    # The dense product would be rounded before a wider bias is added to it.
    as_weight = out_dtype in (None, weight.dtype) and (bias is None or bias.dtype is weight.dtype)
    if as_weight and choose_path(m, values.shape[0], source is not None, weight) == "dense":
        return matmul_dense(values, indices, spans, source, weight, bias)
    weight, source = rows_contiguous(weight), None if source is None else rows_contiguous(source)
    out = weight.new_empty((m, weight.shape[1]), dtype=out_dtype)
    launch_matmul(values, indices, spans, source, weight, bias, out)
    return out


def launch_matmul(
    values: Tensor,
    indices: Tensor,
    spans: Tensor,
    source: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Fills out: the gather, and dense tiles of the rows that overflowed."""
    (m, d), n, room = out.shape, weight.shape[0], values.shape[0]
    if m == 0 or d == 0 or n == 0:
        out.copy_(out.new_zeros(d) if bias is None else bias)
        return
    tile = gather_tile(m, d, weight.element_size())
    # Half-precision results round far more than a running float32 sum loses.
    partial = 64 * tile["BLOCK_E"] if out.dtype is torch.float32 else 0
    meta = {**tile, "PARTIAL": partial}
    meta["LAUNCH_DEPENDENTS"] = source is not None and tuning.dependent_launch(weight.device)
    meta["ALONE"] = source is None
    args = (values, indices, spans, weight, bias, out, weight.stride(0), n, d, room)
    _matmul_fwd_kernel((m, launch.cdiv(d, meta["BLOCK_D"]), 1), args, meta, num_warps=1)
    if source is not None:
        overflow.forward(Overflow(source, spans, room), weight, bias, out)


def matmul_bwd(call: MatmulBwd) -> tuple[Tensor, Tensor]:
    """(weight gradient [N, D] of `dtype`, float32 gradient of values), by transposed entries.

    Without `weight` the second is empty, and with it, 0 at rows that overflowed. Entries count where `mask` is not 0.
    """
    grad, _, keys, col_offsets, values, spans, source, weight, dtype, mask = call
    n, d = col_offsets.shape[0] - 1, grad.shape[1]
    grad_weight = torch.empty(n, d, dtype=dtype, device=grad.device)
    size = 0 if weight is None else values.numel()
    long = min(n, keys.numel() // LONG)
    grad_values = torch.zeros(size, dtype=torch.float32, device=grad.device)
    if n == 0 or d == 0:
        return grad_weight, grad_values
    # How many columns are long, and from an aligned address on, which.
    noted = torch.zeros(4 + long, dtype=torch.int32, device=grad.device)
    weight = None if weight is None else rows_contiguous(weight)
    stride = 0 if weight is None else weight.stride(0)
    tile = bwd_tile(grad.element_size())
    sums = None if weight is None else torch.empty(keys.numel(), dtype=torch.float32, device=grad.device)
    operands = (keys, col_offsets, values, grad, weight, grad_weight, grad_values)
    listed = (noted[4:], noted)
    meta = {**tile.sizes, "LONG": LONG}
    args = (*operands, sums, *listed, stride, d)
    _matmul_bwd_kernel((n, 1, 1), args, meta, **tile.options)
    if long:
        grid = (min(2 * long * launch.cdiv(d, 128), 4 * tuning.programs(grad.device)), 1, 1)
        wide = {"BLOCK_E": 64, "BLOCK_D": tile.sizes["BLOCK_D"], "VEC": tile.sizes["VEC"]}
        _matmul_bwd_long_kernel(grid, (*operands, *listed, stride, d), wide, num_warps=8)
    if source is not None:
        overflow.backward_weight(Overflow(source, spans, values.shape[0]), mask, grad, grad_weight)
    return grad_weight, grad_values


EXAMPLES = {
    _matmul_fwd_kernel: {
        "values_ptr": "*fp32", "w_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK_E": 4, "BLOCK_D": 128, "PARTIAL": 64,
        "LAUNCH_DEPENDENTS": False, "ALONE": False, "num_warps": 1,
    },
    _matmul_bwd_kernel: {
        "offsets_ptr": "*i64", "grad_values_ptr": "*fp32", "BLOCK_E": 8, "STEP": 4, "BLOCK_D": 256, "VEC": 8,
        "LONG": 64, "num_warps": 1, "maxnreg": 80,
    },
    _matmul_bwd_long_kernel: {
        "offsets_ptr": "*i64", "grad_values_ptr": "*fp32", "BLOCK_E": 64, "BLOCK_D": 256, "VEC": 8, "num_warps": 8,
    },
}  # fmt: skip
