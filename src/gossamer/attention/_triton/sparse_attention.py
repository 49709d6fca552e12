"""Attention over selected keys.

A program takes PARTS blocks of 64 neighbouring queries of one head, and walks keys, BLOCK_N at a time: those that any
of its queries takes, by a list (see `key_lists`), or where keys are few, all of them. It gathers their rows of k and v,
scores all of its queries with them on the tensor cores, and keeps a score where the query's bit is set. The softmax is
online and in base 2. The bits come as rows of 32 queries, so that a warp, whose rows of the accumulator belong to one
such row, reads a word for each of its keys and tests one bit of it: the mask costs two instructions a score. Which keys
stand behind a query is settled on the words, a 32nd of the scores; a list's words have it settled.

Where D is no power of two the tile is padded with zeros.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.compiling import together
from gossamer._core.ranges import span
from gossamer.attention._triton.key_lists import key_lists, not_behind, positions
from gossamer.attention._triton.sparse_decode import sparse_decode
from gossamer.attention.records import QUERIES, SparseAttention, SparseAttentionBwd

LIST_BYTES = 1 << 28
"""Bytes that the lists of one launch may take; more blocks of queries are served by more launches."""


@dataclass(frozen=True)
class Tile:
    """Compile-time sizes of a kernel that gathers by lists."""

    parts: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def fwd_tile(q: Tensor, path: str) -> Tile:
    """Tile of the forward pass.

    At D = 128 on an H200, 128 queries in two programs an SM, for which a thread has 128 registers and spills 13, took
    1.88 ms at 32,768 keys, 64 queries 2.11, and 128 in one program 2.72. At 4,096 keys 64 queries were the fastest.
    In float32, 64 keys a step took 0.65 ms where 32 took 0.76, of 1,024 keys.
    """
    if q.element_size() > 2:
        wide = 32 < q.shape[3] <= 128
        return Tile(parts=1, keys=64 if wide else 32, warps=4 if q.shape[3] <= 32 else 8, stages=2)
    if q.shape[3] > 128:
        return Tile(parts=2, keys=32, warps=8, stages=2)
    if path == "tiles" or not tuning.hopper(q.device):
        return Tile(parts=1, keys=64, warps=4, stages=3)
    return Tile(parts=2, keys=64, warps=8, stages=2, registers=128)


LISTS, TILES, TILES_CAUSAL = 0, 1, 2
"""How a kernel walks the keys of a group of queries: by a list, or all of them, or all up to the last query."""


@triton.jit
def begin_walk(
    from_ptr, counts_ptr, first, group, batch, scope, batches, Tq, capacity,
    SCOPES: tl.constexpr, PARTS: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """(where the list, or the words, of a group of queries begin; how many keys to walk; where query 0 stands).

    Of tiles `from_ptr` has words as pairs of int32, `capacity` is Tk, and `counts_ptr` has lengths, or is None.
    """
    if WALK == 0:
        listed = group.to(tl.int64) * (batches * SCOPES) + batch * SCOPES + scope
        return from_ptr + listed * (1 + 2 * PARTS) * capacity, tl.load(counts_ptr + listed), 0
    else:
        end, offset = positions(counts_ptr, batch, Tq, capacity)
        if WALK == 2:
            end = tl.minimum(end, (first + group + 1) * (64 * PARTS) + offset)
        block = (batch * SCOPES + scope) * ((Tq + 63) // 64) + (first + group) * PARTS
        return from_ptr + block * 2 * capacity, end, offset


@triton.jit
def walk_keys(
    from_ptr, start, count, offset, query, row, Tq, capacity, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """(the next BLOCK_N keys; which of them are read at all; bool [64 * PARTS, BLOCK_N], which query takes which)."""
    slot = start + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2 * PARTS)
    if WALK == 0:
        # Past the end the last key once more, with no bit set: a key that nobody lists is never read.
        key = tl.load(from_ptr + tl.minimum(slot, count - 1))
        some = tl.full([BLOCK_N], 1, tl.int1)
        at = from_ptr + (1 + half)[:, None] * capacity + slot[None, :]
        word = tl.load(at, mask=(slot < count)[None, :], other=0)
    else:
        key = slot
        # By load, too, for a row of k is read by other threads than those that test its bits.
        some = tl.zeros([BLOCK_N], tl.int1)
        for part in tl.static_range(PARTS):
            inside = (slot < count) & (query + part * 64 < Tq)
            both = tl.load((from_ptr + part * 2 * capacity).to(tl.pointer_type(tl.int64)) + slot, mask=inside, other=0)
            if WALK == 2:
                both = not_behind(both, slot - (query + part * 64 + offset), 63)
            some = some | (both != 0)
        at = from_ptr + (half // 2 * 2 * capacity + half % 2)[:, None] + 2 * slot[None, :]
        inside = (query + half * 32 < Tq)[:, None] & (slot < count)[None, :]
        word = tl.load(at, mask=inside, other=0)
        if WALK == 2:
            word = not_behind(word, slot[None, :] - (query + half * 32 + offset)[:, None], 31)
    word = tl.reshape(tl.broadcast_to(word[:, None, :], (2 * PARTS, 32, BLOCK_N)), (64 * PARTS, BLOCK_N))
    return key, some, (word & (tl.full([64 * PARTS], 1, tl.int32) << (row & 31))[:, None]) != 0


@triton.jit
def wide_product(
    a_ptr, a_at, a_read, b_ptr, b_at, b_read, D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Rows of a times rows of b, CHUNK columns at a time, so that a thread's registers hold the operands."""
    s = tl.zeros([a_at.shape[0], b_at.shape[0]], tl.float32)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        some = (column < D)[None, :]
        a = tl.load(a_ptr + a_at[:, None] + column[None, :], mask=a_read[:, None] & some, other=0.0)
        b = tl.load(b_ptr + b_at[:, None] + column[None, :], mask=b_read[:, None] & some, other=0.0)
        s = tl.dot(a, b.T, s, input_precision=PRECISION)
    return s


