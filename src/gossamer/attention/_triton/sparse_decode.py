"""Attention of a few new queries over selected keys of a long cache.

With one block of queries a head there are too few programs, so the block's list of keys (see `key_lists`) is cut: a
program takes a part of it for all query heads that share a head of k, 16 rows at least, and leaves its sums
unnormalised, with the largest score that they are relative to. A second kernel weighs the parts of each query. The
lists are made by segments of the keys, one program each, once for all heads that share a selection.

Keys are rows of a contiguous cache, or of pages of PAGE keys, found through a table.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gossamer._core import launch, tuning
from gossamer.attention._triton.key_lists import key_lists, slots_of
from gossamer.attention.records import SparseAttention

BLOCK_N: tl.constexpr = tl.constexpr(64)
SEGMENTS, SEGMENT = 32, 512
"""Segments of the keys whose lists programs of their own make, at most, and keys of one, at least."""


@launch.kernel
def _sparse_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, lists_ptr, counts_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, H, each, pages, pool, scale,
    SEGMENTS: tl.constexpr, GROUP: tl.constexpr, SCOPES: tl.constexpr, HEADS: tl.constexpr, TQ: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (part of the list, HEADS heads of q, batch). stride_kb is a page's where there are pages."""
    BLOCK_M: tl.constexpr = triton.next_power_of_2(max(16, HEADS * TQ))
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    part, parts = tl.program_id(0), tl.num_programs(0)
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    here, query = head + row // TQ, row % TQ
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    inside = (row < HEADS * TQ)[:, None] & wide
    token = (batch * H + here) * TQ + query
    q = tl.load(q_ptr + token[:, None] * D + column[None, :], mask=inside, other=0.0)
    kv_head = (head // GROUP).to(tl.int64)
    scope = batch * SCOPES + head * SCOPES // H
    lists_ptr += scope * 3 * SEGMENTS * each
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.load(counts_ptr + scope * SEGMENTS + tl.arange(0, SEGMENTS))
    starts = tl.cumsum(counts, axis=0) - counts
    count = tl.sum(counts, axis=0)
    first = part * tl.cdiv(tl.cdiv(count, BLOCK_N), parts) * BLOCK_N
    end = tl.minimum(first + tl.cdiv(tl.cdiv(count, BLOCK_N), parts) * BLOCK_N, count)
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        # Past the end the last key once more, with no bit set.
        at = lists_ptr + slots_of(tl.minimum(slot, count - 1), starts, each)
        key = tl.load(at)
        word = tl.load(at + SEGMENTS * each, mask=slot < count, other=0)
        keep = ((word[None, :] >> query[:, None]) & 1) != 0
        if PAGE > 0:
            page = tl.load(table_ptr + batch * pages + key // PAGE).to(tl.int64)
            valid = (page >= 0) & (page < pool)
            page = tl.where(valid, page, 0)
            at = page * stride_kb + (key % PAGE).to(tl.int64) * stride_kt
        else:
            at = batch * stride_kb + key.to(tl.int64) * stride_kt
        at = at[:, None] + (kv_head * stride_kh + column)[None, :]
        k = tl.load(k_ptr + at, mask=wide, other=0.0)
        v = tl.load(v_ptr + at, mask=wide, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee")
        if PAGE > 0:
            # A page that there is not.
            s = tl.where(valid[None, :], s, float("nan"))
        s = tl.where(keep, s, float("-inf"))
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
def _sparse_decode_kernel(
    parts_ptr, out_ptr, lse_ptr, H, Tq, parts, D: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Program (query of one head and batch): weighs its parts."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    token = tl.program_id(0).to(tl.int64)
    batch, head, query = token // (H * Tq), token // Tq % H, token % Tq
    part, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    parts_ptr += (token * parts + part) * (D + 2)
    if DEPENDENT:
        gdc_wait()
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


def sparse_decode(call: SparseAttention) -> tuple[Tensor, Tensor]:
    """The path "decode" of `sparse_attention` -> (out [B, H, Tq, D] in memory as [B, Tq, H, D], lse [B, H, Tq])."""
    q, k, v, words, lengths, table, scale, causal, *_ = call
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
    cuts = max(1, min(launch.cdiv(tk, BLOCK_N.value), 64, 4 * tuning.programs(q.device) // groups))
    segments = min(SEGMENTS, launch.next_power_of_2(launch.cdiv(tk, SEGMENT)))
    lists, counts = key_lists(words, lengths, tq, causal, 1, segments=segments)
    parts = torch.empty(b, h, tq, cuts, d + 2, dtype=torch.float32, device=q.device)
    q, (k, v) = q.contiguous(), _alike(k, v)
    strides = (k.stride(0), *((k.stride(2), k.stride(1)) if paged else k.stride()[1:3]))
    sizes = (*strides, h, lists.shape[3] // segments, 0 if table is None else table.shape[1], k.shape[0])
    args = (q, k, v, parts, lists, counts, table, *sizes, scale)
    follows = tuning.dependent_launch(q.device)
    meta = {"SEGMENTS": segments, "GROUP": h // g, "SCOPES": scopes, "HEADS": heads, "TQ": tq, "D": d}
    meta |= {"PAGE": k.shape[1] if paged else 0, "DEPENDENT": follows}
    grid = (cuts, h // heads, b)
    _sparse_decode_parts_kernel(grid, args, meta, num_warps=4, num_stages=2, launch_pdl=follows)
    meta = {"D": d, "BLOCK": launch.next_power_of_2(cuts), "DEPENDENT": follows}
    _sparse_decode_kernel((b * h * tq, 1, 1), (parts, out, lse, h, tq, cuts), meta, launch_pdl=follows)
    return out.transpose(1, 2), lse


def _alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the same strides, the last of them 1."""
    if k.stride() == v.stride() and k.stride(-1) == 1:
        return k, v
    return k.contiguous(), v.contiguous()


EXAMPLES = {
    _sparse_decode_parts_kernel: {
        "SEGMENTS": 64, "GROUP": 4, "SCOPES": 1, "HEADS": 4, "TQ": 1, "D": 128, "PAGE": 64, "DEPENDENT": False,
    },
    _sparse_decode_kernel: {"D": 128, "BLOCK": 64, "DEPENDENT": False},
}  # fmt: skip
