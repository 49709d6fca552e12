"""The key down to which each row of a slab takes its keys, and for ties, the last column at which that one is taken.

A program owns a row. `_row_threshold_kernel` holds it in registers and narrows a bracket of keys by counting: a guess
first (the row before the slab's, which saves rounds and cannot change the result), then by interpolation on the counts,
every third time the middle. It is done when exactly k keys reach the bracket's lower end. Keys are 15-bit integers that
order as the float16 numbers of the same bits do, so that one `set.ge.f16x2` compares two.

A row beyond the registers is counted at four places at a time, about a guess that is found likewise, or even ones
(`_long_threshold_kernel`): rows that `candidates` does not take, or whose blocks it marks.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention import levels
from gossamer.attention._triton._indexer import in_units, valid_keys, visible_keys

KEPT_KEY = tl.constexpr(31744)
MAX_REGISTERS = levels.LONG_ROW
"""Keys of a row that a program holds."""


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
    """The words at word `at` of a row, in which an always-kept column has the key of these."""
    column = 2 * at
    low = (column < visible) & ((column < sinks) | (column >= visible - window))
    high = (column + 1 < visible) & ((column + 1 < sinks) | (column + 1 >= visible - window))
    words = tl.where(low, (words & -0x10000) | KEPT_KEY, words)
    return tl.where(high, (words & 0xFFFF) | (KEPT_KEY << 16), words)


@triton.jit
def load_words(row_ptr, at, visible, window, sinks, FORCED: tl.constexpr):
    """Words `at` of a row, of two keys each; 0 behind the visible ones, up to the 16 bytes that one load takes."""
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
    """A bracket of the key that `take` reach, and how many reach its ends, once `reach` have reached a probe, which may
    lie outside."""
    enough = reach >= take
    low = tl.where(enough, tl.maximum(low, probe), low)
    high = tl.where(enough, high, tl.minimum(high, probe))
    reach_low = tl.where(enough, tl.minimum(reach_low, reach), reach_low)
    return low, high, reach_low, tl.where(enough, reach_high, tl.maximum(reach_high, reach))


@triton.jit
def probe_at(low, high, even, fifth: tl.constexpr, middle, off):
    """A key between low and high: some fifths of the way, or `off` from a guess."""
    probe = tl.where(even, low + (high - low) * fifth // 5, middle + off)
    return tl.minimum(tl.maximum(probe, low + 1), high - 1)


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
    k and the sinks."""
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
            group, need = part_of_tie(how_many(tl.sum(equalling(words, low, PACKED), axis=1)), need)
            last = group * 64 + column_of_tie(row_ptr, group * 64, visible, low, need, window, sinks, 64, FORCED)
    tl.store(threshold_ptr + first + row, low)
    tl.store(last_ptr + first + row, last)


