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

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.compiling import together
from gossamer.attention._triton.key_lists import key_lists, not_behind, positions
from gossamer.attention._triton.sparse_attention import (
    LISTS,
    Tile,
    alike,
    begin_walk,
    strided,
    walk_keys,
    walks,
    wide_product,
)
from gossamer.attention.records import SparseAttentionBwd, StraightThrough


def query_tile(d: int, element_size: int) -> Tile:
    """Tile of the gradient of q."""
    if element_size > 2:
        return Tile(parts=1, keys=32, warps=8 if d > 64 else 4, stages=1)
    if d > 128:
        return Tile(parts=1, keys=32, warps=4, stages=1)
    return Tile(parts=1, keys=64, warps=4, stages=2)


def key_tile(d: int, element_size: int) -> Tile:
    """Tile of the gradients of k and v. 32 queries a step leave room for 128 keys in registers."""
    if element_size > 2 or d > 128:
        return Tile(parts=8, keys=32, warps=8 if d > 64 else 4, stages=1)
    return Tile(parts=8, keys=128, warps=8, stages=3)


@launch.kernel
def _row_statistics_kernel(
    grad_ptr, q_ptr, out_ptr, lse_ptr, grad_lse_ptr, stats_ptr, grad_out_ptr, q_out_ptr,
    stride_gb, stride_gh, stride_gt, stride_qb, stride_qh, stride_qt, Tq, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_M queries, head, batch): (lse in base 2, grad * out summed - gradient of lse) of each query, and
    contiguous copies of grad and q, 0 for a query that takes no key, which may hold NaN."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    head, batch, heads = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    query = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    row = (batch * heads + head) * Tq + query
    inside = (query < Tq)[:, None] & (column < D)[None, :]
    lse = tl.load(lse_ptr + row, mask=query < Tq, other=float("-inf"))
    taking = lse != float("-inf")
    read = taking[:, None] & inside
    grad_ptr += batch * stride_gb + head * stride_gh
    q_ptr += batch * stride_qb + head * stride_qh
    grad = tl.load(grad_ptr + query[:, None] * stride_gt + column[None, :], mask=read, other=0.0)
    q = tl.load(q_ptr + query[:, None] * stride_qt + column[None, :], mask=read, other=0.0)
    at = ((batch * Tq + query) * heads + head)[:, None] * D + column[None, :]
    out = tl.load(out_ptr + at, mask=read, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row, mask=taking, other=0.0)
    at = row[:, None] * D + column[None, :]
    tl.store(grad_out_ptr + at, grad, mask=inside)
    tl.store(q_out_ptr + at, q, mask=inside)
    tl.store(stats_ptr + 2 * row, lse * 1.4426950408889634, mask=query < Tq)
    tl.store(stats_ptr + 2 * row + 1, delta, mask=query < Tq)


