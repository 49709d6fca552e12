"""Block-sparse attention, forward, through pointers: every dtype, GPU, head and block size, with whatever is added to
the scores.

A program owns BLOCK_M queries of one head and walks the keys of the blocks that their block row lists, laid end to end,
BLOCK_N a step: small blocks share a step, large ones take several. A step gathers its keys and values by row, scores
them, and folds them into a running softmax in base 2. A bias (added; or boolean, True takes part) is read tile by tile,
from a dense tensor that may be broadcast, or from blocks in the order of the lists. The products of a query with
relative positions come ready, R numbers a term, from which each score picks one.

Few queries that meet many keys are split: program (tile, part) takes every SPLITS-th step and leaves its weighted mean
and log-sum-exp in float32; `_attention_join_kernel` joins them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.philox import dropout_weights
from gossamer.blocksparse.attention_lists import INV_LN2, Config, Tile, config_of, meeting, owner_of, row_of
from gossamer.blocksparse.attention_path import Problem, choose_path, empty_like, problem_of, splits_of
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd


@triton.jit
def listed(blocks_ptr, begin, count, at, BLOCK: tl.constexpr):
    """(row in the matrix, entry of the list, whether there is one) of positions in listed blocks laid end to end."""
    exists = at < count * BLOCK
    entry = begin + at // BLOCK
    block = tl.load(blocks_ptr + entry, mask=exists, other=0)
    return block * BLOCK + at % BLOCK, entry, exists


@triton.jit
def load_rows(x_ptr, base, rows, exists, D, BLOCK_D: tl.constexpr):
    """Rows of a matrix with D contiguous columns."""
    inner = tl.arange(0, BLOCK_D)
    at = (base + rows)[:, None] * D + inner[None, :]
    return tl.load(x_ptr + at, mask=exists[:, None] & (inner < D)[None, :], other=0.0)


@triton.jit
def token_major(batch, head, T, H, lines):
    """(base, rows) of lines of one head in `[B, T, H, D]`, which is how results lie in memory: a projection that
    follows, or the gradient of one that came before, then has nothing to copy."""
    return batch.to(tl.int64) * T * H + head, lines * H


@triton.jit
def store_rows(x_ptr, base, rows, exists, D, x, BLOCK_D: tl.constexpr):
    inner = tl.arange(0, BLOCK_D)
    at = (base + rows)[:, None] * D + inner[None, :]
    tl.store(x_ptr + at, x, mask=exists[:, None] & (inner < D)[None, :])


@triton.jit
def dot(a, b, CONFIG: tl.constexpr):
    PRECISION: tl.constexpr = CONFIG.precision
    if CONFIG.upcast:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def bias_start(pair, H, Tq, Tk, CONFIG: tl.constexpr):
    """Where in a dense bias, contiguous, the matrix of a batch and a head begins."""
    matrix = pair.to(tl.int64) * 0
    if CONFIG.bias_head:
        matrix += pair % H
        if CONFIG.bias_batch:
            matrix += (pair // H).to(tl.int64) * H
    elif CONFIG.bias_batch:
        matrix += pair // H
    return matrix * Tk * (Tq if CONFIG.bias_query else 1)


@triton.jit
def relation(places_ptr, term, pair, query, key, sizes, CONFIG: tl.constexpr):
    """Which of a term's relative positions a key has to a query, the outermost for all beyond."""
    B, H, _, Tq, Tk, _ = sizes
    at = places_ptr + (term * B + pair // H).to(tl.int64) * (Tq + Tk)
    of_query = tl.load(at + query, mask=query < Tq, other=0)
    of_key = tl.load(at + Tq + key, mask=key < Tk, other=0)
    # A difference of two positions may be beyond int32.
    first, last = of_query - CONFIG.window // 2, of_query + CONFIG.window // 2
    return tl.minimum(tl.maximum(of_key, first), last) - first


@triton.jit
def taken(elements_ptr, entry, query, key, inside, capacity, CONFIG: tl.constexpr):
    """`inside`, without the pairs that their block leaves out. Most blocks leave out none, and have no words."""
    start = tl.load(elements_ptr + entry, mask=entry < capacity, other=0)
    if tl.max(tl.max(start, 1), 0) > 0:
        at = start + query % CONFIG.block_q * ((CONFIG.block_k + 31) // 32) + key % CONFIG.block_k // 32
        word = tl.load(elements_ptr + at, mask=inside & (start > 0), other=-1)
        inside = inside & ((word >> (key % CONFIG.block_k % 32) & 1) != 0)
    return inside


@triton.jit
def scores(s, added, pair, query, key, entry, inside, shift, scale, sizes, CONFIG: tl.constexpr):
    """Scores, in base 2, with what is added to them; -inf where query and key do not meet. Queries and keys lie along
    either axis."""
    bias_ptr, relative_ptr, places_ptr, elements_ptr = added
    _, H, _, Tq, Tk, capacity = sizes
    if CONFIG.causal:
        inside = inside & (key <= query + shift)
    if elements_ptr is not None:
        inside = taken(elements_ptr, entry, query, key, inside, capacity, CONFIG)
    TERMS: tl.constexpr = CONFIG.terms
    for term in tl.static_range(TERMS):
        step = relation(places_ptr, term, pair, query, key, sizes, CONFIG)
        at = (pair.to(tl.int64) * Tq + query) * (TERMS * CONFIG.window) + (term * CONFIG.window + step)
        s += tl.load(relative_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s *= scale
    if CONFIG.bias != "none":
        if CONFIG.bias == "blocks":
            within = query % CONFIG.block_q * CONFIG.block_k + key % CONFIG.block_k
            at = entry.to(tl.int64) * (CONFIG.block_q * CONFIG.block_k) + within
        elif CONFIG.bias_query:
            at = bias_start(pair, H, Tq, Tk, CONFIG) + query.to(tl.int64) * Tk + key
        else:
            at = bias_start(pair, H, Tq, Tk, CONFIG) + query * 0 + key
        bias = tl.load(bias_ptr + at, mask=inside, other=0)
        if bias_ptr.dtype.element_ty == tl.int8:
            inside = inside & (bias != 0)
        else:
            s += bias.to(tl.float32) * 1.4426950408889634
    return tl.where(inside, s, float("-inf"))


@launch.kernel(do_not_specialize=["capacity", "drop"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, relative_ptr, places_ptr, out_ptr, lse_ptr, offsets_ptr, columns_ptr, lengths_ptr,
    elements_ptr, seed_ptr, B, H, GROUP, Tq, Tk, capacity, scale, drop,
    CONFIG: tl.constexpr,
):  # fmt: skip
    added = (bias_ptr, relative_ptr, places_ptr, elements_ptr)
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    part = tl.program_id(0) % CONFIG.splits
    tile, pair = owner_of(tl.program_id(0) // CONFIG.splits, Tq, CONFIG)
    begin, count, limit, shift, lost = row_of((offsets_ptr, columns_ptr), lengths_ptr, tile, pair, sizes, CONFIG)
    lines = tile * CONFIG.block_m + tl.arange(0, CONFIG.block_m)
    exists = lines < Tq
    meet = meeting(lines, limit, shift, lengths_ptr, Tq, CONFIG)
    q = load_rows(q_ptr, pair.to(tl.int64) * Tq, lines, meet, CONFIG.d, CONFIG.block_d)
    keys = (pair // GROUP).to(tl.int64) * Tk
    m = tl.full([CONFIG.block_m], float("-inf"), tl.float32)
    total = tl.full([CONFIG.block_m], 0.0, tl.float32)
    acc = tl.full([CONFIG.block_m, CONFIG.block_v], 0.0, tl.float32)
    for first in range(part * CONFIG.block_n, count * CONFIG.block_k, CONFIG.splits * CONFIG.block_n):
        at = first + tl.arange(0, CONFIG.block_n)
        key, entry, present = listed(columns_ptr, begin, count, at, CONFIG.block_k)
        present = present & (key < limit)
        k = load_rows(k_ptr, keys, key, present, CONFIG.d, CONFIG.block_d)
        s = scores(
            dot(q, tl.trans(k), CONFIG), added, pair, lines[:, None], key[None, :], entry[None, :],
            meet[:, None] & present[None, :], shift, scale, sizes, CONFIG,
        )  # fmt: skip
        most = tl.maximum(m, tl.max(s, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(m - base)
        total = total * factor + tl.sum(p, 1)
        m = most
        if seed_ptr is not None:
            p *= dropout_weights(seed_ptr, pair, lines[:, None], key[None, :], drop)
        v = load_rows(v_ptr, keys, key, present, CONFIG.dv, CONFIG.block_v)
        acc = acc * factor[:, None] + dot(p.to(v.dtype), v, CONFIG)
    # A row without keys has zeros; one with NaN keeps it.
    total = tl.where(lost, float("nan"), total)
    out = acc * tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    line = (pair * CONFIG.splits + part).to(tl.int64) * Tq
    if CONFIG.splits > 1:
        store_rows(out_ptr, line, lines, exists, CONFIG.dv, out, CONFIG.block_v)
    else:
        base, rows_at = token_major(pair // H, pair % H, Tq, H, lines)
        store_rows(out_ptr, base, rows_at, exists, CONFIG.dv, out, CONFIG.block_v)
    tl.store(lse_ptr + (line + lines), lse, mask=exists)


@launch.kernel
def _attention_join_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, H, Tq, D, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (query, head): the mean of its parts' results, weighted by what their weights sum to."""
    pair = tl.program_id(0) // Tq
    line = tl.program_id(0) % Tq
    parts = (pair.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * Tq + line
    lse = tl.load(partial_lse_ptr + parts)
    most = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weights, 0)
    inner = tl.arange(0, BLOCK_D)
    values = tl.load(partial_ptr + parts[:, None] * D + inner[None, :], mask=(inner < D)[None, :], other=0.0)
    out = tl.sum(values * weights[:, None], 0) * tl.where(total == 0, 0.0, 1.0 / total)
    base, row = token_major(pair // H, pair % H, Tq, H, line)
    tl.store(out_ptr + (base + row) * D + inner, out, mask=inner < D)
    at = pair.to(tl.int64) * Tq + line
    tl.store(lse_ptr + at, tl.where(total == 0, float("-inf"), most + tl.log(total)))


def tile_of(d: int, size: int, block: tuple[int, int], terms: int = 0) -> Tile:
    """The largest tile that registers and the smallest shared memory, 64 KiB on gfx942, hold."""
    wide = launch.next_power_of_2(d) * size
    if wide <= 256:
        return Tile(min(64, block[0]), 64, 4, 2)
    return Tile(min(32 if wide > 512 or terms else 64, block[0]), 32 if wide <= 512 else 16, 4, 1)


def inner_of(d: int) -> int:
    """Inner dimension for which `tuning.dot_precision` chooses: a long one, whose float32 products are three TF32 ones.

    They round by 2^-22, as the exponential between an attention's two products does. Float32 arithmetic on a tile of 64
    x 128 wants more registers than a thread has: one H200 took 942 us for what SDPA does in 252 (T 2,688, D 128). At D
    256 three products spill, and it does not.
    """
    return 1 << 14 if d <= 128 else d


@dataclass(frozen=True)
class Operands:
    """The operands of the kernels of one attention, contiguous, and the config that these give."""

    problem: Problem
    lists: Lists
    inputs: tuple[Tensor | None, ...]
    lengths: Tensor | None
    seed: Tensor | None
    drop: int
    config: Config

    @property
    def masks(self) -> tuple[Tensor | None, ...]:
        """The tensors that say which weights count, as kernels take them before the sizes."""
        return self.lengths, self.lists.elements, self.seed

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The numbers, as kernels take them last."""
        p = self.problem
        return p.b, p.h, p.group, p.tq, p.tk, self.lists.form.capacity, p.scale * INV_LN2, self.drop


def operands(call: BlocksparseAttention | BlocksparseAttentionBwd, tile_of: Callable[..., Tile]) -> Operands:
    """The operands of an attention as its kernels read them: q, k, v, bias, relative and places."""
    p, q, bias, places = problem_of(call), call.q, call.bias, call.places
    kind, own = "none", (False, False, False)
    if bias is not None:
        bias = bias.view(torch.int8) if bias.dtype is torch.bool else bias
        kind = "blocks" if bias.dim() == 3 else "dense"
        if kind == "dense":
            # A bias that is broadcast over queries is read from one row.
            bias = bias[:, :, :1] if bias.stride(2) == 0 else bias
            own = bias.shape[0] > 1, bias.shape[1] > 1, bias.shape[2] > 1
        bias = bias.contiguous()
    terms = (0, 0)
    if call.relative is not None and places is not None:
        terms = places.shape[0], call.relative.shape[-1] // places.shape[0]
    tile = tile_of(max(p.d, p.dv), q.element_size(), p.block, terms[0])
    precision = tuning.dot_precision(q, inner_of(p.d))
    config = config_of(p, tile, kind, *own, *terms, 1, precision["PRECISION"], precision["UPCAST"])
    inputs = q.contiguous(), call.k.contiguous(), call.v.contiguous(), bias, call.relative, places
    return Operands(p, Lists(call.layout, call.form), inputs, call.lengths, call.seed, call.drop, config)


def launch_attention_fwd(given: Operands, splits: int = 1) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp); the keys split into as many parts as asked for, a power of two."""
    p, q, lists = given.problem, given.inputs[0], given.lists
    assert q is not None
    config = replace(given.config, splits=splits)
    # At full width a thread has no registers left for the numbers of dropout.
    if given.seed is not None and max(config.block_d, config.block_v) * q.element_size() >= 256:
        config = replace(config, block_n=min(config.block_n, 32))
    tiles = p.rows * (p.block[0] // config.block_m)
    out, lse = empty_like(q, p.dv), q.new_empty(q.shape[:-1], dtype=torch.float32)
    into: tuple[Tensor, ...] = out, lse
    if splits > 1:
        parts = p.b * p.h * splits
        into = tuple(q.new_empty(size, dtype=torch.float32) for size in ((parts, p.tq, p.dv), (parts, p.tq)))
    args = (*given.inputs, *into, lists.row_offsets, lists.col_indices, *given.masks, *given.sizes)
    _attention_fwd_kernel((tiles * splits * p.b * p.h, 1, 1), args, {"CONFIG": config}, **config.options)
    if splits > 1:
        meta = {"SPLITS": splits, "BLOCK_D": config.block_v}
        args = (*into, out, lse, p.h, p.tq, p.dv)
        _attention_join_kernel((p.b * p.h * p.tq, 1, 1), args, meta, num_warps=1)
    return out, lse


def attention(call: BlocksparseAttention) -> tuple[Tensor, Tensor]:
    """Operator `blocksparse_attention`."""
    q, v = call.q, call.v
    if q.shape[:3].numel() == 0:
        return empty_like(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
    path = choose_path(call)
    if path == "hopper":
        from gossamer.blocksparse._gluon import attention as hopper

        return hopper.launch_attention_fwd(call)
    given = operands(call, tile_of)
    return launch_attention_fwd(given, splits_of(given.problem, q.device) if path == "split" else 1)


EXAMPLE = Config(64, 64, *Tile(64, 64)[:5], 2, 128, 128, 128, 128, True, True, True, "dense", True, True, True, 1, 129)
"""The case of the ahead-of-time test: everything that can be added to the scores."""

EXAMPLES = {
    _attention_fwd_kernel: {"bias_ptr": "*bf16", "seed_ptr": "*i64", "CONFIG": replace(EXAMPLE, block_n=32)},
    _attention_join_kernel: {"SPLITS": 8, "BLOCK_D": 128, "num_warps": 1},
}
