"""Attention over selected keys where most keys are selected: whole products by cuBLAS, and a softmax that knows bits.

In float32 arithmetic a product of PyTorch's own takes a fifth of the time of one in Triton, so that it pays to compute
all scores of some queries, and to leave out of the softmax what is not taken. Queries come in slabs of SLAB_BYTES of
scores, and a slab's products end where its last query sees no more. One kernel turns scores into probabilities in
place, tiles of 16 queries by 128 keys, once to find a row's largest score and their sum, once to write; the other turns
scores and what comes back from the values into probabilities and the scores' gradients. Both read a bit a score.

A key that nobody takes is zeros in these products, for 0 times NaN is NaN.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import autocast, launch
from gossamer.attention._triton.key_lists import not_behind, slots

SLAB_BYTES = 1 << 28
"""Bytes of the scores of a slab, if it has more than 64 queries."""
SLAB_QUERIES = 256
"""Queries of a slab at least; an eighth of all, where that is more."""
SLAB_PRODUCTS = 1 << 28
"""Products of numbers in a slab's scores at least, that it is worth its launches: some 10 us of an H200."""


@triton.jit
def of_program(
    words_ptr, lengths_ptr, first, Tq, Tk, SCOPES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(rows of the slab; row of all batches and heads; the first of the 32 queries that share its words; these words,
    one key each second int32; the keys that they see; where query 0 stands)."""
    head, batch, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    query = (first + tl.program_id(0) * BLOCK_M) // 32 * 32
    end = Tk
    offset = Tk - Tq
    if lengths_ptr is not None:
        end = tl.minimum(end, tl.maximum(tl.load(lengths_ptr + batch).to(tl.int32), 0))
        offset = tl.maximum(end - Tq, 0)
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(query + 32 + offset, 0))
    block = (batch * SCOPES + head * SCOPES // heads) * ((Tq + 63) // 64) + query // 64
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, batch * heads + head, query, words_ptr + block * 2 * Tk + query // 32 % 2, end, offset


@triton.jit
def kept(words_ptr, key, end, query, row, offset, CAUSAL: tl.constexpr):
    """bool [rows, keys]: which query takes which key; rows are of the 32 queries from `query` on."""
    word = tl.load(words_ptr + 2 * key, mask=key < end, other=0)
    if CAUSAL:
        word = not_behind(word, key - (query + offset), 31)
    return (word[None, :] & (tl.full(row.shape, 1, tl.int32) << (row & 31))[:, None]) != 0


@launch.kernel(do_not_specialize=["first", "rows", "columns"])
def _dense_softmax_kernel(
    s_ptr, lse_ptr, words_ptr, lengths_ptr, first, rows, columns, Tq, Tk, scale,
    SCOPES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_M queries of the slab, head, batch): scores [batch, head, row, column] become probabilities."""
    row, head, query, words_ptr, end, offset = of_program(
        words_ptr, lengths_ptr, first, Tq, Tk, SCOPES, CAUSAL, BLOCK_M
    )  # fmt: skip
    inside = row < rows
    s_ptr += (head * rows + row)[:, None] * columns
    log2_scale = scale * 1.4426950408889634
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        keep = kept(words_ptr, key, end, query, first + row, offset, CAUSAL)
        s = tl.load(s_ptr + key[None, :], mask=inside[:, None] & (key < end)[None, :], other=0.0)
        s = tl.where(keep, s * log2_scale, float("-inf"))
        most = tl.maximum(m, tl.max(s, 1))
        finite = tl.where(most == float("-inf"), 0.0, most)
        total = total * tl.exp2(m - finite) + tl.sum(tl.exp2(s - finite[:, None]), 1)
        m = most
    finite = tl.where(m == float("-inf"), 0.0, m)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    for start in range(0, columns, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        keep = kept(words_ptr, key, end, query, first + row, offset, CAUSAL)
        there = inside[:, None] & (key < columns)[None, :]
        s = tl.load(s_ptr + key[None, :], mask=there, other=0.0)
        p = tl.where(keep, tl.exp2(s * log2_scale - finite[:, None]) * share[:, None], 0.0)
        tl.store(s_ptr + key[None, :], p, mask=there)
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + head * Tq + first + row, lse, mask=inside)


@launch.kernel(do_not_specialize=["first", "rows", "columns"])
def _dense_gradient_kernel(
    s_ptr, dp_ptr, rows_ptr, words_ptr, lengths_ptr, first, rows, columns, Tq, Tk, scale,
    SCOPES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_M queries of the slab, head, batch): scores become probabilities, and the gradients of these
    become the scores'. Of each query there are the lse in base 2, and what a softmax's gradient subtracts."""
    row, head, query, words_ptr, end, offset = of_program(
        words_ptr, lengths_ptr, first, Tq, Tk, SCOPES, CAUSAL, BLOCK_M
    )  # fmt: skip
    inside = row < rows
    at = (head * rows + row)[:, None] * columns
    token = head * Tq + first + row
    lse = tl.load(rows_ptr + 2 * token, mask=inside, other=0.0)
    delta = tl.load(rows_ptr + 2 * token + 1, mask=inside, other=0.0)
    log2_scale = scale * 1.4426950408889634
    for start in range(0, columns, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        keep = kept(words_ptr, key, end, query, first + row, offset, CAUSAL)
        there = inside[:, None] & (key < columns)[None, :]
        s = tl.load(s_ptr + at + key[None, :], mask=there, other=0.0)
        dp = tl.load(dp_ptr + at + key[None, :], mask=there, other=0.0)
        p = tl.where(keep, tl.exp2(s * log2_scale - lse[:, None]), 0.0)
        ds = tl.where(keep, p * (dp - delta[:, None]) * scale, 0.0)
        tl.store(s_ptr + at + key[None, :], p, mask=there)
        tl.store(dp_ptr + at + key[None, :], ds, mask=there)


@launch.kernel(do_not_specialize=["N"])
def _taken_rows_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, taken_ptr, words_ptr, lengths_ptr, N, Tk,
    SCOPES: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_K keys, head of k, batch): their rows, zeros where no query takes them, and whether any does."""
    head, batch, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    end = Tk
    if lengths_ptr is not None:
        end = tl.minimum(end, tl.maximum(tl.load(lengths_ptr + batch).to(tl.int32), 0))
    # The scopes of a head are beside each other.
    first = head * SCOPES // heads
    scopes = tl.maximum(SCOPES // heads, 1)
    some = tl.zeros([BLOCK_K], tl.int64)
    for block in range(0, scopes * N):
        at = ((batch * SCOPES + first) * N + block) * Tk + key
        some |= tl.load(words_ptr + at, mask=key < end, other=0)
    column = tl.arange(0, triton.next_power_of_2(D))
    row = (batch * heads + head) * Tk + key
    at = row[:, None] * D + column[None, :]
    inside = (key < Tk)[:, None] & (column < D)[None, :]
    read = inside & (some != 0)[:, None]
    tl.store(keys_ptr + at, tl.load(k_ptr + at, mask=read, other=0.0).to(tl.float32), mask=inside)
    tl.store(values_ptr + at, tl.load(v_ptr + at, mask=read, other=0.0).to(tl.float32), mask=inside)
    tl.store(taken_ptr + row, some != 0, mask=key < Tk)


TILE = {"BLOCK_M": 16, "BLOCK_N": 128}


def slabs(q: Tensor, words: Tensor, lengths: Tensor | None, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(first query, how many, the keys that any of them may see) of each slab, the largest first."""
    b, h, tq, d = q.shape
    tk = words.shape[3]
    least = max(SLAB_QUERIES, tq // 8, SLAB_PRODUCTS // (b * h * tk * d))
    # Of one length, up to a multiple of 64: a short last one costs as many launches.
    step = launch.cdiv(tq, max(1, tq // least))
    step = min(launch.cdiv(step, 64) * 64, max(64, SLAB_BYTES // (4 * b * h * tk) // 64 * 64))
    for first in reversed(range(0, tq, step)):
        rows = min(step, tq - first)
        yield first, rows, min(tk, slots(words, tq, lengths, causal, first + rows))


def taken_rows(k: Tensor, v: Tensor, words: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(k and v in float32, [B * G, Tk, D], zeros where nobody takes a key; bool [B, G, Tk], who is taken)."""
    b, g, tk, d = k.shape
    k, v = k.contiguous(), v.contiguous()
    keys, values = k.new_empty(2, b * g, tk, d, dtype=torch.float32)
    taken = torch.empty(b, g, tk, dtype=torch.bool, device=k.device)
    args = (k, v, keys, values, taken, words, lengths, words.shape[2], tk)
    meta = {"SCOPES": words.shape[1], "D": d, "BLOCK_K": 32}
    _taken_rows_kernel((launch.cdiv(tk, 32), g, b), args, meta, num_warps=4)
    return keys, values, taken


def folded(x: Tensor, first: int, rows: int, groups: int) -> Tensor:
    """Queries of a slab in float32, [B * G, heads of a group * rows, D]."""
    b, h, _, d = x.shape
    return x[:, :, first : first + rows].float().reshape(b * groups, h // groups * rows, d)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, words: Tensor, lengths: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Tq, D] in memory as [B, Tq, H, D], lse [B, H, Tq]) of contiguous words, none of them empty."""
    b, h, tq, d = q.shape
    g, tk = k.shape[1:3]
    out = q.new_empty(b, tq, h, d)
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    keys, values, _ = taken_rows(k, v, words, lengths)
    plan = list(slabs(q, words, lengths, causal))
    scratch = lse.new_empty(b * h * max(rows * columns for _, rows, columns in plan))
    meta = {"SCOPES": words.shape[1], "CAUSAL": causal, **TILE}
    with autocast.disabled(q.device):
        for first, rows, columns in plan:
            s = scratch[: b * h * rows * columns].view(b * g, h // g * rows, columns)
            torch.bmm(folded(q, first, rows, g), keys[:, :columns].transpose(1, 2), out=s)
            args = (s, lse, words.view(torch.int32), lengths, first, rows, columns, tq, tk, scale)
            _dense_softmax_kernel((launch.cdiv(rows, TILE["BLOCK_M"]), h, b), args, meta, num_warps=8)
            o = torch.bmm(s, values[:, :columns])
            out[:, first : first + rows] = o.view(b, h, rows, d).transpose(1, 2)
    return out.transpose(1, 2), lse


def dense_attention_bwd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Tensor,
    words: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and in float32 of k and v; stats are `row_statistics`."""
    b, h, tq, d = q.shape
    g, tk = k.shape[1:3]
    dq = q.new_empty(q.shape)
    dkv = stats.new_empty(2, b * g, tk, d)
    dk, dv = dkv
    keys, values, taken = taken_rows(k, v, words, lengths)
    plan = list(slabs(q, words, lengths, causal))
    scratch = stats.new_empty(2, b * h * max(rows * columns for _, rows, columns in plan))
    meta = {"SCOPES": words.shape[1], "CAUSAL": causal, **TILE}
    with autocast.disabled(q.device):
        for i, (first, rows, columns) in enumerate(plan):
            shape = (b * g, h // g * rows, columns)
            s, dp = (x[: b * h * rows * columns].view(shape) for x in scratch)
            queries, grads = (folded(x, first, rows, g) for x in (q, grad))
            torch.bmm(queries, keys[:, :columns].transpose(1, 2), out=s)
            torch.bmm(grads, values[:, :columns].transpose(1, 2), out=dp)
            args = (s, dp, stats, words.view(torch.int32), lengths, first, rows, columns, tq, tk, scale)
            _dense_gradient_kernel((launch.cdiv(rows, TILE["BLOCK_M"]), h, b), args, meta, num_warps=8)
            dq[:, :, first : first + rows] = torch.bmm(dp, keys[:, :columns]).view(b, h, rows, d)
            # The first slab's last query sees all keys, so that its products are what the others are added to.
            assert i or columns == tk
            dv[:, :columns].baddbmm_(s.transpose(1, 2), grads, beta=min(i, 1))
            dk[:, :columns].baddbmm_(dp.transpose(1, 2), queries, beta=min(i, 1))
    # A query that is NaN would reach keys that nobody takes: 0 times NaN again.
    dk, dv = torch.where(taken[..., None], dkv.view(2, *k.shape), 0)
    return dq, dk, dv


_SLAB = {
    "words_ptr": "*i32", "lengths_ptr": "*i32", **dict.fromkeys(("first", "rows", "columns", "Tq", "Tk"), "i32"),
    "scale": "fp32",
}  # fmt: skip
_META = {"SCOPES": 1, "CAUSAL": True, **TILE}
EXAMPLES = {
    _taken_rows_kernel: {
        "signature": {
            **dict.fromkeys(("k_ptr", "v_ptr", "keys_ptr", "values_ptr"), "*fp32"), "taken_ptr": "*i1",
            "words_ptr": "*i64", "lengths_ptr": "*i32", "N": "i32", "Tk": "i32",
        },
        "constexprs": {"SCOPES": 1, "D": 128, "BLOCK_K": 32},
        "num_warps": 4,
    },
    _dense_softmax_kernel: {
        "signature": {"s_ptr": "*fp32", "lse_ptr": "*fp32", **_SLAB},
        "constexprs": _META,
        "num_warps": 8,
    },
    _dense_gradient_kernel: {
        "signature": {"s_ptr": "*fp32", "dp_ptr": "*fp32", "rows_ptr": "*fp32", **_SLAB},
        "constexprs": _META,
        "num_warps": 8,
    },
}  # fmt: skip
