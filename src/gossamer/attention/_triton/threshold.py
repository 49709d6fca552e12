"""The key down to which each row of a slab takes its keys, and for ties, the last column at which that one is taken.

A program owns a row. `_row_threshold_kernel` holds it in registers and narrows a bracket of keys by counting: a guess
first, which saves rounds and cannot change the result, then by interpolation on the counts, every third time the
middle. It is done when exactly k keys reach the bracket's lower end. The guess is the same search's result in a
sixteenth of the row, which begins at the threshold of the row before the slab's: with correlated scores of 24,576 keys
that takes 6 rounds instead of 11 to 13. Counting at two places a
round halves the rounds, and took a quarter longer; interpolation on logarithms saves one round in eight, and took
longer, too. Keys are 15-bit integers that order as the float16 numbers of the same bits do, so that one
`set.ge.f16x2` compares two.

Rows beyond the registers are read from the L2 (`_long_threshold_kernel`), and should be read once: a sample of the row
brackets the threshold, and of the keys within the bracket, some hundredth of all, each is counted in a bin of its own,
by an atomic that returns nothing. Where the bracket was wrong, or wider than there are bins, a row is read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention._triton._indexer import in_units, valid_keys, visible_keys

KEPT_KEY = tl.constexpr(31744)
MAX_REGISTERS = 32768
"""Keys of a row that a program holds."""
LONG = {"SAMPLE": 4096, "BINS": 2048, "BLOCK": 1024}
"""Of a longer row: words of its sample, bins in which keys near its threshold are counted, words read at a time."""


@triton.jit
def reaching_both(words, both, PACKED: tl.constexpr):
    """For both halves of a word: 0xFFFF where the half is at least the same half of `both`."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = tl.where((words & 0xFFFF) >= (both & 0xFFFF), 0xFFFF, 0)
        return low | tl.where((words >> 16) >= (both >> 16), -0x10000, 0)


@triton.jit
def reaching(words, key, PACKED: tl.constexpr):
    """For both halves of a word: 0xFFFF where the half is at least `key`."""
    return reaching_both(words, key | (key << 16), PACKED)


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
def narrow(words, total, take, slack, guess, step, PACKED: tl.constexpr):
    """(the last key tried; the largest key tried that at least `take` of the words' keys reach; how many reach it; how
    many reach the next key tried). Done when a key was tried that `take` reach, give or take slack, or none is left to
    try. All keys are `total`, at least `take`."""
    low = tl.full([], 1, tl.int32)
    high = tl.full([], KEPT_KEY + 1, tl.int32)
    reach_low = tl.full([], 0, tl.int32) + total
    reach_high = tl.full([], 0, tl.int32)
    last = low
    probe = tl.minimum(tl.maximum(tl.full([], 0, tl.int32) + guess, 2), KEPT_KEY)
    step = tl.full([], 0, tl.int32) + step
    rounds = 0
    off = tl.abs(reach_low - take)
    while (high - low > 1) & (off > slack):
        reach = count(words, probe, PACKED)
        off = tl.abs(reach - take)
        last = probe
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
    return last, low, reach_low, reach_high


