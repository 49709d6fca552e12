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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton._products import block_of_columns, stages_of, strided, wide_product
from gossamer.attention._triton.key_lists import key_lists, positions, seen, slots_of
from gossamer.attention.records import SparseAttention

BLOCK_N: tl.constexpr = tl.constexpr(64)
CHUNKS = 16
"""Chunks of BLOCK_N keys whose words a program looks at together, at most."""
SEGMENTS: tl.constexpr = tl.constexpr(32)
"""Segments of the keys in a list for all heads."""
SHARE = 4096
"""A program's keys beyond which there is a list for all heads: to make it takes as long as to list so many."""


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
            word = seen(word, key, offset, end, 31)
        taken = (word != 0).to(tl.int32)
        slot = list_ptr + found + tl.cumsum(taken, axis=0) - taken
        tl.store(slot, key, mask=taken != 0)
        tl.store(slot + room, word, mask=taken != 0)
        found += tl.sum(taken, axis=0)
    # Other threads read the entries that these have written.
    tl.debug_barrier()
    return found


@triton.jit
def place_of(key, batch, table_ptr, pages, pool, PAGE: tl.constexpr):
    """(batch element or page, key in it, whether there is that page) of a sequence's keys."""
    outer, inner, valid = batch, key.to(tl.int64), key >= 0
    if PAGE > 0:
        page = tl.load(table_ptr + batch * pages + key // PAGE).to(tl.int64)
        valid = (page >= 0) & (page < pool)
        outer, inner = tl.where(valid, page, 0), (key % PAGE).to(tl.int64)
    return outer, inner, valid


@dataclass(frozen=True)
class Config:
    """The properties that the kernel is compiled for, as one constexpr.

    `group` heads of q share a head of k, and a program serves `heads` of them, `tq` queries each. It sums `block_v` of
    the `dv` columns of v. Where `chunk` is above 0, a product reads its operands by so many of their `d` columns. Pages
    have `page` keys, or 0 for none. A program lists `together` chunks of keys at a time, or 0 if there are lists.
    """

    together: int
    group: int
    scopes: int
    heads: int
    tq: int
    d: int
    dv: int
    block_v: int
    chunk: int
    page: int
    causal: bool


@launch.kernel
def _sparse_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, from_ptr, lists_ptr, lengths_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, Tk, room, pages, pool, scale,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys, some heads of q and block of v's columns, batch). stride_kb and stride_vb are a page's
    where there are pages; those of v are None where they are those of k, whose places then serve both: other places
    took 118 us for 95 at batch 32. A program lists the keys of its part from the words at `from_ptr`, in a list of
    `room` slots; or there is a list for all heads, of segments of `room` slots, whose counts stand at `from_ptr`."""
    HEADS: tl.constexpr = CONFIG.heads
    SCOPES: tl.constexpr = CONFIG.scopes
    TQ: tl.constexpr = CONFIG.tq
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D)) if CONFIG.chunk == 0 else 16
    BLOCK_V: tl.constexpr = CONFIG.block_v
    BLOCK_M: tl.constexpr = triton.next_power_of_2(max(16, HEADS * TQ))
    part, parts = tl.program_id(0), tl.num_programs(0)
    member, of_v = block_of_columns(tl.program_id(1), DV, BLOCK_V)
    head, batch = member * HEADS, tl.program_id(2).to(tl.int64)
    H = tl.num_programs(1) // ((DV + BLOCK_V - 1) // BLOCK_V) * HEADS
    row = tl.arange(0, BLOCK_M)
    here, query, exists = head + row // TQ, row % TQ, row < HEADS * TQ
    column = tl.arange(0, BLOCK_D)
    wide, wide_v = (column < D)[None, :], (of_v < DV)[None, :]
    token = (batch * H + here) * TQ + query
    q = tl.zeros([1, 1], tl.float32)
    if CONFIG.chunk == 0:
        q = tl.load(q_ptr + token[:, None] * D + column[None, :], mask=exists[:, None] & wide, other=0.0)
    kv_head = (head // CONFIG.group).to(tl.int64)
    scope = batch * SCOPES + head * SCOPES // H
    if CONFIG.together == 0:
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
        count = list_keys(from_ptr, lists_ptr, part, parts, stop, offset, room, CONFIG.together, CONFIG.causal)
        first, end = 0, count
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        # Past the end the last key once more, with no bit set.
        at = tl.minimum(slot, count - 1)
        if CONFIG.together == 0:
            at = slots_of(at, starts, room)
        key = tl.load(lists_ptr + at)
        word = tl.load(bits_ptr + at, mask=slot < count, other=0)
        keep = ((word[None, :] >> query[:, None]) & 1) != 0
        outer, inner, valid = place_of(key, batch, table_ptr, pages, pool, CONFIG.page)
        at = outer * stride_kb + inner * stride_kt + kv_head * stride_kh
        if CONFIG.chunk > 0:
            s = wide_product(q_ptr, token * D, exists, k_ptr, at, slot >= 0, D, CONFIG.chunk, "ieee")
        else:
            k = tl.load(k_ptr + at[:, None] + column[None, :], mask=wide, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee")
        if stride_vt is not None:
            at = outer * stride_vb + inner * stride_vt + kv_head * stride_vh
        v = tl.load(v_ptr + at[:, None] + of_v[None, :], mask=wide_v, other=0.0)
        if CONFIG.page > 0:
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
    out_ptr = parts_ptr + (token * parts + part) * (DV + 2)
    tl.store(out_ptr[:, None] + of_v[None, :], acc, mask=exists[:, None] & wide_v)
    tl.store(out_ptr + DV, m, mask=exists)
    tl.store(out_ptr + DV + 1, total, mask=exists)


@launch.kernel
def _sparse_decode_kernel(parts_ptr, out_ptr, lse_ptr, H, Tq, parts, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program (query of one head and batch, block of v's columns): weighs its parts."""
    BLOCK_D: tl.constexpr = min(256, triton.next_power_of_2(max(16, D)))
    token = tl.program_id(0).to(tl.int64)
    batch, head, query = token // (H * Tq), token // Tq % H, token % Tq
    part, column = tl.arange(0, BLOCK), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
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
    """The path "decode" of `sparse_attention` -> (out [B, H, Tq, Dv] in memory as [B, Tq, H, Dv], lse [B, H, Tq])."""
    q, k, v, words, lengths, table, scale, causal, *_ = call
    (b, h, tq, d), dv, (_, scopes, _, tk) = q.shape, v.shape[3], words.shape
    paged = table is not None
    g = k.shape[2 if paged else 1]
    out = q.new_empty(b, tq, h, dv)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    if tk == 0 or out.numel() == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-math.inf)
    # Heads that share both a head of k and a list.
    heads = 1 if scopes == h else h // g
    chunk, most = 0, 256
    if max(d, dv) > 256:
        # The sums of 64 rows fill a multiprocessor's registers.
        chunk, most = (64, 512) if q.element_size() == 2 else (32, 256)
        while heads * tq > 64 and heads % 2 == 0:
            heads //= 2
    block_v = min(most, launch.next_power_of_2(max(16, dv)))
    members = h // heads * launch.cdiv(dv, block_v)
    chunks = launch.cdiv(tk, BLOCK_N.value)
    cuts = max(1, min(chunks, 64, 4 * tuning.programs(q.device) // (b * members)))
    if tk > SHARE * cuts:
        lists, read = key_lists(words, lengths, tq, causal, 1, segments=SEGMENTS.value)
        together, room = 0, lists.shape[3] // SEGMENTS.value
    else:
        each = launch.next_power_of_2(launch.cdiv(chunks, cuts))
        together, room, read = min(each, CHUNKS), each * BLOCK_N.value, words.view(torch.int32)
        lists = torch.empty(b * members, cuts, 2, room, dtype=torch.int32, device=q.device)
    parts = torch.empty(b, h, tq, cuts, dv + 2, dtype=torch.float32, device=q.device)
    q, k, v = q.contiguous(), strided(k), strided(v)
    # The batch or page, the head, the key.
    strides: list[int | None] = [x.stride(i) for x in (k, v) for i in ((0, 2, 1) if paged else (0, 1, 2))]
    if strides[:3] == strides[3:]:
        strides[3:] = None, None, None
    sizes = (*strides, tk, room, 0 if table is None else table.shape[1], k.shape[0])
    args = (q, k, v, parts, read, lists, lengths, table, *sizes, scale)
    page = k.shape[1] if paged else 0
    config = Config(together, h // g, scopes, heads, tq, d, dv, block_v, chunk, page, causal)
    options = {"num_warps": 8 if chunk else 4, "num_stages": stages_of(1 if chunk else 2, q)}
    _sparse_decode_parts_kernel((cuts, members, b), args, {"CONFIG": config}, **options)
    meta = {"D": dv, "BLOCK": launch.next_power_of_2(cuts)}
    grid = (b * h * tq, launch.cdiv(dv, 256), 1)
    _sparse_decode_kernel(grid, (parts, out, lse, h, tq, cuts), meta)
    return out.transpose(1, 2), lse


_AS_K: dict[str, None] = dict.fromkeys(("stride_vb", "stride_vh", "stride_vt"))
EXAMPLES = {
    _sparse_decode_parts_kernel: {**_AS_K, "CONFIG": Config(CHUNKS, 4, 1, 4, 1, 128, 128, 128, 0, 64, True)},
    _sparse_decode_kernel: {"D": 128, "BLOCK": 64},
}
