"""What attention's gradient says about the scores that selected its keys.

The gradient of a score is that of the logits of its query and key, summed over heads. A tile is some queries by BLOCK_N
of the keys that their group lists. In it the logits' gradients are computed head after head, as in `sparse_attention`'s
backward pass, and added; then the indexer's heads lie below each other in one product, as in `indexer_loss`, whose two
walks these are: a program a block of queries has what belongs to queries, and an item a tile of keys and a group of
blocks what belongs to keys, added up in the order of groups. Nothing of the size queries times keys is in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton.indexer_loss import BLOCK_N, PARTS, heads_of, keys_of, slopes, student, taken
from gossamer.attention._triton.key_lists import QUERIES, key_lists
from gossamer.attention._triton.sparse_attention import group_chunk, sparse_attention
from gossamer.attention._triton.sparse_attention_bwd import await_entry, row_statistics


@triton.jit
def gradient_of_scores(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, batch, query, key, keep, T, H, scale, GROUP: tl.constexpr, D: tl.constexpr
):
    """The gradient of the logits, summed over heads, float32 [queries, BLOCK_N]."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    total = tl.zeros(keep.shape, tl.float32)
    for head in range(0, H):
        row = (batch * H + head) * T + query
        here = row[:, None] * D + column[None, :]
        inside = (query < T)[:, None] & wide
        at = ((batch * (H // GROUP) + head // GROUP) * T + key)[:, None] * D + column[None, :]
        q = tl.load(q_ptr + here, mask=inside, other=0.0)
        k = tl.load(k_ptr + at, mask=wide, other=0.0)
        lse = tl.load(stats_ptr + 2 * row, mask=query < T, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * (scale * 1.4426950408889634) - lse[:, None]
        grad = tl.load(grad_ptr + here, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=wide, other=0.0)
        delta = tl.load(stats_ptr + 2 * row + 1, mask=query < T, other=0.0)
        dp = tl.dot(grad, v.T, input_precision="ieee") - delta[:, None]
        total += tl.where(keep, tl.exp2(s) * dp, 0.0)
    return total


@launch.kernel(do_not_specialize=["first"])
def _straight_through_rows_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lists_ptr, counts_ptr, dqi_ptr, rows_ptr,
    first, T, H, heads, capacity, scale, scale_idx,
    GROUP: tl.constexpr, D: tl.constexpr, NI: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """Program (M queries, batch): the gradients of q, w and bias before those are summed.

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
    dqi = tl.zeros(qi.shape, tl.float32)
    dw = tl.zeros([NI * M], tl.float32)
    db = tl.zeros([NI * M], tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
        keep = taken(lists_ptr, slot, count, capacity, place, query < T)
        g = gradient_of_scores(
            q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, batch, query, key, keep, T, H, scale, GROUP, D
        )  # fmt: skip
        ki = keys_of(ki_ptr, batch, key, T, DI)
        _, u = student(qi, ki, w, bias, scale_idx, NI, M)
        of_weight, of_argument = slopes(g, u, w, NI, M)
        dw += tl.sum(of_weight, axis=1)
        db += tl.sum(of_argument, axis=1)
        dqi = tl.dot(of_argument.to(ki.dtype), ki, dqi, input_precision="ieee")
    row = tl.arange(0, NI * M)
    head, query = row // M, start_query + row % M
    held = (head < heads) & (query < T)
    at = (batch * heads + head) * T + query
    tl.store(rows_ptr + at, dw, mask=held)
    tl.store(rows_ptr + tl.num_programs(1).to(tl.int64) * heads * T + at, db, mask=held)
    column = tl.arange(0, dqi.shape[1])
    tl.store(dqi_ptr + at[:, None] * DI + column[None, :], dqi * scale_idx, mask=held[:, None] & (column < DI)[None, :])


@launch.kernel(do_not_specialize=["entries"])
def _straight_through_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, qi_ptr, ki_ptr, w_ptr, bias_ptr, lists_ptr, counts_ptr, dki_ptr, plan_ptr,
    T, H, heads, capacity, entries, scale, scale_idx,
    GROUP: tl.constexpr, D: tl.constexpr, NI: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """Programs draw items (entry: group of queries and batch; tile of its keys) from a ticket, as in
    `_sparse_attention_bwd_kv_kernel`."""
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
        for start in range(0, tl.minimum(PARTS * 64, T - group * (PARTS * 64)), M):
            place = start + tl.arange(0, M)
            query = group * (PARTS * 64) + place
            keep = taken(list_ptr, slot, count, capacity, place, query < T)
            g = gradient_of_scores(
                q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, batch, query, key, keep, T, H, scale, GROUP, D
            )  # fmt: skip
            first = group * (PARTS * 64) + start
            qi, w, bias = heads_of(qi_ptr, w_ptr, bias_ptr, batch, first, T, heads, NI, M, DI)
            _, u = student(qi, ki, w, bias, scale_idx, NI, M)
            _, of_argument = slopes(g, u, w, NI, M)
            dki = tl.dot(tl.trans(of_argument).to(qi.dtype), qi, dki, input_precision="ieee")
        await_entry(plan_ptr, done_ptr + entry - batches, entry - batches)
        mask = (slot < count)[:, None] & (column < DI)[None, :]
        at = dki_ptr + (batch * T + key)[:, None] * DI + column[None, :]
        tl.atomic_add(at, dki * scale_idx, mask=mask, sem="relaxed")
        tl.debug_barrier()
        tl.atomic_add(done_ptr + entry, 1, sem="release")
        tile = tl.atomic_add(plan_ptr, 1, sem="relaxed")


def sparse_attention_through(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
    path: str,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor,
    scale_idx: float,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention_through`: as `sparse_attention`; what it has more is for the way back."""
    return sparse_attention(q, k, v, words, counts, indices, lengths, scale, causal, path)


def straight_through(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `straight_through` -> gradients of q_idx, k_idx, w and bias."""
    b, h, t, d = q.shape
    heads, di = q_idx.shape[1], q_idx.shape[3]
    if q.numel() == 0 or q_idx.numel() == 0:
        dqi, dki, dw, db = (torch.zeros_like(x) for x in (q_idx, k_idx, w, bias))
        return dqi, dki, dw, db
    stats = row_statistics(grad, out, lse, grad_lse)
    sigmoids = w.float().sigmoid()
    operands = (q, k, v, grad, stats, q_idx, k_idx, sigmoids, bias.float())
    meta = {"GROUP": h // k.shape[1], "D": d, "NI": launch.next_power_of_2(heads), "DI": di}
    dqi = torch.empty(q_idx.shape, dtype=torch.float32, device=q.device)
    rows = torch.empty(2, b, heads, t, dtype=torch.float32, device=q.device)
    queries = min(64, 256 // meta["NI"])
    step = group_chunk(words, 1)
    for first in range(0, words.shape[2], step):
        lists, listed = key_lists(words, lengths, t, causal, 1, first, step)
        args = (*operands, lists, listed, dqi, rows, first, t, h, heads, lists.shape[-1], scale, scale_idx)
        grid = (lists.shape[0] * QUERIES // queries, b, 1)
        # With 8 warps a thread has too few registers for the indexer's heads.
        _straight_through_rows_kernel(grid, args, meta, num_warps=16)
    dki = torch.zeros(k_idx.shape, dtype=torch.float32, device=q.device)
    lists, listed = key_lists(words, lengths, t, causal, PARTS.value)
    entries = listed.numel()
    plan = torch.zeros(2 + 2 * entries, dtype=torch.int32, device=q.device)
    tiles = (listed.view(-1) + (BLOCK_N.value - 1)) // BLOCK_N.value
    torch.cumsum(tiles, 0, dtype=torch.int32, out=plan[2 : 2 + entries])
    args = (*operands, lists, listed, dki, plan, t, h, heads, lists.shape[-1], entries, scale, scale_idx)
    grid = (2 * tuning.programs(q.device), 1, 1)
    _straight_through_keys_kernel(grid, args, meta, num_warps=8)
    # The sigmoids first: the first operand lays out the result.
    dw = sigmoids * (1 - sigmoids) * rows[0].transpose(1, 2)
    made = ((dqi, q_idx), (dki, k_idx), (dw, w), (rows[1].sum((0, 2)), bias))
    dqi, dki, dw, db = (gradient.to(x.dtype) for gradient, x in made)
    return dqi, dki, dw, db


_OPERANDS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "grad_ptr", "qi_ptr", "ki_ptr"), "*bf16"),
    **dict.fromkeys(("stats_ptr", "w_ptr", "bias_ptr"), "*fp32"), "lists_ptr": "*i32", "counts_ptr": "*i32",
    **dict.fromkeys(("T", "H", "heads", "capacity"), "i32"), "scale": "fp32", "scale_idx": "fp32",
}  # fmt: skip
_SIZES = {"GROUP": 1, "D": 128, "NI": 4, "DI": 64}
EXAMPLES = {
    _straight_through_rows_kernel: {
        "signature": {**_OPERANDS, "dqi_ptr": "*fp32", "rows_ptr": "*fp32", "first": "i32"},
        "constexprs": _SIZES,
        "num_warps": 16,
    },
    _straight_through_keys_kernel: {
        "signature": {**_OPERANDS, "dki_ptr": "*fp32", "plan_ptr": "*i32", "entries": "i32"},
        "constexprs": _SIZES,
        "num_warps": 8,
    },
}
