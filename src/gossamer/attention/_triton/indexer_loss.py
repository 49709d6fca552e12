"""How far an indexer's scores are from attention, and gradients of an indexer: of that distance, or straight through.

A tile is some queries by BLOCK_N of the keys that their group lists (see `key_lists`). In it attention is computed head
after head, and its probabilities, or with values the gradients of its logits, are added over the heads; the indexer's
heads lie below each other in one product, so that 64 queries of 4 heads are 256 rows. Nothing of the size queries times
keys is in memory.

Two kernels walk the same lists. The first, a program a block of queries, has the loss and the gradients that belong to
queries; for the loss it walks its list once before, to sum the exponentials of the indexer's scores. The second, an
item a tile of keys and a group of blocks, has the gradients that belong to keys, added up in the order of groups as in
`sparse_attention_bwd`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.philox import dropout_weights
from gossamer.attention._triton._indexer import activated, derivative, valid_keys
from gossamer.attention._triton._products import stages_of, wide_product
from gossamer.attention._triton.key_lists import await_entry, key_lists, plan_of
from gossamer.attention._triton.sparse_attention import group_chunk
from gossamer.attention.records import QUERIES, IndexerLoss, SparseAttentionBwd

BLOCK_N: tl.constexpr = tl.constexpr(32)
LEAST: tl.constexpr = tl.constexpr(-3e38)
"""Less than any score."""
PARTS: tl.constexpr = tl.constexpr(8)
"""Blocks of queries whose gradient of a key is summed before it goes to memory."""


@triton.jit
def taken(list_ptr, slot, count, capacity, row, rows_held):
    """bool [queries, BLOCK_N]; row is each query's place in its group."""
    word = tl.load(
        list_ptr + (1 + row // 32)[:, None] * capacity + slot[None, :],
        mask=(slot < count)[None, :] & rows_held[:, None],
        other=0,
    )
    return ((word >> (row % 32)[:, None]) & 1) != 0


@dataclass(frozen=True)
class Sizes:
    """The constants that a kernel is compiled for, as one: columns of q and v, and as how many at a time products read
    them; heads of q that share one of k; heads, columns and activation of the indexer."""

    d: int
    dv: int
    chunk: int
    group: int
    heads: int
    di: int
    activation: str


@triton.jit
def over_heads(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, seed_ptr, batch, query, key, keep, T, H, drop, scale, SIZES: tl.constexpr
):  # fmt: skip
    """float32 [queries, BLOCK_N]: the mean over heads of attention's probabilities, by the lse of each query, or with
    values the sum over heads of the logits' gradients, by `row_statistics`."""
    GROUP: tl.constexpr = SIZES.group
    D: tl.constexpr = SIZES.d
    DV: tl.constexpr = SIZES.dv
    CHUNK: tl.constexpr = SIZES.chunk
    total = tl.zeros(keep.shape, tl.float32)
    for head in range(0, H):
        row = (batch * H + head) * T + query
        at = (batch * (H // GROUP) + head // GROUP) * T + key
        s = wide_product(q_ptr, row * D, query < T, k_ptr, at * D, key >= 0, D, CHUNK, "ieee")
        if v_ptr is None:
            lse = tl.load(lse_ptr + row, mask=query < T, other=0.0)
            p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)
        else:
            lse = tl.load(lse_ptr + 2 * row, mask=query < T, other=0.0)
            delta = tl.load(lse_ptr + 2 * row + 1, mask=query < T, other=0.0)
            dp = wide_product(grad_ptr, row * DV, query < T, v_ptr, at * DV, key >= 0, DV, CHUNK, "ieee")
            if seed_ptr is not None:
                dp *= dropout_weights(seed_ptr, batch * H + head, query[:, None], key[None, :], drop)
            p = tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None]) * (dp - delta[:, None])
        total += tl.where(keep, p, 0.0)
    return total if v_ptr is not None else total / H


@triton.jit
def student(qi, ki, w, bias, scale, NI: tl.constexpr, M: tl.constexpr, ACTIVATION: tl.constexpr):
    """(scores [queries, BLOCK_N], activations of the heads [NI * queries, BLOCK_N]) in float32."""
    u = activated(tl.dot(qi, ki.T, input_precision="ieee") * scale + bias[:, None], ACTIVATION)
    return tl.sum(tl.reshape(u * w[:, None], (NI, M, u.shape[1])), axis=0), u