@launch.kernel(do_not_specialize=["first", "Tq", "sharing"])
def _sparse_attention_bwd_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, stats_ptr, from_ptr, counts_ptr,
    stride_kb, stride_kh, stride_kt, first, Tq, capacity, sharing, scale,
    SCOPES: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    WALK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (group of queries, the last first; head; batch). So many heads are `sharing` one of k."""
    BLOCK_M: tl.constexpr = 64 * PARTS
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    row = tl.arange(0, BLOCK_M)
    begin = (first + group) * BLOCK_M
    query = begin + row
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    inside = (query < Tq)[:, None] & wide
    token = (batch * heads + head) * Tq + query
    here = token[:, None] * D + column[None, :]
    CHUNK: tl.constexpr = 32
    IN_CHUNKS: tl.constexpr = (q_ptr.dtype.element_ty == tl.float32) & (PRECISION == "ieee") & (D > CHUNK)
    q = tl.zeros([1, 1], tl.float32)
    grad = tl.zeros([1, 1], tl.float32)
    if not IN_CHUNKS:
        q = tl.load(q_ptr + here, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + here, mask=inside, other=0.0)
    lse = tl.load(stats_ptr + 2 * token, mask=query < Tq, other=0.0)
    delta = tl.load(stats_ptr + 2 * token + 1, mask=query < Tq, other=0.0)
    k_ptr += batch * stride_kb + (head // sharing) * stride_kh
    v_ptr += batch * stride_kb + (head // sharing) * stride_kh
    from_ptr, count, offset = begin_walk(
        from_ptr, counts_ptr, first, group, batch, head * SCOPES // heads, tl.num_programs(2), Tq, capacity,
        SCOPES, PARTS, WALK,
    )  # fmt: skip
    log2_scale = scale * 1.4426950408889634
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        key, some, keep = walk_keys(
            from_ptr, start, count, offset, begin, row, Tq, capacity, PARTS, BLOCK_N, WALK
        )  # fmt: skip
        at = key[:, None] * stride_kt + column[None, :]
        read = some[:, None] & wide
        k = tl.load(k_ptr + at, mask=read, other=0.0)
        if IN_CHUNKS:
            rows, keys = token * D, key * stride_kt
            s = wide_product(q_ptr, rows, query < Tq, k_ptr, keys, some, D, CHUNK, PRECISION)
            dp = wide_product(grad_ptr, rows, query < Tq, v_ptr, keys, some, D, CHUNK, PRECISION)
        else:
            v = tl.load(v_ptr + at, mask=read, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            dp = tl.dot(grad, v.T, input_precision=PRECISION)
        ds = tl.where(keep, tl.exp2(s * log2_scale - lse[:, None]) * (dp - delta[:, None]), 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + here, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_queries(
    dk, dv, k, v, q_ptr, grad_ptr, stats_ptr, row, column, inside, word, log2_scale,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, plus the sums of 32 queries: rows `row` of all tokens and heads, bits of word."""
    keep = (word[:, None] & (tl.full([32], 1, tl.int32) << tl.arange(0, 32))[None, :]) != 0
    token = row[:, None] * D + column[None, :]
    wide = inside[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + token, mask=wide, other=0.0)
    grad = tl.load(grad_ptr + token, mask=wide, other=0.0)
    lse = tl.load(stats_ptr + 2 * row, mask=inside, other=0.0)
    delta = tl.load(stats_ptr + 2 * row + 1, mask=inside, other=0.0)
    s = tl.dot(k, q.T, input_precision=PRECISION)
    p = tl.where(keep, tl.exp2(s * log2_scale - lse[None, :]), 0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, grad.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@launch.kernel(do_not_specialize=["Tq", "H", "sharing", "parts"])
def _sparse_attention_bwd_kv_tiles_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, stats_ptr, words_ptr, lengths_ptr, Tq, Tk, H, sharing, parts, scale,
    SCOPES: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_K keys, the first ones, which most queries see, first; head of k and part of the heads that are
    sharing it; batch)."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    kv_head, batch = tl.program_id(1) // parts, tl.program_id(2).to(tl.int64)
    # Heads of q of this program, and the first of them.
    heads = sharing // parts
    first = tl.program_id(1) * heads
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_D)
    mask = (key < Tk)[:, None] & (column < D)[None, :]
    at = ((batch * (H // sharing) + kv_head) * Tk + key)[:, None] * D + column[None, :]
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    end, offset = positions(lengths_ptr, batch, Tq, Tk)
    steps = tl.cdiv(Tq, 32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tl.program_id(0) * BLOCK_K - offset, 0) // 32
    if tl.program_id(0) * BLOCK_K >= end:
        begin = steps
    some = tl.zeros([BLOCK_K], tl.int32)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for step in range(begin * heads, steps * heads):
        half = step // heads
        head = first + step % heads
        words = words_ptr + ((batch * SCOPES + head * SCOPES // H) * tl.cdiv(Tq, 64) + half // 2) * 2 * Tk + half % 2
        word = tl.load(words + 2 * key, mask=key < end, other=0)
        if CAUSAL:
            word = not_behind(word, key - (half * 32 + offset), 31)
        some |= word
        query = half * 32 + tl.arange(0, 32)
        dk, dv = add_queries(
            dk, dv, k, v, q_ptr, grad_ptr, stats_ptr, (batch * H + head) * Tq + query, column, query < Tq, word,
            scale * 1.4426950408889634, D, PRECISION,
        )  # fmt: skip
    # A key that nobody takes may be NaN, and has no gradient.
    some = (some != 0)[:, None]
    at = ((batch * tl.num_programs(1) + tl.program_id(1)) * Tk + key)[:, None] * D + column[None, :]
    tl.store(dk_ptr + at, tl.where(some, dk * scale, 0.0).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + at, tl.where(some, dv, 0.0).to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def await_entry(plan_ptr, flag_ptr, entry):
    """Returns when all tiles of an entry of the plan are done; there is nothing to wait for before the first."""
    if entry >= 0:
        tiles = tl.load(plan_ptr + 2 + entry) - tl.load(plan_ptr + 1 + entry)
        while tl.atomic_add(flag_ptr, 0, sem="acquire") < tiles:
            pass


@launch.kernel(do_not_specialize=["Tq", "Tk", "H", "sharing", "entries", "scopes"])
def _sparse_attention_bwd_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, stats_ptr, lists_ptr, counts_ptr, plan_ptr,
    Tq, Tk, capacity, H, sharing, entries, scopes, scale,
    SCOPES: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs draw items (entry: group of queries, batch and scope; tile of its keys; head of k) from a ticket.

    The plan is int32: the ticket, entries + 1 offsets of tiles, and how many tiles of each (entry, head) are done.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    G = H // sharing
    # Heads of k that an entry serves; heads of q whose gradients it sums into each; entries in a row for one head of k.
    serves = tl.maximum(G // SCOPES, 1)
    heads = tl.minimum(H // SCOPES, sharing)
    turns = tl.maximum(SCOPES // G, 1)
    done_ptr = plan_ptr + 2 + entries
    total = tl.load(plan_ptr + 1 + entries) * serves
    column = tl.arange(0, BLOCK_D)
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
        served = item % serves
        kv_head = (scope % SCOPES) * G // SCOPES + served
        count = tl.load(counts_ptr + entry)
        slot = (tile - begin) * BLOCK_K + tl.arange(0, BLOCK_K)
        held = slot < count
        list_ptr = lists_ptr + entry.to(tl.int64) * (1 + 2 * PARTS) * capacity  # type: ignore[attr-defined]
        key = tl.load(list_ptr + tl.minimum(slot, count - 1))
        of_head = (batch * G + kv_head) * Tk * D
        at = key[:, None] * D + column[None, :]
        wide = (column < D)[None, :]
        k = tl.load(k_ptr + of_head + at, mask=wide, other=0.0)
        v = tl.load(v_ptr + of_head + at, mask=wide, other=0.0)
        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        head = (scope % SCOPES) * H // SCOPES + served * heads
        halves = tl.minimum(2 * PARTS, tl.cdiv(Tq, 32) - 2 * group * PARTS)
        for step in range(0, halves * heads):
            half = step // heads
            here = head + step % heads
            query = (2 * group * PARTS + half) * 32 + tl.arange(0, 32)
            word = tl.load(list_ptr + (1 + half) * capacity + slot, mask=held, other=0)
            dk, dv = add_queries(
                dk, dv, k, v, q_ptr, grad_ptr, stats_ptr, (batch * H + here) * Tq + query, column, query < Tq, word,
                scale * 1.4426950408889634, D, PRECISION,
            )  # fmt: skip
        # The entry before this one that adds to the same head of k.
        before = tl.where(scope % turns > 0, entry - 1, entry - scopes + turns - 1)
        await_entry(plan_ptr, done_ptr + before * serves + served, before)
        mask = held[:, None] & wide
        tl.atomic_add(dv_ptr + of_head + at, dv, mask=mask, sem="relaxed")
        tl.atomic_add(dk_ptr + of_head + at, dk * scale, mask=mask, sem="relaxed")
        tl.debug_barrier()
        tl.atomic_add(done_ptr + entry * serves + served, 1, sem="release")
        item = tl.atomic_add(plan_ptr, 1, sem="relaxed")


@together
def sparse_attention_bwd(call: SparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `sparse_attention_bwd` -> gradients of q, k and v, contiguous."""
    q, k, v = call.q, call.k, call.v
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    rows, grad, q = row_statistics(call)
    call = call._replace(grad=grad, q=q)
    dq = query_gradient(call, rows)
    dk, dv = (key_gradients_of_tiles if call.path == "tiles" else key_gradients)(call, rows)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def row_statistics(call: SparseAttentionBwd | StraightThrough) -> tuple[Tensor, Tensor, Tensor]:
    """(float32 [B, H, Tq, 2]: lse in base 2, and the term that a softmax's gradient subtracts; grad and q,
    contiguous, 0 for queries that take no key)."""
    grad, q, out = strided(call.grad), strided(call.q), call.out.transpose(1, 2).contiguous()
    b, h, tq, d = grad.shape
    rows = torch.empty(b, h, tq, 2, dtype=torch.float32, device=grad.device)
    grads, queries = torch.empty(2, b, h, tq, d, dtype=q.dtype, device=q.device)
    strides = (*grad.stride()[:3], *q.stride()[:3])
    args = (grad, q, out, call.lse, call.grad_lse, rows, grads, queries, *strides, tq)
    _row_statistics_kernel((launch.cdiv(tq, 32), h, b), args, {"D": d, "BLOCK_M": 32}, num_warps=4)
    return rows, grads, queries


def query_gradient(call: SparseAttentionBwd, rows: Tensor) -> Tensor:
    """Of contiguous grad and q."""
    grad, q = call.grad, call.q
    b, h, tq, d = q.shape
    k, v = alike(call.k, call.v)
    dq = torch.empty_like(q)
    tile = query_tile(d, q.element_size())
    meta = {"SCOPES": call.words.shape[1], "D": d, "BLOCK_N": tile.keys, "PARTS": tile.parts}
    for first, groups, walked, ends, capacity, walk in walks(call, tile.parts):
        sizes = (*k.stride()[:3], first, tq, capacity, h // k.shape[1], call.scale)
        meta |= {"WALK": walk, "PRECISION": tuning.dot_precision(q, d)["PRECISION"]}
        _sparse_attention_bwd_q_kernel(
            (groups, h, b), (q, k, v, grad, dq, rows, walked, ends, *sizes), meta, **tile.options()
        )
    return dq


def key_gradients(call: SparseAttentionBwd, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of contiguous grad and q, by lists, in float32."""
    grad, _, q, k, v, _, _, words, lengths, scale, causal, _ = call
    _, h, tq, d = q.shape
    g, tk = k.shape[1:3]
    k, v = k.contiguous(), v.contiguous()
    # Results of an operator share no memory.
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    tile = key_tile(d, q.element_size())
    lists, listed = key_lists(words, lengths, tq, causal, tile.parts)
    entries, scopes = listed.numel(), listed.shape[1]
    serves = max(1, g // words.shape[1])
    plan = torch.zeros(2 + entries * (1 + serves), dtype=torch.int32, device=k.device)
    tiles = (listed.view(-1) + (tile.keys - 1)) // tile.keys
    torch.cumsum(tiles, 0, dtype=torch.int32, out=plan[2 : 2 + entries])
    meta = {"SCOPES": words.shape[1], "D": d, "BLOCK_K": tile.keys, "PARTS": tile.parts}
    meta["PRECISION"] = tuning.dot_precision(q, d)["PRECISION"]
    args = (
        q, k, v, grad, dk, dv, rows, lists, listed, plan, tq, tk, lists.shape[-1], h, h // g, entries, scopes,
        scale,
    )  # fmt: skip
    grid = (2 * tuning.programs(q.device), 1, 1)
    _sparse_attention_bwd_kv_kernel(grid, args, meta, **tile.options())
    return dk, dv


def key_gradients_of_tiles(call: SparseAttentionBwd, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of contiguous grad and q, by tiles of neighbouring keys, in the dtype of k or in float32."""
    grad, _, q, k, v, _, _, words, lengths, scale, causal, _ = call
    _, h, tq, d = q.shape
    b, g, tk, _ = k.shape
    k, v = k.contiguous(), v.contiguous()
    tile = key_tile(d, q.element_size())
    programs = launch.cdiv(tk, tile.keys) * g * b
    parts = h // g if programs < tuning.programs(q.device) else 1
    if parts > 1:
        dk, dv = torch.empty(2, b, g, parts, tk, d, dtype=torch.float32, device=k.device)
    else:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    meta = {"SCOPES": words.shape[1], "D": d, "BLOCK_K": tile.keys, "CAUSAL": causal}
    meta |= {"PRECISION": tuning.dot_precision(q, d)["PRECISION"]}
    args = (q, k, v, grad, dk, dv, rows, words.view(torch.int32), lengths, tq, tk, h, h // g, parts, scale)
    _sparse_attention_bwd_kv_tiles_kernel((launch.cdiv(tk, tile.keys), g * parts, b), args, meta, **tile.options())
    return (dk.sum(2), dv.sum(2)) if parts > 1 else (dk, dv)


_SIZES = {"SCOPES": 1, "D": 128, "PRECISION": "ieee"}
EXAMPLES = {
    _row_statistics_kernel: {"D": 128, "BLOCK_M": 32},
    _sparse_attention_bwd_q_kernel: {**_SIZES, "BLOCK_N": 64, "PARTS": 1, "WALK": LISTS},
    _sparse_attention_bwd_kv_kernel: {
        "dk_ptr": "*fp32", "dv_ptr": "*fp32", **_SIZES, "BLOCK_K": 128, "PARTS": 8, "num_warps": 8, "num_stages": 3,
    },
    _sparse_attention_bwd_kv_tiles_kernel: {
        "words_ptr": "*i32", **_SIZES, "BLOCK_K": 128, "CAUSAL": True, "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
