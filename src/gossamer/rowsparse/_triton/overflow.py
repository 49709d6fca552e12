"""Overflowed rows through dense tiles, which keep every capacity exact and every density as fast as dense.

A row with more entries than slots is multiplied from its dense source. Which rows those are only the device knows, so
these kernels are always launched and leave at once where a tile has no such row. The three products are those of a
linear layer, restricted to flagged rows: source @ weight, grad @ weight.T (where the source has an entry), and
source.T @ grad added to the weight gradient.

The gradients take the flagged rows from a list, which one program makes beforehand: so few rows that overflowed are few
blocks, wherever they lie. An H200 took 19 ms for two gradients of a weight `[65,536, 2,304]` from 4,096 rows that were
flagged here and there. The forward pass, in which a launch more would show, takes blocks of neighbouring rows.

With few rows a product is bound by reading the weight, so the inner dimension is split over programs; the last one to
finish a tile adds up the partial sums in fixed order, and puts the counter of finished programs back to 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.list_entries import load_threshold
from gossamer.rowsparse._triton.pack import overflowed
from gossamer.rowsparse.records import LinearRows


@triton.jit
def round_tf32(x):
    """x to the nearest TF32: the tensor cores only cut off the bits that they do not read, which doubles the error."""
    bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b in float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    elif PRECISION == "tf32":
        return tl.dot(round_tf32(a), round_tf32(b), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def summed_apart(acc, total, whole):
    """(acc, total) after a sum that is `whole` was added to the total. A product that begins at zeros and is added
    would not do: the compiler makes one running sum of it."""
    return tl.where(whole, 0.0, acc), tl.where(whole, total + acc, total)


@triton.jit
def flagged_product(
    a_rows, b_columns, stride_b, begin, end, flagged, inside,
    ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Product over the inner dimension from begin to end, at flagged rows: float32 [ROWS, COLUMNS].

    `a_rows` [ROWS, 1] and `b_columns` [1, COLUMNS] point at starts of rows and columns, whose numbers lie 1 and
    stride_b apart. With PARTIAL so many are summed on their own: that keeps float32 results as exact as the library's.
    It is one loop all the same, for loads are in flight across the steps of a loop alone.
    """
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, INNER):
        inner = first + tl.arange(0, INNER)
        a = tl.load(a_rows + inner[None, :], mask=flagged[:, None] & (inner < end)[None, :], other=0.0)
        b_ptrs = b_columns + inner.to(tl.int64)[:, None] * stride_b
        b = tl.load(b_ptrs, mask=(inner < end)[:, None] & inside[None, :], other=0.0)
        acc = dot(a.to(b.dtype), b, acc, PRECISION, UPCAST)
        if PARTIAL > 0:
            acc, total = summed_apart(acc, total, (first - begin + INNER) % PARTIAL == 0)
    return total + acc if PARTIAL > 0 else acc


@launch.kernel
def _overflow_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, spans_ptr, threshold_ptr, partial_ptr, arrived_ptr, room, stride_xm, stride_wn,
    stride_wd, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, ACTIVATE: tl.constexpr,
    GDC_WAIT: tl.constexpr,
):  # fmt: skip
    """Program (row block and split, split fastest; share of the column tiles): rows whose spans end beyond `room`.
    ACTIVATE sets results up to max(threshold, 0) to 0."""
    if GDC_WAIT:
        # Launched while the counting kernel still runs; up to here nothing depends on it.
        gdc_wait()
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    flagged = overflowed(spans_ptr, rows, M, room)
    if tl.max(flagged.to(tl.int32), axis=0) > 0:
        tiles = tl.cdiv(D, BLOCK_D)
        length = tl.cdiv(tl.cdiv(N, SPLITS), BLOCK_N) * BLOCK_N
        end = tl.minimum(split * length + length, N)
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            columns = tile * BLOCK_D + tl.arange(0, BLOCK_D)
            inside = columns < D
            w_columns = w_ptr + columns.to(tl.int64)[None, :] * stride_wd
            acc = flagged_product(
                x_rows, w_columns, stride_wn, split * length, end, flagged, inside,
                BLOCK_M, BLOCK_N, BLOCK_D, PARTIAL, PRECISION, UPCAST,
            )  # fmt: skip
            mask = flagged[:, None] & inside[None, :]
            if SPLITS > 1:
                part = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                place = block * tiles + tile
                parts_ptr = partial_ptr + place.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_D
                tl.store(parts_ptr + split * BLOCK_M * BLOCK_D + part, acc)
                tl.debug_barrier()
                last = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == SPLITS - 1
                if last:
                    tl.debug_barrier()
                    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                    for s in range(SPLITS):
                        acc += tl.load(parts_ptr + s * BLOCK_M * BLOCK_D + part, cache_modifier=".cg")
                    tl.store(arrived_ptr + place, 0)
                mask = mask & last
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            out = acc.to(out_ptr.dtype.element_ty)
            if ACTIVATE:
                # Compared as it is stored.
                threshold = tl.zeros([BLOCK_D], tl.float32) + load_threshold(threshold_ptr, 1, columns, inside)
                out = tl.where(out.to(tl.float32) <= threshold[None, :], 0.0, out)
            tl.store(out_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], out, mask=mask)


