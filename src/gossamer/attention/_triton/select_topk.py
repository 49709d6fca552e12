"""From the indexer's inputs to words of selected keys, slab by slab, never holding [Tq, Tk].

A score is stored as a *key*: an int16 from 1 to 31,742 that divides the range from 0 to the sum of the query's gates
evenly, 8 to 15 times as fine as a float16 near the largest. 0 is a key that the query does not see, 31,743 is NaN, and
31,744 stands for the always-kept keys. As bit patterns of float16 these order like the integers they are (the largest
is infinity), so that one `set.ge.f16x2` compares two. A slab of rows is written once and stays in the L2 while

1. `_index_keys_kernel` scores it: a program owns (64 queries, every PARTS-th tile of keys), the heads' queries held,
   and is bound by one `tanh.approx` a head and key.
2. `_row_threshold_kernel` finds each row's k-th largest key and, for ties, the last column at which that key is taken.
   A program holds a row in registers and narrows a bracket of keys by counting: a guess first (the row before the
   slab's, which saves rounds and cannot change the result), then by interpolation on the counts, every third time the
   middle. It is done when exactly k keys reach the bracket's lower end. Rows beyond the registers are counted from the
   L2 (`_long_threshold_kernel`), at four places at once, which a sample of the row brackets.
3. `_take_kernel` compares a tile of 64 queries by some keys with the thresholds and sums the bits into words.

Whatever the slab, a row's result depends on that row alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.attention import levels
from gossamer.attention._triton import selection as lists
from gossamer.attention._triton._indexer import load_bias, load_gates, load_tile, valid_keys, visible_keys
from gossamer.attention._triton.adaptive import rows_k
from gossamer.attention._triton.indexer_scores import check_width, fast, tile

LEVELS = tl.constexpr(levels.LEVELS)
KEPT_KEY = tl.constexpr(31744)
MAX_REGISTERS = 32768
"""Keys of a row that a program holds."""
COLUMNS = 128
"""A slab's rows are this many keys apart, or a multiple: what a tile of scores writes."""


