"""Words of long rows without their scores in memory: only keys that may be among the highest are kept.

To write every key of a long row, to read all for its threshold and once more for its words takes nearly twice as long
as to score them, for a slab is larger than the GPU's second cache. Here a sixteenth of the keys is scored first, one of
each stretch of the row. The key that k / 16 of these reach, and some deviations more, is a bound: in all likelihood
more than k keys of the row reach it, and not many more. Then all are scored, and those that reach the bound are listed
(`_gluon/select_topk.py`). Each thread of a row and part of the keys has a list, so that nothing passes between threads.
Entries are in no order, for each holds all that ranks it: its key, and below that the bits of its column, the lower
columns higher. No two of a row are equal, so that one threshold separates the k highest, ties included.
`_candidates_kernel` has a program for each row: it holds the entries in registers, narrows a bracket of thresholds by
counting, as if their number fell by the same factor everywhere between its ends, and sets the row's bit in the words of
the k highest, by atomics whose order does not show.

A row of which too few keys are listed, or too many for a list, marks its block of 64 rows. Marked blocks are scored and
counted again, in the way that takes any row; its launches are there in any case, and end at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention import levels
from gossamer.attention._triton._indexer import valid_keys, visible_keys
from gossamer.attention._triton.threshold import narrowed

LEAST, MOST = levels.LONG_ROW, 1 << 17
"""Keys beyond which rows do not fit registers, and up to which 17 bits say which it is."""
STRETCH = 16
"""Keys of which the sample has one."""
PARTS = 8
"""Parts of the keys that programs list."""
LISTS = 4 * PARTS
"""Of a row: four threads hold its columns of a tile."""
CLUSTER = 48
"""Entries that a list has room for beyond twice the expected number, for high scores that are neighbours."""
ALIGNED = 4096
"""Bytes at a multiple of which lists begin: a multiple of a list's."""
NONE = tl.constexpr(-(1 << 31))


@launch.kernel
def _candidates_kernel(
    lists_ptr, counts_ptr, bound_ptr, threshold_ptr, last_ptr, flags_ptr, words_ptr, lengths_ptr, first, Tq, padded, Tk,
    ahead, k, LISTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab). `threshold_ptr` and `last_ptr` get the first values of rows that are
    counted again."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    visible = visible_keys((first + row) % padded, valid_keys(lengths_ptr, (first + row) // padded, Tk), Tq, ahead)
    take = tl.minimum(visible, k)
    at = tl.arange(0, LISTS)
    counts = tl.load(counts_ptr + row * LISTS + at)
    listed = tl.sum(counts)
    tl.store(threshold_ptr + first + row, 1)
    tl.store(last_ptr + first + row, tl.where(visible > k, -1, visible - 1))
    settled = (listed >= take) & (tl.max(counts) < SLOTS)
    if (take > 0) & (not settled):
        tl.store(flags_ptr + (first + row) // 64, 1)
    if (take > 0) & settled:
        place = tl.arange(0, SLOTS)[None, :]
        start = row.to(tl.int64) * (LISTS * SLOTS)
        entries = tl.load(lists_ptr + start + at[:, None] * SLOTS + place, mask=place < counts[:, None], other=NONE)
        low = (tl.load(bound_ptr + first + row).to(tl.int64) << 17) + NONE
        high = tl.max(entries).to(tl.int64) + 1
        reach_low = listed
        reach_high = tl.full([], 0, tl.int32)
        rounds = 0
        while reach_low != take:
            above = tl.log2(reach_low.to(tl.float32)) - tl.log2(tl.maximum(reach_high, 1).to(tl.float32) - 0.5)
            part = (tl.log2(reach_low.to(tl.float32)) - tl.log2(take.to(tl.float32))) / above
            probe = low + ((high - low).to(tl.float32) * part).to(tl.int64)
            probe = tl.where(rounds % 3 == 2, (low + high) >> 1, probe)
            probe = tl.minimum(tl.maximum(probe, low + 1), high - 1)
            reach = tl.sum((entries >= probe.to(tl.int32)).to(tl.int32))
            low, high, reach_low, reach_high = narrowed(low, high, reach_low, reach_high, probe, reach, take)
            rounds += 1
        # A word of 64 queries is two integers of 32.
        to = words_ptr + ((first + row) // 64).to(tl.int64) * 2 * Tk + row // 32 % 2
        bit = tl.full([LISTS, SLOTS], 1, tl.int32) << (row % 32)
        tl.atomic_or(to + 2 * (0x1FFFF - (entries & 0x1FFFF)), bit, mask=entries >= low.to(tl.int32), sem="relaxed")


class Lists(NamedTuple):
    """Of rows that take k keys: how many of a row's sample reach its bound, and slots of a list."""

    reach: int
    slots: int

    @property
    def entries(self) -> int:
        """Slots of a row."""
        return LISTS * self.slots


def lists_of(k: int) -> Lists:
    expected = k / STRETCH
    reach = math.ceil(expected + 5.5 * math.sqrt(expected) + 1)
    return Lists(reach, launch.next_power_of_2(2 * reach * STRETCH // LISTS + CLUSTER))


def fits(k: int, queries: int, tk: int) -> bool:
    """Whether rows may be long, and are enough that further launches pay, and registers hold their entries."""
    return LEAST < tk <= MOST and queries >= 2048 and lists_of(k).entries <= 16384


def sampled(k: Tensor) -> Tensor:
    """One key of each stretch, `[B, ceil(Tk / 16), D]`, as if drawn: neighbours are alike, and so may be those some
    steps apart."""
    tk = k.shape[1]
    i = torch.arange(launch.cdiv(tk, STRETCH), dtype=torch.int32, device=k.device)
    return k.index_select(1, (i * STRETCH + (i * 40503 >> 4) % STRETCH).clamp_(max=tk - 1))


def cut(slabs: Sequence[tuple[int, int, int]], most: int) -> list[tuple[int, int]]:
    """(first row, rows) of pieces of the slabs' rows: of equal size, as few as `most` rows allow, a multiple of 64."""
    runs: list[tuple[int, int]] = []
    for begin, rows, _ in slabs:
        first = runs.pop()[0] if runs and runs[-1][1] == begin else begin
        runs.append((first, begin + rows))
    found = []
    for first, end in runs:
        rows = launch.cdiv(launch.cdiv(end - first, launch.cdiv(end - first, most)), 64) * 64
        found += [(at, min(rows, end - at)) for at in range(first, end, rows)]
    return found


def launch_candidates(
    lists: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    words: Tensor,
    lengths: Tensor | None,
    rows: int,
    sizes: tuple[int, ...],
    k: int,
) -> None:
    """Sets the bits of a slab's rows in words, which are zeros. `lists` are entries and counts, `found` are bound,
    threshold, last and flags, `sizes` first, Tq, padded, Tk and ahead."""
    slots = lists_of(k).slots
    args = (*lists, *found, words.view(torch.int32), lengths, *sizes, k)
    meta = {"LISTS": LISTS, "SLOTS": slots}
    # 32 entries to a thread, and three programs of 8,192 to a multiprocessor.
    _candidates_kernel((rows, 1, 1), args, meta, num_warps=max(1, LISTS * slots // 1024), maxnreg=80)


EXAMPLES = {
    _candidates_kernel: {
        "threshold_ptr": "*i32", "words_ptr": "*i32", "LISTS": LISTS, "SLOTS": 256, "num_warps": 8, "maxnreg": 80,
    },
}  # fmt: skip
