"""Thresholds of long rows that are fewer than multiprocessors: the programs of a row share it.

A program that counts a row of 131,072 keys alone reads it some eight times. Here programs count a segment of a row
each, once by the eight highest bits of the keys, and once by the seven lowest of the keys whose highest are those of
the k-th key. The counts of a row's segments say which key is the k-th, and in which segment its last one is taken.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.attention._triton import threshold
from gossamer.attention._triton.threshold import last_of_ties, load_words, part_of_tie, row_of_slab

COARSE, FINE = tl.constexpr(256), tl.constexpr(128)
"""Values of the eight highest bits of a key, and of the seven lowest."""
FEW = 4
"""Multiprocessors that a row must have for itself: an H200 found the thresholds of 64 rows of 131,072 keys in 71 us so,
and in 54 with a program for each."""
MOST = 32
"""Segments of a row, at most."""
TILE = launch.Tile({"BLOCK": 2048}, warps=8)


@triton.jit
def kth_bin(counts, k):
    """(the highest bin that has, together with those above it, k entries; how many those above it have)."""
    bin = tl.sum((tl.cumsum(counts, axis=0, reverse=True) >= k).to(tl.int32), axis=0) - 1
    return bin, tl.sum(tl.where(tl.arange(0, counts.shape[0]) > bin, counts, 0), axis=0)


@triton.jit
def load_counts(counts_ptr, row, SEGMENTS: tl.constexpr, BINS: tl.constexpr):
    """[SEGMENTS, BINS] of a row."""
    at = row.to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    return tl.load(counts_ptr + at[:, None] * BINS + tl.arange(0, BINS)[None, :])


@launch.kernel
def _count_keys_kernel(
    keys_ptr, lengths_ptr, k_ptr, coarse_ptr, fine_ptr, first, Tq, padded, Tk, stride, ahead, k, window, sinks, queries,
    each, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, FORCED: tl.constexpr, IN_BIN: tl.constexpr,
):  # fmt: skip
    """Program (segment of `each` words, query of the slab). With IN_BIN it counts by the lowest bits, of keys whose
    highest are those of the row's k-th key."""
    segment, query = tl.program_id(0), tl.program_id(1)
    row = query // queries * padded + query % queries
    visible, window, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
    if visible > take:
        BINS: tl.constexpr = FINE if IN_BIN else COARSE
        row_ptr = keys_ptr + row.to(tl.int64) * stride
        bin = 0
        if IN_BIN:
            bin, _ = kth_bin(tl.sum(load_counts(coarse_ptr, query, SEGMENTS, COARSE), axis=0), take)
        counts = tl.zeros([BINS], tl.int32)
        for start in range(segment * each, tl.minimum((segment + 1) * each, (visible + 1) // 2), BLOCK):
            words = load_words(row_ptr, start + tl.arange(0, BLOCK), visible, window, sinks, FORCED)
            for half in tl.static_range(2):
                key = (words >> (16 * half)) & 0xFFFF
                if IN_BIN:
                    counts += tl.histogram(key & 127, BINS, mask=key >> 7 == bin)
                else:
                    counts += tl.histogram(key >> 7, BINS)
        at = (query.to(tl.int64) * SEGMENTS + segment) * BINS + tl.arange(0, BINS)
        tl.store((fine_ptr if IN_BIN else coarse_ptr) + at, counts)


@launch.kernel
def _kth_key_kernel(
    keys_ptr, lengths_ptr, k_ptr, coarse_ptr, fine_ptr, threshold_ptr, last_ptr, first, Tq, padded, Tk, stride, ahead,
    k, window, sinks, queries, each, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    FORCED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab): the results of `_long_threshold_kernel`, from the counts of a row's segments."""
    row = tl.program_id(0)
    visible, window, take = row_of_slab(row, lengths_ptr, k_ptr, first, Tq, padded, Tk, ahead, k, window, UNIT)
    low = tl.full([], 1, tl.int32)
    last = visible - 1
    if visible > take:
        query = row // padded * queries + row % padded
        highest = load_counts(coarse_ptr, query, SEGMENTS, COARSE)
        counts = load_counts(fine_ptr, query, SEGMENTS, FINE)
        coarse, above = kth_bin(tl.sum(highest, axis=0), take)
        fine, higher = kth_bin(tl.sum(counts, axis=0), take - above)
        low = coarse * 128 + fine
        need = take - above - higher
        ties = tl.sum(tl.where(tl.arange(0, FINE)[None, :] == fine, counts, 0), axis=1)
        if need < tl.sum(ties, axis=0):
            segment, need = part_of_tie(ties, need)
            row_ptr = keys_ptr + row.to(tl.int64) * stride
            last = last_of_ties(row_ptr, segment * each, visible, low, need, window, sinks, BLOCK, FORCED, PACKED)
    tl.store(threshold_ptr + first + row, low)
    tl.store(last_ptr + first + row, last)


def find_in_segments(
    given: tuple[Tensor | None, ...],
    found: tuple[Tensor, Tensor],
    rows: int,
    sizes: tuple[int, ...],
    rule: tuple[int, int, int],
    packed: bool,
    unit: int,
) -> bool:
    """Fills threshold and last, `found`, of a slab's rows, as `find_thresholds` does, if they are long and its queries
    few; returns whether it has. `given` are keys, lengths and wanted."""
    keys = given[0]
    assert keys is not None
    _, tq, padded, _, stride, _ = sizes
    # Of a part of a batch element's rows, any may be a query.
    queries = tq if rows % padded == 0 else padded
    count = rows // padded * tq if rows % padded == 0 else rows
    programs = tuning.programs(keys.device)
    if stride <= threshold.MAX_REGISTERS or FEW * count > programs:
        return False
    segments = min(MOST, launch.next_power_of_2(2 * programs // count))
    block = TILE.sizes["BLOCK"]
    each = launch.cdiv(stride // 2, segments * block) * block
    bins = (COARSE.value, FINE.value)
    counts = tuple(torch.empty(count, segments, n, dtype=torch.int32, device=keys.device) for n in bins)
    meta = {"SEGMENTS": segments, "BLOCK": block, "UNIT": unit, "FORCED": rule[1] > 0 or rule[2] > 0}
    args = (*given, *counts)
    numbers = (*sizes, *rule, queries, each)
    for in_bin in (False, True):
        _count_keys_kernel((segments, count, 1), (*args, *numbers), {**meta, "IN_BIN": in_bin}, **TILE.options)
    _kth_key_kernel((rows, 1, 1), (*args, *found, *numbers), {**meta, "PACKED": packed}, **TILE.options)
    return True


EXAMPLES = {
    _count_keys_kernel: {
        "keys_ptr": "*i16", "k_ptr": "*i32", "coarse_ptr": "*i32", "fine_ptr": "*i32", "SEGMENTS": MOST, **TILE.sizes,
        "UNIT": 1, "FORCED": True, "IN_BIN": True, "num_warps": TILE.warps,
    },
    _kth_key_kernel: {
        "keys_ptr": "*i16", "k_ptr": "*i32", "coarse_ptr": "*i32", "fine_ptr": "*i32", "threshold_ptr": "*i32",
        "SEGMENTS": MOST, **TILE.sizes, "UNIT": 1, "FORCED": True, "PACKED": False, "num_warps": TILE.warps,
    },
}  # fmt: skip