@triton.jit
def add_head(score, q, k, weight, bias, scale, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """score + weight * sigmoid(q . k * scale + bias), or with FAST, of halved weight, bias and scale, weight * tanh."""
    x = tl.dot(q, k.T, input_precision=PRECISION) * scale + bias
    if FAST:
        gate = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        gate = 1.0 / (1.0 + tl.exp(-x))
    return score + weight[:, None] * gate


@triton.jit
def _index_keys_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, keys_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kt,
    first, Tq, padded, Tk, stride, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys, BLOCK_M rows of the slab), the longest rows first."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    HELD: tl.constexpr = HEADS * BLOCK_D <= 512
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = ((first + block * BLOCK_M) // padded).to(tl.int64)
    rows = (first + block * BLOCK_M) % padded + tl.arange(0, BLOCK_M)
    visible = visible_keys(rows, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    q_ptr += batch * stride_qb
    k_ptr += batch * stride_kb
    w_ptr += batch * Tq * HEADS
    total = tl.zeros([BLOCK_M], tl.float32)
    for h in range(HEADS):
        total += load_gates(w_ptr, rows, h, Tq, HEADS)
    # A query all of whose gates are closed scores 0 everywhere.
    norm = tl.where(total == 0, 0.0, LEVELS / total)
    lowest = tl.full([BLOCK_M], 1.0, tl.float32)
    part = 1.0
    if FAST:
        # sigmoid(x) = (1 + tanh(x / 2)) / 2: what is constant is added once.
        norm *= 0.5
        lowest += norm * total
        part = 0.5
    scale *= part
    queries = ()
    weights = ()
    if HELD:
        for h in tl.static_range(HEADS):
            queries = queries + (load_tile(q_ptr + tl.cast(h, tl.int64) * stride_qh, rows, stride_qt, Tq, D, BLOCK_D),)
            weights = weights + (load_gates(w_ptr, rows, h, Tq, HEADS) * norm,)
    out = keys_ptr + (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * stride
    least = tl.min(tl.where(rows < Tq, visible, Tk), axis=0)
    for at in range(tl.program_id(0) * BLOCK_N, tl.max(visible, axis=0), tl.num_programs(0) * BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, keys, stride_kt, Tk, D, BLOCK_D)
        score = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + lowest[:, None]
        if HELD:
            for h in tl.static_range(HEADS):
                bias = load_bias(bias_ptr, h) * part
                score = add_head(score, queries[h], k, weights[h], bias, scale, PRECISION, FAST)
        else:
            for h in range(HEADS):
                q = load_tile(q_ptr + tl.cast(h, tl.int64) * stride_qh, rows, stride_qt, Tq, D, BLOCK_D)
                weight = load_gates(w_ptr, rows, h, Tq, HEADS) * norm
                score = add_head(score, q, k, weight, load_bias(bias_ptr, h) * part, scale, PRECISION, FAST)
        if FAST:
            # The GPU's smaller of NaN and a number is the number.
            score = tl.minimum(score, 31743.0)
        else:
            score = tl.where(score == score, score, 31743.0)
        # Adding 2^23 rounds to an integer, in the low bits.
        key = (score + 8388608.0).to(tl.int32, bitcast=True).to(tl.int16)
        if at + BLOCK_N > least:
            key = tl.where(keys[None, :] < visible[:, None], key, 0).to(tl.int16)
        tl.store(out + keys[None, :], key)


@triton.jit
def reaching(words, key, PACKED: tl.constexpr):
    """For both halves of a word: 0xFFFF where the half is at least `key`."""
    both = key | (key << 16)
    if PACKED:
        return tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.where((words & 0xFFFF) >= key, 0xFFFF, 0) | tl.where((words >> 16) >= key, -0x10000, 0)


@triton.jit
def equalling(words, key, PACKED: tl.constexpr):
    """For both halves of a word: 0xFFFF where the half equals `key`."""
    both = key | (key << 16)
    if PACKED:
        return tl.inline_asm_elementwise(
            "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.where((words & 0xFFFF) == key, 0xFFFF, 0) | tl.where((words >> 16) == key, -0x10000, 0)


@triton.jit
def how_many(masks):
    """Of the sum of words of such masks, how many halves were set: up to 65,535 of each kind.

    A set low half adds 65,535, a set high one takes 65,536 away; both are read off modulo 2^16.
    """
    low = (-masks) & 0xFFFF
    return low + ((low - ((masks + low) >> 16)) & 0xFFFF)


@triton.jit
def count(words, key, PACKED: tl.constexpr):
    """How many halves of the words are at least `key`."""
    return how_many(tl.sum(reaching(words, key, PACKED)))


@triton.jit
def keep_always(words, at, visible, window, sinks):
    """The words at word `at` of a row, with the key of what is always kept in place of its score's."""
    column = 2 * at
    low = (column < visible) & ((column < sinks) | (column >= visible - window))
    high = (column + 1 < visible) & ((column + 1 < sinks) | (column + 1 >= visible - window))
    words = tl.where(low, (words & -0x10000) | KEPT_KEY, words)
    return tl.where(high, (words & 0xFFFF) | (KEPT_KEY << 16), words)


@triton.jit
def load_words(row_ptr, at, visible, window, sinks, FORCED: tl.constexpr):
    """Words `at` of a row, of two keys each; 0 behind what is visible, up to the 16 bytes that one load takes."""
    words = tl.load(row_ptr.to(tl.pointer_type(tl.int32)) + at, mask=at < (visible + 7) // 8 * 4, other=0)
    if FORCED:
        words = keep_always(words, at, visible, window, sinks)
    return words


@triton.jit
def interpolate(low, high, reach_low, reach_high, k):
    """The key between low and high at which k keys would be reached if the keys between lay evenly."""
    part = ((reach_low - k).to(tl.float32) + 0.5) / (reach_low - reach_high).to(tl.float32)
    return low + ((high - low).to(tl.float32) * part).to(tl.int32)


@triton.jit
def wanted(k_ptr, k, row):
    """How many keys a row of the slab takes."""
    if k_ptr is None:
        return k
    else:
        return tl.load(k_ptr + row)


@triton.jit
def _row_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead, k, window, sinks,
    WORDS: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab), the longest first. A row takes its keys above threshold, and those equal to it up to
    column last. The slab's rows are `first` and following of all rows of thresholds."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (first + row) // padded
    visible = visible_keys((first + row) % padded, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    take = wanted(k_ptr, k, row)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    if visible > take:
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        at = tl.arange(0, WORDS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        words = load_words(row_ptr, at, visible, window, sinks, FORCED)
        high = tl.full([], KEPT_KEY + 1, tl.int32)
        reach_low = visible
        reach_high = tl.full([], 0, tl.int32)
        probe = tl.load(threshold_ptr + tl.maximum(first - 1, 0), mask=first > 0, other=KEPT_KEY // 2)
        probe = tl.minimum(tl.maximum(probe, 2), KEPT_KEY)
        step = 512
        rounds = 0
        while (high - low > 1) & (reach_low != take):
            reach = count(words, probe, PACKED)
            enough = reach >= take
            low = tl.where(enough, probe, low)
            reach_low = tl.where(enough, reach, reach_low)
            high = tl.where(enough, high, probe)
            reach_high = tl.where(enough, reach_high, reach)
            rounds += 1
            between = interpolate(low, high, reach_low, reach_high, take)
            probe = tl.where(rounds % 3 == 2, (low + high) >> 1, between)
            # Until the bracket has two ends it grows from the guess.
            probe = tl.where(low == 1, high - step, tl.where(high > KEPT_KEY, low + step, probe))
            step = tl.minimum(step * 4, 1 << 20)
            probe = tl.minimum(tl.maximum(probe, low + 1), high - 1)
        need = take - reach_high
        if (reach_low != take) & (need < reach_low - reach_high):
            ties = how_many(tl.sum(equalling(words, low, PACKED), axis=1))
            upto = tl.cumsum(ties, axis=0)
            group = tl.sum((upto < need).to(tl.int32), axis=0)
            before = tl.sum(tl.where(upto < need, ties, 0), axis=0)
            last = group * 64 + column_of_tie(
                row_ptr, group * 64, visible, low, need - before, window, sinks, 64, FORCED
            )
    tl.store(threshold_ptr + first + row, low)
    tl.store(last_ptr + first + row, last)


@triton.jit
def column_of_tie(
    row_ptr, start, visible, key, need, window, sinks, BLOCK: tl.constexpr, FORCED: tl.constexpr
):  # fmt: skip
    """Counted from `start`, the column of the need-th key that equals `key`, which is among the next BLOCK."""
    column = start + tl.arange(0, BLOCK)
    found = tl.load(row_ptr + column, mask=column < visible, other=0).to(tl.int32)
    if FORCED:
        kept = (column < visible) & ((column < sinks) | (column >= visible - window))
        found = tl.where(kept, KEPT_KEY, found)
    return tl.sum((tl.cumsum((found == key).to(tl.int32), axis=0) < need).to(tl.int32), axis=0)


@triton.jit
def count_at_four(
    row_ptr, visible, window, sinks, a, b, c, d, BLOCK: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr
):
    """How many keys of a row are at least a, b, c, d."""
    na = tl.zeros([BLOCK], tl.int32)
    nb = tl.zeros([BLOCK], tl.int32)
    nc = tl.zeros([BLOCK], tl.int32)
    nd = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, (visible + 1) // 2, BLOCK, num_stages=3):
        words = load_words(row_ptr, start + tl.arange(0, BLOCK), visible, window, sinks, FORCED)
        na += reaching(words, a, PACKED)
        nb += reaching(words, b, PACKED)
        nc += reaching(words, c, PACKED)
        nd += reaching(words, d, PACKED)
    return tl.sum(how_many(na)), tl.sum(how_many(nb)), tl.sum(how_many(nc)), tl.sum(how_many(nd))


@triton.jit
def kth_of_sample(words, k, PACKED: tl.constexpr):
    """The k-th largest key of the words, by halves."""
    low = tl.full([], 1, tl.int32)
    high = tl.full([], KEPT_KEY + 1, tl.int32)
    while high - low > 1:
        middle = (low + high) >> 1
        enough = count(words, middle, PACKED) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _long_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead, k, window, sinks,
    SAMPLE: tl.constexpr, BLOCK: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `_row_threshold_kernel`, for rows of any length."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (first + row) // padded
    visible = visible_keys((first + row) % padded, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    take = wanted(k_ptr, k, row)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    if visible > take:
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        # Runs of 16 bytes, evenly over the row; of a short row the first.
        i = tl.arange(0, SAMPLE)
        apart = tl.maximum(visible // 8 // (SAMPLE // 4), 1)
        sample = load_words(row_ptr, i // 4 * apart * 4 + i % 4, visible, 0, 0, False)
        sampled = tl.minimum(2 * SAMPLE, visible).to(tl.float32)
        expected = take.to(tl.float32) * sampled / visible.to(tl.float32)
        off = 3.0 * tl.sqrt(expected) + 1.0
        a = kth_of_sample(sample, (expected + off).to(tl.int32), PACKED)
        d = kth_of_sample(sample, tl.maximum(expected - off, 1.0).to(tl.int32), PACKED)
        a = tl.minimum(tl.maximum(a, 2), KEPT_KEY)
        d = tl.minimum(tl.maximum(d, a), KEPT_KEY)
        b = a + (d - a) // 3
        c = a + (d - a) * 2 // 3
        high = tl.full([], KEPT_KEY + 1, tl.int32)
        reach_low = visible
        reach_high = tl.full([], 0, tl.int32)
        rounds = 0
        while (high - low > 1) & (reach_low != take):
            na, nb, nc, nd = count_at_four(row_ptr, visible, window, sinks, a, b, c, d, BLOCK, FORCED, PACKED)
            # The bracket's ends are the largest of the four that enough keys reach, and the next.
            high = tl.where(na < take, a, tl.where(nb < take, b, tl.where(nc < take, c, tl.where(nd < take, d, high))))
            reach_high = tl.where(
                na < take, na, tl.where(nb < take, nb, tl.where(nc < take, nc, tl.where(nd < take, nd, reach_high)))
            )
            low = tl.where(
                nd >= take, d, tl.where(nc >= take, c, tl.where(nb >= take, b, tl.where(na >= take, a, low)))
            )
            reach_low = tl.where(
                nd >= take, nd, tl.where(nc >= take, nc, tl.where(nb >= take, nb, tl.where(na >= take, na, reach_low)))
            )
            width = high - low
            halves = rounds % 2 == 1
            middle = tl.where(halves, low + width // 2, interpolate(low, high, reach_low, reach_high, take))
            apart = tl.maximum(tl.where(halves, width // 5, width // 16), 1)
            b = tl.minimum(tl.maximum(middle, low + 1), high - 1)
            a = tl.maximum(b - apart, low + 1)
            c = tl.minimum(b + tl.maximum(apart // 2, 1), high - 1)
            d = tl.minimum(c + apart, high - 1)
            rounds += 1
        need = take - reach_high
        if (reach_low != take) & (need < reach_low - reach_high):
            seen = 0
            found = 0
            start = -BLOCK
            while seen < need:
                start += BLOCK
                words = load_words(row_ptr, start + tl.arange(0, BLOCK), visible, window, sinks, FORCED)
                found = tl.sum(how_many(equalling(words, low, PACKED)))
                seen += found
            need -= seen - found
            last = 2 * start + column_of_tie(
                row_ptr, 2 * start, visible, low, need, window, sinks, 2 * BLOCK, FORCED
            )  # fmt: skip
    tl.store(threshold_ptr + first + row, low)
    tl.store(last_ptr + first + row, last)


@triton.jit
def take_bits(
    keys_ptr, threshold_ptr, last_ptr, row, t, columns, end, stride, length, Tq, ahead, window, sinks,
    ROWS: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """int32: bit i says that query t + i, row `row` + i of the slab, takes a column. What it does not see has key 0."""
    i = tl.arange(0, ROWS)
    threshold = tl.load(threshold_ptr + i)
    last = tl.load(last_ptr + i)
    at = (row + i).to(tl.int64)[:, None] * stride + columns[None, :]
    key = tl.load(keys_ptr + at, mask=(columns < end)[None, :], other=0).to(tl.int32)
    keep = key >= threshold[:, None] + (columns[None, :] > last[:, None]).to(tl.int32)
    if FORCED:
        visible = visible_keys(t + i, length, Tq, ahead)
        keep |= (columns < sinks)[None, :] | (columns[None, :] >= (visible - window)[:, None])
        keep &= columns[None, :] < visible[:, None]
    return tl.sum(tl.where(keep, (1 << i)[:, None], 0), axis=0)


@triton.jit
def see_bits(t, columns, length, Tq, ahead, ROWS: tl.constexpr):
    """int32: bit i says that query t + i sees a column."""
    i = tl.arange(0, ROWS)
    keep = columns[None, :] < visible_keys(t + i, length, Tq, ahead)[:, None]
    return tl.sum(tl.where(keep, (1 << i)[:, None], 0), axis=0)


@triton.jit
def _take_kernel(
    words_ptr, keys_ptr, lengths_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead, window, sinks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORCED: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK keys, ROWS rows of the slab). With EVERY the rows take whatever they see, and have no keys."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS
    block = ((first + row) // ROWS).to(tl.int64)
    batch = (first + row) // padded
    t = (first + row) % padded
    length = valid_keys(lengths_ptr, batch, Tk)
    most = tl.max(visible_keys(t + tl.arange(0, ROWS), length, Tq, ahead), axis=0)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    if EVERY:
        low = see_bits(t, columns, length, Tq, ahead, 32 if ROWS == 64 else ROWS)
        if ROWS == 64:
            high = see_bits(t + 32, columns, length, Tq, ahead, 32)
    elif tl.program_id(0) * BLOCK < most:
        # The scores' tiles end at a multiple of 16, and so may a load.
        end = tl.cdiv(most, 16) * 16
        threshold_ptr += first + row
        last_ptr += first + row
        if ROWS == 64:
            low = take_bits(
                keys_ptr, threshold_ptr, last_ptr, row, t, columns, end, stride, length, Tq, ahead, window, sinks,
                32, FORCED,
            )  # fmt: skip
            high = take_bits(
                keys_ptr, threshold_ptr + 32, last_ptr + 32, row + 32, t + 32, columns, end, stride, length, Tq, ahead,
                window, sinks, 32, FORCED,
            )  # fmt: skip
        else:
            low = take_bits(
                keys_ptr, threshold_ptr, last_ptr, row, t, columns, end, stride, length, Tq, ahead, window, sinks,
                ROWS, FORCED,
            )  # fmt: skip
    tl.store(words_ptr + block * Tk + columns, lists.join_halves(low, high), mask=columns < Tk)


_index_keys = launch.Kernel(_index_keys_kernel)
_row_threshold = launch.Kernel(_row_threshold_kernel)
_long_threshold = launch.Kernel(_long_threshold_kernel)
_take = launch.Kernel(_take_kernel)


class Slab(NamedTuple):
    """Rows of one launch, of all batch elements' padded rows; `columns` is 0 where they take all that they see."""

    first: int
    rows: int
    columns: int


def slab_plan(b: int, padded: int, tq: int, tk: int, causal: bool, unit: int, k: int, workspace: int) -> list[Slab]:
    """Cuts the b * padded rows at multiples of `unit`; every query takes k keys or all that it sees.

    Where a batch element fits, several share a slab. Otherwise slabs grow shorter as queries see more keys.
    """
    if tk <= k:
        return [Slab(0, b * padded, 0)]
    width = round_up(tk, COLUMNS)
    together = workspace // (2 * padded * width)
    if together and b > 1:
        return [Slab(i * padded, min(together, b - i) * padded, width) for i in range(0, b, together)]

    def columns(until: int) -> int:
        return round_up(min(tk, until + tk - tq), COLUMNS) if causal else width

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


def _dtypes(*tensors: Tensor | None) -> tuple[object, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


class _Call:
    """The launches of one call, slab by slab."""

    def __init__(
        self, inputs: tuple[Tensor | None, ...], scale: float, causal: bool, top: int, window: int, sinks: int
    ) -> None:
        q, k, w, bias, lengths = inputs
        assert q is not None and k is not None and w is not None
        self.q, self.k = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k))
        self.w, self.bias, self.lengths, self.scale = w.contiguous(), bias, lengths, scale
        self.b, self.heads, self.tq, self.d = q.shape
        self.tk = k.shape[1]
        # A word's 64 queries, or as few as a product takes.
        self.unit = 64 if self.tq > 16 else 16
        self.padded = round_up(self.tq, self.unit)
        self.ahead = 1 if causal else self.tk + 1
        self.rule = (top, window, sinks)
        rows = (self.b * self.padded,)
        self.threshold, self.last = (torch.empty(rows, dtype=torch.int32, device=q.device) for _ in range(2))
        self.words = torch.empty(self.b, 1, self.padded // self.unit, self.tk, dtype=torch.int64, device=q.device)
        strides = (*self.q.stride()[:3], *self.k.stride()[:2])
        self.key = (q.shape, self.tk, strides, causal, scale, self.rule, _dtypes(q, k, w, bias, lengths))
        self.packed = {"FORCED": window > 0 or sinks > 0, "PACKED": not INTERPRET and not torch.version.hip}

    def sizes(self, slab: Slab) -> tuple[int, ...]:
        return slab.first, self.tq, self.padded, self.tk, slab.columns, self.ahead

    def score(self, slab: Slab, keys: Tensor) -> None:
        block = tile(self.d, self.q.element_size())
        rows, columns = min(block["BLOCK_M"], self.unit), block["BLOCK_N"]
        precision = tuning.dot_precision(self.q, self.d)["PRECISION"]
        meta = {"HEADS": self.heads, "D": self.d, "BLOCK_M": rows, "BLOCK_N": columns}
        meta |= {"PRECISION": precision, "FAST": fast(self.q)}
        blocks = slab.rows // rows
        # Enough programs that the last wave is short.
        parts = max(1, min(slab.columns // columns, launch.cdiv(6 * tuning.programs(self.q.device), blocks)))
        strides = (*self.q.stride()[:3], *self.k.stride()[:2])
        args = (self.q, self.k, self.w, self.bias, self.lengths, keys, *strides, *self.sizes(slab), self.scale)
        _index_keys(self.key, (parts, blocks, 1), args, meta, num_warps=4, num_stages=3)

    def find(self, slab: Slab, keys: Tensor, wanted: Tensor | None) -> None:
        args = (keys, self.lengths, wanted, self.threshold, self.last, *self.sizes(slab), *self.rule)
        grid = (slab.rows, 1, 1)
        key = (self.key, slab.columns, wanted is None)
        if slab.columns <= MAX_REGISTERS:
            words = max(64, launch.next_power_of_2(slab.columns) // 2)
            # 32 words of a row to a thread.
            warps = max(1, min(32, words // 1024))
            _row_threshold(key, grid, args, {"WORDS": words, **self.packed}, num_warps=warps)
        else:
            _long_threshold(key, grid, args, {"SAMPLE": 4096, "BLOCK": 2048, **self.packed}, num_warps=8)

    def take(self, slab: Slab, keys: Tensor | None) -> None:
        _, window, sinks = self.rule
        args = (self.words, keys, self.lengths, self.threshold, self.last, *self.sizes(slab), window, sinks)
        meta = {"ROWS": self.unit, "BLOCK": 256, "FORCED": self.packed["FORCED"], "EVERY": keys is None}
        _take((self.key, keys is None), (launch.cdiv(self.tk, 256), slab.rows // self.unit, 1), args, meta, num_warps=4)


def select_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor | None,
    predictor: Tensor | None,
    top: int,
    k_min: int,
    k_max: int,
    rule: str,
    temperature: float,
    scale: float,
    causal: bool,
    window: int,
    sinks: int,
    workspace: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `select_topk` -> words, counts and lists of a `Selection` of one scope."""
    check_width("attention.select_topk", q.shape[3], q.element_size())
    call = _Call((q, k, w, bias, lengths), scale, causal, top, window, sinks)
    if call.words.numel():
        least = k_min if rule else top
        plan = slab_plan(call.b, call.padded, call.tq, call.tk, causal, call.unit, least, workspace)
        room = max(slab.rows * slab.columns for slab in plan)
        keys = torch.empty(room, dtype=torch.int16, device=q.device)
        for slab in plan:
            if not slab.columns:
                call.take(slab, None)
                continue
            call.score(slab, keys)
            wanted = None
            if rule:
                wanted = torch.empty(slab.rows, dtype=torch.int32, device=q.device)
                bounds = (k_min, top, k_max)
                rows_k(keys, call.w, lengths, mean, predictor, wanted, call.sizes(slab), bounds, rule, temperature)
            call.find(slab, keys, wanted)
            call.take(slab, keys)
    return (call.words, *lists.union_of_words(call.words, capacity))


_ROWS = {"keys_ptr": "*i16", "lengths_ptr": "*i32", "k_ptr": "*i32", "threshold_ptr": "*i32", "last_ptr": "*i32"}
_SIZES = dict.fromkeys(("first", "Tq", "padded", "Tk", "stride", "ahead"), "i32")
_RULE = dict.fromkeys(("k", "window", "sinks"), "i32")

EXAMPLES = {
    _index_keys_kernel: {
        "signature": {
            "q_ptr": "*bf16", "k_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": "*fp32", "lengths_ptr": None,
            "keys_ptr": "*i16",
            **dict.fromkeys(("stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kt"), "i32"),
            **_SIZES, "scale": "fp32",
        },
        "constexprs": {"HEADS": 4, "D": 64, "BLOCK_M": 64, "BLOCK_N": 64, "PRECISION": "ieee", "FAST": False},
        "num_warps": 4,
        "num_stages": 3,
    },
    _row_threshold_kernel: {
        "signature": {**_ROWS, **_SIZES, **_RULE},
        "constexprs": {"WORDS": 16384, "FORCED": True, "PACKED": False},
        "num_warps": 16,
    },
    _long_threshold_kernel: {
        "signature": {**_ROWS, **_SIZES, **_RULE},
        "constexprs": {"SAMPLE": 4096, "BLOCK": 2048, "FORCED": True, "PACKED": False},
        "num_warps": 8,
    },
    _take_kernel: {
        "signature": {
            "words_ptr": "*i64", **{name: kind for name, kind in _ROWS.items() if name != "k_ptr"}, **_SIZES,
            "window": "i32", "sinks": "i32",
        },
        "constexprs": {"ROWS": 64, "BLOCK": 256, "FORCED": True, "EVERY": False},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