@launch.kernel(do_not_specialize=["first", "Tq", "sharing"])
def _sparse_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, from_ptr, counts_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, first, Tq, capacity, sharing, scale,
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
    query = (begin + row).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    inside = (query < Tq)[:, None] & wide
    q_ptr += batch * stride_qb + head * stride_qh
    # Products in float32 arithmetic hold their operands in registers: a row of more columns than these spills.
    CHUNK: tl.constexpr = 32
    IN_CHUNKS: tl.constexpr = (q_ptr.dtype.element_ty == tl.float32) & (PRECISION == "ieee") & (D > CHUNK)
    q = tl.zeros([1, 1], tl.float32)
    if not IN_CHUNKS:
        q = tl.load(q_ptr + query[:, None] * stride_qt + column[None, :], mask=inside, other=0.0)
    k_ptr += batch * stride_kb + (head // sharing) * stride_kh
    v_ptr += batch * stride_kb + (head // sharing) * stride_kh
    from_ptr, count, offset = begin_walk(
        from_ptr, counts_ptr, first, group, batch, head * SCOPES // heads, tl.num_programs(2), Tq, capacity,
        SCOPES, PARTS, WALK,
    )  # fmt: skip
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        key, some, keep = walk_keys(
            from_ptr, start, count, offset, begin, row, Tq, capacity, PARTS, BLOCK_N, WALK
        )  # fmt: skip
        at = key[:, None] * stride_kt + column[None, :]
        read = some[:, None] & wide
        if IN_CHUNKS:
            s = wide_product(
                q_ptr, query * stride_qt, query < Tq, k_ptr, key * stride_kt, some, D, CHUNK, PRECISION
            )  # fmt: skip
        else:
            k = tl.load(k_ptr + at, mask=read, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keep, s, float("-inf"))
        most = tl.maximum(m, tl.max(s, 1) * log2_scale)
        finite = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s * log2_scale - finite[:, None])
        shrink = tl.exp2(m - finite)
        v = tl.load(v_ptr + at, mask=read, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = most
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    out_ptr += ((batch * Tq + query) * heads + head)[:, None] * D + column[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + (batch * heads + head) * Tq + query, lse, mask=query < Tq)


def strided(x: Tensor) -> Tensor:
    """x [..., D] with rows whose elements are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the same strides, in which 32 bits reach every row of a head."""
    k, v = strided(k), strided(v)
    near = k.shape[2] * k.stride(2) < 1 << 31
    return (k, v) if near and k.stride() == v.stride() else (k.contiguous(), v.contiguous())


def group_chunk(words: Tensor, parts: int) -> int:
    """How many groups of `parts` blocks have lists of LIST_BYTES bytes."""
    each = words.shape[0] * words.shape[1] * (1 + 2 * parts) * (words.shape[3] + 32) * 4
    return max(1, LIST_BYTES // each)


def walks(
    call: SparseAttention | SparseAttentionBwd, parts: int
) -> Iterator[tuple[int, int, Tensor, Tensor | None, int, int]]:
    """For each launch: its first group of queries, how many groups, what the kernel walks, counts or lengths, capacity,
    and the way of walking. Lists take memory, and so may take several launches."""
    words, lengths, causal, num_queries = call.words, call.lengths, call.causal, call.q.shape[2]
    groups = launch.cdiv(num_queries, parts * QUERIES)
    if call.path == "tiles":
        yield 0, groups, words.view(torch.int32), lengths, words.shape[3], TILES_CAUSAL if causal else TILES
        return
    step = group_chunk(words, parts)
    for first in range(0, groups, step):
        with span("sparse_attention/key_lists"):
            lists, counts = key_lists(words, lengths, num_queries, causal, parts, first, step)
        yield first, lists.shape[0], lists, counts, lists.shape[-1], LISTS


@together
def sparse_attention(call: SparseAttention) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention` -> (out [B, H, Tq, D] in memory as [B, Tq, H, D], lse [B, H, Tq])."""
    if call.path == "decode":
        return sparse_decode(call)
    q, k, v, words, _, _, scale, *_ = call
    b, h, tq, d = q.shape
    g, tk = k.shape[1:3]
    out = q.new_empty(b, tq, h, d)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    if tk == 0 or d == 0 or out.numel() == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-math.inf)
    q = strided(q)
    k, v = alike(k, v)
    tile = fwd_tile(q, call.path)
    meta = {"SCOPES": words.shape[1], "D": d, "BLOCK_N": tile.keys, "PARTS": tile.parts}
    for first, groups, walked, ends, capacity, walk in walks(call, tile.parts):
        args = (q, k, v, out, lse, walked, ends, *q.stride()[:3], *k.stride()[:3], first, tq, capacity, h // g, scale)
        meta |= {"WALK": walk, "PRECISION": tuning.dot_precision(q, d)["PRECISION"]}
        _sparse_attention_fwd_kernel((groups, h, b), args, meta, **tile.options())
    return out.transpose(1, 2), lse


EXAMPLES = {
    _sparse_attention_fwd_kernel: {
        "SCOPES": 1, "D": 128, "BLOCK_N": 64, "PARTS": 2, "WALK": LISTS, "PRECISION": "ieee", "num_warps": 8,
        "maxnreg": 128,
    },
}  # fmt: skip