@triton.jit
def part_of_tie(ties, need):
    """(the part of a row in which the need-th tie stands, which of the part's ties it is); parts have `ties` each."""
    before = tl.cumsum(ties, axis=0) < need
    return tl.sum(before.to(tl.int32), axis=0), need - tl.sum(tl.where(before, ties, 0), axis=0)


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
def last_of_ties(
    row_ptr, start, visible, key, need, window, sinks, BLOCK: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """The column of the need-th key that equals `key`, from word `start` of a row on."""
    seen = 0
    found = 0
    start -= BLOCK
    while seen < need:
        start += BLOCK
        words = load_words(row_ptr, start + tl.arange(0, BLOCK), visible, window, sinks, FORCED)
        found = tl.sum(how_many(equalling(words, key, PACKED)))
        seen += found
    need -= seen - found
    return 2 * start + column_of_tie(row_ptr, 2 * start, visible, key, need, window, sinks, 2 * BLOCK, FORCED)


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


@launch.kernel
def _long_threshold_kernel(
    keys_ptr, lengths_ptr, k_ptr, threshold_ptr, last_ptr, flags_ptr, first, Tq, padded, Tk, stride, ahead, k, window,
    sinks, BLOCK: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `_row_threshold_kernel`, for rows of any length, by counting at four places at a time; of marked blocks of 64
    rows alone, where there are marks."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    visible, window, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    marked = flags_ptr is None
    if flags_ptr is not None:
        marked = tl.load(flags_ptr + (first + row) // 64) != 0
    if marked & (visible > take):
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        high = tl.full([], KEPT_KEY + 1, tl.int32)
        reach_low = visible
        reach_high = tl.full([], 0, tl.int32)
        guess = tl.load(threshold_ptr + tl.maximum(first - 1, 0), mask=first > 0, other=0)
        near, far = 128, 1024
        # Without a row before the slab's the first places are even, and so is every third of the later ones.
        rounds = tl.where(first > 0, 0, 2)
        while (high - low > 1) & (reach_low != take):
            even = rounds % 3 == 2
            a = probe_at(low, high, even, 1, guess, -far)
            b = probe_at(low, high, even, 2, guess, -near)
            c = probe_at(low, high, even, 3, guess, near)
            d = probe_at(low, high, even, 4, guess, far)
            na, nb, nc, nd = count_at_four(row_ptr, visible, window, sinks, a, b, c, d, BLOCK, FORCED, PACKED)
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, a, na, take)
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, b, nb, take)
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, c, nc, take)
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, d, nd, take)
            rounds += 1
            guess = interpolate(low, high, reach_low, reach_high, take)
            near, far = (high - low) // 64 + 1, (high - low) // 8
        need = take - reach_high
        if (reach_low != take) & (need < reach_low - reach_high):
            last = last_of_ties(row_ptr, 0, visible, low, need, window, sinks, BLOCK, FORCED, PACKED)
    if marked:
        tl.store(threshold_ptr + first + row, low)
        tl.store(last_ptr + first + row, last)


LONG = launch.Tile({"BLOCK": 1024}, warps=8)
FEW_LONG = launch.Tile({"BLOCK": 4096}, warps=16)
"""Of rows that are fewer than multiprocessors: one that has no other row waits for memory."""


def find_thresholds(
    given: tuple[Tensor | None, ...],
    found: tuple[Tensor, Tensor],
    rows: int,
    sizes: tuple[int, ...],
    rule: tuple[int, int, int],
    packed: bool,
    unit: int = 1,
    flags: Tensor | None = None,
) -> None:
    """Fills threshold and last, `found`, int32, for `rows` rows of keys. `given` are keys, lengths and wanted, `sizes`
    are first, Tq, padded, Tk, stride and ahead, `rule` is k, window and sinks, and wanted int32 `[rows]` takes the
    place of k. With a `unit` of several keys to a column, k, wanted and sinks are columns, and the window is keys,
    1 - unit for none."""
    given = (*given, *found)
    meta = {"UNIT": unit, "FORCED": rule[1] > 0 or rule[2] > 0, "PACKED": packed}
    stride = sizes[4]
    if flags is None and stride <= MAX_REGISTERS:
        words = max(64, launch.next_power_of_2(stride) // 2)
        # 32 words of a row to a thread.
        warps = max(1, min(32, words // 1024))
        _row_threshold_kernel((rows, 1, 1), (*given, *sizes, *rule), {"WORDS": words, **meta}, num_warps=warps)
        return
    tile = FEW_LONG if rows < tuning.programs(found[0].device) else LONG
    _long_threshold_kernel((rows, 1, 1), (*given, flags, *sizes, *rule), {**tile.sizes, **meta}, **tile.options)


EXAMPLES = {
    _row_threshold_kernel: {
        "keys_ptr": "*i16", "k_ptr": "*i32", "threshold_ptr": "*i32", "WORDS": 16384, "UNIT": 1, "FORCED": True,
        "PACKED": False, "num_warps": 16,
    },
    _long_threshold_kernel: {
        "keys_ptr": "*i16", "k_ptr": "*i32", "threshold_ptr": "*i32", **LONG.sizes, "UNIT": 1, "FORCED": True,
        "PACKED": False, "num_warps": LONG.warps,
    },
}  # fmt: skip
