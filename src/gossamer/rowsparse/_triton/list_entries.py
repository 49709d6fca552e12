"""A dense matrix to one list of entries a row, in one pass: in slots of its own, or right behind the row before.

A program reads a *piece*, a part of a row or several short rows, and keeps of it one bit an element, in registers. It
publishes how many bits are set, learns from the programs before it where its lists begin, and reads the kept elements
again. A program finds its start by decoupled look-back (Merrill and Garland, "Single-pass Parallel Prefix Scan with
Decoupled Look-back"): it adds up the counts of the pieces before it, back to the first that knows the sum of all before
itself. Programs wait only for programs that started earlier, so waiting cannot deadlock.

Byte c of a thread's word has the bits of chunk c of the piece, so that each load is coalesced and a lane keeps what it
has loaded. Columns ascend by chunk, then by lane, then by bit: one scan of 64-bit words, with a 16-bit field for each
chunk, ranks them all.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse.formats import empty_slots
from gossamer.rowsparse.pack import MOST_ENTRIES, default_capacity
from gossamer.rowsparse.records import PackRows

DONE = tl.constexpr(1 << 31)
"""Marks a flag whose count is the sum of all pieces up to its own."""
SUM = tl.constexpr((1 << 31) - 1)
"""The bits of a flag that hold a sum, as `folded` has it."""
FOLD = tl.constexpr(1 << 30)
"""More entries than any room holds."""
UNKNOWN = tl.constexpr(1 << 48)
"""Stands in a sum for a count that has not been published."""
LOOK = tl.constexpr(128)
"""Flags that a program reads at a time."""
CHUNKS = 4
"""Chunks of a piece: bytes of a word."""


@triton.jit
def ones_in_bytes(bits):
    """Set bits of each byte of an int32, in that byte."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (bits + (bits >> 4)) & 0x0F0F0F0F


@triton.jit
def sum_bytes(counts):
    """The sum of the four bytes of an int32."""
    counts = (counts & 0x00FF00FF) + ((counts >> 8) & 0x00FF00FF)
    return (counts + (counts >> 16)) & 0xFF


@triton.jit
def spread_bytes(counts):
    """The four bytes of an int32 as the four 16-bit fields of an int64."""
    wide = counts.to(tl.int64)
    wide = (wide | (wide << 16)) & 0x0000FFFF0000FFFF
    return (wide | (wide << 8)) & 0x00FF00FF00FF00FF


@triton.jit
def sum_fields(fields):
    """The sum of the four 16-bit fields of an int64, as int32."""
    low = (fields & 0xFFFF) + ((fields >> 16) & 0xFFFF)
    return (low + ((fields >> 32) & 0xFFFF) + ((fields >> 48) & 0xFFFF)).to(tl.int32)