@triton.jit
def heads_of(qi_ptr, w_ptr, bias_ptr, batch, query, active, T, HEADS: tl.constexpr, DI: tl.constexpr):
    """(rows of q [NI * M, Di], weights, biases [NI * M]) of M queries, head after head; a head that there is not, and a
    query that is not active, which may hold NaN, weigh 0."""
    NI: tl.constexpr = triton.next_power_of_2(max(HEADS, 1))
    BLOCK: tl.constexpr = triton.next_power_of_2(max(16, DI))
    M: tl.constexpr = query.shape[0]
    head = tl.reshape(tl.broadcast_to(tl.arange(0, NI)[:, None], (NI, M)), (NI * M,))
    query = tl.reshape(tl.broadcast_to(query[None, :], (NI, M)), (NI * M,))
    held = (head < HEADS) & tl.reshape(tl.broadcast_to(active[None, :], (NI, M)), (NI * M,))
    column = tl.arange(0, BLOCK)
    at = (batch * HEADS + head) * T + query
    qi = tl.load(qi_ptr + at[:, None] * DI + column[None, :], mask=held[:, None] & (column < DI)[None, :], other=0.0)
    w = tl.load(w_ptr + (batch * T + query) * HEADS + head, mask=held, other=0.0)
    return qi, w, tl.load(bias_ptr + head, mask=head < HEADS, other=0.0)


@triton.jit
def load_lse(v_ptr, lse_ptr, lse_idx_ptr, batch, query, T, H):
    """The lse of a query that `takes_part` looks at: of the indexer, or with values of attention."""
    if v_ptr is None:
        return tl.load(lse_idx_ptr + batch * T + query, mask=query < T, other=float("inf"))
    else:
        return tl.load(lse_ptr + 2 * (batch * H * T + query), mask=query < T, other=float("inf"))


@triton.jit
def takes_part(lse):
    """The lse of a query that takes no key is -inf, and that of one behind the lengths inf."""
    return (lse != float("inf")) & (lse != float("-inf"))


@triton.jit
def keys_of(ki_ptr, batch, key, T, DI: tl.constexpr):
    """Rows of the indexer's keys [BLOCK_N, Di]."""
    column = tl.arange(0, triton.next_power_of_2(max(16, DI)))
    at = (batch * T + key)[:, None] * DI + column[None, :]
    return tl.load(ki_ptr + at, mask=(column < DI)[None, :], other=0.0)


@triton.jit
def slopes(g, u, w, NI: tl.constexpr, M: tl.constexpr, ACTIVATION: tl.constexpr):
    """(gradient of each head's weight, of its activation's argument), [NI * M, BLOCK_N], for g of the scores."""
    g = tl.reshape(tl.broadcast_to(g[None, :, :], (NI, M, g.shape[1])), (NI * M, g.shape[1]))
    return g * u, g * w[:, None] * derivative(u, ACTIVATION)


