"""How far an indexer's scores are from attention, and the gradient that brings them closer.

A tile is some queries by BLOCK_N of the keys that their group lists (see `key_lists`). In it the teacher is computed
head after head, as in attention, and the probabilities of all heads are added; the student's heads lie below each other
in one product, so that 64 queries of 4 heads are 256 rows. Nothing of the size queries times keys is in memory.

Three kernels walk the same lists: the first sums the student's exponentials (scores are sums of sigmoids: no largest
one has to be subtracted); the second, a program a block of queries, has the loss and what belongs to queries; the
third, an item a tile of keys and a group of blocks, what belongs to keys, added up in the order of groups as in
`sparse_attention_bwd`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton.key_lists import QUERIES, key_lists
from gossamer.attention._triton.sparse_attention import group_chunk
from gossamer.attention._triton.sparse_attention_bwd import await_entry

BLOCK_N: tl.constexpr = tl.constexpr(32)
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


@triton.jit
def teacher(q_ptr, k_ptr, lse_ptr, batch, query, key, keep, T, H, scale, GROUP: tl.constexpr, D: tl.constexpr):
    """The mean over heads of attention's probabilities, float32 [queries, BLOCK_N]."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    total = tl.zeros(keep.shape, tl.float32)
    for head in range(0, H):
        row = (batch * H + head) * T + query
        q = tl.load(q_ptr + row[:, None] * D + column[None, :], mask=(query < T)[:, None] & wide, other=0.0)
        at = (batch * (H // GROUP) + head // GROUP) * T + key
        k = tl.load(k_ptr + at[:, None] * D + column[None, :], mask=wide, other=0.0)
        lse = tl.load(lse_ptr + row, mask=query < T, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale - lse[:, None]
        total += tl.where(keep, tl.exp2(s * 1.4426950408889634), 0.0)
    return total / H


@triton.jit
def student(qi, ki, w, bias, scale, NI: tl.constexpr, M: tl.constexpr):
    """(scores [queries, BLOCK_N], sigmoids of the heads [NI * queries, BLOCK_N]) in float32."""
    u = tl.sigmoid(tl.dot(qi, ki.T, input_precision="ieee") * scale + bias[:, None])
    return tl.sum(tl.reshape(u * w[:, None], (NI, M, u.shape[1])), axis=0), u


@triton.jit
def heads_of(qi_ptr, w_ptr, bias_ptr, batch, first, T, heads, NI: tl.constexpr, M: tl.constexpr, DI: tl.constexpr):
    """(rows of q [NI * M, Di], weights, biases [NI * M]) of M queries, head after head; heads that are none weigh 0."""
    BLOCK: tl.constexpr = triton.next_power_of_2(max(16, DI))
    row = tl.arange(0, NI * M)
    head, query = row // M, first + row % M
    held = (head < heads) & (query < T)
    column = tl.arange(0, BLOCK)
    at = (batch * heads + head) * T + query
    qi = tl.load(qi_ptr + at[:, None] * DI + column[None, :], mask=held[:, None] & (column < DI)[None, :], other=0.0)
    w = tl.load(w_ptr + (batch * T + query) * heads + head, mask=held, other=0.0)
    return qi, w, tl.load(bias_ptr + head, mask=head < heads, other=0.0)


@triton.jit
def keys_of(ki_ptr, batch, key, T, DI: tl.constexpr):
    """Rows of the indexer's keys [BLOCK_N, Di]."""
    column = tl.arange(0, triton.next_power_of_2(max(16, DI)))
    at = (batch * T + key)[:, None] * DI + column[None, :]
    return tl.load(ki_ptr + at, mask=(column < DI)[None, :], other=0.0)


@triton.jit
def slopes(g, u, w, NI: tl.constexpr, M: tl.constexpr):
    """(gradient of each head's sigmoid times its weight, of its argument), [NI * M, BLOCK_N], for g of the scores."""
    g = tl.reshape(tl.broadcast_to(g[None, :, :], (NI, M, g.shape[1])), (NI * M, g.shape[1]))
    return g * u, g * w[:, None] * u * (1 - u)


@launch.kernel(do_not_specialize=["first"])
def _indexer_lse_kernel(
    qi_ptr, ki_ptr, w_ptr, bias_ptr, lse_ptr, lists_ptr, counts_ptr, first, T, heads, capacity, scale,
    NI: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """Program (M queries, batch): the logarithm of the sum of the student's exponentials."""
    M: tl.constexpr = 64 if NI <= 4 else 256 // NI
    batch = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * M // 64
    place = tl.program_id(0) * M % 64 + tl.arange(0, M)
    start_query = first * 64 + tl.program_id(0) * M
    listed = group.to(tl.int64) * tl.num_programs(1) + batch
    count = tl.load(counts_ptr + listed)
    lists_ptr += listed * 3 * capacity
    qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, start_query, T, heads, NI, M, DI)
    query = start_query + tl.arange(0, M)
    total = tl.zeros([M], tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
        keep = taken(lists_ptr, slot, count, capacity, place, query < T)
        scores, _ = student(qi, keys_of(ki_ptr, batch, key, T, DI), w, bias, scale, NI, M)
        total += tl.sum(tl.where(keep, tl.exp(scores), 0.0), axis=1)
    tl.store(lse_ptr + batch * T + query, tl.log(total), mask=query < T)


@launch.kernel(do_not_specialize=["first"])
def _indexer_loss_rows_kernel(
    q_ptr, k_ptr, lse_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lse_idx_ptr, lists_ptr, counts_ptr, loss_ptr, dqi_ptr,
    rows_ptr, first, T, H, heads, capacity, scale, scale_idx,
    GROUP: tl.constexpr, D: tl.constexpr, NI: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """Program (M queries, batch): the loss of each, and the gradients of q, w and bias before those are summed.

    rows is float32 [2, B, n, T]: the gradient of the weights after their sigmoid, and of the biases.
    """
    M: tl.constexpr = 64 if NI <= 4 else 256 // NI
    batch = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * M // 64
    place = tl.program_id(0) * M % 64 + tl.arange(0, M)
    start_query = first * 64 + tl.program_id(0) * M
    listed = group.to(tl.int64) * tl.num_programs(1) + batch
    count = tl.load(counts_ptr + listed)
    lists_ptr += listed * 3 * capacity
    qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, start_query, T, heads, NI, M, DI)
    query = start_query + tl.arange(0, M)
    lse_idx = tl.load(lse_idx_ptr + batch * T + query, mask=query < T, other=0.0)
    loss = tl.zeros([M], tl.float32)
    dqi = tl.zeros(qi.shape, tl.float32)
    dw = tl.zeros([NI * M], tl.float32)
    db = tl.zeros([NI * M], tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
        keep = taken(lists_ptr, slot, count, capacity, place, query < T)
        wanted = teacher(q_ptr, k_ptr, lse_ptr, batch, query, key, keep, T, H, scale, GROUP, D)
        ki = keys_of(ki_ptr, batch, key, T, DI)
        scores, u = student(qi, ki, w, bias, scale_idx, NI, M)
        scores = scores - lse_idx[:, None]
        loss += tl.sum(tl.where(wanted == 0, 0.0, wanted * (tl.log(wanted) - scores)), axis=1)
        of_weight, of_argument = slopes(tl.where(keep, tl.exp(scores), 0.0) - wanted, u, w, NI, M)
        dw += tl.sum(of_weight, axis=1)
        db += tl.sum(of_argument, axis=1)
        dqi = tl.dot(of_argument.to(ki.dtype), ki, dqi, input_precision="ieee")
    tl.store(loss_ptr + batch * T + query, loss, mask=query < T)
    row = tl.arange(0, NI * M)
    head, query = row // M, start_query + row % M
    held = (head < heads) & (query < T)
    at = (batch * heads + head) * T + query
    tl.store(rows_ptr + at, dw, mask=held)
    tl.store(rows_ptr + tl.num_programs(1).to(tl.int64) * heads * T + at, db, mask=held)
    column = tl.arange(0, dqi.shape[1])
    tl.store(dqi_ptr + at[:, None] * DI + column[None, :], dqi * scale_idx, mask=held[:, None] & (column < DI)[None, :])


@launch.kernel(do_not_specialize=["entries", "batches"])
def _indexer_loss_keys_kernel(
    q_ptr, k_ptr, lse_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lse_idx_ptr, lists_ptr, counts_ptr, dki_ptr, plan_ptr,
    T, H, heads, capacity, entries, batches, scale, scale_idx,
    GROUP: tl.constexpr, D: tl.constexpr, NI: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """Programs draw items (entry: group of queries and batch; tile of its keys) from a ticket, as in
    `_sparse_attention_bwd_kv_kernel`."""
    M: tl.constexpr = 64 if NI <= 4 else 256 // NI
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
            keep = taken(list_ptr, slot, count, capacity, place, query < T)
            wanted = teacher(q_ptr, k_ptr, lse_ptr, batch, query, key, keep, T, H, scale, GROUP, D)
            first = group * (PARTS * 64) + start
            qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, first, T, heads, NI, M, DI)
            scores, u = student(qi, ki, w, bias, scale_idx, NI, M)
            lse_idx = tl.load(lse_idx_ptr + batch * T + query, mask=query < T, other=0.0)
            g = tl.where(keep, tl.exp(scores - lse_idx[:, None]), 0.0) - wanted
            _, of_argument = slopes(g, u, w, NI, M)
            dki = tl.dot(tl.trans(of_argument).to(qi.dtype), qi, dki, input_precision="ieee")
        await_entry(plan_ptr, done_ptr + entry - batches, entry - batches)
        mask = (slot < count)[:, None] & (column < DI)[None, :]
        at = dki_ptr + (batch * T + key)[:, None] * DI + column[None, :]
        tl.atomic_add(at, dki * scale_idx, mask=mask, sem="relaxed")
        tl.debug_barrier()
        tl.atomic_add(done_ptr + entry, 1, sem="release")
        tile = tl.atomic_add(plan_ptr, 1, sem="relaxed")


def indexer_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor,
    words: Tensor,
    lengths: Tensor | None,
    scale: float,
    scale_idx: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_loss` -> (loss, and its gradients of q_idx, k_idx, w and bias)."""
    b, h, t, d = q.shape
    heads, di = q_idx.shape[1], q_idx.shape[3]
    if q.numel() == 0:
        dqi, dki, dw, db = (torch.zeros_like(x) for x in (q_idx, k_idx, w, bias))
        return torch.zeros((), dtype=torch.float32, device=q.device), dqi, dki, dw, db
    sigmoids = w.float().sigmoid()
    biases = bias.float()
    sizes = {"NI": launch.next_power_of_2(heads), "DI": di}
    both = {"GROUP": h // k.shape[1], "D": d, **sizes}
    lse_idx, loss = (torch.empty(b, t, dtype=torch.float32, device=q.device) for _ in range(2))
    dqi = torch.empty(q_idx.shape, dtype=torch.float32, device=q.device)
    rows = torch.empty(2, b, heads, t, dtype=torch.float32, device=q.device)
    queries = min(64, 256 // sizes["NI"])
    step = group_chunk(words, 1)
    behind = None if lengths is None else torch.arange(t, device=q.device) >= lengths[:, None]
    if behind is not None:
        # An infinite denominator takes a query out of everything.
        lse = lse.masked_fill(behind[:, None], torch.inf)
    operands = (q, k, lse, q_idx, k_idx, sigmoids, biases, lse_idx)
    for first in range(0, words.shape[2], step):
        lists, listed = key_lists(words, lengths, t, causal, 1, first, step)
        grid = (lists.shape[0] * QUERIES // queries, b, 1)
        args = (q_idx, k_idx, sigmoids, biases, lse_idx, lists, listed, first, t, heads, lists.shape[-1], scale_idx)
        _indexer_lse_kernel(grid, args, sizes, num_warps=8)
        if behind is not None:
            lse_idx.masked_fill_(behind, torch.inf)
        args = (*operands, lists, listed, loss, dqi, rows, first, t, h, heads, lists.shape[-1], scale, scale_idx)
        _indexer_loss_rows_kernel(grid, args, both, num_warps=8)
    dki = _key_gradient(operands, words, lengths, scale, scale_idx, causal, both)
    each = 1 / lse_idx.isfinite().sum().clamp(min=1)
    # The sigmoids first: the first operand lays out the result.
    dw = sigmoids * (1 - sigmoids) * rows[0].transpose(1, 2)
    made = ((dqi, q_idx), (dki, k_idx), (dw, w), (rows[1].sum((0, 2)), bias))
    dqi, dki, dw, db = ((gradient * each).to(x.dtype) for gradient, x in made)
    return loss.sum() * each, dqi, dki, dw, db


def _key_gradient(
    operands: tuple[Tensor, ...],
    words: Tensor,
    lengths: Tensor | None,
    scale: float,
    scale_idx: float,
    causal: bool,
    meta: dict[str, int],
) -> Tensor:
    """Of k_idx, in float32."""
    q, q_idx, k_idx = operands[0], operands[3], operands[4]
    b, h, t, _ = q.shape
    dki = torch.zeros(k_idx.shape, dtype=torch.float32, device=q.device)
    lists, listed = key_lists(words, lengths, t, causal, PARTS.value)
    entries = listed.numel()
    plan = torch.zeros(2 + 2 * entries, dtype=torch.int32, device=q.device)
    tiles = (listed.view(-1) + (BLOCK_N.value - 1)) // BLOCK_N.value
    torch.cumsum(tiles, 0, dtype=torch.int32, out=plan[2 : 2 + entries])
    sizes = (t, h, q_idx.shape[1], lists.shape[-1], entries, b)
    args = (*operands, lists, listed, dki, plan, *sizes, scale, scale_idx)
    grid = (2 * tuning.programs(q.device), 1, 1)
    _indexer_loss_keys_kernel(grid, args, meta, num_warps=8)
    return dki


_STUDENT = {
    **dict.fromkeys(("qi_ptr", "ki_ptr"), "*bf16"), **dict.fromkeys(("w_ptr", "bias_ptr", "lse_ptr"), "*fp32"),
    "lists_ptr": "*i32", "counts_ptr": "*i32", "T": "i32", "heads": "i32", "capacity": "i32",
}  # fmt: skip
_BOTH = {
    **_STUDENT, **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16"), "lse_idx_ptr": "*fp32", "H": "i32", "scale": "fp32",
    "scale_idx": "fp32",
}  # fmt: skip
_SIZES = {"GROUP": 1, "D": 128, "NI": 4, "DI": 64}
EXAMPLES = {
    _indexer_lse_kernel: {
        "signature": {**_STUDENT, "first": "i32", "scale": "fp32"},
        "constexprs": {"NI": 4, "DI": 64},
        "num_warps": 8,
    },
    _indexer_loss_rows_kernel: {
        "signature": {**_BOTH, **dict.fromkeys(("loss_ptr", "dqi_ptr", "rows_ptr"), "*fp32"), "first": "i32"},
        "constexprs": _SIZES,
        "num_warps": 8,
    },
    _indexer_loss_keys_kernel: {
        "signature": {**_BOTH, "dki_ptr": "*fp32", "plan_ptr": "*i32", "entries": "i32", "batches": "i32"},
        "constexprs": _SIZES,
        "num_warps": 8,
    },
}
