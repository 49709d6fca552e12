"""Overflowed rows through dense tiles: what keeps every capacity exact, and every density as fast as dense.

A row with more entries than slots is multiplied from its dense source. Which rows those are only the device knows, so
these kernels are always launched and leave at once where a tile has no such row. The three products are those of a
linear layer, restricted to flagged rows: source @ weight, grad @ weight.T where the source holds an entry, and
source.T @ grad added to the weight gradient.

With few rows a product is bound by reading the weight, so the inner dimension is split over programs; the last one to
finish a tile adds up the partial sums in fixed order and rearms the counter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gossamer._core import launch, tuning


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b in float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _overflow_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, counts_ptr, limit, stride_xm, stride_wn, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Program (row block, column tile, split), split fastest: rows whose count exceeds `limit`."""
    if FOLLOWS:
        # Launched while the counting kernel still runs; up to here nothing depends on it.
        gdc_wait()
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tiles_d = tl.cdiv(D, BLOCK_D)
    tile_d = tile % tiles_d
    rows = (tile // tiles_d) * BLOCK_M + tl.arange(0, BLOCK_M)
    flagged = tl.load(counts_ptr + rows, mask=rows < M, other=0) > limit
    if tl.max(flagged.to(tl.int32), axis=0) > 0:
        columns = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        length = tl.cdiv(tl.cdiv(N, SPLITS), BLOCK_N) * BLOCK_N
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
        for first in range(split * length, tl.minimum(split * length + length, N), BLOCK_N):
            inner = first + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptrs + inner[None, :], mask=flagged[:, None] & (inner < N)[None, :], other=0.0)
            w = tl.load(
                w_ptr + inner.to(tl.int64)[:, None] * stride_wn + columns[None, :],
                mask=(inner < N)[:, None] & inside[None, :],
                other=0.0,
            )
            acc = dot(x.to(w.dtype), w, acc, PRECISION, UPCAST)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
        mask = flagged[:, None] & inside[None, :]
        if SPLITS > 1:
            part = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            partial_ptr += tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_D
            tl.store(partial_ptr + split * BLOCK_M * BLOCK_D + part, acc)
            tl.debug_barrier()
            last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
            if last:
                tl.debug_barrier()
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for s in range(SPLITS):
                    acc += tl.load(partial_ptr + s * BLOCK_M * BLOCK_D + part, cache_modifier=".cg")
                tl.store(arrived_ptr + tile, 0)
            mask = mask & last
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptrs, acc, mask=mask)


@triton.jit
def _overflow_bwd_source_kernel(
    grad_ptr, w_ptr, x_ptr, out_ptr, counts_ptr, limit, stride_wn, stride_xm, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row block, share of the column tiles): grad @ weight.T at flagged rows, 0 where the source holds 0."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    flagged = tl.load(counts_ptr + rows, mask=rows < M, other=0) > limit
    if tl.max(flagged.to(tl.int32), axis=0) > 0:
        for tile in range(tl.program_id(1), tl.cdiv(N, BLOCK_N), tl.num_programs(1)):
            inner = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first in range(0, D, BLOCK_D):
                columns = first + tl.arange(0, BLOCK_D)
                inside = columns < D
                grad = tl.load(
                    grad_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :],
                    mask=flagged[:, None] & inside[None, :],
                    other=0.0,
                )
                w = tl.load(
                    w_ptr + inner.to(tl.int64)[None, :] * stride_wn + columns[:, None],
                    mask=(inner < N)[None, :] & inside[:, None],
                    other=0.0,
                )
                acc = dot(grad.to(w.dtype), w, acc, PRECISION, UPCAST)
            mask = flagged[:, None] & (inner < N)[None, :]
            x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_xm + inner[None, :], mask=mask, other=0.0)
            out = tl.where(x != 0, acc, 0.0)
            tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + inner[None, :], out, mask=mask)


