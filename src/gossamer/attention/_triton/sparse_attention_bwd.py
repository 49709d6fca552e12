"""Gradients of attention over selected keys, from the logarithm of the softmax's denominator, in a fixed order.

The first kernel keeps, for each query, that logarithm in base 2 beside the product of the output and its
gradient. The second is the forward pass's twin: the same program walks the same list and sums the gradient of q.

The third sums those of k and v. Turning the lists around would give each key its own list of queries, and no two keys
the same one: nothing that a tensor core could share. So it keeps the lists, but of longer groups of queries (PARTS
blocks), whose keys are not many more than a block's. An item of work is BLOCK_K keys of one group's list: the tile of k
and v is gathered once, the group's queries stream past it, and only the sums go to memory, once a group instead of once
a block. There they are added, in float32, by atomics that need no order of their own, for it is given: items are drawn
in order, a key is in one item of a group, and an item adds when all items of the group before are done. It has hardly
ever to wait, for they were drawn long before.

Where keys are few there are no lists (see `choose_path`): a program owns a tile of neighbouring keys, all queries that
may see one of them stream past it with their words, and it writes its sums once, in the dtype of k. Where these are
fewer programs than multiprocessors, each head of q has programs of its own, whose float32 sums are added afterwards.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.compiling import together
from gossamer._core.philox import dropout_weights
from gossamer.attention._triton._products import block_of_columns, reached, strided, wide_product
from gossamer.attention._triton.indexer_loss import indexer_gradients
from gossamer.attention._triton.key_lists import await_entry, key_lists, plan_of, positions, seen
from gossamer.attention._triton.sparse_attention import (
    EXAMPLE,
    Tile,
    begin_walk,
    config_of,
    walk_keys,
    walks,
)
from gossamer.attention.records import SparseAttentionBwd


def query_tile(d: int, element_size: int) -> Tile:
    """Tile of the gradient of q."""
    if element_size > 2:
        return Tile(parts=1, keys=32, warps=8 if d > 64 else 4, stages=1)
    if d > 128:
        return Tile(parts=1, keys=32, warps=4 if d <= 256 else 8, stages=1)
    return Tile(parts=1, keys=64, warps=4, stages=2)


def key_tile(d: int, element_size: int) -> Tile:
    """Tile of the gradients of k and v. 32 queries a step leave room for 128 keys in registers."""
    if element_size > 2 or d > 128:
        return Tile(parts=8, keys=32, warps=8 if d > 64 else 4, stages=1)
    return Tile(parts=8, keys=128, warps=8, stages=3)


@launch.kernel
def _row_statistics_kernel(
    grad_ptr, q_ptr, out_ptr, lse_ptr, grad_lse_ptr, stats_ptr, grad_out_ptr, q_out_ptr,
    stride_gb, stride_gh, stride_gt, stride_qb, stride_qh, stride_qt, Tq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_M queries, head, batch): (lse in base 2, grad * out summed - gradient of lse) of each query, and
    contiguous copies of grad and q, 0 for a query that takes no key, which may hold NaN."""
    head, batch, heads = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    query = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (batch * heads + head) * Tq + query
    lse = tl.load(lse_ptr + row, mask=query < Tq, other=float("-inf"))
    taking = lse != float("-inf")
    column = tl.arange(0, triton.next_power_of_2(max(16, D)))[None, :]
    at = batch * stride_qb + head * stride_qh + query[:, None] * stride_qt + column
    q = tl.load(q_ptr + at, mask=taking[:, None] & (column < D), other=0.0)
    tl.store(q_out_ptr + row[:, None] * D + column, q, mask=(query < Tq)[:, None] & (column < D))
    column = tl.arange(0, triton.next_power_of_2(max(16, DV)))[None, :]
    read = taking[:, None] & (column < DV)
    at = batch * stride_gb + head * stride_gh + query[:, None] * stride_gt + column
    grad = tl.load(grad_ptr + at, mask=read, other=0.0)
    at = ((batch * Tq + query) * heads + head)[:, None] * DV + column
    out = tl.load(out_ptr + at, mask=read, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row, mask=taking, other=0.0)
    tl.store(grad_out_ptr + row[:, None] * DV + column, grad, mask=(query < Tq)[:, None] & (column < DV))
    tl.store(stats_ptr + 2 * row, lse * 1.4426950408889634, mask=query < Tq)
    tl.store(stats_ptr + 2 * row + 1, delta, mask=query < Tq)


