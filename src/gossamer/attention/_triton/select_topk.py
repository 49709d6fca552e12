"""From the indexer's inputs to words of selected keys, slab by slab, never holding [Tq, Tk].

A score is stored as a *key*: an int16 from 1 to 31,742 that divides the range from 0 to the sum of the query's gates
evenly, 8 to 15 times as fine as a float16 near the largest, or for the activation "relu" has a score's upper bits (see
`key_of`). 0 is a key that the query does not see, 31,743 is NaN, and 31,744 stands for the always-kept keys. As bit
patterns of float16 these order like the integers they are (the largest is infinity), so that one `set.ge.f16x2`
compares two. A slab of rows is taken through three kernels:

1. `_index_keys_kernel` scores it: a program owns (64 queries, every PARTS-th tile of keys), the heads' queries held,
   and is bound by one `tanh.approx` a head and key, or with "relu" by products. Hopper has a kernel of its own for many
   keys, in `_gluon`.
2. `threshold` finds each row's k-th largest key and, for ties, the last column at which that key is taken.
3. `_take_kernel` compares 64 queries' keys with their thresholds, two keys an instruction: a thread owns some columns
   and walks the rows, 16 bytes of each and some rows at a time, so that nothing passes between threads, and 16 rows of
   a pair of columns fill an integer.

On Hopper long rows go through `candidates` first. The three kernels then run for blocks that it marks.

With UNIT 4 a column of a slab is four neighbouring keys: the largest of their keys is stored, everything until the
words is about columns, and a word is written for each key, without the queries that do not see it.

Whatever the slab, a row's result depends on that row alone.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.compiling import together
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.attention import levels
from gossamer.attention._triton import candidates
from gossamer.attention._triton._indexer import (
    activated,
    approximate_tanh,
    in_units,
    load_bias,
    load_gates,
    load_tile,
    valid_keys,
    visible_keys,
)
from gossamer.attention._triton._products import rows_product, stages_of
from gossamer.attention._triton.adaptive import rows_k
from gossamer.attention._triton.few_rows import find_in_segments
from gossamer.attention._triton.indexer_scores import check_width, fast, kernel_activation
from gossamer.attention._triton.threshold import find_thresholds, load_words, reaching_both
from gossamer.attention.records import SelectTopk

LEVELS, CLOSED = tl.constexpr(levels.LEVELS), tl.constexpr(levels.CLOSED)
ZERO, TINY = tl.constexpr(levels.ZERO), tl.constexpr(levels.TINY)
FIRST_BITS, STEP_BITS = tl.constexpr(levels.FIRST_BITS), tl.constexpr(levels.STEP_BITS)
MOST_HEADS = 128
"""Heads of a query, at most, that are the rows of one product."""
COLUMNS = 128
"""A slab's rows are this many keys apart, or a multiple: a tile of scores writes so many."""


@triton.jit
def folded(total, ACTIVATION: tl.constexpr):
    """(factor of the gates, key of a score of 0, factor of products and biases) of queries whose gates sum to `total`.
    A query all of whose gates are closed scores 0 everywhere."""
    norm = tl.where(total < CLOSED, 0.0, (1.0 if ACTIVATION == "relu" else LEVELS) / total)
    if ACTIVATION == "relu":
        return norm, 0.0 * norm, 1.0
    elif ACTIVATION == "tanh":
        # sigmoid(x) = (1 + tanh(x / 2)) / 2: the constant terms are added once.
        return 0.5 * norm, 1.0 + 0.5 * norm * total, 0.5
    else:
        return norm, 1.0 + 0.0 * norm, 1.0


@triton.jit
def unfolded(x, ACTIVATION: tl.constexpr):
    """The activation of x, or tanh where `folded` has taken it for the sigmoid."""
    return approximate_tanh(x) if ACTIVATION == "tanh" else activated(x, ACTIVATION)