@triton.jit
def begin_list(lists_ptr, counts_ptr, batch, first, capacity, M: tl.constexpr):
    """(the list of a program of M queries, its number of keys, the queries' places in their group, the queries)."""
    listed = (tl.program_id(0) * M // 64).to(tl.int64) * tl.num_programs(1) + batch
    place = tl.program_id(0) * M % 64 + tl.arange(0, M)
    query = first * 64 + tl.program_id(0) * M + tl.arange(0, M)
    return lists_ptr + listed * 3 * capacity, tl.load(counts_ptr + listed), place, query


@triton.jit
def student_lse(
    qi_ptr, ki_ptr, w_ptr, bias_ptr, list_ptr, batch, count, capacity, place, query, T, scale, SIZES: tl.constexpr
):  # fmt: skip
    """The logarithm of the sum of the exponentials of the indexer's scores of the keys that each query takes."""
    DI: tl.constexpr = SIZES.di
    ACTIVATION: tl.constexpr = SIZES.activation
    NI: tl.constexpr = triton.next_power_of_2(max(SIZES.heads, 1))
    M: tl.constexpr = query.shape[0]
    qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, query, query < T, T, SIZES.heads, DI)
    total = tl.zeros([M], tl.float32)
    largest = tl.full([M], LEAST, tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        key = tl.load(list_ptr + tl.minimum(slot, count - 1))
        keep = taken(list_ptr, slot, count, capacity, place, query < T)
        scores, _ = student(qi, keys_of(ki_ptr, batch, key, T, DI), w, bias, scale, NI, M, ACTIVATION)
        before = largest
        largest = tl.maximum(before, tl.max(tl.where(keep, scores, LEAST), axis=1))
        total *= tl.exp(before - largest)
        total += tl.sum(tl.where(keep, tl.exp(scores - largest[:, None]), 0.0), axis=1)
    return tl.log(total) + largest


@launch.kernel(do_not_specialize=["first", "drop"])
def _indexer_rows_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, seed_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lse_idx_ptr, lists_ptr,
    counts_ptr, dqi_ptr, rows_ptr, lengths_ptr, first, T, H, capacity, drop, scale, idx_scale, SIZES: tl.constexpr,
):  # fmt: skip
    """Program (M queries, batch): without values the loss and the indexer's lse of each; the gradients of q, w and bias
    before those are summed.

    rows is float32: [B, Hi, T] gradients of the weights that multiply activations, as many of the biases, losses
    [B, T].
    """
    HEADS: tl.constexpr = SIZES.heads
    DI: tl.constexpr = SIZES.di
    ACTIVATION: tl.constexpr = SIZES.activation
    NI: tl.constexpr = triton.next_power_of_2(max(HEADS, 1))
    M: tl.constexpr = 64 if NI <= 4 else 256 // NI
    batch = tl.program_id(1).to(tl.int64)
    lists_ptr, count, place, query = begin_list(lists_ptr, counts_ptr, batch, first, capacity, M)
    if v_ptr is None:
        lse_idx = student_lse(
            qi_ptr, ki_ptr, w_ptr, bias_ptr, lists_ptr, batch, count, capacity, place, query, T, idx_scale, SIZES
        )  # fmt: skip
        lse_idx = tl.where(query < valid_keys(lengths_ptr, batch, T), lse_idx, float("inf"))
        tl.store(lse_idx_ptr + batch * T + query, lse_idx, mask=query < T)
    else:
        lse_idx = load_lse(v_ptr, lse_ptr, lse_idx_ptr, batch, query, T, H)
    active = takes_part(lse_idx)
    qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, query, active, T, HEADS, DI)
    loss = tl.zeros([M], tl.float32)
    dqi = tl.zeros(qi.shape, tl.float32)
    dw = tl.zeros([NI * M], tl.float32)
    db = tl.zeros([NI * M], tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
        keep = taken(lists_ptr, slot, count, capacity, place, active)
        g = over_heads(
            q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, seed_ptr, batch, query, key, keep, T, H, drop, scale, SIZES
        )  # fmt: skip
        ki = keys_of(ki_ptr, batch, key, T, DI)
        scores, u = student(qi, ki, w, bias, idx_scale, NI, M, ACTIVATION)
        if v_ptr is None:
            scores = scores - lse_idx[:, None]
            loss += tl.sum(tl.where(g == 0, 0.0, g * (tl.log(g) - scores)), axis=1)
            g = tl.where(keep, tl.exp(scores), 0.0) - g
        of_weight, of_argument = slopes(g, u, w, NI, M, ACTIVATION)
        dw += tl.sum(of_weight, axis=1)
        db += tl.sum(of_argument, axis=1)
        dqi = tl.dot(of_argument.to(ki.dtype), ki, dqi, input_precision="ieee")
    size = tl.num_programs(1).to(tl.int64) * HEADS * T
    tl.store(rows_ptr + 2 * size + batch * T + query, loss, mask=query < T)
    row = tl.arange(0, NI * M)
    head, query = row // M, first * 64 + tl.program_id(0) * M + row % M
    held = (head < HEADS) & (query < T)
    at = (batch * HEADS + head) * T + query
    tl.store(rows_ptr + at, dw, mask=held)
    tl.store(rows_ptr + size + at, db, mask=held)
    column = tl.arange(0, dqi.shape[1])
    tl.store(dqi_ptr + at[:, None] * DI + column[None, :], dqi * idx_scale, mask=held[:, None] & (column < DI)[None, :])


@launch.kernel(do_not_specialize=["entries", "drop"])
def _indexer_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, seed_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lse_idx_ptr, lists_ptr,
    counts_ptr, dki_ptr, plan_ptr, T, H, capacity, entries, drop, scale, idx_scale, SIZES: tl.constexpr,
):  # fmt: skip
    """Programs draw items (entry: group of queries and batch; tile of its keys) from a ticket, as in
    `_sparse_attention_bwd_kv_kernel`."""
    HEADS: tl.constexpr = SIZES.heads
    DI: tl.constexpr = SIZES.di
    ACTIVATION: tl.constexpr = SIZES.activation
    NI: tl.constexpr = triton.next_power_of_2(max(HEADS, 1))
    M: tl.constexpr = 64 if NI <= 4 else 256 // NI
    batches = entries // tl.cdiv(T, PARTS * 64)
    done_ptr = plan_ptr + 2 + entries
    total = tl.load(plan_ptr + 1 + entries)
    column = tl.arange(0, triton.next_power_of_2(max(16, DI)))
    entry = 0
    begin = tl.load(plan_ptr + 1)
    end = tl.load(plan_ptr + 2)
    tile = tl.atomic_add(plan_ptr, 1, sem="relaxed")
    while tile < total:
        while tile >= end:
            entry += 1
            begin = end
            end = tl.load(plan_ptr + 2 + entry)
        group, batch = entry // batches, (entry % batches).to(tl.int64)
        count = tl.load(counts_ptr + entry)
        slot = (tile - begin) * BLOCK_N + tl.arange(0, BLOCK_N)
        list_ptr = lists_ptr + entry.to(tl.int64) * (1 + 2 * PARTS) * capacity  # type: ignore[attr-defined]
        key = tl.load(list_ptr + tl.minimum(slot, count - 1))
        ki = keys_of(ki_ptr, batch, key, T, DI)
        dki = tl.zeros(ki.shape, tl.float32)
        last = tl.minimum(PARTS * 64, T - group * (PARTS * 64))
        for start in range(0, last, M):
            place = start + tl.arange(0, M)
            query = group * (PARTS * 64) + place
            lse_idx = load_lse(v_ptr, lse_ptr, lse_idx_ptr, batch, query, T, H)
            active = takes_part(lse_idx)
            keep = taken(list_ptr, slot, count, capacity, place, active)
            g = over_heads(
                q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, seed_ptr, batch, query, key, keep, T, H, drop, scale, SIZES
            )  # fmt: skip
            qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, query, active, T, HEADS, DI)
            scores, u = student(qi, ki, w, bias, idx_scale, NI, M, ACTIVATION)
            if v_ptr is None:
                g = tl.where(keep, tl.exp(scores - lse_idx[:, None]), 0.0) - g
            _, of_argument = slopes(g, u, w, NI, M, ACTIVATION)
            dki = tl.dot(tl.trans(of_argument).to(qi.dtype), qi, dki, input_precision="ieee")
        await_entry(plan_ptr, done_ptr + entry - batches, entry - batches)
        mask = (slot < count)[:, None] & (column < DI)[None, :]
        at = dki_ptr + (batch * T + key)[:, None] * DI + column[None, :]
        tl.atomic_add(at, dki * idx_scale, mask=mask, sem="relaxed")
        tl.debug_barrier()
        tl.atomic_add(done_ptr + entry, 1, sem="release")
        tile = tl.atomic_add(plan_ptr, 1, sem="relaxed")


