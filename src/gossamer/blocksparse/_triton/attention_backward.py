"""Block-sparse attention, backward, through pointers: the derivatives of `attention`.

Four kernels. `_attention_stats_kernel` keeps two numbers for each query. `_attention_dq_kernel` owns BLOCK_M queries
and walks the keys of their block row's list; `_attention_dkdv_kernel` owns BLOCK_N keys and walks the queries of their
block column's list, for each head that shares the keys, on transposed scores; `_attention_dbias_kernel` owns a tile of
the bias and walks the heads and batches that share it. Each recomputes the weights from the log-sum-exp and writes its
sums once, so that results do not depend on the order in which programs run.

The kernel over queries also adds up the gradients of relative positions, `[B, H, Tq, terms * R]`, in memory: of each
tile, for each position that occurs in it, row by row the gradients of the keys that stand there. Far from the diagonal
of a sequence that is a single position, the outermost. A program alone adds to its queries' sums, one tile after the
other, so that the order of the additions is fixed.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer._core.philox import dropout_weights
from gossamer.blocksparse._triton.attention import (
    EXAMPLE,
    Operands,
    dot,
    listed,
    load_rows,
    operands,
    relation,
    scores,
    store_rows,
    token_major,
)
from gossamer.blocksparse.attention_lists import Tile, column_of, last_of, matrix_of, owner_of, reached, row_of
from gossamer.blocksparse.attention_path import choose_path, empty_like, leaves_idle
from gossamer.blocksparse.records import BlocksparseAttentionBwd

ROWS = 64
"""Queries of a program that makes statistics, and what their number is padded to."""


@launch.kernel
def _attention_stats_kernel(
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, stats_ptr, stride_gb, stride_gh, stride_gt, H, T, D, tiles,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`stats`, `[B, H, 2, tiles * ROWS]`: the log-sum-exp in base 2, +inf where a row has no keys or is padding, so
    that weights are 0 there; and the row sums of grad * out, less the gradient of the log-sum-exp, 0 there."""
    pair = tl.program_id(0) // tiles
    lines = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK_D)
    exists = lines < T
    inside = exists[:, None] & (inner < D)[None, :]
    base, rows = token_major(pair // H, pair % H, T, H, lines)
    out = tl.load(out_ptr + (base + rows)[:, None] * D + inner[None, :], mask=inside, other=0.0)
    line = pair.to(tl.int64) * T + lines
    grad_ptr += (pair // H).to(tl.int64) * stride_gb + (pair % H).to(tl.int64) * stride_gh
    grad = tl.load(grad_ptr + lines.to(tl.int64)[:, None] * stride_gt + inner[None, :], mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(lse_ptr + line, mask=exists, other=float("-inf")) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + line, mask=exists, other=0.0)
    # A query that meets no key may have NaN as its gradient, which weights of 0 would keep.
    delta = tl.where(lse == float("inf"), 0.0, delta)
    stats_ptr += pair.to(tl.int64) * (2 * tiles * ROWS) + lines
    tl.store(stats_ptr, lse)
    tl.store(stats_ptr + tiles * ROWS, delta)


@triton.jit
def load_stats(stats_ptr, pair, lines, exists, Tq):
    """(log-sum-exp in base 2, row sum) of queries."""
    padded = tl.cdiv(Tq, 64) * 64
    stats_ptr += pair.to(tl.int64) * (2 * padded) + lines
    lse = tl.load(stats_ptr, mask=exists, other=float("inf"))
    return lse, tl.load(stats_ptr + padded, mask=exists, other=0.0)


@triton.jit
def derivatives(
    x, y, dx, dy, lse, delta, added, seed_ptr, pair, query, key, entry, inside, shift, scale, drop, sizes,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """(weights, derivatives of the scores) of a tile. Queries lie along one axis and keys along the other: x and y are
    q and k, dx and dy the result's gradient and v, each in the order of the axes."""
    s = scores(dot(x, tl.trans(y), CONFIG), added, pair, query, key, entry, inside, shift, scale, sizes, CONFIG)
    p = tl.exp2(s - lse)
    weights = p
    dp = dot(dx, tl.trans(dy), CONFIG)
    if seed_ptr is not None:
        factors = dropout_weights(seed_ptr, pair, query, key, drop)
        weights = p * factors
        dp *= factors
    return weights, p * (dp - delta)


@triton.jit
def add_relative(sums_ptr, ds, places_ptr, pair, query, key, present, sizes, CONFIG: tl.constexpr):
    """Adds the gradients `ds` of a tile of scores to those of the relative positions of its keys."""
    TERMS: tl.constexpr = CONFIG.terms
    exists = query < sizes[3]
    sums_ptr += pair.to(tl.int64) * sizes[3] * (TERMS * CONFIG.window)
    for term in tl.static_range(TERMS):
        step = relation(places_ptr, term, pair, query[:, None], key[None, :], sizes, CONFIG)
        both = exists[:, None] & present[None, :]
        low = tl.min(tl.min(tl.where(both, step, CONFIG.window), 1), 0)
        high = tl.max(tl.max(tl.where(both, step, -1), 1), 0) + 1
        for position in range(low, high):
            there = tl.sum(tl.where(step == position, ds, 0.0), 1)
            at = query.to(tl.int64) * (TERMS * CONFIG.window) + (term * CONFIG.window + position)
            tl.atomic_add(sums_ptr + at, there, mask=exists, sem="relaxed")


@launch.kernel(do_not_specialize=["capacity", "drop"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, relative_ptr, places_ptr, grad_ptr, stats_ptr, dq_ptr, drelative_sums_ptr,
    offsets_ptr, columns_ptr, lengths_ptr, elements_ptr, seed_ptr, B, H, GROUP, Tq, Tk, capacity, scale, drop,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """`drelative_sums` are zeros."""
    added = (bias_ptr, relative_ptr, places_ptr, elements_ptr)
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    tile, pair = owner_of(tl.program_id(0), Tq, CONFIG)
    begin, count, limit, shift, lost = row_of((offsets_ptr, columns_ptr), lengths_ptr, tile, pair, sizes, CONFIG)
    lines = tile * CONFIG.block_m + tl.arange(0, CONFIG.block_m)
    exists = lines < Tq
    queries = pair.to(tl.int64) * Tq
    keys = (pair // GROUP).to(tl.int64) * Tk
    lse, delta = load_stats(stats_ptr, pair, lines, exists, Tq)
    q = load_rows(q_ptr, queries, lines, exists, CONFIG.d, CONFIG.block_d)
    grad = load_rows(grad_ptr, queries, lines, exists, CONFIG.dv, CONFIG.block_v)
    dq = tl.full([CONFIG.block_m, CONFIG.block_d], 0.0, tl.float32)
    for first in range(0, count * CONFIG.block_k, CONFIG.block_n):
        at = first + tl.arange(0, CONFIG.block_n)
        key, entry, present = listed(columns_ptr, begin, count, at, CONFIG.block_k)
        present = present & (key < limit)
        k = load_rows(k_ptr, keys, key, present, CONFIG.d, CONFIG.block_d)
        v = load_rows(v_ptr, keys, key, present, CONFIG.dv, CONFIG.block_v)
        _, ds = derivatives(
            q, k, grad, v, lse[:, None], delta[:, None], added, seed_ptr, pair, lines[:, None], key[None, :],
            entry[None, :], exists[:, None] & present[None, :], shift, scale, drop, sizes, CONFIG,
        )  # fmt: skip
        dq += dot(ds.to(k.dtype), k, CONFIG)
        if drelative_sums_ptr is not None:
            ds *= scale * 0.6931471805599453
            add_relative(drelative_sums_ptr, ds, places_ptr, pair, lines, key, present, sizes, CONFIG)
    dq = tl.where(lost, float("nan"), dq * (scale * 0.6931471805599453))
    base, rows_at = token_major(pair // H, pair % H, Tq, H, lines)
    store_rows(dq_ptr, base, rows_at, exists, CONFIG.d, dq, CONFIG.block_d)
    if drelative_sums_ptr is not None:
        if lost:
            for position in range(0, CONFIG.terms * CONFIG.window):
                at = (queries + lines) * (CONFIG.terms * CONFIG.window) + position
                tl.store(drelative_sums_ptr + at, tl.full([CONFIG.block_m], float("nan"), tl.float32), mask=exists)


@launch.kernel(do_not_specialize=["capacity", "drop"])
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, relative_ptr, places_ptr, grad_ptr, stats_ptr, dk_ptr, dv_ptr, offsets_ptr,
    order_ptr, rows_ptr, lengths_ptr, elements_ptr, seed_ptr, H, GROUP, Tq, Tk, capacity, scale, drop,
    CONFIG: tl.constexpr,
):  # fmt: skip
    added = (bias_ptr, relative_ptr, places_ptr, elements_ptr)
    tiles = tl.cdiv(Tk, CONFIG.block_k) * (CONFIG.block_k // CONFIG.block_n)
    sizes = (tl.num_programs(0) // tiles // (H // GROUP), H, GROUP, Tq, Tk, capacity)
    first_key = tl.program_id(0) % tiles * CONFIG.block_n
    pair = tl.program_id(0) // tiles
    batch = pair // (H // GROUP)
    limit, shift = reached(lengths_ptr, batch, Tq, Tk)
    key = first_key + tl.arange(0, CONFIG.block_n)
    keys = pair.to(tl.int64) * Tk
    k = load_rows(k_ptr, keys, key, key < limit, CONFIG.d, CONFIG.block_d)
    v = load_rows(v_ptr, keys, key, key < limit, CONFIG.dv, CONFIG.block_v)
    dk = tl.full([CONFIG.block_n, CONFIG.block_d], 0.0, tl.float32)
    dv = tl.full([CONFIG.block_n, CONFIG.block_v], 0.0, tl.float32)
    for member in range(0, GROUP):
        of_query = pair * GROUP + member
        lists = (offsets_ptr, order_ptr, rows_ptr)
        begin, count, base, lost = column_of(lists, first_key, limit, shift, batch, of_query % H, sizes, CONFIG)
        queries = of_query.to(tl.int64) * Tq
        for first in range(0, count * CONFIG.block_q, CONFIG.block_m):
            at = first + tl.arange(0, CONFIG.block_m)
            present = at < count * CONFIG.block_q
            entry = tl.load(order_ptr + begin + at // CONFIG.block_q, mask=present, other=0)
            query = (tl.load(rows_ptr + entry, mask=present, other=0) - base) * CONFIG.block_q + at % CONFIG.block_q
            present = present & (query < Tq)
            lse, delta = load_stats(stats_ptr, of_query, query, present, Tq)
            q = load_rows(q_ptr, queries, query, present, CONFIG.d, CONFIG.block_d)
            grad = load_rows(grad_ptr, queries, query, present, CONFIG.dv, CONFIG.block_v)
            weights, ds = derivatives(
                k, q, v, grad, lse[None, :], delta[None, :], added, seed_ptr, of_query, query[None, :], key[:, None],
                entry[None, :], (key < limit)[:, None] & present[None, :], shift, scale, drop, sizes, CONFIG,
            )  # fmt: skip
            dv += dot(weights.to(grad.dtype), grad, CONFIG)
            dk += dot(ds.to(q.dtype), q, CONFIG)
        dk = tl.where(lost, float("nan"), dk)
        dv = tl.where(lost, float("nan"), dv)
    base, rows_at = token_major(batch, pair % (H // GROUP), Tk, H // GROUP, key)
    store_rows(dk_ptr, base, rows_at, key < Tk, CONFIG.d, dk * (scale * 0.6931471805599453), CONFIG.block_d)
    store_rows(dv_ptr, base, rows_at, key < Tk, CONFIG.dv, dv, CONFIG.block_v)


@launch.kernel(do_not_specialize=["capacity", "drop"])
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, relative_ptr, places_ptr, grad_ptr, stats_ptr, dbias_ptr, offsets_ptr, blocks_ptr,
    columns_ptr, lengths_ptr, elements_ptr, seed_ptr, B, H, GROUP, Tq, Tk, capacity, scale, drop,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """A tile of the bias lies within one block, and is the sum over the batches and heads that share it. `blocks_ptr`
    holds the number of each block for a dense bias, else its row."""
    SIDE_K: tl.constexpr = CONFIG.block_k // CONFIG.block_n
    PARTS: tl.constexpr = CONFIG.block_q // CONFIG.block_m * SIDE_K
    DENSE: tl.constexpr = CONFIG.bias == "dense"
    OWN_BATCH: tl.constexpr = CONFIG.bias_batch if DENSE else CONFIG.layout_batch
    OWN_HEAD: tl.constexpr = CONFIG.bias_head if DENSE else CONFIG.layout_head
    added = (bias_ptr, relative_ptr, places_ptr, elements_ptr)
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    rows = tl.cdiv(Tq, CONFIG.block_q)
    columns = tl.cdiv(Tk, CONFIG.block_k)
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS
    total = tl.load(offsets_ptr + last_of(B, H, rows, CONFIG))
    if DENSE:
        line = block // columns
        c = block % columns
    else:
        line = tl.load(blocks_ptr + block, mask=block < total, other=0)
        c = tl.load(columns_ptr + block, mask=block < total, other=0)
    r = line % rows
    owner = line // rows
    heads = 1 if OWN_HEAD else H
    members = heads if OWN_BATCH else heads * B
    row_in = part // SIDE_K * CONFIG.block_m + tl.arange(0, CONFIG.block_m)
    column_in = part % SIDE_K * CONFIG.block_n + tl.arange(0, CONFIG.block_n)
    lines = r * CONFIG.block_q + row_in
    key = c * CONFIG.block_k + column_in
    exists = lines < Tq
    acc = tl.full([CONFIG.block_m, CONFIG.block_n], 0.0, tl.float32)
    for member in range(0, members):
        batch = (owner // H if OWN_HEAD else owner) if OWN_BATCH else member // heads
        head = (owner % H if OWN_BATCH else owner) if OWN_HEAD else member % heads
        entry = block
        if DENSE:
            z = matrix_of(batch, head, H, CONFIG)
            entry = tl.load(blocks_ptr + (z * rows + r).to(tl.int64) * columns + c)
        if (entry >= 0) & (entry < total):
            limit, shift = reached(lengths_ptr, batch, Tq, Tk)
            present = key < limit
            pair = batch * H + head
            queries = pair.to(tl.int64) * Tq
            keys = (pair // GROUP).to(tl.int64) * Tk
            lse, delta = load_stats(stats_ptr, pair, lines, exists, Tq)
            q = load_rows(q_ptr, queries, lines, exists, CONFIG.d, CONFIG.block_d)
            grad = load_rows(grad_ptr, queries, lines, exists, CONFIG.dv, CONFIG.block_v)
            k = load_rows(k_ptr, keys, key, present, CONFIG.d, CONFIG.block_d)
            v = load_rows(v_ptr, keys, key, present, CONFIG.dv, CONFIG.block_v)
            _, ds = derivatives(
                q, k, grad, v, lse[:, None], delta[:, None], added, seed_ptr, pair, lines[:, None], key[None, :],
                tl.zeros([1, 1], tl.int32) + entry, exists[:, None] & present[None, :], shift, scale, drop, sizes,
                CONFIG,
            )  # fmt: skip
            acc += ds
    acc = tl.where(total > capacity, float("nan"), acc)
    if DENSE:
        at = (owner.to(tl.int64) * Tq + lines)[:, None] * Tk + key[None, :]
        tl.store(dbias_ptr + at, acc, mask=exists[:, None] & (key < Tk)[None, :])
    else:
        within = row_in[:, None] * CONFIG.block_k + column_in[None, :]
        tl.store(dbias_ptr + block.to(tl.int64) * (CONFIG.block_q * CONFIG.block_k) + within, acc)


def tile_of(d: int, size: int, block: tuple[int, int], terms: int = 0) -> Tile:
    """Tile of the backward kernels, which hold twice what the forward one does, and more with relative positions."""
    wide = launch.next_power_of_2(d) * size
    side = 64 if wide <= 256 else 32 if wide <= 512 else 16
    keys = max(16, side // 2) if terms and wide >= 256 else side
    return Tile(min(side, block[0]), min(keys, block[1]), 4, 1)


def attention_stats(out: Tensor, grad: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The numbers that the backward kernels keep of each query; lse is contiguous, grad has contiguous rows."""
    b, h, t, d = out.shape
    tiles = launch.cdiv(t, ROWS)
    stats = lse.new_empty(b, h, 2, tiles * ROWS)
    args = (out.transpose(1, 2).contiguous(), grad, lse, grad_lse, stats, *grad.stride()[:3], h, t, d, tiles)
    meta = {"ROWS": ROWS, "BLOCK_D": launch.next_power_of_2(d)}
    _attention_stats_kernel((b * h * tiles, 1, 1), args, meta)
    return stats


def launch_attention_bwd(
    given: Operands, grad: Tensor, stats: Tensor, drelative: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Gradients of the operand `relative` are added to `drelative`, float32 zeros."""
    p, lists, config, (q, k, v, *_) = given.problem, given.lists, given.config, given.inputs
    assert q is not None and k is not None and v is not None
    dq, dk, dv = (empty_like(x) for x in (q, k, v))
    inputs = (*given.inputs, grad, stats)
    grid = (p.rows * (p.block[0] // config.block_m) * p.b * p.h, 1, 1)
    args = (*inputs, dq, drelative, lists.row_offsets, lists.col_indices, *given.masks, *given.sizes)
    _attention_dq_kernel(grid, args, {"CONFIG": config}, **config.options)
    # The kernel over keys holds two sums: at full width half as many queries a step, or they spill.
    if max(config.block_d, config.block_v) * q.element_size() >= 256:
        config = replace(config, block_m=max(16, config.block_m // 2))
    grid = (p.columns * (p.block[1] // config.block_n) * p.b * p.key_heads, 1, 1)
    columns = lists.col_offsets, lists.transpose_order, lists.row_indices
    args = (*inputs, dk, dv, *columns, *given.masks, *given.sizes[1:])
    _attention_dkdv_kernel(grid, args, {"CONFIG": config}, **config.options)
    return dq, dk, dv


def launch_attention_dbias(given: Operands, bias: Tensor, grad: Tensor, stats: Tensor) -> Tensor:
    """Gradient of a bias, in the shape in which the operator has it."""
    p, config, lists, dense = given.problem, given.config, given.lists, bias.dim() == 4
    dbias = bias.new_empty(bias.shape)
    blocks = bias.shape[0] * bias.shape[1] * p.rows * p.columns if dense else lists.form.capacity
    which = lists.positions if dense else lists.row_indices
    args = (*given.inputs, grad, stats, dbias, lists.row_offsets, which, lists.col_indices, *given.masks, *given.sizes)
    grid = (blocks * (p.block[0] // config.block_m) * (p.block[1] // config.block_n), 1, 1)
    _attention_dbias_kernel(grid, args, {"CONFIG": config}, **config.options)
    return dbias


def attention_bwd(call: BlocksparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `blocksparse_attention_bwd`."""
    grad, grad_lse, out, lse, q, k, v, bias, relative, *_ = call
    # Results share no memory.
    dbias, drelative = q.new_empty(0), q.new_empty(0)
    if 0 in (q.shape[:3].numel(), k.shape[:3].numel()):
        if bias is not None and call.with_bias:
            dbias = bias.new_zeros(bias.shape)
        if relative is not None and call.with_relative:
            drelative = relative.new_zeros(relative.shape)
        dq, dk, dv = (empty_like(x).zero_() for x in (q, k, v))
        return dq, dk, dv, dbias, drelative
    if leaves_idle(call):
        # Rows of queries that take no key may hold NaN, which weights of 0 would keep.
        taking = (lse != -torch.inf)[..., None]
        q, grad = torch.where(taking, q, 0), torch.where(taking, grad, 0)
        call = call._replace(q=q, grad=grad)
    # Statistics, and the copy engine, read rows wherever they stand.
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    stats = attention_stats(out, grad, lse, grad_lse)
    if choose_path(call) == "hopper":
        from gossamer.blocksparse._gluon.attention_backward import launch_attention_bwd as on_hopper

        return *on_hopper(call, grad, stats), dbias, drelative
    given, grad, sums = operands(call, tile_of), grad.contiguous(), None
    if relative is not None and call.with_relative:
        sums = torch.zeros_like(relative, dtype=torch.float32)
    dq, dk, dv = launch_attention_bwd(given, grad, stats, sums)
    if sums is not None:
        drelative = sums.to(q.dtype)
    if bias is not None and call.with_bias:
        dbias = launch_attention_dbias(given, bias, grad, stats)
    return dq, dk, dv, dbias, drelative


_EXAMPLE = {"bias_ptr": "*bf16", "seed_ptr": "*i64", "CONFIG": replace(EXAMPLE, block_n=32), "num_stages": 1}
EXAMPLES = {
    _attention_stats_kernel: {"ROWS": ROWS, "BLOCK_D": 128},
    _attention_dq_kernel: _EXAMPLE,
    _attention_dkdv_kernel: _EXAMPLE | {"CONFIG": replace(EXAMPLE, block_n=32, block_m=32)},
    _attention_dbias_kernel: _EXAMPLE,
}
