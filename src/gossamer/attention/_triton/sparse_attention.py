"""Attention over selected keys.

A program takes PARTS blocks of 64 neighbouring queries of one head, and walks the list of the keys that any of them
takes (see `key_lists`), BLOCK_N at a time. It gathers their rows of k and v, which lie anywhere, scores all of its
queries with them on the tensor cores, and keeps a score where the query's bit is set. The softmax is online and in
base 2. The bits come as rows of 32 queries, so that a warp, whose rows of the accumulator belong to one such row, reads
a word for each of its keys and tests one bit of it: the mask costs two instructions a score.

Where D is no power of two the tile is padded with zeros.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton.key_lists import QUERIES, key_lists
from gossamer.attention._triton.sparse_decode import sparse_decode
from gossamer.attention.sparse_attention import choose_path

LISTS = 1 << 28
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
        """What a launch takes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def fwd_tile(d: int, element_size: int) -> Tile:
    """Tile of the forward pass."""
    if element_size > 2:
        return Tile(parts=1, keys=32, warps=4, stages=2)
    if d > 128:
        return Tile(parts=1, keys=32, warps=4, stages=2)
    return Tile(parts=1, keys=64, warps=4, stages=3)


@triton.jit
def listed_bits(lists_ptr, slot, count, capacity, bit, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """bool [64 * PARTS, BLOCK_N]: which query takes which of the listed keys."""
    row = 1 + tl.arange(0, 2 * PARTS)
    word = tl.load(lists_ptr + row[:, None] * capacity + slot[None, :], mask=(slot < count)[None, :], other=0)
    word = tl.reshape(tl.broadcast_to(word[:, None, :], (2 * PARTS, 32, BLOCK_N)), (64 * PARTS, BLOCK_N))
    return (word & bit[:, None]) != 0


@triton.jit(do_not_specialize=["first"])
def _sparse_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lists_ptr, counts_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, first, Tq, capacity, scale,
    GROUP: tl.constexpr, SCOPES: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (group of queries, the last first; head; batch)."""
    BLOCK_M: tl.constexpr = 64 * PARTS
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(16, D))
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    row = tl.arange(0, BLOCK_M)
    query = (first + group) * BLOCK_M + row
    bit = tl.full([BLOCK_M], 1, tl.int32) << (row & 31)
    column = tl.arange(0, BLOCK_D)
    inside = (query < Tq)[:, None] & (column < D)[None, :]
    q_ptr += batch * stride_qb + head * stride_qh
    q = tl.load(q_ptr + query[:, None] * stride_qt + column[None, :], mask=inside, other=0.0)
    k_ptr += batch * stride_kb + (head // GROUP) * stride_kh
    v_ptr += batch * stride_kb + (head // GROUP) * stride_kh
    listed = group.to(tl.int64) * (tl.num_programs(2) * SCOPES) + batch * SCOPES + head * SCOPES // heads
    count = tl.load(counts_ptr + listed)
    lists_ptr += listed * (1 + 2 * PARTS) * capacity
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        # Past the end the last key once more, with no bit set: a key that nobody lists is never read.
        key = tl.load(lists_ptr + tl.minimum(slot, count - 1))
        keep = listed_bits(lists_ptr, slot, count, capacity, bit, PARTS, BLOCK_N)
        at = key[:, None] * stride_kt + column[None, :]
        k = tl.load(k_ptr + at, mask=(column < D)[None, :], other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keep, s, float("-inf"))
        most = tl.maximum(m, tl.max(s, 1) * log2_scale)
        finite = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s * log2_scale - finite[:, None])
        shrink = tl.exp2(m - finite)
        v = tl.load(v_ptr + at, mask=(column < D)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = most
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    out_ptr += ((batch * Tq + query) * heads + head)[:, None] * D + column[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + (batch * heads + head) * Tq + query, lse, mask=query < Tq)


_sparse_attention_fwd = launch.Kernel(_sparse_attention_fwd_kernel)


def strided(x: Tensor) -> Tensor:
    """x [..., D] with rows whose elements are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the same strides, in which 32 bits reach every row of a head."""
    k, v = strided(k), strided(v)
    near = k.shape[2] * k.stride(2) < 1 << 31
    return (k, v) if near and k.stride() == v.stride() else (k.contiguous(), v.contiguous())


def group_chunk(words: Tensor, parts: int) -> int:
    """How many groups of `parts` blocks have lists of LISTS bytes."""
    each = words.shape[0] * words.shape[1] * (1 + 2 * parts) * (words.shape[3] + 32) * 4
    return max(1, LISTS // each)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention` -> (out [B, H, Tq, D] in memory as [B, Tq, H, D], lse [B, H, Tq])."""
    b, h, tq, d = q.shape
    g, tk = k.shape[1:3]
    if choose_path(tq) == "decode":
        return sparse_decode(q, k, v, None, words, counts, indices, lengths, scale, causal)
    out = q.new_empty(b, tq, h, d)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    if tk == 0 or d == 0 or out.numel() == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-math.inf)
    q, words = strided(q), words.contiguous()
    k, v = alike(k, v)
    tile = fwd_tile(d, q.element_size())
    step = group_chunk(words, tile.parts)
    meta = {"GROUP": h // g, "SCOPES": words.shape[1], "D": d, "BLOCK_N": tile.keys, "PARTS": tile.parts}
    meta["PRECISION"] = tuning.dot_precision(q, d)["PRECISION"]
    for first in range(0, launch.cdiv(tq, tile.parts * QUERIES), step):
        lists, listed = key_lists(words, lengths, tq, causal, tile.parts, first, step)
        args = (q, k, v, out, lse, lists, listed, *q.stride()[:3], *k.stride()[:3], first, tq, lists.shape[-1], scale)
        key = (q.dtype, *args[7:-1], *meta.values())
        _sparse_attention_fwd(key, (lists.shape[0], h, b), args, meta, **tile.options())
    return out.transpose(1, 2), lse


STRIDES = dict.fromkeys(("stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kh", "stride_kt"), "i32")
EXAMPLES = {
    _sparse_attention_fwd_kernel: {
        "signature": {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16"), "lse_ptr": "*fp32",
            "lists_ptr": "*i32", "counts_ptr": "*i32", **STRIDES, "first": "i32", "Tq": "i32", "capacity": "i32",
            "scale": "fp32",
        },
        "constexprs": {"GROUP": 1, "SCOPES": 1, "D": 128, "BLOCK_N": 64, "PARTS": 1, "PRECISION": "ieee"},
        "num_warps": 4,
        "num_stages": 3,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