def indexer_loss(call: IndexerLoss) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_loss` -> (loss, and its gradients of q_idx, k_idx, w and bias)."""
    q, indexer = call.q, (call.q_idx, call.k_idx, call.w, call.bias)
    if q.numel() == 0:
        dqi, dki, dw, db = (torch.zeros_like(x) for x in indexer)
        return torch.zeros((), dtype=torch.float32, device=q.device), dqi, dki, dw, db
    lse_idx = torch.empty(q.shape[0], q.shape[2], dtype=torch.float32, device=q.device)
    *grads, loss = indexer_gradients(call, indexer, (q, call.k, None, None, call.lse), lse_idx)
    each = 1 / lse_idx.isfinite().sum().clamp(min=1)
    dqi, dki, dw, db = ((gradient * each).to(x.dtype) for gradient, x in zip(grads, indexer))
    return loss.sum() * each, dqi, dki, dw, db


def indexer_gradients(
    call: IndexerLoss | SparseAttentionBwd,
    indexer: tuple[Tensor, ...],
    attended: tuple[Tensor | None, ...],
    lse_idx: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Float32 gradients of q_idx, k_idx, w and bias, and losses of queries. `attended` is (q, k, None, None, lse), or
    for a gradient straight through (q, k, v, grad, `row_statistics`). `lse_idx` is filled for the loss: inf of queries
    behind the lengths, which take no part."""
    words, lengths, causal, scales = call.words, call.lengths, call.causal, (call.scale, call.scale_idx)
    q, k, v, *_ = attended
    q_idx, k_idx, w, bias = indexer
    assert q is not None and k is not None
    (b, h, t, d), (_, heads, _, di) = q.shape, q_idx.shape
    gates, biases = w.float() if call.activation == "relu" else w.float().sigmoid(), bias.float()
    dv = d if v is None else v.shape[3]
    # Registers hold no more operands of products of float32 without tensor cores.
    chunk = 32 if q.element_size() > 2 or max(d, dv) > 256 else launch.next_power_of_2(max(16, d, dv))
    meta = {"SIZES": Sizes(d, dv, chunk, h // k.shape[1], heads, di, call.activation)}
    drop, seed = (call.drop, call.seed) if isinstance(call, SparseAttentionBwd) else (0, None)
    dqi = torch.empty(q_idx.shape, dtype=torch.float32, device=q.device)
    rows = torch.empty(2 * b * heads * t + b * t, dtype=torch.float32, device=q.device)
    queries = min(64, 256 // launch.next_power_of_2(heads))
    step = group_chunk(words, 1)
    operands = (*attended, seed, q_idx, k_idx, gates, biases, lse_idx)
    for first in range(0, words.shape[2], step):
        lists, listed = key_lists(words, lengths, t, causal, 1, first, step)
        grid, capacity = (lists.shape[0] * QUERIES // queries, b, 1), lists.shape[-1]
        args = (*operands, lists, listed, dqi, rows, lengths, first, t, h, capacity, drop, *scales)
        # Gradients of logits leave a thread of 8 warps too few registers for the indexer's heads.
        _indexer_rows_kernel(grid, args, meta, num_warps=8 if v is None else 16, num_stages=stages_of(3, q))
    dki = torch.zeros(k_idx.shape, dtype=torch.float32, device=q.device)
    lists, listed = key_lists(words, lengths, t, causal, PARTS.value)
    plan = plan_of(listed, BLOCK_N.value, 1)
    args = (*operands, lists, listed, dki, plan, t, h, lists.shape[-1], listed.numel(), drop, *scales)
    _indexer_keys_kernel((2 * tuning.programs(q.device), 1, 1), args, meta, num_warps=8, num_stages=stages_of(3, q))
    of_weights, of_biases = rows[: -b * t].view(2, b, heads, t)
    of_weights = of_weights.transpose(1, 2)
    # The weight of a query that takes no key may be NaN.
    inner = 1 if call.activation == "relu" else gates * (1 - gates)
    dw = torch.where(of_weights == 0, 0, inner * of_weights).contiguous()
    return dqi, dki, dw, of_biases.sum((0, 2)), rows[-b * t :]


_SIZES = {"seed_ptr": None, "w_ptr": "*fp32", "lse_idx_ptr": None, "SIZES": Sizes(128, 128, 128, 1, 4, 64, "sigmoid")}
EXAMPLES = {
    _indexer_rows_kernel: {**_SIZES, "rows_ptr": "*fp32", "num_warps": 16},
    _indexer_keys_kernel: {**_SIZES, "num_warps": 8},
}