@triton.jit
def load_sample(row_ptr, visible, SAMPLE: tl.constexpr):
    """SAMPLE words, in runs of 16 bytes, evenly over the row; of a short row the first."""
    i = tl.arange(0, SAMPLE)
    apart = tl.maximum(visible // 8 // (SAMPLE // 4), 1)
    return load_words(row_ptr, i // 4 * apart * 4 + i % 4, visible, 0, 0, False)


@triton.jit
def of_sample(take, visible, SAMPLE: tl.constexpr):
    """(of `take` keys of a row, how many its sample should have, at least 1; how many keys it has)."""
    sampled = tl.minimum(2 * SAMPLE, visible)
    expected = take.to(tl.float32) * sampled.to(tl.float32) / visible.to(tl.float32)
    return tl.maximum(expected.to(tl.int32), 1), sampled


@triton.jit
def wanted(k_ptr, k, row):
    """How many keys a row of the slab takes."""
    if k_ptr is None:
        # A tensor, also where k is the constant 1.
        return tl.full([], 0, tl.int32) + k
    else:
        return tl.load(k_ptr + row)


@triton.jit
def _row_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead, k, window, sinks,
    WORDS: tl.constexpr, SAMPLE: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab), the longest first. A row takes its keys above threshold, and those equal to it up to
    column last. The slab's rows are `first` and following of all rows of thresholds. A column is UNIT keys, and so are
    k and what is always kept first."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (first + row) // padded
    visible = visible_keys((first + row) % padded, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    visible, window = in_units(visible, window, UNIT)
    take = wanted(k_ptr, k, row)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    if visible > take:
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        at = tl.arange(0, WORDS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        words = load_words(row_ptr, at, visible, window, sinks, FORCED)
        guess = tl.load(threshold_ptr + tl.maximum(first - 1, 0), mask=first > 0, other=KEPT_KEY // 2)
        if SAMPLE > 0:
            sample = load_sample(row_ptr, visible, SAMPLE)
            expected, sampled = of_sample(take, visible, SAMPLE)
            guess, _, _, _ = narrow(sample, sampled, expected, tl.sqrt(expected.to(tl.float32)), guess, 512, PACKED)
        # A sample's guess is near.
        step = 128 if SAMPLE > 0 else 512
        _, low, reach_low, reach_high = narrow(words, visible, take, 0.0, guess, step, PACKED)
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
def count_between(
    row_ptr, bins_ptr, visible, window, sinks, low, high, shift,
    BINS: tl.constexpr, BLOCK: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """(int32 [BINS], how many keys of a row lie in each 2^shift from low on up to high; how many are above high)."""
    at = bins_ptr + tl.arange(0, BINS)
    tl.store(at, tl.zeros([BINS], tl.int32))
    tl.debug_barrier()
    above = tl.zeros([BLOCK], tl.int32)
    one = tl.full([BLOCK], 1, tl.int32)
    for start in tl.range(0, (visible + 1) // 2, BLOCK, num_stages=3):
        words = load_words(row_ptr, start + tl.arange(0, BLOCK), visible, window, sinks, FORCED)
        above += reaching(words, high + 1, PACKED)
        first = (words & 0xFFFF) - low
        second = (words >> 16) - low
        mask = (first >= 0) & (first <= high - low)
        tl.atomic_add(bins_ptr + (first >> shift), one, mask=mask, sem="relaxed")
        mask = (second >= 0) & (second <= high - low)
        tl.atomic_add(bins_ptr + (second >> shift), one, mask=mask, sem="relaxed")
    tl.debug_barrier()
    # From where the atomics were done, not from a cache.
    bins = tl.load(at, volatile=True)
    tl.debug_barrier()
    return bins, tl.sum(how_many(above))


@triton.jit
def _long_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, bins_ptr, first, Tq, padded, Tk, stride, ahead, k, window,
    sinks, SAMPLE: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """As `_row_threshold_kernel`, for rows of any length. Each program has BINS bins of its own."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (first + row) // padded
    visible = visible_keys((first + row) % padded, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    visible, window = in_units(visible, window, UNIT)
    take = wanted(k_ptr, k, row)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    if visible > take:
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        bins_ptr += row * BINS
        sample = load_sample(row_ptr, visible, SAMPLE)
        expected, sampled = of_sample(take, visible, SAMPLE)
        # Twice the usual deviation of runs whose eight keys are alike.
        off = 6.0 * tl.sqrt(expected.to(tl.float32)) + 1.0
        guess = tl.load(threshold_ptr + tl.maximum(first - 1, 0), mask=first > 0, other=KEPT_KEY // 2)
        more = tl.minimum((expected + off).to(tl.int32), sampled)
        _, low, _, _ = narrow(sample, sampled, more, off * 0.3, guess, 512, PACKED)
        fewer = tl.maximum((expected - off).to(tl.int32), 1)
        high, _, _, _ = narrow(sample, sampled, fewer, off * 0.3, low + 512, 512, PACKED)
        high = tl.maximum(high, low)
        reach_low = visible
        reach_high = tl.full([], 0, tl.int32)
        search = tl.full([], 1, tl.int32)
        while search != 0:
            shift = tl.full([], 0, tl.int32)
            while (high - low) >> shift >= BINS:
                shift += 1
            bins, above = count_between(
                row_ptr, bins_ptr, visible, window, sinks, low, high, shift, BINS, BLOCK, FORCED, PACKED
            )  # fmt: skip
            # How many keys reach the lower end of each bin.
            reach = above + tl.sum(bins) - tl.cumsum(bins, axis=0) + bins
            enough = tl.sum((reach >= take).to(tl.int32))
            its = tl.arange(0, BINS) == enough - 1
            if above >= take:
                low = high + 1
                high = tl.full([], KEPT_KEY, tl.int32)
            elif enough == 0:
                high = low - 1
                low = tl.full([], 1, tl.int32)
            else:
                low += (enough - 1) << shift
                high = tl.minimum(high, low + (1 << shift) - 1)
                reach_low = tl.sum(tl.where(its, reach, 0))
                reach_high = reach_low - tl.sum(tl.where(its, bins, 0))
                search = shift
        need = take - reach_high
        if need < reach_low - reach_high:
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


_row_threshold = launch.Kernel(_row_threshold_kernel)
_long_threshold = launch.Kernel(_long_threshold_kernel)


def find_thresholds(
    keys: Tensor,
    lengths: Tensor | None,
    wanted: Tensor | None,
    threshold: Tensor,
    last: Tensor,
    rows: int,
    sizes: tuple[int, ...],
    rule: tuple[int, int, int],
    packed: bool,
    unit: int = 1,
) -> None:
    """Fills threshold and last, int32, for `rows` rows of keys; `sizes` are first, Tq, padded, Tk, stride and ahead,
    `rule` is k, window and sinks, and `wanted` int32 `[rows]` takes the place of k. With a `unit` of several keys to a
    column, k, wanted and sinks are columns, and the window is keys, 1 - unit for none."""
    args = (keys, lengths, wanted, threshold, last, *sizes, *rule)
    meta = {"UNIT": unit, "FORCED": rule[1] > 0 or rule[2] > 0, "PACKED": packed}
    stride = sizes[4]
    if stride <= MAX_REGISTERS:
        words = max(64, launch.next_power_of_2(stride) // 2)
        # 32 words of a row to a thread.
        warps = max(1, min(32, words // 1024))
        # A sixteenth of a long row.
        sample = max(256, words // 16) if words >= 1024 else 0
        _row_threshold((rows, 1, 1), args, {"WORDS": words, "SAMPLE": sample, **meta}, num_warps=warps)
    else:
        bins = torch.empty(rows * LONG["BINS"], dtype=torch.int32, device=keys.device)
        _long_threshold((rows, 1, 1), (*args[:5], bins, *args[5:]), {**LONG, **meta}, num_warps=8)


_ROWS = {"keys_ptr": "*i16", "lengths_ptr": "*i32", "k_ptr": "*i32", "threshold_ptr": "*i32", "last_ptr": "*i32"}
_SIZES = dict.fromkeys(
    ("first", "Tq", "padded", "Tk", "stride", "ahead", "k", "window", "sinks"), "i32"
)  # fmt: skip
EXAMPLES = {
    _row_threshold_kernel: {
        "signature": {**_ROWS, **_SIZES},
        "constexprs": {"WORDS": 16384, "SAMPLE": 1024, "UNIT": 1, "FORCED": True, "PACKED": False},
        "num_warps": 16,
    },
    _long_threshold_kernel: {
        "signature": {**_ROWS, "bins_ptr": "*i32", **_SIZES},
        "constexprs": {**LONG, "UNIT": 1, "FORCED": True, "PACKED": False},
        "num_warps": 8,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