@triton.jit
def pop_lowest(bits):
    """(place of each word's lowest set bit, the bits that are left). A float's exponent is the place of its one bit."""
    low = (bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return (low >> 23) - 127, bits & (bits - 1)


@triton.jit
def folded(total):
    """A sum as 31 bits hold it: from FOLD on its remainder, with FOLD added. So a sum that no room reaches still tells
    so, and the difference of two sums is right."""
    return tl.where(total >= FOLD, (total & (FOLD - 1)) | FOLD, total)


@triton.jit
def publish(flag_ptr, epoch, word):
    """Sets a flag of this launch. An atomic, because a plain store could sit in a write buffer while others wait."""
    tl.atomic_xchg(flag_ptr, (epoch.to(tl.int64) << 32) | word, sem="relaxed")


@triton.jit
def wait_sum(flag_ptr, epoch):
    """The sum of all pieces up to the flag's own, once it is known: int64."""
    ready = (epoch.to(tl.int64) << 1) | 1
    word = tl.load(flag_ptr, volatile=True)
    while (word >> 31) != ready:
        word = tl.load(flag_ptr, volatile=True)
    return word & SUM


@triton.jit
def sum_before(flags_ptr, first, piece, epoch):
    """The number of entries of the pieces from `first` on and before `piece`: int64, folded.

    An epoch is compared for equality: launches of several host threads may reach the stream in another order.
    """
    at = tl.arange(0, LOOK)
    total = tl.zeros([], tl.int64)
    end = piece
    while end > first:
        inside = end - LOOK + at >= first
        last = -1
        run = tl.full([], UNKNOWN, tl.int64)
        while run >= UNKNOWN:
            words = tl.load(flags_ptr + end - LOOK + at, mask=inside, other=0, volatile=True)
            ready = (words >> 32) == epoch
            last = tl.max(tl.where(inside & ready & ((words & DONE) != 0), at, -1), axis=0)
            counts = tl.where(ready, words & SUM, UNKNOWN)
            run = tl.sum(tl.where(inside & (at >= last), counts, 0), axis=0)
        total += run
        end = tl.where(last >= 0, first, end - LOOK)
    return folded(total)


@triton.jit
def add_bias(z, bias_ptr, columns, inside):
    """z + bias in float32, rounded once to the dtype of z: the number that is compared is the number that is stored."""
    if bias_ptr is None:
        return z.to(tl.float32)
    else:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        return (z.to(tl.float32) + bias).to(z.dtype).to(tl.float32)


@triton.jit
def load_threshold(threshold_ptr, stride_t, columns, inside):
    """A threshold below 0 keeps the elements that 0 keeps, because values are at least 0."""
    if threshold_ptr is None:
        return 0.0
    else:
        threshold = tl.load(threshold_ptr + columns * stride_t, mask=inside, other=0.0).to(tl.float32)
        return tl.where(threshold < 0, 0.0, threshold)


@triton.jit
def piece_bits(
    x_ptr, bias_ptr, threshold_ptr, stride_t, radius, row, stride_xm, begin, M, N,
    WORDS: tl.constexpr, VEC: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Whether elements are kept: bit v of byte c of a row's word w is the row's element
    VEC * (begin + c * WORDS + w) + v."""
    lane = tl.arange(0, ROWS * WORDS) % WORDS
    bits = tl.zeros([ROWS * WORDS], tl.int32)
    for c in tl.static_range(PARTS):
        first = begin + c * WORDS + lane
        columns = first[:, None] * VEC + tl.arange(0, VEC)[None, :]
        if EVEN:
            # Words are whole: that is said in words, for the compiler to load 16 bytes at a time.
            offset = (row * (stride_xm // VEC) + first) * VEC
            inside = (first < N // VEC)[:, None]
        else:
            offset = row * stride_xm + first * VEC
            inside = columns < N
        inside = inside & (row < M)[:, None]
        x = tl.load(x_ptr + offset[:, None] + tl.arange(0, VEC)[None, :], mask=inside, other=0.0)
        if radius is None:
            keep = x != 0
        else:
            pre = add_bias(x, bias_ptr, columns, inside)
            most = load_threshold(threshold_ptr, stride_t, columns, inside)
            if WINDOW:
                most = most - radius
            keep = ~(pre <= most) & inside
        bits |= tl.sum(keep.to(tl.int32) << (8 * c + tl.arange(0, VEC)[None, :]), axis=1)
    return bits


@triton.jit
def write_entries(
    x_ptr, bias_ptr, threshold_ptr, stride_t, radius, values_ptr, indices_ptr, bits, place, row, stride_xm, begin,
    WORDS: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Every word writes its lowest entry in turn, so the work follows the fullest word, which has 1 or 2 in sparse
    data. `place` (start and end of the row's room, int64; 16-bit places by chunk) says where a word's entries go.
    Returns how many of a word's entries exceed the threshold, with WINDOW, in which the others have the value 0."""
    lane = tl.arange(0, ROWS * WORDS) % WORDS
    start, room, within = place
    active = tl.zeros([ROWS * WORDS], tl.int32)
    for _ in range(tl.max(sum_bytes(ones_in_bytes(bits)), axis=0)):
        held = bits != 0
        bit, bits = pop_lowest(bits)
        chunk = (bit >> 3) & 3
        slot = start + ((within >> (16 * chunk)) & 0xFFFF)
        within += tl.full([], 1, tl.int64) << (16 * chunk)
        mask = held & (slot < room)
        column = (begin + chunk * WORDS + lane) * VEC + (bit & 7)
        value = tl.load(x_ptr + row * stride_xm + column, mask=held, other=0.0)
        if radius is not None:
            value = add_bias(value, bias_ptr, column, held)
            if WINDOW:
                below = value <= load_threshold(threshold_ptr, stride_t, column, held)
                value = tl.where(below, 0.0, value)
                active += (held & ~below).to(tl.int32)
        tl.store(values_ptr + slot, value, mask=mask)
        tl.store(indices_ptr + slot, column, mask=mask)
    return active


@triton.jit
def clear_slots(values_ptr, indices_ptr, rows, counts, M, room, BLOCK: tl.constexpr):
    """Marks the slots behind the entries of rows that have `room` slots each."""
    for first in range(tl.min(tl.where(rows < M, counts, room), axis=0), room, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        mask = (rows < M)[:, None] & (slots[None, :] >= counts[:, None]) & (slots < room)[None, :]
        at = rows[:, None] * room + slots[None, :]
        tl.store(indices_ptr + at, -1, mask=mask)
        tl.store(values_ptr + at, 0.0, mask=mask)


@launch.kernel(do_not_specialize=["epoch"])
def _list_entries_kernel(
    x_ptr, bias_ptr, threshold_ptr, values_ptr, indices_ptr, spans_ptr, l0_ptr, flags_ptr,
    epoch, stride_t, radius, stride_xm, M, N, pieces, room,
    WORDS: tl.constexpr, VEC: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, piece of them), pieces fastest; where ROWS is not 1, `pieces` is.

    Where `radius` is None entries are the elements that differ from 0. CHAINED rows share `room` slots, and their
    starts are folded; else each row has `room` slots of its own, and starts behind all of them where it has more
    entries. Counts are true. With a WINDOW the entries above their threshold are added to the numbers at `l0_ptr`.
    """
    pid = tl.program_id(0)
    part = pid % pieces
    begin = part * (PARTS * WORDS)
    rows = (pid // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = (pid // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS * WORDS) // WORDS
    bits = piece_bits(
        x_ptr, bias_ptr, threshold_ptr, stride_t, radius, row, stride_xm, begin, M, N, WORDS, VEC, PARTS, ROWS, EVEN,
        WINDOW,
    )  # fmt: skip
    fields = spread_bytes(ones_in_bytes(bits)).reshape([ROWS, WORDS])
    by_chunk = tl.sum(fields, axis=1)
    counts = sum_fields(by_chunk)
    count = tl.sum(counts, axis=0)
    if flags_ptr is not None:
        publish(flags_ptr + pid, epoch, count.to(tl.int64))
    chunks_before = (by_chunk << 16) + (by_chunk << 32) + (by_chunk << 48)
    within = tl.cumsum(fields, axis=1) - fields + chunks_before[:, None]
    base = tl.zeros([], tl.int64)
    if flags_ptr is not None:
        base = sum_before(flags_ptr, 0 if CHAINED else pid - part, pid, epoch)
        publish(flags_ptr + pid, epoch, folded(base + count) | DONE)
    start = base + tl.cumsum(counts, axis=0) - counts if CHAINED else rows * room + base
    if count > 0:
        of_row = tl.broadcast_to(start[:, None], [ROWS, WORDS]).reshape([ROWS * WORDS])
        end = room if CHAINED else (row + 1) * room
        active = write_entries(
            x_ptr, bias_ptr, threshold_ptr, stride_t, radius, values_ptr, indices_ptr, bits,
            (of_row, end, within.reshape([ROWS * WORDS])), row, stride_xm, begin, WORDS, VEC, ROWS, WINDOW,
        )  # fmt: skip
        if WINDOW and l0_ptr is not None:
            found = tl.sum(active.reshape([ROWS, WORDS]), axis=1).to(tl.float32)
            # Whole numbers: the sum does not depend on the order of arrival.
            tl.atomic_add(l0_ptr + rows, found, mask=rows < M, sem="relaxed")
    if CHAINED:
        if part == 0:
            tl.store(spans_ptr + rows, folded(start), mask=rows < M)
    if part == pieces - 1:
        if not CHAINED:
            counts += base.to(tl.int32)
            clear_slots(values_ptr, indices_ptr, rows, counts, M, room, 1024 // ROWS)
            behind = tl.zeros([], tl.int64) + room
            tl.store(spans_ptr + rows, tl.where(counts > room, behind * M, rows * room), mask=rows < M)
        elif pieces > 1:
            before = tl.zeros([], tl.int64)
            if pid >= pieces:
                before = wait_sum(flags_ptr + pid - pieces, epoch)
            counts += ((base - before) & (FOLD - 1)).to(tl.int32)
        tl.store(spans_ptr + M + rows, counts.to(tl.int64), mask=rows < M)
        if l0_ptr is not None and not WINDOW:
            tl.store(l0_ptr + rows, counts, mask=rows < M)


class Limit(NamedTuple):
    """The bounds that elements have to exceed to be kept, instead of differing from 0: z + bias above the thresholds of
    columns, or less than `radius` below them. Without thresholds the limit is 0, and it is never below."""

    bias: Tensor | None
    threshold: Tensor | None
    radius: float = 0.0


class Cut(NamedTuple):
    """How rows are cut: the kernel's sizes, pieces a row, and warps."""

    sizes: dict[str, int]
    pieces: int
    warps: int


WARPS, WORDS = 4, 512
"""Warps of a program, and words of a chunk."""
MANY = 1 << 23
"""Words of a matrix from which on chunks are twice as long: 152 us for 161 of 4,096 rows of 65,536 16-bit numbers. With
a limit they would take more registers than there are."""


@lru_cache(1024)
def cut(m: int, n: int, element_size: int, limited: bool = False) -> Cut:
    """How m rows of n columns are cut into pieces, or short rows put into one."""
    vec = 16 // element_size
    words = launch.cdiv(n, vec)
    chunk = 2 * WORDS if m * words >= MANY and not limited else WORDS
    pieces = launch.cdiv(words, CHUNKS * chunk)
    # Chunks of fewer words than a warp has lanes would be read 16 bytes here and there.
    width = min(chunk, max(launch.next_power_of_2(launch.cdiv(words, CHUNKS)), min(launch.next_power_of_2(words), 32)))
    parts = launch.cdiv(launch.cdiv(words, pieces), width)
    # Many short rows share a program, few do not.
    rows = 1 if pieces > 1 else min(chunk // width, launch.next_power_of_2(launch.cdiv(m, 256)))
    sizes = {"WORDS": width, "VEC": vec, "PARTS": parts, "ROWS": rows}
    return Cut(sizes, launch.cdiv(words, parts * width), WARPS)


def pack_rows(call: PackRows) -> tuple[Tensor, Tensor, Tensor]:
    """As its record says."""
    x, capacity = call
    return list_all(x) if capacity is None else list_slots(x, capacity)


def list_slots(
    x: Tensor,
    capacity: int,
    limit: Limit | None = None,
    l0: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, spans) of the elements that differ from 0, or with a limit of those that it keeps, in
    `capacity` slots for each row. `l0` (float32 `[M]`, zeros) gets how many entries of each row exceed its threshold.
    Slots without an entry hold a value of 0 and the column -1. `out` has room for values and indices."""
    m = x.shape[0]
    if out is None:
        packed = empty_slots(x, m, m * capacity)
    else:
        packed = *out, x.new_empty(2, m, dtype=torch.int64)
    if x.numel() == 0:
        return packed[0].zero_(), packed[1].fill_(-1), packed[2].zero_()
    _launch(x, packed, capacity, False, limit, l0)
    return packed


def list_all(x: Tensor, limit: Limit | None = None, l0: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The same with as many slots as there are entries, for which the host waits.

    Room is first made for more entries than usual: one pass does, unless there are more still.
    """
    m, n = x.shape
    out = empty_slots(x, m, min(m * default_capacity(n), MOST_ENTRIES))
    if x.numel() == 0:
        return out[0][:0].clone(), out[1][:0].clone(), out[2].zero_()
    _launch(x, out, out[0].shape[0], True, limit, l0)
    total = int(out[2][:, -1].sum())
    if total > MOST_ENTRIES:
        raise ValueError(f"rowsparse: a container holds at most 2^30 entries, got {total}. Take fewer rows at a time.")
    if total > out[0].shape[0]:
        out = empty_slots(x, m, total)
        _launch(x, out, total, True, limit, None)
    # Copies, for the kept part of a large batch is to be no larger than its entries.
    return out[0][:total].clone(), out[1][:total].clone(), out[2]


def _launch(
    x: Tensor, out: tuple[Tensor, Tensor, Tensor], room: int, chained: bool, limit: Limit | None, l0: Tensor | None
) -> None:
    """Fills values, indices and spans, and l0 if there is one."""
    (m, n), x = x.shape, rows_contiguous(x)
    sizes, pieces, warps = cut(m, n, x.element_size(), limit is not None)
    programs = launch.cdiv(m, sizes["ROWS"]) * pieces
    flags = launch.flags(programs, x.device) if chained or pieces > 1 else (None, 0)
    by: tuple[Any, ...] = (None, None)
    stride_t = radius = None
    if limit is not None:
        stride_t, radius = 0 if limit.threshold is None else limit.threshold.stride(0), float(limit.radius)
        by = (limit.bias, limit.threshold)
    args = (x, *by, *out, l0, *flags, stride_t, radius, x.stride(0), m, n, pieces, room)
    even = (n | x.stride(0)) % sizes["VEC"] == 0
    meta = {**sizes, "EVEN": even, "WINDOW": bool(radius), "CHAINED": chained}
    _list_entries_kernel((programs, 1, 1), args, meta, num_warps=warps)


EXAMPLES = {
    _list_entries_kernel: {
        "flags_ptr": "*i64", "WORDS": 512, "VEC": 8, "PARTS": 4, "ROWS": 1, "EVEN": True, "WINDOW": True,
        "CHAINED": True,
    },
}  # fmt: skip
