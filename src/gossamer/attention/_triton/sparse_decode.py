"""Attention of a few new queries over selected keys of a long cache.

With one block of queries a head there are too few programs, so the keys are cut: a program takes every n-th chunk of 64
keys. It lists the keys of its chunks that any query takes, with the queries' bits, gathers by this list, for all query
heads that share a head of k, 16 rows at least, and leaves its sums unnormalised, with the largest score that they are
relative to. Where there are so many programs that each reads many words, several heads of k take turns at one list. A
second kernel weighs the parts of each query.

Keys are rows of a contiguous cache, or of pages of PAGE keys, found through a table.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton.key_lists import not_behind, positions
from gossamer.attention.records import SparseAttention

BLOCK_N: tl.constexpr = tl.constexpr(64)
CHUNKS: tl.constexpr = tl.constexpr(16)
"""Chunks of BLOCK_N keys whose words a program looks at together, at most."""
PARTS = 64
"""Programs among which the keys are cut, at most."""
WORDS = 8192
"""Words of a program beyond which heads of k take turns."""


@triton.jit
def list_keys(words_ptr, list_ptr, part, parts, end, offset, ROOM: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys of a part any query takes: `list_ptr` gets these, and ROOM behind each the bits of who takes it.
    Query i stands at key i + offset."""
    TOGETHER: tl.constexpr = min(ROOM // BLOCK_N, CHUNKS)
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
        tl.store(slot + ROOM, word, mask=taken != 0)
        found += tl.sum(taken, axis=0)
    # Other threads read what these have written.
    tl.debug_barrier()
    return found


@launch.kernel
def _sparse_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, words_ptr, lists_ptr, lengths_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, H, Tk, pages, pool, scale,
    ROOM: tl.constexpr, TURNS: tl.constexpr, GROUP: tl.constexpr, SCOPES: tl.constexpr, HEADS: tl.constexpr,
    TQ: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys, HEADS heads of q at each of TURNS, batch). stride_kb is a page's where there are
    pages."""
    BLOCK_M: tl.constexpr = triton.next_power_of_2(max(16, HEADS * TQ))
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    part, parts = tl.program_id(0), tl.num_programs(0)
    first, batch = tl.program_id(1) * (TURNS * HEADS), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    query = row % TQ
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    inside = (row < HEADS * TQ)[:, None] & wide
    words_ptr += (batch * SCOPES + first * SCOPES // H) * 2 * Tk
    lists_ptr += ((batch * tl.num_programs(1) + tl.program_id(1)) * parts + part) * 2 * ROOM
    end, offset = positions(lengths_ptr, batch, TQ, Tk)
    count = list_keys(words_ptr, lists_ptr, part, parts, end, offset, ROOM, CAUSAL)
    log2_scale = scale * 1.4426950408889634
    for turn in range(TURNS):
        head = first + turn * HEADS
        token = (batch * H + head + row // TQ) * TQ + query
        q = tl.load(q_ptr + token[:, None] * D + column[None, :], mask=inside, other=0.0)
        of_head = tl.cast(head // GROUP, tl.int64) * stride_kh + column
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, count, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            # Past the end the last key once more, of whom nobody's bit is set.
            key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
            word = tl.load(lists_ptr + ROOM + slot, mask=slot < count, other=0)
            keep = ((word[None, :] >> query[:, None]) & 1) != 0
            if PAGE > 0:
                page = tl.load(table_ptr + batch * pages + key // PAGE).to(tl.int64)
                valid = (page >= 0) & (page < pool)
                page = tl.where(valid, page, 0)
                at = page * stride_kb + (key % PAGE).to(tl.int64) * stride_kt
            else:
                at = batch * stride_kb + key.to(tl.int64) * stride_kt
            at = at[:, None] + of_head[None, :]
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
    chunks = launch.cdiv(tk, BLOCK_N.value)
    groups, most, turns = h // heads, 4 * tuning.programs(q.device), 1
    if scopes == 1 and tk * b * groups > WORDS * most:
        turns = math.gcd(groups, launch.next_power_of_2(PARTS * b * groups // most))
    groups //= turns
    cuts = max(1, min(chunks, PARTS, most // (b * groups)))
    room = launch.next_power_of_2(launch.cdiv(chunks, cuts)) * BLOCK_N.value
    lists = torch.empty(b * groups, cuts, 2, room, dtype=torch.int32, device=q.device)
    parts = torch.empty(b, h, tq, cuts, d + 2, dtype=torch.float32, device=q.device)
    q, (k, v) = q.contiguous(), _alike(k, v)
    strides = (k.stride(0), *((k.stride(2), k.stride(1)) if paged else k.stride()[1:3]))
    meta = {
        "ROOM": room,
        "TURNS": turns,
        "GROUP": h // g,
        "SCOPES": scopes,
        "HEADS": heads,
        "TQ": tq,
        "D": d,
        "PAGE": k.shape[1] if paged else 0,
    }
    meta["CAUSAL"] = causal
    sizes = (*strides, h, tk, 0 if table is None else table.shape[1], k.shape[0])
    args = (q, k, v, parts, words.view(torch.int32), lists, lengths, table, *sizes, scale)
    # Two tiles at a time, or four programs to a multiprocessor.
    stages, registers = (2, None) if turns == 1 else (1, 128)
    options = {"num_warps": 4, "num_stages": stages, "maxnreg": registers}
    _sparse_decode_parts_kernel((cuts, groups, b), args, meta, **options)
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
        "words_ptr": "*i32", "ROOM": 1024, "TURNS": 1, "GROUP": 4, "SCOPES": 1, "HEADS": 4, "TQ": 1, "D": 128,
        "PAGE": 64, "CAUSAL": True,
    },
    _sparse_decode_kernel: {"D": 128, "BLOCK": 64},
}  # fmt: skip
