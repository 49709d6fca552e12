"""Attention of a few new queries over selected keys of a long cache.

With one block of queries a head there are too few programs, so the keys are cut: a program takes a part of them for all
query heads that share a head of k, 16 rows at least. It gathers by a list of the keys that any query takes, with the
queries' bits, and leaves its sums unnormalised, with the largest score that they are relative to. A second kernel
weighs the parts of each query.

A part is every n-th chunk of 64 keys, whose list the program makes itself; or where these keys are many, because a
large batch leaves few programs for a sequence, an equal share of one list that a kernel before it has made for all
heads, by segments of the keys (see `key_lists`).

Keys are rows of a contiguous cache, or of pages of PAGE keys, found through a table.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton.key_lists import key_lists, not_behind, positions, slots_of
from gossamer.attention.records import SparseAttention

BLOCK_N: tl.constexpr = tl.constexpr(64)
CHUNKS = 16
"""Chunks of BLOCK_N keys whose words a program looks at together, at most."""
SEGMENTS: tl.constexpr = tl.constexpr(32)
"""Segments of the keys in a list for all heads."""
SHARE = 4096
"""A program's keys beyond which there is a list for all heads: an H200 made one of 131,072 keys in 4.7 us, in which a
program lists 4,096 keys."""


@triton.jit
def list_keys(words_ptr, list_ptr, part, parts, end, offset, room, TOGETHER: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys of a part any query takes: `list_ptr` gets these, and `room` behind each the bits of the queries
    that take it. Query i stands at key i + offset."""
    found = 0
    for first in range(part * BLOCK_N, end, parts * (TOGETHER * BLOCK_N)):
        chunk = tl.arange(0, TOGETHER)[:, None] * parts * BLOCK_N
        key = tl.reshape(first + chunk + tl.arange(0, BLOCK_N)[None, :], (TOGETHER * BLOCK_N,))
        # The lower half of a word: there are no more than 16 queries.
        word = tl.load(words_ptr + 2 * key.to(tl.int64), mask=key < end, other=0)
        if CAUSAL:
            word = not_behind(word, key - offset, 31)
        taken = (word != 0).to(tl.int32)
        slot = list_ptr + found + tl.cumsum(taken, axis=0) - taken
        tl.store(slot, key, mask=taken != 0)
        tl.store(slot + room, word, mask=taken != 0)
        found += tl.sum(taken, axis=0)
    # Other threads read the entries that these have written.
    tl.debug_barrier()
    return found


@launch.kernel
def _sparse_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, from_ptr, lists_ptr, lengths_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, Tk, room, pages, pool, scale,
    TOGETHER: tl.constexpr, GROUP: tl.constexpr, SCOPES: tl.constexpr, HEADS: tl.constexpr, TQ: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys, HEADS heads of q, batch). stride_kb is a page's where there are pages. A program lists
    the keys of its part, TOGETHER chunks at a time, from the words at `from_ptr`, in a list of `room` slots; with 0
    there is a list for all heads, of segments of `room` slots, whose counts stand at `from_ptr`."""
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
    scope = batch * SCOPES + head * SCOPES // H
    if TOGETHER == 0:
        lists_ptr += scope * 3 * SEGMENTS * room
        bits_ptr = lists_ptr + SEGMENTS * room
        counts = tl.load(from_ptr + scope * SEGMENTS + tl.arange(0, SEGMENTS))
        starts = tl.cumsum(counts, axis=0) - counts
        count = tl.sum(counts, axis=0)
        share = tl.cdiv(tl.cdiv(count, BLOCK_N), parts) * BLOCK_N
        first, end = part * share, tl.minimum(part * share + share, count)
    else:
        lists_ptr += ((batch * tl.num_programs(1) + tl.program_id(1)) * parts + part) * 2 * room
        bits_ptr = lists_ptr + room
        stop, offset = positions(lengths_ptr, batch, TQ, Tk)
        from_ptr += scope * 2 * Tk
        count = list_keys(from_ptr, lists_ptr, part, parts, stop, offset, room, TOGETHER, CAUSAL)
        first, end = 0, count
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        # Past the end the last key once more, with no bit set.
        at = tl.minimum(slot, count - 1)
        if TOGETHER == 0:
            at = slots_of(at, starts, room)
        key = tl.load(lists_ptr + at)
        word = tl.load(bits_ptr + at, mask=slot < count, other=0)
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
    chunks = launch.cdiv(tk, BLOCK_N.value)
    cuts = max(1, min(chunks, 64, 4 * tuning.programs(q.device) // groups))
    if tk > SHARE * cuts:
        lists, read = key_lists(words, lengths, tq, causal, 1, segments=SEGMENTS.value)
        together, room = 0, lists.shape[3] // SEGMENTS.value
    else:
        each = launch.next_power_of_2(launch.cdiv(chunks, cuts))
        together, room, read = min(each, CHUNKS), each * BLOCK_N.value, words.view(torch.int32)
        lists = torch.empty(groups, cuts, 2, room, dtype=torch.int32, device=q.device)
    parts = torch.empty(b, h, tq, cuts, d + 2, dtype=torch.float32, device=q.device)
    q, (k, v) = q.contiguous(), _alike(k, v)
    strides = (k.stride(0), *((k.stride(2), k.stride(1)) if paged else k.stride()[1:3]))
    sizes = (*strides, tk, room, 0 if table is None else table.shape[1], k.shape[0])
    args = (q, k, v, parts, read, lists, lengths, table, *sizes, scale)
    meta = {"TOGETHER": together, "GROUP": h // g, "SCOPES": scopes, "HEADS": heads, "TQ": tq, "D": d}
    meta |= {"PAGE": k.shape[1] if paged else 0, "CAUSAL": causal}
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
        "TOGETHER": CHUNKS, "GROUP": 4, "SCOPES": 1, "HEADS": 4, "TQ": 1, "D": 128, "PAGE": 64,
        "CAUSAL": True,
    },
    _sparse_decode_kernel: {"D": 128, "BLOCK": 64},
}  # fmt: skip
