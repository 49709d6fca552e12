"""The key down to which each row of a slab takes its keys, and for ties, the last column at which that one is taken.

A program owns a row. `_row_threshold_kernel` holds it in registers and narrows a bracket of keys by counting: a guess
first (the row before the slab's, which saves rounds and cannot change the result), then by interpolation on the counts,
every third time the middle. It is done when exactly k keys reach the bracket's lower end. Counting at two places a
round halves the rounds, and took a quarter longer; interpolation on logarithms saves one round in eight, and took
longer, too. So did a guess out of a sample of the row's own keys: it halves the rounds, and takes as long to find.
Keys are 15-bit integers that order as the float16 numbers of the same bits do, so that one
`set.ge.f16x2` compares two.

A row beyond the registers is read once (`_listed_threshold_kernel`). A sample of it brackets the threshold: 2,048 words
of two keys, one from each stretch of the row. Words with a key in the bracket, some hundredth of all, go into 1,024
lists, one for each place of the loop, so that nothing passes between threads, and with them where they stand; what is
left to find is found in the lists, ties included. A row whose bracket misleads, or whose lists overflow, is counted
from the start, at four places at a time, as often as it takes (`_long_threshold_kernel`: in the same kernel that takes
twice the registers). So are rows in blocks that `candidates` marks. To count each key of the bracket in a bin of its
own, by an atomic, took half as long again as to read a row three times. Listed words that are kept in registers for the
search took 5% longer, and 17% to 22% where each thread has a list of its own (131,072 keys, H100): what costs is that a
multiprocessor waits, with six warps to a scheduler of which less than one is ready.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention import levels
from gossamer.attention._triton._indexer import in_units, valid_keys, visible_keys

KEPT_KEY = tl.constexpr(31744)
MAX_REGISTERS = levels.LONG_ROW
"""Keys of a row that a program holds."""
FEW = tl.constexpr(4)
"""Ties that are found one after the other, as usual; where a row takes more they are halved."""


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
def narrowed(low, high, reach_low, reach_high, probe, reach, take):
    """A bracket of the key that `take` reach, and how many reach its ends, once `reach` have reached a key between."""
    enough = reach >= take
    low = tl.where(enough, probe, low)
    high = tl.where(enough, high, probe)
    return low, high, tl.where(enough, reach, reach_low), tl.where(enough, reach_high, reach)


@triton.jit
def wanted(k_ptr, k, row):
    """How many keys a row of the slab takes."""
    if k_ptr is None:
        # A tensor, also where k is the constant 1.
        return tl.full([], 0, tl.int32) + k
    else:
        return tl.load(k_ptr + row)


@triton.jit
def row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT: tl.constexpr):
    """(columns that a row sees, how many of the last are always kept, how many it takes)."""
    length = valid_keys(lengths_ptr, (first + row) // padded, Tk)
    visible, kept = in_units(visible_keys((first + row) % padded, length, Tq, ahead), window, UNIT)
    return visible, kept, wanted(k_ptr, k, row)


@launch.kernel
def _row_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead, k, window, sinks,
    WORDS: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab), the longest first. A row takes its keys above threshold, and those equal to it up to
    column last. The slab's rows are `first` and following of all rows of thresholds. A column is UNIT keys, and so are
    k and what is always kept first."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    visible, window, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
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
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, probe, reach, take)
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
def bracket_of_sample(words, k_low, k_high, PACKED: tl.constexpr):
    """A key that at least k_low of a sample's reach, and one that fewer than k_high do, by halves, until the sample
    has little more than k_low - k_high keys between them."""
    low = tl.full([], 1, tl.int32)
    high = tl.full([], 1, tl.int32)
    step = tl.full([], 1 << 14, tl.int32)
    reach_low = tl.full([], 1 << 16, tl.int32)
    reach_high = tl.full([], 0, tl.int32)
    enough = k_low - k_high + (k_low - k_high) // 4
    while (step > 0) & (reach_low - reach_high > enough):
        # The key sought is at least low, or high, and below it + 2 * step. Four counts of 16 bits are summed as one.
        at_low = (reaching(words, low + step, PACKED) & 0x10001).to(tl.int64)
        at_high = (reaching(words, high + step, PACKED) & 0x10001).to(tl.int64)
        counts = tl.sum(at_low + (at_high << 32))
        pairs = (counts & 0xFFFF0000FFFF) + ((counts >> 16) & 0xFFFF0000FFFF)
        n = (pairs & 0xFFFFFFFF).to(tl.int32)
        reach_low = tl.where(n >= k_low, n, reach_low)
        low = tl.where(n >= k_low, low + step, low)
        n = (pairs >> 32).to(tl.int32)
        reach_high = tl.where(n >= k_high, reach_high, n)
        high = tl.where(n >= k_high, high + step, high)
        step = step >> 1
    return low, high + tl.maximum(2 * step, 1)


@triton.jit
def append(
    words_ptr, places_ptr, slot, words, some, place, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr
):
    """Writes words at `slot`, and where they stand, where `some` is not 0, up to a slot; returns the next slots.

    Stores of Triton would want the words in another order of threads than the load of 16 bytes brings them.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .pred some, fits; .reg .b64 at;
            setp.ne.b32 some, $3, 0; setp.lt.and.s32 fits, $1, $7, some;
            mad.wide.s32 at, $1, 4, $5; @fits st.global.b32 [at], $2;
            mad.wide.s32 at, $1, 2, $6; @fits st.global.b16 [at], $4;
            selp.b32 $0, $8, 0, some; add.s32 $0, $0, $1; }""",
            "=&r,r,r,r,r,l,l,r,r",
            [slot, words, some, place, words_ptr.to(tl.int64), places_ptr.to(tl.int64), LIMIT, BLOCK],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        fits = (some != 0) & (slot < LIMIT)
        tl.store(words_ptr + slot, words, mask=fits)
        tl.store(places_ptr + slot, (place + tl.zeros([BLOCK], tl.int32)).to(tl.int16), mask=fits)
        return slot + tl.where(some != 0, BLOCK, 0)


@triton.jit
def listed_words(words_ptr, listed, i, BLOCK: tl.constexpr):
    """The i-th word of each list, 0 where a list is shorter. All are read, so that a thread reads its four at once."""
    words = tl.load(words_ptr + i * BLOCK + tl.arange(0, BLOCK))
    return tl.where(i < listed, words, 0)


@triton.jit
def count_listed(words_ptr, listed, most, key, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """How many keys in lists of words are at least `key`; `listed` are the lists' lengths, at most `most`, and lists
    have room for a multiple of four."""
    masks = tl.zeros([BLOCK], tl.int32)
    # Four are asked for before the first is looked at.
    for start in range(0, most, 4):
        for i in tl.static_range(4):
            masks += reaching(listed_words(words_ptr, listed, start + i, BLOCK), key, PACKED)
    return tl.sum(how_many(masks))


@triton.jit
def listed_ties(words_ptr, places_ptr, listed, i, key, BLOCK: tl.constexpr):
    """(whether the first, and the second key of each list's i-th word equals `key`, the column of the first)."""
    words = listed_words(words_ptr, listed, i, BLOCK)
    at = tl.arange(0, BLOCK)
    place = tl.load(places_ptr + i * BLOCK + at).to(tl.int32)
    return (words & 0xFFFF) == key, (words >> 16) == key, 2 * (place * BLOCK + at)


@triton.jit
def count_listed_ties(words_ptr, places_ptr, listed, most, key, upto, BLOCK: tl.constexpr):
    """How many keys in lists of words equal `key` and stand at a column of at most `upto`."""
    ties = tl.zeros([BLOCK], tl.int32)
    for start in range(0, most, 4):
        for i in tl.static_range(4):
            low, high, column = listed_ties(words_ptr, places_ptr, listed, start + i, key, BLOCK)
            ties += (low & (column <= upto)).to(tl.int32) + (high & (column < upto)).to(tl.int32)
    return tl.sum(ties)


@triton.jit
def next_listed_tie(words_ptr, places_ptr, listed, most, key, after, BLOCK: tl.constexpr):
    """The first column behind `after` of a key in lists of words that equals `key`."""
    first = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, most, 4):
        for i in tl.static_range(4):
            low, high, column = listed_ties(words_ptr, places_ptr, listed, start + i, key, BLOCK)
            first = tl.minimum(first, tl.where(high & (column >= after), column + 1, 0x7FFFFFFF))
            first = tl.minimum(first, tl.where(low & (column > after), column, 0x7FFFFFFF))
    return tl.min(first)


