"""The k * M largest pre-activations of a batch as entries of its rows: exact, without a host sync, in one reading.

A sample, 16 of each 2,048 columns of some of the rows, is counted by key (see `select`). Its r-th largest is the
*bound*, r being half as many again as the sample's share of the k * M largest, and a margin. One pass over the rows
lists the columns of numbers that reach the bound, and the numbers are counted by key: the k-th largest of the batch is
found in those counts, and a row's entries in its list. Keys of more than 16 bits are counted by their upper 16 first,
and where those are the k-th largest's by the rest.

A row with more than its list holds is read again. So is everything where the sample has misled, so that fewer than
k * M numbers reach the bound. As only the device knows, the passes that do it are always launched.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.pack import chunk_columns, clear_slots, count_bits, pop_lowest, scan_tile, word_bits
from gossamer.rowsparse.formats import empty_slots
from gossamer.sae._triton.select import SHIFT, emit_largest, list_largest, load_pre, rank_key, ranked

BOUND, LISTED, KTH, NEED = (tl.constexpr(word) for word in range(4))
"""Words that the launches tell each other: the bound, how many numbers reach it, the k-th largest key of the batch,
and how many of those that equal it are wanted."""


GROUPS = 128
"""Words that a warp has of a chunk of a row that is read again."""
BATCH_RUN = 16
"""Neighbouring columns of a sample of a batch: 32 or 64 bytes."""


def batch_sample(m: int, n: int, k: int) -> tuple[int, int, int]:
    """(rows from one that is sampled to the next, columns of each, columns from one run of them to the next).

    Among them are 64 of the k * m largest, or more, as far as half of the columns will do for that. Of many rows some
    are taken, some 90 or more that have some 256 of those; the step is odd, lest all be at one place of texts of the
    same length."""
    step = max(2 * BATCH_RUN, min(2048, 1 << (k * m // 4 | 1).bit_length() - 1))
    columns = min(n, max(1, n // step) * BATCH_RUN)
    rows = max(1, min(m // 128, k * m * columns // n // 256))
    return rows | 1, columns, step


def batch_rank(total: int, share: float) -> int:
    """Which of a sample's largest numbers is hardly ever larger than the `total`-th largest of the batch: half as many
    more than expected, for some latents fire more often than others, and a few."""
    expected = total * share
    return math.ceil(1.5 * expected + 4.6 * math.sqrt(expected) + 3)


def batch_tile(m: int, n: int, element_size: int) -> launch.Tile:
    """Tile of the pass over a batch: rows that do not fill the GPU get more threads each."""
    groups, warps = (256, 8) if m < 512 else (64, 1)
    return launch.Tile(scan_tile(n, element_size, groups), warps)


def batch_list(n: int, k: int) -> int:
    """Room for the numbers of a row that reach the bound, 1.5 to 2 k on average in a large batch. Where that is little,
    no more memory than a row of 16-bit numbers takes."""
    return min(n, max(1024, min(8 * k, n // 4), 3 * k))


@launch.kernel
def _count_sample_kernel(
    z_ptr, bias_ptr, scale_ptr, counts_ptr, every, N, size,
    RUN: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program p: counts the keys above 0 of the first RUN of each STEP columns, `size` in all, of row p * every."""
    z_ptr += tl.program_id(0).to(tl.int64) * every * N
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        columns = tl.where(at < size, at // RUN * STEP + at % RUN, N)
        key = rank_key(load_pre(z_ptr, columns, N), bias_ptr, scale_ptr, columns, N, SHIFT)
        tl.atomic_add(counts_ptr + (key >> LOW), tl.full([BLOCK], 1, tl.int64), mask=key > 0, sem="relaxed")


@launch.kernel
def _find_kernel(
    counts_ptr, words_ptr, rank, PART: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """The bin in which the rank-th largest is counted: of the sample (PART 0), of the listed numbers (1), or, for the
    rank that is left, by the low bits of the keys (2). Bin 0 where fewer are counted."""
    CHUNK: tl.constexpr = 4096 if BINS > 4096 else BINS
    wanted = tl.full([], rank, tl.int64)
    if PART == 2:
        wanted = tl.load(words_ptr + NEED)
    above = tl.zeros([], tl.int64)
    found = tl.full([], -1, tl.int32)
    beyond = tl.zeros([], tl.int64)
    bins = BINS - CHUNK + tl.arange(0, CHUNK)
    counts = tl.load(counts_ptr + bins)
    for _ in range(0, BINS // CHUNK):
        following = tl.load(counts_ptr + bins - CHUNK, mask=bins >= CHUNK, other=0)
        total = tl.sum(counts, axis=0)
        if (found < 0) & (above + total >= wanted):
            upto = above + total - tl.cumsum(counts, axis=0) + counts
            found = tl.max(tl.where(upto >= wanted, bins, -1), axis=0)
            beyond = tl.sum(tl.where(bins == found, upto - counts, 0), axis=0)
        above += total
        bins -= CHUNK
        counts = following
    if found < 0:
        beyond = above - tl.load(counts_ptr)
    key = tl.maximum(found, 0).to(tl.int64) << LOW
    if PART == 0:
        # Not NaN, for the bound is compared as a number.
        tl.store(words_ptr + BOUND, tl.minimum(tl.maximum(key, 1), 0x7F800000 >> SHIFT))
    else:
        if PART == 2:
            key += tl.load(words_ptr + KTH)
        tl.store(words_ptr + KTH, key)
        tl.store(words_ptr + NEED, wanted - beyond)


@launch.kernel
def _list_row_kernel(
    z_ptr, bias_ptr, scale_ptr, words_ptr, columns_ptr, reach_ptr, N, length,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program (row): the columns of numbers that reach the bound, as far as there is room; how many are in `reach_ptr`.

    All further work for them is left to `_count_listed_kernel`: here one thread of a warp would do it at a
    time."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * N
    columns_ptr += row * length
    bound = (tl.load(words_ptr + BOUND).to(tl.int32) << SHIFT).to(tl.float32, bitcast=True)
    # Of the dtype of z, so that 16-bit numbers are compared as they are.
    bound = bound.to(z_ptr.dtype.element_ty).to(tl.float32)
    if z_ptr.dtype.element_ty == tl.float16:
        # The smallest float16, where key 1 was rounded to 0.
        bound = tl.maximum(bound, 2.0**-24)
    base = 0
    z = load_pre(z_ptr, chunk_columns(0, BLOCK, VEC), N)
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        # NaN is not below.
        bits = word_bits(~(ranked(z, bias_ptr, scale_ptr, columns, N) < bound), VEC)
        if tl.max(bits, axis=0) > 0:
            found = count_bits(bits)
            slot = base + tl.cumsum(found, axis=0) - found
            base += tl.sum(found, axis=0)
            left = 1
            while left > 0:
                column, held, bits = pop_lowest(bits, start, BLOCK, VEC)
                tl.store(columns_ptr + slot, column, mask=held & (slot < length))
                slot += held.to(tl.int32)
                left = tl.max(bits, axis=0)
        z = following
    tl.store(reach_ptr + row, base)


@triton.jit
def count_in_window(bins, mask, window, first, counts_ptr, WINDOW: tl.constexpr):
    """Counts bins: from `first` on in the window, which is returned, and others at once. Numbers that compete for a
    few bins would wait for each other in memory."""
    inside = mask & (bins >= first) & (bins < first + WINDOW)
    ones = tl.full(bins.shape, 1, tl.int64)
    tl.atomic_add(counts_ptr + bins, ones, mask=mask & ~inside, sem="relaxed")
    return window + tl.histogram(tl.where(inside, bins - first, 0), WINDOW, mask=inside)


@triton.jit
def window_below(key, LOW: tl.constexpr, WINDOW: tl.constexpr):
    """Where a window begins that reaches to a little above the largest of these keys."""
    return tl.maximum((tl.max(key, axis=0) >> LOW) + 65 - WINDOW, 0)


@triton.jit
def add_window(window, first, counts_ptr, WINDOW: tl.constexpr):
    bins = first + tl.arange(0, WINDOW)
    tl.atomic_add(counts_ptr + bins, window.to(tl.int64), mask=window > 0, sem="relaxed")


@launch.kernel
def _count_listed_kernel(
    z_ptr, bias_ptr, scale_ptr, counts_ptr, words_ptr, list_ptr, columns_ptr, reach_ptr, M, N, length,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program p takes ROWS rows at a time, from p * ROWS on: it lists and counts the keys of the listed columns, and
    how many numbers reach the bound. Rows that do not fit are left to `_count_rest_kernel`."""
    bound = tl.load(words_ptr + BOUND).to(tl.int32)
    # Most numbers that reach a bound are close to it, but anything may exceed 0.
    first = tl.where(bound > 1, bound >> LOW, -1)
    window = tl.zeros([WINDOW], tl.int32)
    total = tl.zeros([], tl.int64)
    block = tl.program_id(0)
    while block * ROWS < M:
        rows = block * ROWS + tl.arange(0, ROWS)
        reach = tl.load(reach_ptr + rows, mask=rows < M, other=0)
        total += tl.sum(reach.to(tl.int64), axis=0)
        listed = tl.where(reach <= length, reach, 0)
        row = rows.to(tl.int64)[:, None]
        for start in range(0, tl.max(listed, axis=0), BLOCK):
            at = start + tl.arange(0, BLOCK)[None, :]
            held = at < listed[:, None]
            column = tl.load(columns_ptr + row * length + at, mask=held, other=0)
            z = tl.load(z_ptr + row * N + column, mask=held, other=0.0)
            key = rank_key(z, bias_ptr, scale_ptr, column, N, SHIFT)
            tl.store(list_ptr + row * length + at, key, mask=held)
            key, mask = tl.reshape(key, [ROWS * BLOCK]), tl.reshape(held, [ROWS * BLOCK])
            if first < 0:
                first = window_below(tl.where(mask, key, 0), LOW, WINDOW)
            window = count_in_window(key >> LOW, mask, window, first, counts_ptr, WINDOW)
        block += tl.num_programs(0)
    add_window(window, tl.maximum(first, 0), counts_ptr, WINDOW)
    tl.atomic_add(words_ptr + LISTED, total, sem="relaxed")


@launch.kernel
def _count_rest_kernel(
    z_ptr, bias_ptr, scale_ptr, counts_ptr, words_ptr, reach_ptr, wanted, M, N, length,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program p takes rows p, p + programs, ...: it counts the keys of rows that do not fit their lists, and where the
    bound was too high, of numbers below it as well; no list is to be used then."""
    bound = tl.load(words_ptr + BOUND).to(tl.int32)
    misled = (tl.load(words_ptr + LISTED) < wanted) & (bound > 1)
    window = tl.zeros([WINDOW], tl.int32)
    first = tl.full([], -1, tl.int32)
    row = tl.program_id(0).to(tl.int64)
    while row < M:
        reach = tl.load(reach_ptr + row)
        if misled | (reach > length):
            lowest = bound
            highest = 0x7FFFFFFF
            if misled:
                lowest = tl.full([], 1, tl.int32)
                if reach <= length:
                    highest = bound - 1
            for start in range(0, N, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                z = load_pre(z_ptr + row * N, columns, N)
                key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
                mask = (key >= lowest) & (key <= highest)
                if first < 0:
                    first = window_below(tl.where(mask, key, 0), LOW, WINDOW)
                window = count_in_window(key >> LOW, mask, window, first, counts_ptr, WINDOW)
            if misled:
                # By now every thread has read it.
                tl.debug_barrier()
                tl.store(reach_ptr + row, length + 1)
        row += tl.num_programs(0)
    add_window(window, tl.maximum(first, 0), counts_ptr, WINDOW)


@launch.kernel
def _count_low_kernel(
    z_ptr, bias_ptr, scale_ptr, counts_ptr, words_ptr, list_ptr, reach_ptr, N, length,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program (row): the low bits of the keys that have the k-th largest's upper bits."""
    row = tl.program_id(0).to(tl.int64)
    upper = tl.load(words_ptr + KTH).to(tl.int32) >> LOW
    reach = tl.load(reach_ptr + row)
    if reach <= length:
        for first in range(0, reach, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = tl.load(list_ptr + row * length + at, mask=at < reach, other=0)
            ones = tl.full([BLOCK], 1, tl.int64)
            tl.atomic_add(
                counts_ptr + (key & ((1 << LOW) - 1)), ones, mask=(key > 0) & (key >> LOW == upper), sem="relaxed"
            )
    else:
        for start in range(0, N, BLOCK):
            columns = chunk_columns(start, BLOCK, VEC)
            key = rank_key(load_pre(z_ptr + row * N, columns, N), bias_ptr, scale_ptr, columns, N, SHIFT)
            ones = tl.full([BLOCK // VEC, VEC], 1, tl.int64)
            tl.atomic_add(
                counts_ptr + (key & ((1 << LOW) - 1)), ones, mask=(key > 0) & (key >> LOW == upper), sem="relaxed"
            )


@launch.kernel
def _count_ties_kernel(
    z_ptr, bias_ptr, scale_ptr, words_ptr, list_ptr, reach_ptr, ties_ptr, above_ptr, N, length,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program (row): how many of its keys equal the k-th largest, and how many are above it."""
    row = tl.program_id(0).to(tl.int64)
    kth = tl.maximum(tl.load(words_ptr + KTH).to(tl.int32), 1)
    reach = tl.load(reach_ptr + row)
    ties = 0
    above = 0
    if reach <= length:
        for first in range(0, reach, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = tl.load(list_ptr + row * length + at, mask=at < reach, other=0)
            ties += tl.sum((key == kth).to(tl.int32), axis=0)
            above += tl.sum((key > kth).to(tl.int32), axis=0)
    else:
        for start in range(0, N, BLOCK):
            columns = chunk_columns(start, BLOCK, VEC)
            key = rank_key(load_pre(z_ptr + row * N, columns, N), bias_ptr, scale_ptr, columns, N, SHIFT)
            ties += tl.sum(count_bits(word_bits(key == kth, VEC)), axis=0)
            above += tl.sum(count_bits(word_bits(key > kth, VEC)), axis=0)
    tl.store(ties_ptr + row, ties)
    tl.store(above_ptr + row, above)


@launch.kernel(specialize=("M",))
def _share_ties_kernel(
    words_ptr, ties_ptr, above_ptr, kth_ptr, need_ptr, spans_ptr, M, N, BLOCK: tl.constexpr
):  # fmt: skip
    """The one program: in order of rows, a row may take the wanted ties that the rows before it have left. Where fewer
    numbers than wanted are above 0, the smallest key is the k-th largest, and wanted wherever it is. The spans of rows
    follow."""
    key = tl.load(words_ptr + KTH)
    kth = tl.maximum(key, 1).to(tl.int32)
    left = tl.where(key > 0, tl.load(words_ptr + NEED), 1 << 62)
    begin = tl.zeros([], tl.int64)
    for first in range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        ties = tl.load(ties_ptr + rows, mask=rows < M, other=0).to(tl.int64)
        need = left - (tl.cumsum(ties, axis=0) - ties)
        tl.store(kth_ptr + rows, tl.full([BLOCK], 0, tl.int32) + kth, mask=rows < M)
        need = tl.minimum(tl.maximum(need, 0), N)
        tl.store(need_ptr + rows, need.to(tl.int32), mask=rows < M)
        left -= tl.sum(ties, axis=0)
        kept = tl.load(above_ptr + rows, mask=rows < M, other=0) + tl.minimum(ties, need)
        tl.store(spans_ptr + rows, begin + tl.cumsum(kept, axis=0) - kept, mask=rows < M)
        tl.store(spans_ptr + M + rows, kept, mask=rows < M)
        begin += tl.sum(kept, axis=0)


@launch.kernel
def _emit_row_kernel(
    z_ptr, bias_ptr, scale_ptr, list_ptr, columns_ptr, reach_ptr, kth_ptr, need_ptr, values_ptr, indices_ptr, spans_ptr,
    l0_ptr, N, length, slots, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Program (row): its entries from its list, or from z where the list had no room for all. The programs share the
    slots behind the last entry, of `slots` in all."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    behind = tl.load(spans_ptr + rows - 1) + tl.load(spans_ptr + 2 * rows - 1)
    clear_slots(values_ptr, indices_ptr, behind + row * 256, slots, rows * 256, 256)
    begin, room = tl.load(spans_ptr + row), tl.load(spans_ptr + rows + row).to(tl.int32)
    kth, need = tl.load(kth_ptr + row), tl.load(need_ptr + row)
    z_ptr += row * N
    reach = tl.load(reach_ptr + row)
    if reach <= length:
        emit_largest(
            z_ptr, bias_ptr, scale_ptr, list_ptr + row * length, columns_ptr + row * length, None, reach, kth, need,
            values_ptr + begin, indices_ptr + begin, N, room, LIST, SHIFT,
        )  # fmt: skip
    else:
        list_largest(
            z_ptr, bias_ptr, scale_ptr, kth, need, values_ptr + begin, indices_ptr + begin, N, room, BLOCK, VEC, SHIFT,
            False,
        )  # fmt: skip
    tl.store(l0_ptr + row, room)


class Found:
    """The lists of numbers that reach the bound, and which of them rows keep."""

    __slots__ = ("columns", "keys", "kth", "length", "need", "reach")

    def __init__(self, m: int, length: int, device: torch.device) -> None:
        self.length = length
        # Each by itself, for kernels want them on 16 bytes.
        self.keys, self.columns = (torch.empty(m, length, dtype=torch.int32, device=device) for _ in range(2))
        self.reach, self.kth, self.need = (torch.empty(m, dtype=torch.int32, device=device) for _ in range(3))


def find(z: Tensor, bias: Tensor | None, k: int, scale: Tensor | None, spans: Tensor) -> Found:
    """The k * M largest keys of z [M, N] + bias [N], times scale [N]: a row selects every key above kth[row] and the
    first need[row] that equal it. Rows whose `reach` exceeds `length` are not in the lists. Fills `spans`."""
    m, n = z.shape
    shift = SHIFT[z.dtype]
    low = max(31 - shift - 16, 0)
    bins = 1 << 31 - shift - low
    every, size, step = batch_sample(m, n, k)
    found = Found(m, batch_list(n, k), z.device)
    memory = torch.zeros(2 * bins + (1 << low) + 4, dtype=torch.int64, device=z.device)
    words, sample, counts, rest = memory.split([4, bins, bins, 1 << low])
    operands, grid = (z, bias, scale), (m, 1, 1)
    tile = batch_tile(m, n, z.element_size())
    meta = {**tile.sizes, "SHIFT": shift}
    bits = {"SHIFT": shift, "LOW": low}
    part = {"RUN": BATCH_RUN, "STEP": step, "BLOCK": min(1024, launch.next_power_of_2(size))}
    rows = launch.cdiv(m, every)
    _count_sample_kernel((rows, 1, 1), (*operands, sample, every, n, size), {**part, **bits})
    rank = batch_rank(k * m, rows / m * size / n)
    _find_kernel((1, 1, 1), (sample, words, rank), {"PART": 0, "BINS": bins, **bits}, num_warps=16)
    args = (*operands, words, found.columns, found.reach, n, found.length)
    _list_row_kernel(grid, args, meta, **tile.options)
    cores = tuning.programs(z.device)
    args = (*operands, counts, words, found.keys, found.columns, found.reach, m, n, found.length)
    # An octave is 128 bins of bfloat16, and 256 of others.
    part = {"ROWS": 8, "BLOCK": 256, "WINDOW": 256 if 64 * k <= n else 1024, **bits}
    _count_listed_kernel((min(launch.cdiv(m, 8), 2 * cores), 1, 1), args, part, num_warps=8)
    args = (*operands, counts, words, found.reach, k * m, m, n, found.length)
    part = {"BLOCK": 4096 // z.element_size(), "WINDOW": 1024, **bits}
    _count_rest_kernel((min(m, 4 * cores), 1, 1), args, part, num_warps=8)
    _find_kernel((1, 1, 1), (counts, words, k * m), {"PART": 1, "BINS": bins, **bits}, num_warps=16)
    listed = (words, found.keys, found.reach)
    if low:
        args = (*operands, rest, *listed, n, found.length)
        _count_low_kernel(grid, args, {**meta, **bits}, **tile.options)
        part = {"PART": 2, "BINS": 1 << low, "SHIFT": shift, "LOW": 0}
        _find_kernel((1, 1, 1), (rest, words, 0), part, num_warps=16)
    ties = torch.empty(m, dtype=torch.int32, device=z.device)
    above = torch.empty_like(ties)
    args = (*operands, *listed, ties, above, n, found.length)
    _count_ties_kernel(grid, args, meta, **tile.options)
    args = (words, ties, above, found.kth, found.need, spans, m, n)
    _share_ties_kernel((1, 1, 1), args, {"BLOCK": min(4096, launch.next_power_of_2(m))}, num_warps=8)
    return found


def batch_topk(z: Tensor, bias: Tensor | None, k: int, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values [M * k], indices [M * k], spans [2, M], l0 [M] in float32) of the k * M largest elements above 0."""
    m, n = z.shape
    out = (*empty_slots(z, m, m * k), torch.empty(m, dtype=torch.float32, device=z.device))
    found = find(z, bias, k, scale, out[2])
    # A program is four warps.
    meta = {**scan_tile(n, z.element_size(), 4 * GROUPS), "SHIFT": SHIFT[z.dtype], "LIST": 256}
    args = (z, bias, scale, found.keys, found.columns, found.reach, found.kth, found.need, *out, n, found.length, m * k)
    _emit_row_kernel((m, 1, 1), args, meta, num_warps=4)
    return out


EXAMPLES = {
    _count_sample_kernel: {"counts_ptr": "*i64", "RUN": 16, "STEP": 2048, "BLOCK": 512, "SHIFT": 16, "LOW": 0},
    _count_ties_kernel: {"BLOCK": 512, "VEC": 8, "SHIFT": 16, "num_warps": 1},
    _share_ties_kernel: {"BLOCK": 4096, "num_warps": 8},
    _find_kernel: {"counts_ptr": "*i64", "PART": 1, "BINS": 32768, "SHIFT": 16, "LOW": 0, "num_warps": 16},
    _emit_row_kernel: {"BLOCK": 4096, "VEC": 8, "SHIFT": 16, "LIST": 256},
    _list_row_kernel: {"BLOCK": 512, "VEC": 8, "SHIFT": 16, "num_warps": 1},
    _count_listed_kernel: {
        "counts_ptr": "*i64", "ROWS": 8, "BLOCK": 256, "WINDOW": 256, "SHIFT": 16, "LOW": 0, "num_warps": 8,
    },
    _count_rest_kernel: {"counts_ptr": "*i64", "BLOCK": 2048, "WINDOW": 1024, "SHIFT": 16, "LOW": 0, "num_warps": 8},
    _count_low_kernel: {
        "z_ptr": "*fp32", "counts_ptr": "*i64", "BLOCK": 256, "VEC": 4, "SHIFT": 0, "LOW": 15, "num_warps": 1,
    },
}  # fmt: skip