@triton.jit
def key_of(score, ACTIVATION: tl.constexpr):
    """The key of a score, in the low bits: for "relu" the upper bits of its magnitude plus TINY, either
    side of ZERO."""
    if ACTIVATION == "relu":
        bits = score.to(tl.int32, bitcast=True)
        steps = (tl.abs(score) + TINY).to(tl.int32, bitcast=True) - FIRST_BITS
        steps = tl.minimum(steps >> STEP_BITS, ZERO - 1)
        return tl.where(score == score, ZERO + tl.where(bits < 0, -steps, steps), 31743)
    else:
        # The GPU's smaller of NaN and a number is the number.
        score = tl.minimum(score, 31743.0) if ACTIVATION == "tanh" else tl.where(score == score, score, 31743.0)
        # Adding 2^23 rounds to an integer, in the low bits.
        return (score + 8388608.0).to(tl.int32, bitcast=True)


@triton.jit
def store_keys(out, key, at, UNIT: tl.constexpr):
    """Stores keys [rows, keys] from key `at` on as columns of rows that begin at `out` [rows, 1]."""
    M: tl.constexpr = key.shape[0]
    N: tl.constexpr = key.shape[1] // UNIT
    if UNIT > 1:
        key = tl.max(tl.reshape(key, [M, N, UNIT]), axis=2).to(tl.int16)
    tl.store(out + (at // UNIT + tl.arange(0, N))[None, :], key)


@launch.kernel
def _index_keys_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, keys_ptr, stride_qb, stride_qh, stride_qt, stride_kb,
    first, Tq, padded, Tk, stride, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys, BLOCK_M rows of the slab), the longest rows first."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    HELD: tl.constexpr = HEADS * BLOCK_D <= 512 and q_ptr.dtype.element_ty != tl.float32
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = ((first + block * BLOCK_M) // padded).to(tl.int64)
    rows = (first + block * BLOCK_M) % padded + tl.arange(0, BLOCK_M)
    visible = visible_keys(rows, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    q_ptr += batch * stride_qb
    k_ptr += batch * stride_kb
    w_ptr += batch * Tq * HEADS
    total = tl.zeros([BLOCK_M], tl.float32)
    for h in range(HEADS):
        total += tl.abs(load_gates(w_ptr, rows, h, Tq, HEADS, ACTIVATION))
    norm, lowest, part = folded(total, ACTIVATION)
    scale *= part
    queries = ()
    weights = ()
    if HELD:
        for h in tl.static_range(HEADS):
            queries = queries + (load_tile(q_ptr + tl.cast(h, tl.int64) * stride_qh, rows, stride_qt, Tq, D, BLOCK_D),)
            weights = weights + (load_gates(w_ptr, rows, h, Tq, HEADS, ACTIVATION) * norm,)
    out = keys_ptr + (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * stride
    least = tl.min(tl.where(rows < Tq, visible, Tk), axis=0)
    end = tl.max(visible, axis=0)
    if UNIT > 1:
        # Readers of columns take 8 at once.
        end = (end + 8 * UNIT - 1) // (8 * UNIT) * (8 * UNIT)
    for at in range(tl.program_id(0) * BLOCK_N, end, tl.num_programs(0) * BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, keys, D, Tk, D, BLOCK_D)
        score = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + lowest[:, None]
        if HELD:
            for h in tl.static_range(HEADS):
                x = tl.dot(queries[h], k.T, input_precision=PRECISION) * scale + load_bias(bias_ptr, h) * part
                score += weights[h][:, None] * unfolded(x, ACTIVATION)
        else:
            for h in range(HEADS):
                of_head = q_ptr + tl.cast(h, tl.int64) * stride_qh
                q = load_tile(of_head, rows, stride_qt, Tq, D, BLOCK_D)
                x = rows_product(q, k, of_head, rows, stride_qt, Tq, k_ptr, keys, Tk, D, PRECISION)
                x = x * scale + load_bias(bias_ptr, h) * part
                weight = load_gates(w_ptr, rows, h, Tq, HEADS, ACTIVATION) * norm
                score += weight[:, None] * unfolded(x, ACTIVATION)
        key = key_of(score, ACTIVATION).to(tl.int16)
        if at + BLOCK_N > least:
            key = tl.where(keys[None, :] < visible[:, None], key, 0).to(tl.int16)
        store_keys(out, key, at, UNIT)


@launch.kernel
def _index_keys_of_few_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, keys_ptr, stride_qb, stride_qh, stride_qt, stride_kb,
    first, Tq, padded, Tk, stride, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (query of the slab, part of the keys): a query's heads are the rows of one product."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(D, 16))
    BLOCK_H: tl.constexpr = triton.next_power_of_2(max(HEADS, 16))
    row = tl.program_id(0) // Tq * padded + tl.program_id(0) % Tq
    batch, t = ((first + row) // padded).to(tl.int64), (first + row) % padded
    visible = visible_keys(t, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    head = tl.minimum(tl.arange(0, BLOCK_H), HEADS - 1)
    held = tl.arange(0, BLOCK_H) < HEADS
    gates = load_gates(w_ptr + batch * Tq * HEADS, t + tl.zeros([BLOCK_H], tl.int32), head, Tq, HEADS, ACTIVATION)
    gates = tl.where(held, gates, 0.0)
    norm, lowest, part = folded(tl.sum(tl.abs(gates), axis=0), ACTIVATION)
    bias = tl.zeros([BLOCK_H], tl.float32) + load_bias(bias_ptr, head) * part
    q_ptr += batch * stride_qb + t.to(tl.int64) * stride_qt
    q = load_tile(q_ptr, head, stride_qh, HEADS, D, BLOCK_D)
    k_ptr += batch * stride_kb
    end = visible
    if UNIT > 1:
        # Readers of columns take 8 at once.
        end = (end + 8 * UNIT - 1) // (8 * UNIT) * (8 * UNIT)
    for at in range(tl.program_id(1) * BLOCK_N, end, tl.num_programs(1) * BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, keys, D, Tk, D, BLOCK_D)
        x = rows_product(q, k, q_ptr, head, stride_qh, HEADS, k_ptr, keys, Tk, D, PRECISION)
        x = x * (scale * part) + bias[:, None]
        score = lowest + tl.sum((gates * norm)[:, None] * tl.where(held[:, None], unfolded(x, ACTIVATION), 0.0), axis=0)
        key = tl.where(keys < visible, key_of(score, ACTIVATION), 0).to(tl.int16)
        store_keys(keys_ptr + row.to(tl.int64) * stride + tl.zeros([1, 1], tl.int64), key[None, :], at, UNIT)


@triton.jit
def take_halves(
    keys_ptr, threshold_ptr, last_ptr, row, t, begin, at, stride, length, Tq, ahead, window, sinks,
    UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr, EVERY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """int32 of pairs `at` of columns: bit i says that query t + i, row `row` + i of the slab, takes the first column of
    the pair, bit 16 + i that it takes the second."""
    bits = tl.zeros(at.shape, tl.int32)
    bit = tl.full(at.shape, 0x10001, tl.int32)
    for part in range(0, 16, TOGETHER):
        rows = ()
        if not EVERY:
            # All are asked for before the first is looked at.
            for i in tl.static_range(TOGETHER):
                visible, kept = in_units(visible_keys(t + part + i, length, Tq, ahead), window, UNIT)
                row_ptr = keys_ptr + (row + part + i).to(tl.int64) * stride
                rows = rows + (load_words(row_ptr, at, visible, kept, sinks, FORCED),)
        for i in tl.static_range(TOGETHER):
            if EVERY:
                visible, _ = in_units(visible_keys(t + part + i, length, Tq, ahead), window, UNIT)
                taken = tl.where(2 * at < visible, 0xFFFF, 0) | tl.where(2 * at + 1 < visible, -0x10000, 0)
            else:
                last = tl.load(last_ptr + part + i)
                # Behind the last column at which the threshold itself is taken it is one higher.
                threshold = tl.load(threshold_ptr + part + i) + (begin > last).to(tl.int32)
                both = tl.zeros(at.shape, tl.int32) + (threshold | (threshold << 16))
                if (last >= begin) & (last < begin + 2 * at.shape[0]):
                    both += tl.where(2 * at > last, 0x10001, tl.where(2 * at == last, 0x10000, 0))
                taken = reaching_both(rows[i], both, PACKED)
            bits |= taken & bit
            bit <<= 1
    return bits


@launch.kernel
def _take_kernel(
    words_ptr, keys_ptr, lengths_ptr, threshold_ptr, last_ptr, flags_ptr, first, Tq, padded, Tk, stride, ahead, window,
    sinks, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
    EVERY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, ROWS rows of the slab). With EVERY the rows take whatever they see, and have no keys.
    Where there are marks, blocks without one keep their words."""
    begin = tl.program_id(0) * BLOCK
    at = begin // 2 + tl.arange(0, BLOCK // 2)
    row = tl.program_id(1) * ROWS
    block = ((first + row) // ROWS).to(tl.int64)
    if flags_ptr is not None:
        if tl.load(flags_ptr + block) == 0:
            return
    batch = (first + row) // padded
    t = (first + row) % padded
    length = valid_keys(lengths_ptr, batch, Tk)
    even = tl.zeros([BLOCK // 2], tl.int64)
    odd = tl.zeros([BLOCK // 2], tl.int64)
    if begin * UNIT < tl.max(visible_keys(t + tl.arange(0, ROWS), length, Tq, ahead), axis=0):
        for part in tl.static_range(ROWS // 16):
            bits = take_halves(
                keys_ptr, threshold_ptr + first + row + part * 16, last_ptr + first + row + part * 16, row + part * 16,
                t + part * 16, begin, at, stride, length, Tq, ahead, window, sinks, UNIT, FORCED, PACKED, EVERY,
                TOGETHER,
            )  # fmt: skip
            even |= (bits & 0xFFFF).to(tl.int64) << (16 * part)
            odd |= ((bits >> 16) & 0xFFFF).to(tl.int64) << (16 * part)
    column = 2 * at[:, None] + tl.arange(0, 2)[None, :]
    if UNIT == 1:
        tl.store(words_ptr + block * Tk + column, tl.join(even, odd), mask=column < Tk)
    else:
        key = column[:, :, None] * UNIT + tl.arange(0, UNIT)[None, None, :]
        # The first of the block's queries that sees a key; a shift by 64 is not defined.
        sees = key - tl.maximum(length - Tq, 0) - ahead + 1 - t
        seeing = tl.full(key.shape, -1, tl.int64) << tl.minimum(tl.maximum(sees, 0), 63).to(tl.int64)
        word = tl.where((sees < ROWS) & (key < length), tl.join(even, odd)[:, :, None] & seeing, 0)
        tl.store(words_ptr + block * Tk + key, word, mask=key < Tk)


TAKE, TAKE_ROWS = 256, 4
"""Columns of a program of `_take_kernel`, eight to a thread, and rows that it asks for at a time, of 16."""


class Slab(NamedTuple):
    """Rows of one launch, of all batch elements' padded rows; `columns` is 0 where they take all that they see."""

    first: int
    rows: int
    columns: int


def slab_plan(
    b: int, padded: int, tq: int, tk: int, causal: bool, unit: int, k: int, workspace: int, each: int
) -> list[Slab]:
    """Cuts the b * padded rows at multiples of `unit`; every query takes k keys or all that it sees. A column is `each`
    keys. `workspace` bytes are for the scores.

    Where a batch element fits, several share a slab. Otherwise slabs grow shorter as queries see more keys.
    """

    if tk <= k:
        return [Slab(0, b * padded, 0)]
    width = round_up(launch.cdiv(tk, each), COLUMNS)
    together = workspace // (2 * padded * width)
    if together > 0 and b > 1:
        return [Slab(i * padded, min(together, b - i) * padded, width) for i in range(0, b, together)]

    def columns(until: int) -> int:
        return round_up(launch.cdiv(min(tk, until + tk - tq), each), COLUMNS) if causal else width

    every = min(padded, max(0, (k - (tk - tq)) // unit * unit)) if causal else 0
    plan = []
    for start in range(0, b * padded, padded):
        if every:
            plan.append(Slab(start, every, 0))
        at = every
        while at < padded:
            rows = unit
            while at + rows < padded and 2 * (rows + unit) * columns(at + rows + unit) <= workspace:
                rows += unit
            plan.append(Slab(start + at, rows, columns(at + rows)))
            at += rows
    return plan


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return launch.cdiv(n, multiple) * multiple


LONG = 8192
"""Keys from which Hopper's own kernel scores: to describe its operands takes the host as long as fewer take the GPU."""


def choose_keys(call: "_Call", adaptive: str) -> Literal["candidates", "all"]:
    """Which keys of long rows are written: where Hopper's kernel scores, and no adaptive rule asks for all, those that
    may be among the highest."""
    if call.tiles is None or adaptive or not candidates.fits(call.rule[0], call.b * call.tq, call.tk):
        return "all"
    return "candidates"


def choose_scores(q: Tensor, k: Tensor, granularity: int) -> Literal["hopper", "general"]:
    """Which kernel scores. Both store the same keys, bit by bit."""
    if granularity > 1 or q.shape[2] <= 16 or k.shape[1] < LONG or not (fast(q) and tuning.hopper(q.device)):
        return "general"
    from gossamer.attention._gluon import select_topk as hopper

    return "hopper" if hopper.readable(q, k) else "general"


class _Call:
    """The launches of one call, slab by slab."""

    def __init__(self, call: SelectTopk) -> None:
        q, k, granularity = call.q, call.k, call.granularity
        self.q = q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous()
        # Keys stand one behind the other, as in a slice of a longer cache too.
        self.k = k if k.stride()[1:] == (k.shape[2], 1) else k.contiguous()
        self.w, self.bias, self.lengths = call.w, call.bias, call.lengths
        self.scored = call.scale, call.activation
        self.b, self.heads, self.tq, self.d = q.shape
        self.tk = k.shape[1]
        # A word's 64 queries, or as few as a product takes.
        self.unit = 64 if self.tq > 16 else 16
        self.padded = round_up(self.tq, self.unit)
        self.ahead = 1 if call.causal else self.tk + 1
        heads = max(16, launch.next_power_of_2(self.heads))
        # At most half the rows of products that 16 queries of each head are, or as many as Hopper takes at once.
        few = self.unit == 16 and (self.heads >= 64 or self.tq * heads <= 8 * self.heads)
        self.heads_as_rows = few and heads <= MOST_HEADS
        self.granularity = granularity
        self.rule = (call.top // granularity, call.window or 1 - granularity, launch.cdiv(call.sinks, granularity))
        rows = (self.b * self.padded,)
        self.threshold, self.last = (torch.empty(rows, dtype=torch.int32, device=q.device) for _ in range(2))
        self.words = torch.empty(self.b, 1, self.padded // self.unit, self.tk, dtype=torch.int64, device=q.device)
        self.packed = not INTERPRET and not torch.version.hip
        # Descriptors by which the copy engine reads queries and keys.
        self.tiles = None
        if choose_scores(self.q, self.k, granularity) == "hopper":
            from gossamer.attention._gluon import select_topk as hopper

            self.tiles = hopper.descriptors(self.q, self.k)

    def sizes(self, slab: Slab) -> tuple[int, ...]:
        return slab.first, self.tq, self.padded, self.tk, slab.columns, self.ahead

    def score(self, slab: Slab, keys: Tensor, flags: Tensor | None = None) -> None:
        if self.tiles is not None:
            from gossamer.attention._gluon import select_topk as hopper

            given = (self.w, self.bias, self.lengths, keys)
            sparing = hopper.Sparing(flags)
            hopper.launch_index_keys(self.tiles, given, slab.rows, self.sizes(slab), *self.scored, sparing)
            return
        rows, columns = self.unit, 64
        scale, activation = self.scored
        precision = tuning.dot_precision(self.q, self.d)["PRECISION"]
        meta = {"HEADS": self.heads, "D": self.d, "BLOCK_N": columns}
        meta |= {"UNIT": self.granularity, "PRECISION": precision, "ACTIVATION": kernel_activation(activation, self.q)}
        blocks = slab.rows // self.padded * self.tq if self.heads_as_rows else slab.rows // rows
        # Enough programs that the last wave is short.
        tiles = slab.columns * self.granularity // columns
        parts = max(1, min(tiles, launch.cdiv(6 * tuning.programs(self.q.device), blocks)))
        strides = (*self.q.stride()[:3], self.k.stride(0))
        args = (self.q, self.k, self.w, self.bias, self.lengths, keys, *strides, *self.sizes(slab), scale)
        if self.heads_as_rows:
            # An axis of programs but the first has at most 65,535.
            _index_keys_of_few_kernel((blocks, parts, 1), args, meta, num_warps=4, num_stages=stages_of(3, self.q))
        else:
            meta |= {"BLOCK_M": rows}
            _index_keys_kernel((parts, blocks, 1), args, meta, num_warps=4, num_stages=3)

    def find(self, slab: Slab, keys: Tensor, wanted: Tensor | None, flags: Tensor | None) -> None:
        given, found = (keys, self.lengths, wanted), (self.threshold, self.last)
        sizes, rule, packed, unit = self.sizes(slab), self.rule, self.packed, self.granularity
        if flags is not None or not find_in_segments(given, found, slab.rows, sizes, rule, packed, unit):
            find_thresholds(given, found, slab.rows, sizes, rule, packed, unit, flags)

    def take(self, slab: Slab, keys: Tensor | None, flags: Tensor | None = None) -> None:
        _, window, sinks = self.rule
        args = (self.words, keys, self.lengths, self.threshold, self.last, flags, *self.sizes(slab), window, sinks)
        meta = {"ROWS": self.unit, "BLOCK": TAKE, "UNIT": self.granularity, "PACKED": self.packed}
        meta |= {"FORCED": window > 0 or sinks > 0, "EVERY": keys is None, "TOGETHER": TAKE_ROWS}
        grid = (launch.cdiv(self.tk, TAKE * self.granularity), slab.rows // self.unit, 1)
        _take_kernel(grid, args, meta, num_warps=TAKE // 256)

    def take_candidates(self, slabs: list[Slab], room: Tensor) -> Tensor:
        """Writes the words of slabs of long rows, but of blocks of 64 rows that it marks in int32 `[blocks]`. `room`,
        int8, holds the keys of any of the slabs."""
        from gossamer.attention._gluon import select_topk as hopper

        tiles = self.tiles
        assert tiles is not None
        top, window, sinks = self.rule
        lists, sample = candidates.lists_of(top), candidates.sampled(self.k)
        sampled = hopper.descriptors(self.q, sample)
        width = round_up(sample.shape[1], COLUMNS)
        each = max(2 * width, 4 * (lists.entries + candidates.LISTS))
        room = room[-room.data_ptr() % candidates.ALIGNED :]
        flags = torch.zeros(len(self.threshold) // 64, dtype=torch.int32, device=self.q.device)
        # The entry in front of the first piece is the first guess of its rows, the same in each run.
        bound, unused = torch.full_like(self.threshold, levels.LEVELS // 2), torch.empty_like(self.last)
        given = (self.w, self.bias, self.lengths)
        for first, rows in candidates.cut(slabs, len(room) // each // 64 * 64):
            slab = Slab(first, rows, width)
            with span("select_topk/bounds"):
                keys = room[: 2 * width * rows].view(torch.int16)
                sparing = hopper.Sparing(unit=candidates.STRETCH)
                hopper.launch_index_keys(sampled, (*given, keys), rows, self.sizes(slab), *self.scored, sparing)
                given_keys, rule = (keys, self.lengths, None), (lists.reach, 1 - candidates.STRETCH, 0)
                args = (rows, self.sizes(slab), rule, self.packed, candidates.STRETCH)
                find_thresholds(given_keys, (bound, unused), *args)
            slab = Slab(first, rows, lists.entries)
            with span("select_topk/candidates"):
                entries, counts = room[: each * rows].view(torch.int32).split(lists.entries * rows)[:2]
                sparing = hopper.Sparing(bound=bound, counts=counts, parts=candidates.PARTS, kept=(window, sinks))
                hopper.launch_index_keys(tiles, (*given, entries), rows, self.sizes(slab), *self.scored, sparing)
                self.words.view(-1, self.tk)[first // 64 : (first + rows) // 64].zero_()
                found = (bound, self.threshold, self.last, flags)
                sizes = (first, self.tq, self.padded, self.tk, self.ahead)
                candidates.launch_candidates((entries, counts), found, self.words, self.lengths, rows, sizes, top)
        return flags


@together
def select_topk(given: SelectTopk) -> Tensor:
    """Operator `select_topk`."""
    q, rule, granularity = given.q, given.rule, given.granularity
    check_width("attention.select_topk", q.shape[3], q.element_size())
    call = _Call(given)
    if call.words.numel():
        sizes = (call.b, call.padded, call.tq, call.tk, given.causal, call.unit)
        plan = slab_plan(*sizes, given.k_min if rule else given.top, given.workspace, granularity)
        room = torch.empty(max(2 * slab.rows * slab.columns for slab in plan), dtype=torch.int8, device=q.device)
        flags: Tensor | None = None
        long = [slab for slab in plan if slab.columns > candidates.LEAST] if choose_keys(call, rule) != "all" else []
        if long:
            flags = call.take_candidates(long, room)
        for slab in plan:
            if not slab.columns:
                call.take(slab, None)
                continue
            keys = room[: 2 * slab.rows * slab.columns].view(torch.int16)
            of_slab = flags if slab in long else None
            with span("select_topk/scores"):
                call.score(slab, keys, of_slab)
            wanted = None
            if rule:
                wanted = torch.empty(slab.rows, dtype=torch.int32, device=q.device)
                rows_k(given, keys, wanted, call.sizes(slab))
            with span("select_topk/thresholds"):
                call.find(slab, keys, wanted, of_slab)
            with span("select_topk/words"):
                call.take(slab, keys, of_slab)
    return call.words


EXAMPLES = {
    _index_keys_kernel: {
        "lengths_ptr": None, "keys_ptr": "*i16", "HEADS": 4, "D": 64, "BLOCK_M": 64, "BLOCK_N": 64,
        "UNIT": 1, "PRECISION": "ieee", "ACTIVATION": "sigmoid", "num_stages": 3,
    },
    _index_keys_of_few_kernel: {
        "lengths_ptr": None, "keys_ptr": "*i16", "HEADS": 4, "D": 64, "BLOCK_N": 64, "UNIT": 1,
        "PRECISION": "ieee", "ACTIVATION": "sigmoid", "num_stages": 3,
    },
    _take_kernel: {
        "keys_ptr": "*i16", "threshold_ptr": "*i32", "ROWS": 64, "BLOCK": 256, "UNIT": 1, "FORCED": True,
        "PACKED": False, "EVERY": False, "TOGETHER": 4, "num_warps": 1,
    },
}  # fmt: skip