@triton.jit
def sampled_bracket(
    row_ptr, visible, take, window, sinks, SAMPLE: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr
):
    """A key that more than `take` keys of a row probably reach, and a higher one that fewer do."""
    i = tl.arange(0, SAMPLE)
    # One word of each stretch of the row, as if drawn: neighbours are alike, and so may be those some steps apart.
    apart = ((visible + 1) // 2 + SAMPLE - 1) // SAMPLE
    words = load_words(row_ptr, i * apart + (i * 40503 >> 4) % apart, visible, window, sinks, FORCED)
    expected = take.to(tl.float32) / apart.to(tl.float32)
    # Six deviations, and four where both keys of a word say the same: a row that is missed is counted by one program,
    # while the others wait.
    off = 6.0 * tl.sqrt(expected) + 1.0
    k_low = (expected + off).to(tl.int32)
    low, high = bracket_of_sample(words, k_low, tl.maximum(expected - off, 1.0).to(tl.int32), PACKED)
    return low, tl.minimum(high, KEPT_KEY + 1)


@triton.jit
def search_lists(
    words_ptr, places_ptr, listed, most, low, high, reach_low, reach_high, take, visible, BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """(threshold, last column) of a row whose words with a key from low on, and below high, are in lists."""
    # A listed word's other key may be higher.
    above = reach_high - count_listed(words_ptr, listed, most, high, BLOCK, PACKED)
    rounds = 0
    while (high - low > 1) & (reach_low != take):
        between = interpolate(low, high, reach_low, reach_high, take)
        probe = tl.where(rounds % 3 == 2, (low + high) >> 1, between)
        probe = tl.minimum(tl.maximum(probe, low + 1), high - 1)
        reach = above + count_listed(words_ptr, listed, most, probe, BLOCK, PACKED)
        low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, probe, reach, take)
        rounds += 1
    last = visible - 1
    if reach_low != take:
        need = take - reach_high
        before = tl.full([], -1, tl.int32)
        seen = tl.full([], 0, tl.int32)
        ties = reach_low - reach_high
        # Up to column `before` there are `seen` ties, too few, and up to `last` there are `ties`.
        while ties != need:
            if need - seen > FEW:
                middle = (before + last) >> 1
                upto = count_listed_ties(words_ptr, places_ptr, listed, most, low, middle, BLOCK)
                enough = upto >= need
                ties = tl.where(enough, upto, ties)
                last = tl.where(enough, middle, last)
                seen = tl.where(enough, seen, upto)
                before = tl.where(enough, before, middle)
            else:
                before = next_listed_tie(words_ptr, places_ptr, listed, most, low, before, BLOCK)
                seen += 1
                last = tl.where(seen == need, before, last)
                ties = tl.where(seen == need, need, ties)
    return low, last


@launch.kernel
def _listed_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, lists_ptr, rows, first, Tq, padded, Tk, stride, ahead, k,
    window, sinks, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, UNIT: tl.constexpr,
    FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `_row_threshold_kernel`, for rows of any length, which the programs take in turns. Of rows that lists do not
    settle, last is -1."""
    words_ptr = lists_ptr + tl.program_id(0) * (SLOTS * BLOCK // 2 * 3)
    places_ptr = (words_ptr + SLOTS * BLOCK).to(tl.pointer_type(tl.int16))
    lane = tl.arange(0, BLOCK)
    for turn in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = rows - 1 - turn
        visible, kept, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
        low = tl.full([], 1, tl.int32)
        last = visible - 1
        if visible > take:
            row_ptr = keys_ptr + row.to(tl.int64) * stride
            low, high = sampled_bracket(row_ptr, visible, take, kept, sinks, SAMPLE, FORCED, PACKED)
            reaching_low = tl.zeros([BLOCK], tl.int32)
            reaching_high = tl.zeros([BLOCK], tl.int32)
            slot = lane
            for start in tl.range(0, (visible + 1) // 2, BLOCK, num_stages=4):
                words = load_words(row_ptr, start + lane, visible, kept, sinks, FORCED)
                from_low = reaching(words, low, PACKED)
                from_high = reaching(words, high, PACKED)
                reaching_low += from_low
                reaching_high += from_high
                between = from_low ^ from_high
                slot = append(words_ptr, places_ptr, slot, words, between, start // BLOCK, SLOTS * BLOCK, BLOCK, PACKED)
            tl.debug_barrier()
            both = tl.sum((how_many(reaching_low).to(tl.int64) << 32) + how_many(reaching_high))
            reach_low = (both >> 32).to(tl.int32)
            reach_high = both.to(tl.int32)
            listed = slot // BLOCK
            most = tl.max(listed)
            last = tl.full([], -1, tl.int32)
            if (most <= SLOTS) & (reach_low >= take) & (reach_high < take):
                low, last = search_lists(
                    words_ptr, places_ptr, listed, most, low, high, reach_low, reach_high, take, visible, BLOCK, PACKED
                )  # fmt: skip
        tl.store(threshold_ptr + first + row, low)
        tl.store(last_ptr + first + row, last)


@launch.kernel
def _long_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, flags_ptr, first, Tq, padded, Tk, stride, ahead, k, window,
    sinks, BLOCK: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `_row_threshold_kernel`, for rows of any length where last is -1, by counting at four places at a time; of
    marked blocks of 64 rows alone where there are marks."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    visible, window, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
    counts = (tl.load(last_ptr + first + row) < 0) & (visible > take)
    if flags_ptr is not None:
        counts &= tl.load(flags_ptr + (first + row) // 64) != 0
    if counts:
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        low = tl.full([], 1, tl.int32)
        high = tl.full([], KEPT_KEY + 1, tl.int32)
        reach_low = visible
        reach_high = tl.full([], 0, tl.int32)
        while (high - low > 1) & (reach_low != take):
            width = high - low
            a = tl.maximum(low + width // 5, low + 1)
            b = tl.maximum(low + width * 2 // 5, low + 1)
            c = tl.maximum(low + width * 3 // 5, low + 1)
            d = tl.maximum(low + width * 4 // 5, low + 1)
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
        last = visible - 1
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
            last = 2 * start + column_of_tie(row_ptr, 2 * start, visible, low, need, window, sinks, 2 * BLOCK, FORCED)
        tl.store(threshold_ptr + first + row, low)
        tl.store(last_ptr + first + row, last)


BLOCK = 1024
LISTED = launch.Tile({"SAMPLE": 2048, "BLOCK": BLOCK, "SLOTS": levels.LIST_BYTES // 6 // BLOCK}, 8, registers=80)
"""Of a long row: words of its sample, lists, and words of a list, each of which takes six bytes: itself, and where it
stands. Three programs to a multiprocessor, but where keys are always kept."""


def list_programs(rows: int, columns: int, device: torch.device) -> int:
    """How many programs find the thresholds of rows of that many keys by lists; 0 where rows fit registers."""
    return min(rows, 3 * tuning.programs(device)) if columns > MAX_REGISTERS else 0


def find_thresholds(
    keys: Tensor,
    lengths: Tensor | None,
    wanted: Tensor | None,
    threshold: Tensor,
    last: Tensor,
    lists: Tensor | None,
    rows: int,
    sizes: tuple[int, ...],
    rule: tuple[int, int, int],
    packed: bool,
    unit: int = 1,
    flags: Tensor | None = None,
) -> None:
    """Fills threshold and last, int32, for `rows` rows of keys; `lists` int32 `[programs, LIST_BYTES / 4]` is
    for rows beyond the registers; `sizes` are first, Tq, padded, Tk, stride and ahead,
    `rule` is k, window and sinks, and `wanted` int32 `[rows]` takes the place of k. With a `unit` of several keys to a
    column, k, wanted and sinks are columns, and the window is keys, 1 - unit for none."""
    given = (keys, lengths, wanted, threshold, last)
    meta = {"UNIT": unit, "FORCED": rule[1] > 0 or rule[2] > 0, "PACKED": packed}
    stride = sizes[4]
    by_counts = (*given, flags, *sizes, *rule), {"BLOCK": BLOCK, **meta}
    if flags is not None:
        _long_threshold_kernel((rows, 1, 1), *by_counts, num_warps=8)
    elif stride <= MAX_REGISTERS:
        words = max(64, launch.next_power_of_2(stride) // 2)
        # 32 words of a row to a thread.
        warps = max(1, min(32, words // 1024))
        _row_threshold_kernel((rows, 1, 1), (*given, *sizes, *rule), {"WORDS": words, **meta}, num_warps=warps)
    else:
        assert lists is not None
        args = (*given, lists, rows, *sizes, *rule)
        options = LISTED.options | ({"maxnreg": 96} if meta["FORCED"] else {})
        _listed_threshold_kernel((min(rows, len(lists)), 1, 1), args, {**LISTED.sizes, **meta}, **options)
        _long_threshold_kernel((rows, 1, 1), *by_counts, num_warps=8)


_ROWS = {"keys_ptr": "*i16", "lengths_ptr": "*i32", "k_ptr": "*i32", "threshold_ptr": "*i32", "last_ptr": "*i32"}
_SIZES = dict.fromkeys(
    ("first", "Tq", "padded", "Tk", "stride", "ahead", "k", "window", "sinks"), "i32"
)  # fmt: skip
EXAMPLES = {
    _row_threshold_kernel: {
        "signature": {**_ROWS, **_SIZES},
        "constexprs": {"WORDS": 16384, "UNIT": 1, "FORCED": True, "PACKED": False},
        "num_warps": 16,
    },
    _listed_threshold_kernel: {
        "signature": {**_ROWS, "lists_ptr": "*i32", "rows": "i32", **_SIZES},
        "constexprs": {**LISTED.sizes, "UNIT": 1, "FORCED": False, "PACKED": False},
        "num_warps": 8,
        "maxnreg": 96,
    },
    _long_threshold_kernel: {
        "signature": {**_ROWS, "flags_ptr": "*i32", **_SIZES},
        "constexprs": {"BLOCK": BLOCK, "UNIT": 1, "FORCED": True, "PACKED": False},
        "num_warps": 8,
    },
}  # fmt: skip