@launch.kernel(do_not_specialize=["first", "Tq", "sharing", "drop"])
def _sparse_attention_bwd_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, stats_ptr, from_ptr, counts_ptr, seed_ptr,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, first, Tq, capacity, sharing, drop, scale,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Program (group of queries, the last first; head and block of q's columns; batch). So many heads are `sharing` one
    of k."""
    BLOCK_M: tl.constexpr = 64 * CONFIG.parts
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    CHUNK: tl.constexpr = CONFIG.chunk
    PRECISION: tl.constexpr = CONFIG.precision
    BLOCK_N: tl.constexpr = CONFIG.keys
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_V: tl.constexpr = CONFIG.block_v
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    head, column = block_of_columns(tl.program_id(1), D, BLOCK_D)
    head, batch = head.to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // ((D + BLOCK_D - 1) // BLOCK_D)
    row = tl.arange(0, BLOCK_M)
    begin = (first + group) * BLOCK_M
    query = begin + row
    wide = (column < D)[None, :]
    of_v = tl.arange(0, BLOCK_V)
    wide_v = (of_v < DV)[None, :]
    token = (batch * heads + head) * Tq + query
    here = token[:, None] * D + column[None, :]
    inside = (query < Tq)[:, None] & wide
    q = tl.zeros([1, 1], tl.float32)
    grad = tl.zeros([1, 1], tl.float32)
    if CHUNK == 0:
        q = tl.load(q_ptr + here, mask=inside, other=0.0)
        grad_at = token[:, None] * DV + of_v[None, :]
        grad = tl.load(grad_ptr + grad_at, mask=(query < Tq)[:, None] & wide_v, other=0.0)
    lse = tl.load(stats_ptr + 2 * token, mask=query < Tq, other=0.0)
    delta = tl.load(stats_ptr + 2 * token + 1, mask=query < Tq, other=0.0)
    k_ptr += batch * stride_kb + (head // sharing) * stride_kh
    v_ptr += batch * stride_vb + (head // sharing) * stride_vh
    from_ptr, count, offset = begin_walk(
        from_ptr, counts_ptr, first, group, batch, head * CONFIG.scopes // heads, tl.num_programs(2), Tq, capacity,
        CONFIG,
    )  # fmt: skip
    log2_scale = scale * 1.4426950408889634
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        key, some, keep = walk_keys(from_ptr, start, count, offset, begin, row, Tq, capacity, CONFIG)
        k = tl.load(k_ptr + key[:, None] * stride_kt + column[None, :], mask=some[:, None] & wide, other=0.0)
        at = key * stride_vt
        if CHUNK > 0:
            s = wide_product(q_ptr, token * D, query < Tq, k_ptr, key * stride_kt, some, D, CHUNK, PRECISION)
            dp = wide_product(grad_ptr, token * DV, query < Tq, v_ptr, at, some, DV, CHUNK, PRECISION)
        else:
            v = tl.load(v_ptr + at[:, None] + of_v[None, :], mask=some[:, None] & wide_v, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            dp = tl.dot(grad, v.T, input_precision=PRECISION)
        if seed_ptr is not None:
            dp *= dropout_weights(seed_ptr, batch * heads + head, query[:, None], key[None, :], drop)
        ds = tl.where(keep, tl.exp2(s * log2_scale - lse[:, None]) * (dp - delta[:, None]), 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + here, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(x_ptr, rows, read, column, D: tl.constexpr, CHUNK: tl.constexpr):
    """Rows of k or v, or nothing where products read these by parts."""
    if CHUNK > 0:
        return tl.zeros([1, 1], tl.float32)
    else:
        at = rows[:, None] + column[None, :]
        return tl.load(x_ptr + at, mask=read[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def add_queries(
    dk, dv, k, v, k_ptr, v_ptr, q_ptr, grad_ptr, stats_ptr, seed_ptr, key, rows, read, pair, query, inside, of_q, of_v,
    word, Tq, log2_scale, drop, CONFIG: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, plus the sums of 32 queries of a head, counted over batches, by the bits of word;
    `rows` of k and v."""
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    CHUNK: tl.constexpr = CONFIG.chunk
    PRECISION: tl.constexpr = CONFIG.precision
    keep = (word[:, None] & (tl.full([32], 1, tl.int32) << tl.arange(0, 32))[None, :]) != 0
    row = pair * Tq + query
    at = row[:, None] * D + of_q[None, :]
    q = tl.load(q_ptr + at, mask=inside[:, None] & (of_q < D)[None, :], other=0.0)
    at = row[:, None] * DV + of_v[None, :]
    grad = tl.load(grad_ptr + at, mask=inside[:, None] & (of_v < DV)[None, :], other=0.0)
    lse = tl.load(stats_ptr + 2 * row, mask=inside, other=0.0)
    delta = tl.load(stats_ptr + 2 * row + 1, mask=inside, other=0.0)
    if CHUNK > 0:
        s = wide_product(k_ptr, rows * D, read, q_ptr, row * D, inside, D, CHUNK, PRECISION)
        dp = wide_product(v_ptr, rows * DV, read, grad_ptr, row * DV, inside, DV, CHUNK, PRECISION)
    else:
        s = tl.dot(k, q.T, input_precision=PRECISION)
        dp = tl.dot(v, grad.T, input_precision=PRECISION)
    p = tl.where(keep, tl.exp2(s * log2_scale - lse[None, :]), 0.0)
    weighted = p
    if seed_ptr is not None:
        factors = dropout_weights(seed_ptr, pair, query[None, :], key[:, None], drop)
        weighted, dp = p * factors, dp * factors
    dv = tl.dot(weighted.to(grad.dtype), grad, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def kept_columns(program, CONFIG: tl.constexpr):
    """(which unit of work, which columns of k, which of v) of a program that sums a block of both."""
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_V: tl.constexpr = CONFIG.block_v
    BLOCKS: tl.constexpr = CONFIG.blocks
    block = program % BLOCKS
    return program // BLOCKS, block * BLOCK_D + tl.arange(0, BLOCK_D), block * BLOCK_V + tl.arange(0, BLOCK_V)


@launch.kernel(do_not_specialize=["Tq", "H", "sharing", "parts", "drop"])
def _sparse_attention_bwd_kv_tiles_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, stats_ptr, words_ptr, lengths_ptr, seed_ptr,
    Tq, Tk, H, sharing, parts, drop, scale, CAUSAL: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, the first ones, which most queries see, first, and block of columns; head of k and part of
    the heads that are sharing it; batch)."""
    BLOCK_K: tl.constexpr = CONFIG.keys
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_V: tl.constexpr = CONFIG.block_v
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    tile, of_k, of_v = kept_columns(tl.program_id(0), CONFIG)
    kv_head, batch = tl.program_id(1) // parts, tl.program_id(2).to(tl.int64)
    # Heads of q of this program, and the first of them.
    heads = sharing // parts
    first = tl.program_id(1) * heads
    key = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = (batch * (H // sharing) + kv_head) * Tk + key
    k = load_keys(k_ptr, rows * D, key < Tk, of_k, D, CONFIG.chunk)
    v = load_keys(v_ptr, rows * DV, key < Tk, of_v, DV, CONFIG.chunk)
    end, offset = positions(lengths_ptr, batch, Tq, Tk)
    steps = tl.cdiv(Tq, 32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tile * BLOCK_K - offset, 0) // 32
    if tile * BLOCK_K >= end:
        begin = steps
    some = tl.zeros([BLOCK_K], tl.int32)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for step in range(begin * heads, steps * heads):
        half = step // heads
        head = first + step % heads
        scope = batch * CONFIG.scopes + head * CONFIG.scopes // H
        words = words_ptr + (scope * tl.cdiv(Tq, 64) + half // 2) * 2 * Tk + half % 2
        word = tl.load(words + 2 * key, mask=key < end, other=0)
        if CAUSAL:
            word = seen(word, key, half * 32 + offset, end, 31)
        some |= word
        query = half * 32 + tl.arange(0, 32)
        dk, dv = add_queries(
            dk, dv, k, v, k_ptr, v_ptr, q_ptr, grad_ptr, stats_ptr, seed_ptr, key, rows, key < Tk, batch * H + head,
            query, query < Tq, of_k, of_v, word, Tq, scale * 1.4426950408889634, drop, CONFIG,
        )  # fmt: skip
    # A key that nobody takes may be NaN, and has no gradient.
    some = (some != 0)[:, None]
    rows = (batch * tl.num_programs(1) + tl.program_id(1)) * Tk + key
    at, mask = rows[:, None] * D + of_k[None, :], (key < Tk)[:, None] & (of_k < D)[None, :]
    tl.store(dk_ptr + at, tl.where(some, dk * scale, 0.0).to(dk_ptr.dtype.element_ty), mask=mask)
    at, mask = rows[:, None] * DV + of_v[None, :], (key < Tk)[:, None] & (of_v < DV)[None, :]
    tl.store(dv_ptr + at, tl.where(some, dv, 0.0).to(dv_ptr.dtype.element_ty), mask=mask)


@launch.kernel(do_not_specialize=["Tq", "Tk", "H", "sharing", "entries", "scopes", "drop"])
def _sparse_attention_bwd_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, stats_ptr, lists_ptr, counts_ptr, plan_ptr, seed_ptr,
    Tq, Tk, capacity, H, sharing, entries, scopes, drop, scale, CONFIG: tl.constexpr,
):  # fmt: skip
    """Programs draw items (entry: group of queries, batch and scope; tile of its keys; head of k and block of columns)
    from a ticket.

    The plan is int32: the ticket, entries + 1 offsets of tiles, and how many tiles of each (entry, head and block) are
    done.
    """
    BLOCK_K: tl.constexpr = CONFIG.keys
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_V: tl.constexpr = CONFIG.block_v
    PARTS: tl.constexpr = CONFIG.parts
    SCOPES: tl.constexpr = CONFIG.scopes
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    G = H // sharing
    # Heads of k that an entry serves, each in blocks of columns; heads of q whose gradients it sums into each; entries
    # in a row for one head of k.
    serves = tl.maximum(G // SCOPES, 1) * CONFIG.blocks
    heads = tl.minimum(H // SCOPES, sharing)
    turns = tl.maximum(SCOPES // G, 1)
    done_ptr = plan_ptr + 2 + entries
    total = tl.load(plan_ptr + 1 + entries) * serves
    entry = 0
    begin = tl.load(plan_ptr + 1)
    end = tl.load(plan_ptr + 2)
    item = tl.atomic_add(plan_ptr, 1, sem="relaxed")
    while item < total:
        tile = item // serves
        while tile >= end:
            entry += 1
            begin = end
            end = tl.load(plan_ptr + 2 + entry)
        group, scope = entry // scopes, entry % scopes
        batch = (scope // SCOPES).to(tl.int64)
        served, of_k, of_v = kept_columns(item % serves, CONFIG)
        kv_head = (scope % SCOPES) * G // SCOPES + served
        count = tl.load(counts_ptr + entry)
        slot = (tile - begin) * BLOCK_K + tl.arange(0, BLOCK_K)
        held = slot < count
        list_ptr = lists_ptr + entry.to(tl.int64) * (1 + 2 * PARTS) * capacity  # type: ignore[attr-defined]
        key = tl.load(list_ptr + tl.minimum(slot, count - 1))
        every = tl.full([BLOCK_K], 1, tl.int1)
        rows = (batch * G + kv_head) * Tk + key
        k = load_keys(k_ptr, rows * D, every, of_k, D, CONFIG.chunk)
        v = load_keys(v_ptr, rows * DV, every, of_v, DV, CONFIG.chunk)
        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        head = (scope % SCOPES) * H // SCOPES + served * heads
        halves = tl.minimum(2 * PARTS, tl.cdiv(Tq, 32) - 2 * group * PARTS)
        for step in range(0, halves * heads):
            half = step // heads
            here = head + step % heads
            query = (2 * group * PARTS + half) * 32 + tl.arange(0, 32)
            word = tl.load(list_ptr + (1 + half) * capacity + slot, mask=held, other=0)
            dk, dv = add_queries(
                dk, dv, k, v, k_ptr, v_ptr, q_ptr, grad_ptr, stats_ptr, seed_ptr, key, rows, every, batch * H + here,
                query, query < Tq, of_k, of_v, word, Tq, scale * 1.4426950408889634, drop, CONFIG,
            )  # fmt: skip
        # The entry before this one that adds to the same head of k.
        before = tl.where(scope % turns > 0, entry - 1, entry - scopes + turns - 1)
        await_entry(plan_ptr, done_ptr + before * serves + item % serves, before)
        at, mask = (rows * DV)[:, None] + of_v[None, :], held[:, None] & (of_v < DV)[None, :]
        tl.atomic_add(dv_ptr + at, dv, mask=mask, sem="relaxed")
        at, mask = (rows * D)[:, None] + of_k[None, :], held[:, None] & (of_k < D)[None, :]
        tl.atomic_add(dk_ptr + at, dk * scale, mask=mask, sem="relaxed")
        tl.debug_barrier()
        tl.atomic_add(done_ptr + entry * serves + item % serves, 1, sem="release")
        item = tl.atomic_add(plan_ptr, 1, sem="relaxed")


@together
def sparse_attention_bwd(call: SparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `sparse_attention_bwd` -> gradients of q, k and v, contiguous, and of q_idx, k_idx, w and bias."""
    q, k, v = call.q, call.k, call.v
    indexer = tuple(x for x in (call.q_idx, call.k_idx, call.w, call.bias) if x is not None)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        dq, dk, dv = (x.new_zeros(x.shape if call.attended else 0) for x in (q, k, v))
        return dq, dk, dv, *_without_scores(indexer, q)
    rows, grad, q = row_statistics(call)
    call = call._replace(grad=grad, q=q)
    dq, dk, dv = (q.new_empty(0) for _ in range(3))
    if call.attended:
        dq = query_gradient(call, rows)
        dk, dv = (key_gradients_of_tiles if call.path == "tiles" else key_gradients)(call, rows)
    if not indexer:
        return dq, dk.to(k.dtype), dv.to(v.dtype), *_without_scores(indexer, q)
    *found, _ = indexer_gradients(call, indexer, (q, k.contiguous(), v.contiguous(), grad, rows))
    dqi, dki, dw, db = (gradient.to(x.dtype) for gradient, x in zip(found, indexer))
    return dq, dk.to(k.dtype), dv.to(v.dtype), dqi, dki, dw, db


def _without_scores(indexer: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of an indexer where there is no query, or `[0]` where there is no indexer."""
    dqi, dki, dw, db = map(torch.zeros_like, indexer) if indexer else (like.new_empty(0) for _ in range(4))
    return dqi, dki, dw, db


def row_statistics(call: SparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor]:
    """(float32 [B, H, Tq, 2]: lse in base 2, and the term that a softmax's gradient subtracts; grad and q,
    contiguous, 0 for queries that take no key)."""
    grad, q, out = strided(call.grad), strided(call.q), call.out.transpose(1, 2).contiguous()
    (b, h, tq, d), dv = q.shape, grad.shape[3]
    rows = torch.empty(b, h, tq, 2, dtype=torch.float32, device=grad.device)
    grads, queries = (torch.empty(b, h, tq, width, dtype=q.dtype, device=q.device) for width in (dv, d))
    strides = (*grad.stride()[:3], *q.stride()[:3])
    args = (grad, q, out, call.lse, call.grad_lse, rows, grads, queries, *strides, tq)
    block = min(32, max(1, 8192 // launch.next_power_of_2(max(d, dv))))
    _row_statistics_kernel((launch.cdiv(tq, block), h, b), args, {"D": d, "DV": dv, "BLOCK_M": block}, num_warps=4)
    return rows, grads, queries


def query_gradient(call: SparseAttentionBwd, rows: Tensor) -> Tensor:
    """Of contiguous grad and q."""
    grad, q = call.grad, call.q
    b, h, tq, d = q.shape
    k, v, strides = reached(call.k, call.v)
    dq = torch.empty_like(q)
    tile = query_tile(max(d, v.shape[3]), q.element_size())
    config = config_of(tile, call.words.shape[1], q, v.shape[3])
    for first, groups, walked, ends, capacity, walk in walks(call, tile.parts):
        sizes = (*strides, first, tq, capacity, h // k.shape[1], call.drop, call.scale)
        args = (q, k, v, grad, dq, rows, walked, ends, call.seed, *sizes)
        grid = (groups, h * launch.cdiv(d, config.block_d), b)
        _sparse_attention_bwd_q_kernel(grid, args, {"CONFIG": replace(config, walk=walk)}, **tile.options())
    return dq


def key_gradients(call: SparseAttentionBwd, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of contiguous grad and q, by lists, in float32."""
    grad, q, words = call.grad, call.q, call.words
    (_, h, tq, d), (_, g, tk, wide) = q.shape, call.v.shape
    k, v = call.k.contiguous(), call.v.contiguous()
    # Results of an operator share no memory.
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=k.device) for x in (k, v))
    tile = key_tile(max(d, wide), q.element_size())
    config = config_of(tile, words.shape[1], q, wide)
    lists, listed = key_lists(words, call.lengths, tq, call.causal, tile.parts)
    plan = plan_of(listed, tile.keys, max(1, g // words.shape[1]) * config.blocks)
    sizes = (tq, tk, lists.shape[-1], h, h // g, listed.numel(), listed.shape[1], call.drop, call.scale)
    args = (q, k, v, grad, dk, dv, rows, lists, listed, plan, call.seed, *sizes)
    grid = (2 * tuning.programs(q.device), 1, 1)
    _sparse_attention_bwd_kv_kernel(grid, args, {"CONFIG": config}, **tile.options())
    return dk, dv


def key_gradients_of_tiles(call: SparseAttentionBwd, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of contiguous grad and q, by tiles of neighbouring keys, in the dtype of k or in float32."""
    grad, q, words = call.grad, call.q, call.words
    (_, h, tq, d), (b, g, tk, wide) = q.shape, call.v.shape
    k, v = call.k.contiguous(), call.v.contiguous()
    tile = key_tile(max(d, wide), q.element_size())
    config = config_of(tile, words.shape[1], q, wide)
    programs = launch.cdiv(tk, tile.keys) * g * b
    parts = h // g if programs < tuning.programs(q.device) else 1
    if parts > 1:
        dk, dv = (torch.empty(b, g, parts, tk, x, dtype=torch.float32, device=k.device) for x in (d, wide))
    else:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    sizes = (tq, tk, h, h // g, parts, call.drop, call.scale)
    args = (q, k, v, grad, dk, dv, rows, words.view(torch.int32), call.lengths, call.seed, *sizes)
    grid = (launch.cdiv(tk, tile.keys) * config.blocks, g * parts, b)
    meta = {"CAUSAL": call.causal, "CONFIG": config}
    _sparse_attention_bwd_kv_tiles_kernel(grid, args, meta, **tile.options())
    return (dk.sum(2), dv.sum(2)) if parts > 1 else (dk, dv)


_WIDE = replace(EXAMPLE, keys=128, parts=8)
EXAMPLES = {
    _row_statistics_kernel: {"D": 128, "DV": 128, "BLOCK_M": 32},
    _sparse_attention_bwd_q_kernel: {"seed_ptr": None, "CONFIG": replace(EXAMPLE, parts=1)},
    _sparse_attention_bwd_kv_kernel: {
        "dk_ptr": "*fp32", "dv_ptr": "*fp32", "seed_ptr": None, "CONFIG": _WIDE, "num_warps": 8, "num_stages": 3,
    },
    _sparse_attention_bwd_kv_tiles_kernel: {
        "words_ptr": "*i32", "seed_ptr": None, "CAUSAL": True, "CONFIG": _WIDE, "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