@launch.kernel(specialize=("M",))
def _overflow_rows_kernel(spans_ptr, rows_ptr, room, M, BLOCK: tl.constexpr):
    """One program: the number of rows whose spans end beyond `room`, and behind it those rows in order."""
    found = 0
    for first in range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        flagged = overflowed(spans_ptr, rows, M, room).to(tl.int32)
        place = 1 + found + tl.cumsum(flagged, axis=0) - flagged
        tl.store(rows_ptr + place, rows, mask=flagged != 0)
        found += tl.sum(flagged, axis=0)
    tl.store(rows_ptr, found)


@triton.jit
def load_rows(rows_ptr, first, number, BLOCK_M: tl.constexpr):
    """(BLOCK_M of the `number` listed rows from `first` on, which are there)"""
    at = first + tl.arange(0, BLOCK_M)
    listed = at < number
    return tl.load(rows_ptr + 1 + at, mask=listed, other=0).to(tl.int64), listed


@launch.kernel
def _overflow_bwd_source_kernel(
    grad_ptr, w_ptr, x_ptr, out_ptr, rows_ptr, stride_wn, stride_xm, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Programs share (column tile, block of listed rows), however few blocks there are, and neighbours a tile of the
    weight: grad @ weight.T; MASKED: 0 where x is 0."""
    number = tl.load(rows_ptr)
    blocks = tl.cdiv(number, BLOCK_M)
    for item in range(tl.program_id(0), blocks * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        rows, flagged = load_rows(rows_ptr, item % blocks * BLOCK_M, number, BLOCK_M)
        inner = item // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        grad_rows, w_rows = grad_ptr + rows[:, None] * D, w_ptr + inner.to(tl.int64)[None, :] * stride_wn
        acc = flagged_product(
            grad_rows, w_rows, 1, 0, D, flagged, inner < N, BLOCK_M, BLOCK_D, BLOCK_N, PARTIAL, PRECISION, UPCAST
        )
        mask = flagged[:, None] & (inner < N)[None, :]
        if MASKED:
            x = tl.load(x_ptr + rows[:, None] * stride_xm + inner[None, :], mask=mask, other=0.0)
            acc = tl.where(x != 0, acc, 0.0)
        tl.store(out_ptr + rows[:, None] * N + inner[None, :], acc, mask=mask)


@launch.kernel
def _overflow_bwd_weight_kernel(
    x_ptr, mask_ptr, grad_ptr, out_ptr, rows_ptr, stride_xm, stride_km, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Programs share the tiles of the weight: adds source.T @ grad over the listed rows to the numbers there. A mask
    leaves out elements of the source where it is 0."""
    number = tl.load(rows_ptr)
    if number > 0:
        tiles_d = tl.cdiv(D, BLOCK_D)
        for tile in range(tl.program_id(0), tiles_d * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            inner = (tile // tiles_d) * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
            acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for first in range(0, number, BLOCK_M):
                rows, flagged = load_rows(rows_ptr, first, number, BLOCK_M)
                held = flagged[None, :] & (inner < N)[:, None]
                x = tl.load(x_ptr + rows[None, :] * stride_xm + inner[:, None], mask=held, other=0.0)
                if mask_ptr is not None:
                    kept = tl.load(mask_ptr + rows[None, :] * stride_km + inner[:, None], mask=held, other=0.0)
                    x = tl.where(kept != 0, x, 0.0)
                grad = tl.load(
                    grad_ptr + rows[:, None] * D + columns[None, :],
                    mask=flagged[:, None] & (columns < D)[None, :],
                    other=0.0,
                )
                acc = dot(x.to(grad.dtype), grad, acc, PRECISION, UPCAST)
            mask = (inner < N)[:, None] & (columns < D)[None, :]
            out_ptrs = out_ptr + inner.to(tl.int64)[:, None] * D + columns[None, :]
            tl.store(out_ptrs, acc + tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32), mask=mask)


SUMMED = 128
"""Products of float32 that are summed on their own."""


class Overflow(NamedTuple):
    """The rows of a dense source `[M, N]` that count: rows whose spans end beyond `room`."""

    source: Tensor
    spans: Tensor
    room: int


def fwd_tile(m: int, n: int, d: int, weight: Tensor) -> launch.Tile:
    """Tile of the dense product of overflowed rows [m, n] @ [n, d], with SPLITS."""
    wide = m > 64
    block_m = 128 if wide else 16 if m <= 16 else 32 if m <= 32 else 64
    block_d = 128 if wide and weight.element_size() == 2 else 64
    tiles = -(-m // block_m) * -(-d // block_d)
    # Two waves of programs, each long enough to hide its start.
    splits = max(1, min(2 * tuning.programs(weight.device) // tiles, n // 512))
    inner = 32 if wide and weight.element_size() > 2 else 64
    sizes = {"BLOCK_M": block_m, "BLOCK_N": inner, "BLOCK_D": block_d, "SPLITS": splits}
    return launch.Tile(sizes, 8 if wide else 4, 3)


def forward(
    rows: Overflow, weight: Tensor, bias: Tensor | None, out: Tensor, limit: tuple[Tensor | None] | None = None
) -> None:
    """Writes source @ weight + bias into the rows of `out` that overflowed; with a `limit`, a threshold `[D]` or None,
    0 where that is up to max(threshold, 0)."""
    source = rows_contiguous(rows.source)
    m, n = source.shape
    d = weight.shape[1]
    tile = fwd_tile(m, n, d, weight)
    sizes = tile.sizes
    follows = tuning.dependent_launch(weight.device)
    summed = SUMMED if out.dtype is torch.float32 and not tuning.tf32() else 0
    meta = {**sizes, "PARTIAL": summed, **tuning.dot_precision(weight, n)}
    meta |= {"ACTIVATE": limit is not None, "GDC_WAIT": follows}
    tiles, blocks, splits = launch.cdiv(d, sizes["BLOCK_D"]), launch.cdiv(m, sizes["BLOCK_M"]), sizes["SPLITS"]
    partial = arrived = None
    if splits > 1:
        partial = launch.scratch.get(tiles * blocks * splits * sizes["BLOCK_M"] * sizes["BLOCK_D"], weight.device)
        arrived = launch.counters.get(tiles * blocks, weight.device)
    args = (source, weight, bias, out, rows.spans, limit and limit[0], partial, arrived, rows.room)
    args += (source.stride(0), *weight.stride(), m, n, d)
    shares = tiles
    if limit is not None:
        # A layer has many tiles: no more programs than fill the GPU a few times look for rows in vain.
        shares = min(tiles, max(launch.cdiv(4 * tuning.programs(weight.device), blocks), 16))
    grid = (blocks * splits, min(shares, 65535), 1)
    _overflow_fwd_kernel(grid, args, meta, launch_pdl=follows, **tile.options)


def linear_source(call: LinearRows) -> Tensor:
    """As its record says. The dense matrix of such a source never existed."""
    x, weight, bias, threshold, spans, room = call
    out = x.new_empty(x.shape[0], weight.shape[0])
    launch_linear_source(x, weight, bias, threshold, spans, room, out)
    return out


def launch_linear_source(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None, spans: Tensor, room: int, out: Tensor
) -> None:
    """Writes the layer into the rows of `out` whose spans end beyond `room`."""
    if out.numel():
        forward(Overflow(x, spans, room), weight.t(), bias, out, (threshold,))


def list_overflowed(spans: Tensor, room: int) -> Tensor:
    """int32 `[M + 1]`: how many rows have spans that end beyond `room`, and behind that which, in order."""
    m = spans.shape[1]
    rows = torch.empty(m + 1, dtype=torch.int32, device=spans.device)
    _overflow_rows_kernel((1, 1, 1), (spans, rows, room, m), {"BLOCK": 4096}, num_warps=8)
    return rows


def backward_source(rows: Overflow, grad: Tensor, weight: Tensor, out: Tensor, masked: bool) -> None:
    """Writes grad @ weight.T into the rows of `out` [M, N] that overflowed; `masked`: 0 where source is 0."""
    source, weight, grad = rows_contiguous(rows.source), rows_contiguous(weight), grad.contiguous()
    m, n = source.shape
    d = weight.shape[1]
    summed = 64 if weight.dtype is torch.float32 and not tuning.tf32() else 0
    meta = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32, "PARTIAL": summed, **tuning.dot_precision(weight, d)}
    meta["MASKED"] = masked
    args = (grad, weight, source, out, list_overflowed(rows.spans, rows.room), weight.stride(0), source.stride(0), n, d)
    items = launch.cdiv(m, meta["BLOCK_M"]) * launch.cdiv(n, meta["BLOCK_N"])
    grid = (min(items, 8 * tuning.programs(grad.device)), 1, 1)
    _overflow_bwd_source_kernel(grid, args, meta, num_warps=8 if summed else 4, num_stages=3)


def weight_tile(element_size: int) -> launch.Tile:
    """Tile of the part of a weight's gradient that comes from rows that overflowed."""
    if element_size == 2:
        return launch.Tile({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_D": 128}, 8, 3)
    return launch.Tile({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128}, 4, 2)


def backward_weight(rows: Overflow, mask: Tensor | None, grad: Tensor, out: Tensor) -> None:
    """Adds source.T @ grad over the rows that overflowed to `out` [N, D]. With a `mask` [M, N] elements of the source
    count where it differs from 0."""
    source = rows_contiguous(rows.source)
    mask = None if mask is None else rows_contiguous(mask)
    strides = source.stride(0), 0 if mask is None else mask.stride(0)
    (m, n), d = source.shape, grad.shape[1]
    tile = weight_tile(grad.element_size())
    meta = {**tile.sizes, **tuning.dot_precision(grad, m)}
    args = (source, mask, grad, out, list_overflowed(rows.spans, rows.room), *strides, n, d)
    tiles = launch.cdiv(d, meta["BLOCK_D"]) * launch.cdiv(n, meta["BLOCK_N"])
    _overflow_bwd_weight_kernel((min(tiles, 4 * tuning.programs(grad.device)), 1, 1), args, meta, **tile.options)


EXAMPLES = {
    _overflow_fwd_kernel: {
        "bias_ptr": None, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128, "SPLITS": 1, "PARTIAL": 0, "PRECISION": "ieee",
        "UPCAST": False, "ACTIVATE": True, "GDC_WAIT": False, "num_warps": 8,
    },
    _overflow_rows_kernel: {"BLOCK": 4096, "num_warps": 8},
    _overflow_bwd_source_kernel: {
        "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32, "PARTIAL": 0, "PRECISION": "ieee", "UPCAST": False, "MASKED": True,
    },
    _overflow_bwd_weight_kernel: {
        "mask_ptr": "*bf16", **weight_tile(2).sizes, "PRECISION": "ieee", "UPCAST": False, "num_warps": 8,
        "num_stages": 3,
    },
}  # fmt: skip
