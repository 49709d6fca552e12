"""Attention over selected keys.

A program takes PARTS blocks of 64 neighbouring queries of one head, and walks keys, BLOCK_N at a time: those that any
of its queries takes, by a list (see `key_lists`), or where keys are few, all of them. It gathers their rows of k and v,
scores all of its queries with them on the tensor cores, and keeps a score where the query's bit is set. The softmax is
online and in base 2. The bits come as rows of 32 queries, so that a warp, whose rows of the accumulator belong to one
such row, reads a word for each of its keys and tests one bit of it: the mask costs two instructions a score. Which keys
stand behind a query is settled on the words, a 32nd of the scores; a list's words have it settled.

Where a width is no power of two the tile is padded with zeros. Where one is above 256 products read their operands by
parts of their columns, and programs sum a block of columns each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.compiling import together
from gossamer._core.philox import dropout_weights
from gossamer._core.ranges import span
from gossamer.attention._triton._products import block_of_columns, reached, strided, wide_product
from gossamer.attention._triton.key_lists import key_lists, positions, seen
from gossamer.attention._triton.sparse_decode import sparse_decode
from gossamer.attention.records import QUERIES, SparseAttention, SparseAttentionBwd

LIST_BYTES = 1 << 28
"""Bytes that the lists of one launch may take; more blocks of queries are served by more launches."""


@dataclass(frozen=True)
class Tile:
    """Blocks of 64 queries and keys of a step, and the options of a launch."""

    parts: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


@dataclass(frozen=True)
class Config:
    """The properties that a kernel is compiled for, as one constexpr.

    q has `d` columns, v `dv`. A program sums `block_d` columns of a result as wide as q, and `block_v` of one as
    wide as v. Where `chunk` is above 0, products read their operands by so many columns, since a thread's registers
    hold no whole rows.
    """

    scopes: int
    parts: int
    keys: int
    d: int
    dv: int
    block_d: int
    block_v: int
    chunk: int
    precision: str
    walk: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of columns of k and v together."""
        return max(launch.cdiv(self.d, self.block_d), launch.cdiv(self.dv, self.block_v))


def config_of(tile: Tile, scopes: int, q: Tensor, dv: int, most: int = 256) -> Config:
    """The config for a tile, of which `most` columns are summed at a time."""
    d, precision = q.shape[3], tuning.dot_precision(q, q.shape[3])["PRECISION"]
    of_q, of_v = (min(most, launch.next_power_of_2(max(16, width))) for width in (d, dv))
    wide = 256 if q.element_size() == 2 or precision != "ieee" else 32
    chunk = 0 if max(d, dv) <= wide else 64 if q.element_size() == 2 else 32
    return Config(scopes, tile.parts, tile.keys, d, dv, of_q, of_v, chunk, precision)


def fwd_tile(call: SparseAttention) -> Tile:
    """Tile of the forward pass."""
    q, width = call.q, max(call.q.shape[3], call.v.shape[3])
    if q.element_size() > 2:
        return Tile(parts=1, keys=64 if 32 < width <= 128 else 32, warps=4 if width <= 32 else 8, stages=2)
    if width > 128:
        return Tile(parts=2 if width <= 256 else 1, keys=32, warps=8, stages=2)
    # The numbers of dropout need registers, too.
    if call.path == "tiles" or call.seed is not None or not tuning.hopper(q.device):
        return Tile(parts=1, keys=64, warps=4, stages=3)
    return Tile(parts=2, keys=64, warps=8, stages=2, registers=128)


LISTS, TILES, TILES_CAUSAL = 0, 1, 2
"""How a kernel walks the keys of a group of queries: by a list, or all of them, or all up to the last query."""


