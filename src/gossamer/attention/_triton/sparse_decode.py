"""Attention of a few new queries over selected keys of a long cache.

With one block of queries a head there are too few programs, so the block's list of keys is cut: a program takes a part
of it for all query heads that share a head of k, 16 rows at least, and leaves its sums unnormalised, with the largest
score that they are relative to. A second kernel weighs the parts of each query. A list that has overflowed (see
`Selection`) is replaced by all keys, of which the words then say which are taken.

Keys are rows of a contiguous cache, or of pages of PAGE keys, found through a table.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning

BLOCK_N: tl.constexpr = tl.constexpr(64)


@launch.kernel
def _sparse_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, words_ptr, counts_ptr, indices_ptr, lengths_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, Tk, capacity, pages, pool, scale,
    GROUP: tl.constexpr, SCOPES: tl.constexpr, HEADS: tl.constexpr, TQ: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (part of the list, HEADS heads of q, batch). stride_kb is a page's where there are pages.

    A page outside of the pool is not read; queries that take one of its keys are NaN.
    """
    BLOCK_M: tl.constexpr = triton.next_power_of_2(max(16, HEADS * TQ))
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    part, parts = tl.program_id(0), tl.num_programs(0)
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    H = tl.num_programs(1) * HEADS
    row = tl.arange(0, BLOCK_M)
    here, query = head + row // TQ, row % TQ
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    inside = (row < HEADS * TQ)[:, None] & wide
    token = (batch * H + here) * TQ + query
    q = tl.load(q_ptr + token[:, None] * D + column[None, :], mask=inside, other=0.0)
    kv_head = (head // GROUP).to(tl.int64)
    listed = batch * SCOPES + head * SCOPES // H
    words_ptr += listed * Tk
    indices_ptr += listed * capacity
    count = tl.load(counts_ptr + listed)
    end = Tk
    offset = Tk - TQ
    if lengths_ptr is not None:
        end = tl.minimum(end, tl.load(lengths_ptr + batch).to(tl.int32))
        offset = tl.maximum(end - TQ, 0)
    whole = count > capacity
    count = tl.where(whole, end, count)
    each = tl.cdiv(tl.cdiv(count, BLOCK_N), parts) * BLOCK_N
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, count), BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        held = slot < count
        key = tl.load(indices_ptr + slot, mask=held & (not whole), other=0)
        key = tl.where(whole & held, slot, key)
        held = held & (key < end)
        key = tl.where(held, key, 0)
        word = tl.load(words_ptr + key, mask=held, other=0)
        keep = ((word[None, :] >> query.to(tl.int64)[:, None]) & 1) != 0
        if CAUSAL:
            keep = keep & (key[None, :] <= (query + offset)[:, None])
        if PAGE > 0:
            page = tl.load(table_ptr + batch * pages + key // PAGE, mask=held, other=0).to(tl.int64)
            outside = held & ((page < 0) | (page >= pool))
            lost = tl.max((keep & outside[None, :]).to(tl.int32), 1) > 0
            total = tl.where(lost, float("nan"), total)
            held = held & (page >= 0) & (page < pool)
            at = page * stride_kb + (key % PAGE) * stride_kt
        else:
            at = batch * stride_kb + key.to(tl.int64) * stride_kt
        at = at[:, None] + (kv_head * stride_kh + column)[None, :]
        # A key that no list has is not read: what lies there may be NaN.
        k = tl.load(k_ptr + at, mask=held[:, None] & wide, other=0.0)
        v = tl.load(v_ptr + at, mask=held[:, None] & wide, other=0.0)
        s = tl.where(keep, tl.dot(q, k.T, input_precision="ieee"), float("-inf"))
        most = tl.maximum(m, tl.max(s, 1) * log2_scale)
        finite = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s * log2_scale - finite[:, None])
        shrink = tl.exp2(m - finite)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = most
    out_ptr = parts_ptr + (token * parts + part) * (D + 2)
    tl.store(out_ptr[:, None] + column[None, :], acc, mask=inside)
    tl.store(out_ptr + D, m, mask=row < HEADS * TQ)
    tl.store(out_ptr + D + 1, total, mask=row < HEADS * TQ)


