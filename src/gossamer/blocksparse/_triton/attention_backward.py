"""Block-sparse attention, backward, through pointers: what `attention` computes, differentiated.

Four kernels. `_attention_stats_kernel` keeps two numbers for each query. `_attention_dq_kernel` owns BLOCK_M queries
and walks the keys of their block row's list; `_attention_dkdv_kernel` owns BLOCK_N keys and walks the queries of their
block column's list, for each head that shares the keys, on transposed scores; `_attention_dbias_kernel` owns a tile of
the bias and walks the heads and batches that share it. Each recomputes the weights from the log-sum-exp and writes its
sums once, so that results do not depend on the order in which programs run.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.attention import (
    INV_LN2,
    Problem,
    Tile,
    bias_of,
    dot,
    listed,
    problem_of,
    scores,
    span,
)

ROWS = 64
"""Queries of a program that makes statistics, and what their number is padded to."""


@triton.jit
def _attention_stats_kernel(
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, stats_ptr, stride_gb, stride_gh, stride_gt, H, T, D, tiles,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`stats`, `[B, H, 2, tiles * ROWS]`: the log-sum-exp in base 2, +inf where a row has no keys or is padding, so
    that weights are 0 there; and the row sums of grad * out, less the gradient of the log-sum-exp."""
    pair = tl.program_id(0) // tiles
    lines = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK_D)
    exists = lines < T
    inside = exists[:, None] & (inner < D)[None, :]
    line = pair.to(tl.int64) * T + lines
    out = tl.load(out_ptr + line[:, None] * D + inner[None, :], mask=inside, other=0.0)
    grad_ptr += (pair // H).to(tl.int64) * stride_gb + (pair % H).to(tl.int64) * stride_gh
    grad = tl.load(grad_ptr + lines.to(tl.int64)[:, None] * stride_gt + inner[None, :], mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(lse_ptr + line, mask=exists, other=float("-inf")) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + line, mask=exists, other=0.0)
    stats_ptr += pair.to(tl.int64) * (2 * tiles * ROWS) + lines
    tl.store(stats_ptr, lse)
    tl.store(stats_ptr + tiles * ROWS, delta)


@triton.jit
def load_rows(x_ptr, base, rows, exists, D, BLOCK_D: tl.constexpr):
    """Rows of a matrix with D contiguous columns."""
    inner = tl.arange(0, BLOCK_D)
    at = (base + rows)[:, None] * D + inner[None, :]
    return tl.load(x_ptr + at, mask=exists[:, None] & (inner < D)[None, :], other=0.0)


@triton.jit
def store_rows(x_ptr, base, rows, exists, D, x, BLOCK_D: tl.constexpr):
    inner = tl.arange(0, BLOCK_D)
    at = (base + rows)[:, None] * D + inner[None, :]
    tl.store(x_ptr + at, x, mask=exists[:, None] & (inner < D)[None, :])


@triton.jit
def load_stats(stats_ptr, pair, lines, exists, padded):
    """(log-sum-exp in base 2, row sum) of queries."""
    stats_ptr += pair.to(tl.int64) * (2 * padded) + lines
    lse = tl.load(stats_ptr, mask=exists, other=float("inf"))
    return lse, tl.load(stats_ptr + padded, mask=exists, other=0.0)


@triton.jit
def key_limit(lengths_ptr, batch, Tk):
    limit = Tk
    if lengths_ptr is not None:
        limit = tl.minimum(tl.load(lengths_ptr + batch), Tk)
    return limit


@triton.jit
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, grad_ptr, stats_ptr, dq_ptr, offsets_ptr, columns_ptr, lengths_ptr,
    stride_zb, stride_zh, stride_bb, stride_bh, stride_bq, H, GROUP, rows, tiles, Tq, Tk, D, scale, factor, padded,
    last, capacity,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    batch = pair // H
    head = pair % H
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = lines < Tq
    row = (batch * stride_zb + head * stride_zh) * rows + tile * BLOCK_M // BLOCK_Q
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    limit = key_limit(lengths_ptr, batch, Tk)
    queries = pair.to(tl.int64) * Tq
    keys = (batch * (H // GROUP) + head // GROUP).to(tl.int64) * Tk
    if BIAS == "dense":
        bias_ptr += batch.to(tl.int64) * stride_bb + head.to(tl.int64) * stride_bh
    q = load_rows(q_ptr, queries, lines, exists, D, BLOCK_D)
    grad = load_rows(grad_ptr, queries, lines, exists, D, BLOCK_D)
    lse, delta = load_stats(stats_ptr, pair, lines, exists, padded)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, count * BLOCK_K, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        key, entry, present = listed(columns_ptr, 0, begin, count, at, BLOCK_K)
        present = present & (key < limit)
        k = load_rows(k_ptr, keys, key, present, D, BLOCK_D)
        v = load_rows(v_ptr, keys, key, present, D, BLOCK_D)
        s = scores(
            dot(q, tl.trans(k), PRECISION, UPCAST) * scale, bias_ptr, stride_bq, lines[:, None], key[None, :],
            entry[None, :], exists[:, None] & present[None, :], Tk - Tq, BLOCK_Q, BLOCK_K, CAUSAL, BIAS,
        )  # fmt: skip
        p = tl.exp2(s - lse[:, None])
        ds = p * (dot(grad, tl.trans(v), PRECISION, UPCAST) - delta[:, None])
        dq += dot(ds.to(k.dtype), k, PRECISION, UPCAST)
    store_rows(dq_ptr, queries, lines, exists, D, tl.where(lost, float("nan"), dq * factor), BLOCK_D)


@triton.jit
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, grad_ptr, stats_ptr, dk_ptr, dv_ptr, offsets_ptr, order_ptr, rows_ptr, lengths_ptr,
    stride_zb, stride_zh, stride_bb, stride_bh, stride_bq, H, GROUP, rows, columns, tiles, Tq, Tk, D, scale, factor,
    padded, last, capacity,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    batch = pair // (H // GROUP)
    limit = key_limit(lengths_ptr, batch, Tk)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = key < Tk
    keys = pair.to(tl.int64) * Tk
    k = load_rows(k_ptr, keys, key, exists, D, BLOCK_D)
    v = load_rows(v_ptr, keys, key, exists, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(0, GROUP):
        head = pair % (H // GROUP) * GROUP + member
        z = batch * stride_zb + head * stride_zh
        begin, count, lost = span(offsets_ptr, z * columns + tile * BLOCK_N // BLOCK_K, last, capacity)
        queries = (batch * H + head).to(tl.int64) * Tq
        bias_at = bias_ptr
        if BIAS == "dense":
            bias_at = bias_ptr + (batch.to(tl.int64) * stride_bb + head.to(tl.int64) * stride_bh)
        for first in range(0, count * BLOCK_Q, BLOCK_M):
            at = first + tl.arange(0, BLOCK_M)
            present = at < count * BLOCK_Q
            entry = tl.load(order_ptr + begin + at // BLOCK_Q, mask=present, other=0)
            query = (tl.load(rows_ptr + entry, mask=present, other=0) - z * rows) * BLOCK_Q + at % BLOCK_Q
            present = present & (query < Tq)
            q = load_rows(q_ptr, queries, query, present, D, BLOCK_D)
            grad = load_rows(grad_ptr, queries, query, present, D, BLOCK_D)
            lse, delta = load_stats(stats_ptr, batch * H + head, query, present, padded)
            s = scores(
                dot(k, tl.trans(q), PRECISION, UPCAST) * scale, bias_at, stride_bq, query[None, :], key[:, None],
                entry[None, :], (key < limit)[:, None] & present[None, :], Tk - Tq, BLOCK_Q, BLOCK_K, CAUSAL, BIAS,
            )  # fmt: skip
            p = tl.exp2(s - lse[None, :])
            dv += dot(p.to(grad.dtype), grad, PRECISION, UPCAST)
            ds = p * (dot(v, tl.trans(grad), PRECISION, UPCAST) - delta[None, :])
            dk += dot(ds.to(q.dtype), q, PRECISION, UPCAST)
        dk = tl.where(lost, float("nan"), dk)
        dv = tl.where(lost, float("nan"), dv)
    store_rows(dk_ptr, keys, key, exists, D, dk * factor, BLOCK_D)
    store_rows(dv_ptr, keys, key, exists, D, dv, BLOCK_D)


@triton.jit
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, grad_ptr, stats_ptr, dbias_ptr, offsets_ptr, blocks_ptr, columns_ptr, lengths_ptr,
    stride_zb, stride_zh, stride_bb, stride_bh, stride_bq, H, GROUP, rows, columns, Tq, Tk, D, scale, padded, last,
    capacity, batches, heads, groups,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of the bias lies within one block. `batches` and `heads` are how many of each share it, `groups` how many
    sets of heads a dense bias tells apart; `blocks_ptr` holds the number of each block for a dense one, else its row.
    """
    SIDE_Q: tl.constexpr = BLOCK_Q // BLOCK_M
    SIDE_K: tl.constexpr = BLOCK_K // BLOCK_N
    part = tl.program_id(0) % (SIDE_Q * SIDE_K)
    block = tl.program_id(0) // (SIDE_Q * SIDE_K)
    total = tl.load(offsets_ptr + last)
    if BIAS == "dense":
        r = block // columns % rows
        c = block % columns
        owner = block // (columns * rows)
        batch0 = tl.where(batches > 1, 0, owner // groups)
        head0 = tl.where(heads > 1, 0, owner % groups)
    else:
        listed_row = tl.load(blocks_ptr + block, mask=block < total, other=0)
        c = tl.load(columns_ptr + block, mask=block < total, other=0)
        r = listed_row % rows
        z = listed_row // rows
        owner = 0
        batch0 = tl.where(stride_zb > 0, z // tl.maximum(stride_zb, 1), 0)
        head0 = tl.where(stride_zh > 0, z - batch0 * stride_zb, 0)
    row_in = part // SIDE_K * BLOCK_M + tl.arange(0, BLOCK_M)
    column_in = part % SIDE_K * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = r * BLOCK_Q + row_in
    key = c * BLOCK_K + column_in
    exists = lines < Tq
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for share in range(0, batches * heads):
        batch = batch0 + share // heads
        head = head0 + share % heads
        entry = block
        if BIAS == "dense":
            z_of = batch * stride_zb + head * stride_zh
            entry = tl.load(blocks_ptr + (z_of * rows + r).to(tl.int64) * columns + c)
        if (entry >= 0) & (entry < total):
            limit = key_limit(lengths_ptr, batch, Tk)
            present = key < limit
            queries = (batch * H + head).to(tl.int64) * Tq
            keys = (batch * (H // GROUP) + head // GROUP).to(tl.int64) * Tk
            bias_at = bias_ptr
            if BIAS == "dense":
                bias_at = bias_ptr + (batch.to(tl.int64) * stride_bb + head.to(tl.int64) * stride_bh)
            q = load_rows(q_ptr, queries, lines, exists, D, BLOCK_D)
            grad = load_rows(grad_ptr, queries, lines, exists, D, BLOCK_D)
            k = load_rows(k_ptr, keys, key, present, D, BLOCK_D)
            v = load_rows(v_ptr, keys, key, present, D, BLOCK_D)
            lse, delta = load_stats(stats_ptr, batch * H + head, lines, exists, padded)
            s = scores(
                dot(q, tl.trans(k), PRECISION, UPCAST) * scale, bias_at, stride_bq, lines[:, None], key[None, :],
                entry, exists[:, None] & present[None, :], Tk - Tq, BLOCK_Q, BLOCK_K, CAUSAL, BIAS,
            )  # fmt: skip
            p = tl.exp2(s - lse[:, None])
            acc += p * (dot(grad, tl.trans(v), PRECISION, UPCAST) - delta[:, None])
    acc = tl.where(total > capacity, float("nan"), acc)
    if BIAS == "dense":
        at = (owner.to(tl.int64) * Tq + lines)[:, None] * Tk + key[None, :]
        tl.store(dbias_ptr + at, acc, mask=exists[:, None] & (key < Tk)[None, :])
    else:
        at = block.to(tl.int64) * (BLOCK_Q * BLOCK_K) + (row_in[:, None] * BLOCK_K + column_in[None, :])
        tl.store(dbias_ptr + at, acc)


_attention_stats = launch.Kernel(_attention_stats_kernel)
_attention_dq = launch.Kernel(_attention_dq_kernel)
_attention_dkdv = launch.Kernel(_attention_dkdv_kernel)
_attention_dbias = launch.Kernel(_attention_dbias_kernel)


def tile_of(d: int, size: int, block: tuple[int, int]) -> Tile:
    """Tile of the backward kernels, which hold twice what the forward one does."""
    wide = launch.next_power_of_2(d) * size
    side = 64 if wide <= 256 else 32 if wide <= 512 else 16
    return Tile(min(side, block[0]), min(side, block[1]), 4, 1)


def attention_stats(out: Tensor, grad: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """What the backward kernels keep of each query; out and lse are contiguous, grad has contiguous rows."""
    b, h, t, d = out.shape
    tiles = launch.cdiv(t, ROWS)
    stats = lse.new_empty(b, h, 2, tiles * ROWS)
    sizes = (*grad.stride()[:3], h, t, d, tiles)
    meta = {"ROWS": ROWS, "BLOCK_D": launch.next_power_of_2(d)}
    key = (sizes, out.dtype, grad.dtype, grad_lse is None)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    _attention_stats(key, (b * h * tiles, 1, 1), (out, grad, lse, grad_lse, stats, *sizes), meta)
    return stats


def launch_attention_bwd(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lengths: Tensor | None, grad: Tensor,
    stats: Tensor, lists: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v. `lists` are a layout's: row_offsets, col_indices, row_indices, col_offsets,
    transpose_order, positions."""
    p = problem
    row_offsets, col_indices, row_indices, col_offsets, order, _ = lists
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    tile, meta, key, strides, bias, scale = _common(p, q, bias, lengths, col_indices)
    steps = (*p.z, *strides, p.h, p.group, p.rows)
    sizes = (p.tq, p.tk, p.d, scale, p.scale, stats.shape[-1])
    inputs = (q, k, v, bias, grad, stats)
    tiles = p.rows * (p.block[0] // tile.block_m)
    args = (*inputs, dq, row_offsets, col_indices, lengths, *steps, tiles, *sizes, p.matrices * p.rows, key[-1])
    _attention_dq(key, (tiles * p.b * p.h, 1, 1), args, meta, num_warps=tile.warps, num_stages=tile.stages)
    # The kernel over keys holds two sums: at full width half as many queries a step, or they spill.
    if launch.next_power_of_2(p.d) * q.element_size() >= 256:
        meta = {**meta, "BLOCK_M": max(16, tile.block_m // 2)}
    key = (meta["BLOCK_M"], *key)
    tiles = p.columns * (p.block[1] // tile.block_n)
    args = (*inputs, dk, dv, col_offsets, order, row_indices, lengths, *steps, p.columns, tiles, *sizes)
    args += (p.matrices * p.columns, key[-1])
    grid = (tiles * p.b * p.key_heads, 1, 1)
    _attention_dkdv(key, grid, args, meta, num_warps=tile.warps, num_stages=tile.stages)
    return dq, dk, dv


def launch_attention_dbias(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: Tensor | None, grad: Tensor,
    stats: Tensor, lists: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """Gradient of the bias."""
    p = problem
    row_offsets, col_indices, row_indices, _, _, positions = lists
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    dbias = bias.new_empty(bias.shape)
    dense = bias.dim() == 4
    if dense:
        batches, heads = p.b // bias.shape[0], p.h // bias.shape[1]
        blocks, groups = bias.shape[0] * bias.shape[1] * p.rows * p.columns, bias.shape[1]
    else:
        batches, heads = (1 if step else n for step, n in zip(p.z, (p.b, p.h)))
        blocks, groups = col_indices.shape[0], 1
    tile, meta, key, strides, bias, scale = _common(p, q, bias, lengths, col_indices)
    steps = (*p.z, *strides, p.h, p.group, p.rows, p.columns)
    sizes = (p.tq, p.tk, p.d, scale, stats.shape[-1], p.matrices * p.rows, key[-1], batches, heads, groups)
    args = (q, k, v, bias, grad, stats, dbias, row_offsets, positions if dense else row_indices, col_indices, lengths)
    grid = (blocks * (p.block[0] // tile.block_m) * (p.block[1] // tile.block_n), 1, 1)
    key = (batches, heads, groups, *key)
    _attention_dbias(key, grid, (*args, *steps, *sizes), meta, num_warps=tile.warps, num_stages=tile.stages)
    return dbias


def _common(p: Problem, q: Tensor, bias: Tensor | None, lengths: Tensor | None, col_indices: Tensor) -> tuple:
    """What the backward kernels share: tile, meta, key (capacity last), strides, bias and scale in base 2."""
    tile = tile_of(p.d, q.element_size(), p.block)
    bias, kind, strides = bias_of(bias)
    wide = launch.next_power_of_2(max(p.d, 16))
    meta = {"BLOCK_Q": p.block[0], "BLOCK_K": p.block[1], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    meta |= {"BLOCK_D": wide, "CAUSAL": p.causal, "BIAS": kind, **tuning.dot_precision(q, p.d)}
    key = (p, strides, q.dtype, bias is None or bias.dtype, lengths is None, *meta.values(), col_indices.shape[0])
    return tile, meta, key, strides, bias, p.scale * INV_LN2


def attention_bwd(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, lengths: Tensor | None, row_offsets: Tensor, col_indices: Tensor, row_indices: Tensor,
    col_offsets: Tensor, transpose_order: Tensor, positions: Tensor, z_batch: int, z_head: int, height: int,
    width: int, causal: bool, scale: float, with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Operator `blocksparse_attention_bwd` -> gradients of q, k, v and the bias, the last empty unless asked for."""
    wanted = bias is not None and with_bias
    none = q.new_empty(0)
    if q.numel() == 0 or k.numel() == 0:
        dbias = bias.new_zeros(bias.shape) if bias is not None and with_bias else none
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dbias
    problem = problem_of(q, k, z_batch, z_head, height, width, causal, scale)
    lists = row_offsets, col_indices, row_indices, col_offsets, transpose_order, positions
    grad = grad.contiguous()
    stats = attention_stats(out, grad, lse, grad_lse)
    grads = launch_attention_bwd(problem, q, k, v, bias, lengths, grad, stats, lists)
    if not wanted or bias is None:
        return *grads, none
    return *grads, launch_attention_dbias(problem, q, k, v, bias, lengths, grad, stats, lists)


_POINTERS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "bias_ptr", "grad_ptr"), "*bf16") | {"stats_ptr": "*fp32"}
_STEPS = ("stride_zb", "stride_zh", "stride_bb", "stride_bh", "stride_bq", "H", "GROUP", "rows")
_CONSTANTS = {
    "BLOCK_Q": 64, "BLOCK_K": 64, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 128, "CAUSAL": True, "BIAS": "dense",
    "PRECISION": "ieee", "UPCAST": False,
}  # fmt: skip


def _example(
    outputs: tuple[str, ...], lists: tuple[str, ...], integers: tuple[str, ...], **tile: int
) -> dict[str, Any]:
    signature = {**_POINTERS, **dict.fromkeys(outputs, "*bf16"), **dict.fromkeys((*lists, "lengths_ptr"), "*i32")}
    kinds = {name: "fp32" if name in ("scale", "factor") else "i32" for name in (*_STEPS, *integers)}
    return {"signature": signature | kinds, "constexprs": _CONSTANTS | tile, "num_warps": 4, "num_stages": 1}


_SIZES = ("Tq", "Tk", "D", "scale")

EXAMPLES = {
    _attention_stats_kernel: {
        "signature": {
            **dict.fromkeys(("out_ptr", "grad_ptr"), "*bf16"),
            **dict.fromkeys(("lse_ptr", "grad_lse_ptr", "stats_ptr"), "*fp32"),
            **dict.fromkeys(("stride_gb", "stride_gh", "stride_gt", "H", "T", "D", "tiles"), "i32"),
        },
        "constexprs": {"ROWS": ROWS, "BLOCK_D": 128},
        "num_warps": 4,
    },
    _attention_dq_kernel: _example(
        ("dq_ptr",), ("offsets_ptr", "columns_ptr"), ("tiles", *_SIZES, "factor", "padded", "last", "capacity")
    ),
    _attention_dkdv_kernel: _example(
        ("dk_ptr", "dv_ptr"),
        ("offsets_ptr", "order_ptr", "rows_ptr"),
        ("columns", "tiles", *_SIZES, "factor", "padded", "last", "capacity"),
        BLOCK_M=32,
    ),
    _attention_dbias_kernel: _example(
        ("dbias_ptr",),
        ("offsets_ptr", "blocks_ptr", "columns_ptr"),
        ("columns", *_SIZES, "padded", "last", "capacity", "batches", "heads", "groups"),
    ),
}
"""Example signatures for the ahead-of-time compile test."""
