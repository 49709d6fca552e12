"""Gradient of what queries make of relative positions, `[B, H, Tq, terms * R]`.

A program owns BLOCK_M queries of one head and BLOCK_R of a term's R positions, walks the keys of its block row's list
and computes the weights' gradients again, as the other backward kernels do. To each of its positions it adds, row by
row, the gradients of the keys that stand there: a sum over the tile with all others masked. It visits only the
positions that occur between a tile of queries and a tile of keys, and leaves a tile at once where none of them is its
own. Far from the diagonal of a sequence that is a single one, the outermost. Nothing is added by atomics, so that the
sums do not depend on the order in which programs run.
"""

from dataclasses import replace

import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse._triton.attention import (
    EXAMPLE,
    Operands,
    dot,
    last_of,
    listed,
    load_rows,
    load_stats,
    matrix_of,
    met,
    reached,
    relation,
    scores,
    span,
)

CHUNK = 64
"""Most positions of a program."""


@launch.kernel(do_not_specialize=["capacity"])
def _attention_drelative_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, relative_ptr, places_ptr, grad_ptr, stats_ptr, drelative_ptr, offsets_ptr,
    columns_ptr, lengths_ptr, elements_ptr, B, H, GROUP, Tq, Tk, D, capacity, scale, CONFIG: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = CONFIG.window
    BLOCK_Q: tl.constexpr = CONFIG.block_q
    BLOCK_K: tl.constexpr = CONFIG.block_k
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_D: tl.constexpr = CONFIG.block_d
    TERMS: tl.constexpr = CONFIG.terms
    rows = tl.cdiv(Tq, BLOCK_Q)
    tiles = rows * (BLOCK_Q // BLOCK_M)
    chunks = tl.cdiv(R, BLOCK_R)
    tile = tl.program_id(0) % tiles
    first_of = tl.program_id(0) // tiles % chunks * BLOCK_R
    term = tl.program_id(0) // (tiles * chunks) % TERMS
    pair = tl.program_id(0) // (tiles * chunks * TERMS)
    batch = pair // H
    head = pair % H
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = lines < Tq
    row = matrix_of(batch, head, H, CONFIG) * rows + tile * BLOCK_M // BLOCK_Q
    begin, count, lost = span(offsets_ptr, row, last_of(B, H, rows, CONFIG), capacity)
    limit, shift = reached(lengths_ptr, batch, Tq, Tk)
    count = met(columns_ptr, lengths_ptr, begin, count, tile, limit, shift, CONFIG)
    queries = pair.to(tl.int64) * Tq
    keys = (batch * (H // GROUP) + head // GROUP).to(tl.int64) * Tk
    q = load_rows(q_ptr, queries, lines, exists, D, BLOCK_D)
    grad = load_rows(grad_ptr, queries, lines, exists, D, BLOCK_D)
    lse, delta = load_stats(stats_ptr, pair, lines, exists, Tq, 64)
    own = first_of + tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(0, count * BLOCK_K, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        key, entry, present = listed(columns_ptr, begin, count, at, BLOCK_K)
        present = present & (key < limit)
        step = relation(places_ptr, term, batch, B, lines[:, None], key[None, :], Tq, Tk, R)
        both = exists[:, None] & present[None, :]
        low = tl.maximum(tl.min(tl.min(tl.where(both, step, R), 1), 0), first_of)
        high = tl.minimum(tl.max(tl.max(tl.where(both, step, -1), 1), 0) + 1, first_of + BLOCK_R)
        if low < high:
            k = load_rows(k_ptr, keys, key, present, D, BLOCK_D)
            v = load_rows(v_ptr, keys, key, present, D, BLOCK_D)
            s = scores(
                dot(q, tl.trans(k), CONFIG), bias_ptr, relative_ptr, places_ptr, elements_ptr, pair, B, H,
                lines[:, None], key[None, :], entry[None, :], both, Tq, Tk, shift, capacity, scale, CONFIG,
            )  # fmt: skip
            ds = tl.exp2(s - lse[:, None]) * (dot(grad, tl.trans(v), CONFIG) - delta[:, None])
            for position in range(low, high):
                there = tl.sum(tl.where(step == position, ds, 0.0), 1)
                acc += tl.where((own == position)[None, :], there[:, None], 0.0)
    acc = tl.where(lost, float("nan"), acc * (scale * 0.6931471805599453))
    to = (queries + lines)[:, None] * (TERMS * R) + (term * R + own)[None, :]
    tl.store(drelative_ptr + to, acc, mask=exists[:, None] & (own < R)[None, :])


def launch_attention_drelative(given: Operands, grad: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the operand `relative`."""
    p, config, lists, relative = given.problem, given.config, given.lists, given.inputs[4]
    assert relative is not None
    drelative = relative.new_empty(relative.shape)
    wide = min(CHUNK, launch.next_power_of_2(config.window))
    args = (*given.inputs, grad, stats, drelative, lists.row_offsets, lists.col_indices, *given.sizes)
    tiles = p.rows * (p.block[0] // config.block_m)
    grid = (tiles * launch.cdiv(config.window, wide) * config.terms * p.b * p.h, 1, 1)
    meta = {"CONFIG": config, "BLOCK_R": wide}
    _attention_drelative_kernel(grid, args, meta, **config.options)
    return drelative


EXAMPLES = {
    _attention_drelative_kernel: {
        "bias_ptr": "*bf16", "CONFIG": replace(EXAMPLE, block_n=32), "BLOCK_R": CHUNK, "num_stages": 1,
    },
}  # fmt: skip