@launch.kernel
def _sparse_decode_kernel(parts_ptr, out_ptr, lse_ptr, H, Tq, parts, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program (query of one head and batch): weighs its parts."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    token = tl.program_id(0).to(tl.int64)
    batch, head, query = token // (H * Tq), token // Tq % H, token % Tq
    part, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    parts_ptr += (token * parts + part) * (D + 2)
    m = tl.load(parts_ptr + D, mask=part < parts, other=float("-inf"))
    sums = tl.load(parts_ptr + D + 1, mask=part < parts, other=0.0)
    inside = (part < parts)[:, None] & (column < D)[None, :]
    acc = tl.load(parts_ptr[:, None] + column[None, :], mask=inside, other=0.0)
    most = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(sums * weight, 0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    at = ((batch * Tq + query) * H + head) * D + column
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=column < D)
    lse = tl.where(total == 0, float("-inf"), (most + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + token, lse)


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_decode` -> (out [B, H, Tq, D] in memory as [B, Tq, H, D], lse [B, H, Tq])."""
    b, h, tq, d = q.shape
    paged, tk = table is not None, words.shape[3]
    g = k.shape[2 if paged else 1]
    out = q.new_empty(b, tq, h, d)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    if tk == 0 or d == 0 or out.numel() == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-math.inf)
    scopes = words.shape[1]
    # Heads that share both a head of k and a list.
    heads = 1 if scopes == h else h // g
    groups = b * (h // heads)
    cuts = launch.cdiv(min(tk, max(1, indices.shape[3])), BLOCK_N.value)
    cuts = max(1, min(cuts, 64, 4 * tuning.programs(q.device) // groups))
    parts = torch.empty(b, h, tq, cuts, d + 2, dtype=torch.float32, device=q.device)
    k, v = _alike(k, v)
    strides = (k.stride(0), *((k.stride(2), k.stride(1)) if paged else k.stride()[1:3]))
    words, indices = words.contiguous(), indices.contiguous()
    table = table.contiguous() if table is not None else None
    meta = {"GROUP": h // g, "SCOPES": scopes, "HEADS": heads, "TQ": tq, "D": d, "PAGE": k.shape[1] if paged else 0}
    meta["CAUSAL"] = causal
    sizes = (*strides, tk, indices.shape[3], 0 if table is None else table.shape[1], k.shape[0])
    args = (q.contiguous(), k, v, parts, words, counts.contiguous(), indices, lengths, table, *sizes, scale)
    _sparse_decode_parts_kernel((cuts, h // heads, b), args, meta, num_warps=4, num_stages=2)
    meta = {"D": d, "BLOCK": launch.next_power_of_2(cuts)}
    _sparse_decode_kernel((b * h * tq, 1, 1), (parts, out, lse, h, tq, cuts), meta)
    return out.transpose(1, 2), lse


def _alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the same strides, the last of them 1."""
    if k.stride() == v.stride() and k.stride(-1) == 1:
        return k, v
    return k.contiguous(), v.contiguous()


EXAMPLES = {
    _sparse_decode_parts_kernel: {
        "signature": {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16"), "parts_ptr": "*fp32", "words_ptr": "*i64",
            **dict.fromkeys(("counts_ptr", "indices_ptr", "lengths_ptr", "table_ptr"), "*i32"),
            **dict.fromkeys(("stride_kb", "stride_kh", "stride_kt", "Tk", "capacity", "pages", "pool"), "i32"),
            "scale": "fp32",
        },
        "constexprs": {"GROUP": 4, "SCOPES": 1, "HEADS": 4, "TQ": 1, "D": 128, "PAGE": 64, "CAUSAL": True},
        "num_warps": 4,
    },
    _sparse_decode_kernel: {
        "signature": {
            "parts_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32", "H": "i32", "Tq": "i32", "parts": "i32",
        },
        "constexprs": {"D": 128, "BLOCK": 64},
        "num_warps": 4,
    },
}  # fmt: skip