@triton.jit
def _overflow_bwd_weight_kernel(
    x_ptr, grad_ptr, out_ptr, counts_ptr, any_ptr, limit, stride_xm, M, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Programs share the tiles of the weight: adds source.T @ grad over flagged rows to what is there."""
    if tl.load(any_ptr) != 0:
        tiles_d = tl.cdiv(D, BLOCK_D)
        for tile in range(tl.program_id(0), tiles_d * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            inner = (tile // tiles_d) * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
            mask = (inner < N)[:, None] & (columns < D)[None, :]
            acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for first in range(0, M, BLOCK_M):
                rows = first + tl.arange(0, BLOCK_M)
                flagged = tl.load(counts_ptr + rows, mask=rows < M, other=0) > limit
                if tl.max(flagged.to(tl.int32), axis=0) > 0:
                    x = tl.load(
                        x_ptr + rows.to(tl.int64)[None, :] * stride_xm + inner[:, None],
                        mask=flagged[None, :] & (inner < N)[:, None],
                        other=0.0,
                    )
                    grad = tl.load(
                        grad_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :],
                        mask=flagged[:, None] & (columns < D)[None, :],
                        other=0.0,
                    )
                    acc = dot(x.to(grad.dtype), grad, acc, PRECISION, UPCAST)
            out_ptrs = out_ptr + inner.to(tl.int64)[:, None] * D + columns[None, :]
            tl.store(out_ptrs, acc + tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32), mask=mask)


_overflow_fwd = launch.Kernel(_overflow_fwd_kernel)
_overflow_bwd_source = launch.Kernel(_overflow_bwd_source_kernel)
_overflow_bwd_weight = launch.Kernel(_overflow_bwd_weight_kernel)


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def forward(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    counts: Tensor,
    limit: int,
    space: tuple[Tensor, Tensor] | None = None,
) -> launch.Bound | None:
    """Writes source @ weight + bias into the rows of `out` whose count exceeds `limit`.

    `space` is what `workspace` gave for these shapes, for callers that keep it. Returns the launch, bound to all but
    (source, weight, bias, out, partial, arrived, counts).
    """
    source = _unit_columns(source)
    m, n = source.shape
    d = weight.shape[1]
    tile, warps, stages = tuning.dense_tile(m, n, d, weight)
    follows = tuning.dependent_launch(weight.device)
    meta = {**tile, **tuning.dot_precision(weight), "FOLLOWS": follows}
    partial, arrived = space or workspace(m, n, weight)
    key = (m, n, d, limit, source.dtype, weight.dtype, out.dtype, bias is None or bias.dtype, counts.dtype)
    key += (source.stride(0), weight.stride(0), meta["PRECISION"])
    args = (source, weight, bias, out, partial, arrived, counts, limit, source.stride(0), weight.stride(0), m, n, d)
    tiles = launch.cdiv(d, meta["BLOCK_D"]) * launch.cdiv(m, meta["BLOCK_M"])
    grid = (tiles * meta["SPLITS"], 1, 1)
    return _overflow_fwd(key, grid, args, meta, num_warps=warps, num_stages=stages, follows=follows, head=7)


def workspace(m: int, n: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(partial sums float32, arrival counters int32, zero) that `forward` needs for source [m, n]."""
    tile, _, _ = tuning.dense_tile(m, n, weight.shape[1], weight)
    tiles = launch.cdiv(weight.shape[1], tile["BLOCK_D"]) * launch.cdiv(m, tile["BLOCK_M"])
    size = tiles * tile["SPLITS"] * tile["BLOCK_M"] * tile["BLOCK_D"] if tile["SPLITS"] > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=weight.device)
    return partial, launch.counters.get(tiles, weight.device)


def backward_source(grad: Tensor, weight: Tensor, source: Tensor, out: Tensor, counts: Tensor, limit: int) -> None:
    """Writes (grad @ weight.T) where source != 0 into the rows of `out` [M, N] whose count exceeds `limit`."""
    source, weight, grad = _unit_columns(source), _unit_columns(weight), grad.contiguous()
    m, n = source.shape
    d = weight.shape[1]
    meta = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_D": 32, **tuning.dot_precision(weight)}
    key = (m, n, d, limit, grad.dtype, source.dtype, weight.dtype, out.dtype, counts.dtype)
    key += (source.stride(0), weight.stride(0), meta["PRECISION"])
    args = (grad, weight, source, out, counts, limit, weight.stride(0), source.stride(0), m, n, d)
    row_blocks = launch.cdiv(m, meta["BLOCK_M"])
    share = min(launch.cdiv(n, meta["BLOCK_N"]), max(launch.cdiv(4 * tuning.programs(grad.device), row_blocks), 16))
    grid = (row_blocks, share, 1)
    _overflow_bwd_source(key, grid, args, meta, num_warps=4, num_stages=3)


def backward_weight(source: Tensor, grad: Tensor, out: Tensor, counts: Tensor, limit: int) -> None:
    """Adds source.T @ grad over the rows whose count exceeds `limit` to `out` [N, D]."""
    source, grad = _unit_columns(source), grad.contiguous()
    m, n = source.shape
    d = grad.shape[1]
    meta = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128, **tuning.dot_precision(grad)}
    key = (m, n, d, limit, source.dtype, grad.dtype, out.dtype, counts.dtype, source.stride(0), meta["PRECISION"])
    any_flagged = (counts > limit).any()
    args = (source, grad, out, counts, any_flagged, limit, source.stride(0), m, n, d)
    tiles = launch.cdiv(d, meta["BLOCK_D"]) * launch.cdiv(n, meta["BLOCK_N"])
    grid = (min(tiles, 4 * tuning.programs(grad.device)), 1, 1)
    _overflow_bwd_weight(key, grid, args, meta, num_warps=4, num_stages=2)


EXAMPLES = {
    _overflow_fwd_kernel: {
        "signature": {
            "x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": None, "out_ptr": "*bf16", "partial_ptr": "*fp32",
            "arrived_ptr": "*i32", "counts_ptr": "*i32", "limit": "i32", "stride_xm": "i32", "stride_wn": "i32",
            "M": "i32", "N": "i32", "D": "i32",
        },
        "constexprs": {
            "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128, "SPLITS": 1, "PRECISION": "ieee", "UPCAST": False,
            "FOLLOWS": False,
        },
        "num_warps": 8,
    },
    _overflow_bwd_source_kernel: {
        "signature": {
            "grad_ptr": "*bf16", "w_ptr": "*bf16", "x_ptr": "*bf16", "out_ptr": "*bf16", "counts_ptr": "*i32",
            "limit": "i32", "stride_wn": "i32", "stride_xm": "i32", "M": "i32", "N": "i32", "D": "i32",
        },
        "constexprs": {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_D": 32, "PRECISION": "ieee", "UPCAST": False},
        "num_warps": 4,
    },
    _overflow_bwd_weight_kernel: {
        "signature": {
            "x_ptr": "*bf16", "grad_ptr": "*bf16", "out_ptr": "*bf16", "counts_ptr": "*i32", "any_ptr": "*i1",
            "limit": "i32", "stride_xm": "i32", "M": "i32", "N": "i32", "D": "i32",
        },
        "constexprs": {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128, "PRECISION": "ieee", "UPCAST": False},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