@triton.jit
def begin_walk(
    from_ptr, counts_ptr, first, group, batch, scope, batches, Tq, capacity, CONFIG: tl.constexpr
):  # fmt: skip
    """(where the list, or the words, of a group of queries begin; how many keys to walk; where query 0 stands).

    Of tiles `from_ptr` has words as pairs of int32, `capacity` is Tk, and `counts_ptr` has lengths, or is None.
    """
    PARTS: tl.constexpr = CONFIG.parts
    SCOPES: tl.constexpr = CONFIG.scopes
    if CONFIG.walk == 0:
        listed = group.to(tl.int64) * (batches * SCOPES) + batch * SCOPES + scope
        return from_ptr + listed * (1 + 2 * PARTS) * capacity, tl.load(counts_ptr + listed), 0
    else:
        end, offset = positions(counts_ptr, batch, Tq, capacity)
        if CONFIG.walk == 2:
            end = tl.minimum(end, (first + group + 1) * (64 * PARTS) + offset)
        block = (batch * SCOPES + scope) * ((Tq + 63) // 64) + (first + group) * PARTS
        return from_ptr + block * 2 * capacity, end, offset


@triton.jit
def walk_keys(
    from_ptr, start, count, offset, query, row, Tq, capacity, CONFIG: tl.constexpr
):  # fmt: skip
    """(the next BLOCK_N keys; which of them are read at all; bool [64 * PARTS, BLOCK_N], which query takes which)."""
    PARTS: tl.constexpr = CONFIG.parts
    BLOCK_N: tl.constexpr = CONFIG.keys
    WALK: tl.constexpr = CONFIG.walk
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
                both = seen(both, slot, query + part * 64 + offset, count, 63)
            some = some | (both != 0)
        at = from_ptr + (half // 2 * 2 * capacity + half % 2)[:, None] + 2 * slot[None, :]
        inside = (query + half * 32 < Tq)[:, None] & (slot < count)[None, :]
        word = tl.load(at, mask=inside, other=0)
        if WALK == 2:
            word = seen(word, slot[None, :], (query + half * 32 + offset)[:, None], count, 31)
    word = tl.reshape(tl.broadcast_to(word[:, None, :], (2 * PARTS, 32, BLOCK_N)), (64 * PARTS, BLOCK_N))
    return key, some, (word & (tl.full([64 * PARTS], 1, tl.int32) << (row & 31))[:, None]) != 0


@launch.kernel(do_not_specialize=["first", "Tq", "sharing", "drop"])
def _sparse_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, from_ptr, counts_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    first, Tq, capacity, sharing, drop, scale, CONFIG: tl.constexpr,
):  # fmt: skip
    """Program (group of queries, the last first; head and block of v's columns; batch). So many heads are `sharing` one
    of k."""
    BLOCK_M: tl.constexpr = 64 * CONFIG.parts
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    CHUNK: tl.constexpr = CONFIG.chunk
    PRECISION: tl.constexpr = CONFIG.precision
    BLOCK_N: tl.constexpr = CONFIG.keys
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_V: tl.constexpr = CONFIG.block_v
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    head, of_v = block_of_columns(tl.program_id(1), DV, BLOCK_V)
    head, batch = head.to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // ((DV + BLOCK_V - 1) // BLOCK_V)
    row = tl.arange(0, BLOCK_M)
    begin = (first + group) * BLOCK_M
    query = (begin + row).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    wide = (column < D)[None, :]
    q_ptr += batch * stride_qb + head * stride_qh
    q = tl.zeros([1, 1], tl.float32)
    if CHUNK == 0:
        inside = (query < Tq)[:, None] & wide
        q = tl.load(q_ptr + query[:, None] * stride_qt + column[None, :], mask=inside, other=0.0)
    k_ptr += batch * stride_kb + (head // sharing) * stride_kh
    v_ptr += batch * stride_vb + (head // sharing) * stride_vh
    from_ptr, count, offset = begin_walk(
        from_ptr, counts_ptr, first, group, batch, head * CONFIG.scopes // heads, tl.num_programs(2), Tq, capacity,
        CONFIG,
    )  # fmt: skip
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, count, BLOCK_N):
        key, some, keep = walk_keys(from_ptr, start, count, offset, begin, row, Tq, capacity, CONFIG)
        if CHUNK > 0:
            s = wide_product(
                q_ptr, query * stride_qt, query < Tq, k_ptr, key * stride_kt, some, D, CHUNK, PRECISION
            )  # fmt: skip
        else:
            at = key[:, None] * stride_kt + column[None, :]
            k = tl.load(k_ptr + at, mask=some[:, None] & wide, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keep, s, float("-inf"))
        most = tl.maximum(m, tl.max(s, 1) * log2_scale)
        finite = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s * log2_scale - finite[:, None])
        shrink = tl.exp2(m - finite)
        at = key[:, None] * stride_vt + of_v[None, :]
        v = tl.load(v_ptr + at, mask=some[:, None] & (of_v < DV)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        if seed_ptr is not None:
            p *= dropout_weights(seed_ptr, batch * heads + head, (begin + row)[:, None], key[None, :], drop)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = most
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    out_ptr += ((batch * Tq + query) * heads + head)[:, None] * DV + of_v[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=(query < Tq)[:, None] & (of_v < DV)[None, :])
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + (batch * heads + head) * Tq + query, lse, mask=query < Tq)


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
    q, k, v, tq = call.q, call.k, call.v, call.q.shape[2]
    (b, h, *_), (_, g, tk, dv) = q.shape, v.shape
    out = q.new_empty(b, tq, h, dv)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    if tk == 0 or out.numel() == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-math.inf)
    q = strided(q)
    k, v, strides = reached(k, v)
    tile = fwd_tile(call)
    config = config_of(tile, call.words.shape[1], q, dv, 512 if q.element_size() == 2 else 256)
    grid = h * launch.cdiv(dv, config.block_v), b
    for first, groups, walked, ends, capacity, walk in walks(call, tile.parts):
        sizes = (*q.stride()[:3], *strides, first, tq, capacity, h // g, call.drop, call.scale)
        args = (q, k, v, out, lse, walked, ends, call.seed, *sizes)
        meta = {"CONFIG": replace(config, walk=walk)}
        _sparse_attention_fwd_kernel((groups, *grid), args, meta, **tile.options())
    return out.transpose(1, 2), lse


EXAMPLE = Config(1, 2, 64, 128, 128, 128, 128, 0, "ieee")
EXAMPLES = {
    _sparse_attention_fwd_kernel: {"seed_ptr": None, "CONFIG": EXAMPLE, "num_warps": 8, "maxnreg": 128},
}
