"""Candidates for the lister: one pass over a dense matrix that writes a row's entries behind those of the row before.

Every candidate keeps bits of the elements that it has read, learns where its list begins, and reads the kept elements
again. The candidates differ in how a program learns its start:

- `chain`: from the programs before it, by look-back over their counts;
- `deferred`: likewise, but programs draw pieces by a ticket, and look back after the next piece has been counted;
- `slots`: row r begins at r * capacity, and only pieces of one row wait for each other.

The script compares each result with `torch.nonzero`, and then times candidates and today's packs in turns.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer import rowsparse
from gossamer._core import launch, tuning

DONE = tl.constexpr(1 << 31)
MOST = tl.constexpr((1 << 31) - 1)
INTERPRET = launch.INTERPRET


@triton.jit
def ones_in_bytes(bits):
    """Set bits of each byte of an int32, in that byte."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (bits + (bits >> 4)) & 0x0F0F0F0F


@triton.jit
def spread_bytes(counts):
    """The four bytes of an int32 as the four 16-bit fields of an int64."""
    wide = counts.to(tl.int64)
    wide = (wide | (wide << 16)) & 0x0000FFFF0000FFFF
    return (wide | (wide << 8)) & 0x00FF00FF00FF00FF


@triton.jit
def sum_fields(fields):
    return ((fields & 0xFFFF) + ((fields >> 16) & 0xFFFF) + ((fields >> 32) & 0xFFFF) + ((fields >> 48) & 0xFFFF)).to(
        tl.int32
    )


@triton.jit
def lowest_place(bits):
    """(the lowest set bit's place, the other bits)"""
    low = (bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return (low >> 23) - 127, bits & (bits - 1)


@triton.jit
def publish(flag_ptr, epoch, word):
    tl.atomic_xchg(flag_ptr, (epoch.to(tl.int64) << 32) | word, sem="relaxed")


@triton.jit
def wait_done(flag_ptr, epoch):
    """The inclusive sum at a flag."""
    ready = (epoch.to(tl.int64) << 1) | 1
    word = tl.load(flag_ptr, volatile=True)
    while (word >> 31) != ready:
        word = tl.load(flag_ptr, volatile=True)
    return word & MOST


UNKNOWN = tl.constexpr(1 << 48)


@triton.jit
def look_back(flags_ptr, piece, stop, epoch, WINDOW: tl.constexpr):
    """The sum of the counts of pieces `stop` to `piece`, without the latter; int64, at most MOST."""
    at = tl.arange(0, WINDOW)
    total = tl.zeros([], tl.int64)
    end = piece
    while end > stop:
        index = end - WINDOW + at
        inside = index >= stop
        found = tl.full([], UNKNOWN, tl.int64)
        last = -1
        while found >= UNKNOWN:
            words = tl.load(flags_ptr + index, mask=inside, other=0, volatile=True)
            ready = (words >> 32) == epoch
            last = tl.max(tl.where(inside & ready & ((words & DONE) != 0), at, -1), axis=0)
            counts = tl.where(ready, words & MOST, UNKNOWN)
            found = tl.sum(tl.where(inside & (at >= last), counts, 0), axis=0)
        total += found
        end = tl.where(last >= 0, stop, end - WINDOW)
    return tl.minimum(total, MOST)


@triton.jit
def piece_bits(
    x_ptr, row, stride, begin, M, N, T: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr
):
    """Byte c of word (r, t) has the bits of the VEC columns from begin + (c * T + t) * VEC on."""
    word = tl.arange(0, ROWS * T)
    lane = word % T
    words, wide = N // VEC, stride // VEC
    bits = tl.zeros([ROWS * T], tl.int32)
    inside = row < M
    for c in tl.static_range(CHUNKS):
        at = begin + c * T + lane
        offset = (row * wide + at) * VEC
        held = inside & (at < words)
        x = tl.load(x_ptr + offset[:, None] + tl.arange(0, VEC)[None, :], mask=held[:, None], other=0.0)
        keep = (x != 0).to(tl.int32) << (8 * c + tl.arange(0, VEC)[None, :])
        bits |= tl.sum(keep, axis=1)
    return bits


@triton.jit
def fields_of(bits, T: tl.constexpr, ROWS: tl.constexpr):
    """(places before each word by chunk, entries by row)"""
    fields = spread_bytes(ones_in_bytes(bits)).reshape([ROWS, T])
    totals = tl.sum(fields, axis=1)
    bases = (totals << 16) + (totals << 32) + (totals << 48)
    before = tl.cumsum(fields, axis=1) - fields + bases[:, None]
    return before.reshape([ROWS * T]), sum_fields(totals)


@triton.jit
def write_entries(
    x_ptr, values_ptr, indices_ptr, bits, before, start, row, stride, begin, room,
    T: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`start` is where the list of each word's row begins (int64), of those whose list begins in this piece at 0."""
    word = tl.arange(0, ROWS * T)
    lane = word % T
    wide = stride // VEC
    most = tl.max(sum_bytes(ones_in_bytes(bits)), axis=0)
    for _ in range(most):
        held = bits != 0
        place, bits = lowest_place(bits)
        chunk = (place >> 3) & 3
        slot = start + ((before >> (16 * chunk)) & 0xFFFF)
        before += tl.full([], 1, tl.int64) << (16 * chunk)
        mask = held & (slot < room)
        column = (begin + chunk * T + lane) * VEC + (place & 7)
        value = tl.load(x_ptr + row * wide * VEC + column, mask=mask, other=0.0)
        tl.store(values_ptr + slot, value, mask=mask)
        tl.store(indices_ptr + slot, column, mask=mask)


@triton.jit
def sum_bytes(counts):
    counts = (counts & 0x00FF00FF) + ((counts >> 8) & 0x00FF00FF)
    return (counts + (counts >> 16)) & 0xFF


@triton.jit
def finish(
    x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, stride, M, N, parts, room, capacity,
    piece, bits, before, totals,
    T: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    group = piece // parts
    part = piece % parts
    begin = part * (CHUNKS * T)
    count = tl.sum(totals, axis=0)
    rows = group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if SLOTS:
        lead = look_back(flags_ptr, piece, piece - part, epoch, WINDOW)
        if parts > 1:
            publish(flags_ptr + piece, epoch, tl.minimum(lead + count, MOST) | DONE)
        start = rows * capacity + lead
        if part == parts - 1:
            tl.store(counts_ptr + rows, lead.to(tl.int32) + totals, mask=rows < M)
            tl.store(starts_ptr + rows, rows * capacity, mask=rows < M)
    else:
        base = look_back(flags_ptr, piece, 0, epoch, WINDOW)
        publish(flags_ptr + piece, epoch, tl.minimum(base + count, MOST) | DONE)
        start = base + tl.cumsum(totals, axis=0) - totals
        if part == 0:
            tl.store(starts_ptr + rows, start, mask=rows < M)
        if part == parts - 1:
            of_row = totals
            if (parts > 1) & (group > 0):
                of_row = (base + count - wait_done(flags_ptr + piece - part - 1, epoch)).to(tl.int32) + totals * 0
            elif parts > 1:
                of_row = (base + count).to(tl.int32) + totals * 0
            tl.store(counts_ptr + rows, of_row, mask=rows < M)
    if count > 0:
        row = group.to(tl.int64) * ROWS + tl.arange(0, ROWS * T) // T
        starts = tl.broadcast_to(start[:, None], [ROWS, T]).reshape([ROWS * T])
        limit = room
        if SLOTS:
            # Rows that overflow their slots: the script does not time those.
            limit = room
        write_entries(
            x_ptr, values_ptr, indices_ptr, bits, before, starts, row, stride, begin, limit, T, VEC, ROWS
        )  # fmt: skip


@launch.kernel(do_not_specialize=["epoch"])
def _chain_kernel(
    x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, stride, M, N, parts, room, capacity,
    T: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row = (piece // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS * T) // T
    bits = piece_bits(x_ptr, row, stride, piece % parts * (CHUNKS * T), M, N, T, VEC, CHUNKS, ROWS)
    before, totals = fields_of(bits, T, ROWS)
    if not SLOTS or parts > 1:
        publish(flags_ptr + piece, epoch, tl.sum(totals, axis=0).to(tl.int64))
    finish(
        x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, stride, M, N, parts, room, capacity,
        piece, bits, before, totals, T, VEC, CHUNKS, ROWS, WINDOW, SLOTS,
    )  # fmt: skip


@launch.kernel(do_not_specialize=["epoch"])
def _deferred_kernel(
    x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, ticket_ptr, stride, M, N, parts, pieces,
    room, capacity,
    T: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """The last program to draw leaves the ticket at 0."""
    held = -1
    held_bits = tl.zeros([ROWS * T], tl.int32)
    held_before = tl.zeros([ROWS * T], tl.int64)
    held_totals = tl.zeros([ROWS], tl.int32)
    piece = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while piece < pieces:
        row = (piece // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS * T) // T
        bits = piece_bits(x_ptr, row, stride, piece % parts * (CHUNKS * T), M, N, T, VEC, CHUNKS, ROWS)
        before, totals = fields_of(bits, T, ROWS)
        if not SLOTS or parts > 1:
            publish(flags_ptr + piece, epoch, tl.sum(totals, axis=0).to(tl.int64))
        if held >= 0:
            finish(
                x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, stride, M, N, parts, room,
                capacity, held, held_bits, held_before, held_totals, T, VEC, CHUNKS, ROWS, WINDOW, SLOTS,
            )  # fmt: skip
        held, held_bits, held_before, held_totals = piece, bits, before, totals
        piece = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    if held >= 0:
        finish(
            x_ptr, values_ptr, indices_ptr, starts_ptr, counts_ptr, flags_ptr, epoch, stride, M, N, parts, room,
            capacity, held, held_bits, held_before, held_totals, T, VEC, CHUNKS, ROWS, WINDOW, SLOTS,
        )  # fmt: skip
    if piece == pieces + tl.num_programs(0) - 1:
        tl.atomic_xchg(ticket_ptr, 0, sem="relaxed")


def lister(
    kind: str, T: int, warps: int, window: int = 128, per_sm: int = 4, registers: int | None = None, rows: int = 1
) -> Any:
    """A call (x, capacity) -> (values, indices, starts, counts)."""

    def run(x: Tensor, capacity: int) -> tuple[Tensor, ...]:
        (m, n), vec = x.shape, 16 // x.element_size()
        room = m * capacity
        values = torch.empty(room, dtype=x.dtype, device=x.device)
        indices = torch.empty(room, dtype=torch.int32, device=x.device)
        starts = torch.empty(m, dtype=torch.int64, device=x.device)
        counts = torch.empty(m, dtype=torch.int32, device=x.device)
        words = n // vec
        at_once = rows
        if words > T:
            parts = launch.cdiv(words, 4 * T)
            t, chunks = T, min(4, launch.cdiv(launch.cdiv(words, parts), T))
            parts = launch.cdiv(words, t * chunks)
            at_once = rows if parts == 1 else 1
        else:
            # One row in a chunk or less.
            parts, chunks = 1, 1
            t = launch.next_power_of_2(words)
            at_once = T // t
        pieces = launch.cdiv(m, at_once) * parts
        flags, epoch = launch.flags.get(pieces, x.device)
        meta = {"T": t, "VEC": vec, "CHUNKS": chunks, "ROWS": at_once, "WINDOW": window, "SLOTS": kind == "slots"}
        head = (x, values, indices, starts, counts, flags, epoch)
        if kind == "deferred":
            ticket = launch.counters.get(1, x.device)
            grid = min(pieces, 1 if INTERPRET else per_sm * tuning.programs(x.device))
            args = (*head, ticket, x.stride(0), m, n, parts, pieces, room, capacity)
            _deferred_kernel((grid, 1, 1), args, meta, num_warps=warps, maxnreg=registers)
        else:
            args = (*head, x.stride(0), m, n, parts, room, capacity)
            _chain_kernel((pieces, 1, 1), args, meta, num_warps=warps, maxnreg=registers)
        return values, indices, starts, counts

    return run


CANDIDATES: dict[str, Any] = {
    "chain 128/1": lister("chain", 128, 1),
    "chain 128/1 w256": lister("chain", 128, 1, window=256),
    "chain 256/1": lister("chain", 256, 1),
    "chain 256/1 r80": lister("chain", 256, 1, registers=80),
    "chain 256/1 w512": lister("chain", 256, 1, window=512),
    "chain 256/2": lister("chain", 256, 2),
    "chain 256/2 x2": lister("chain", 256, 2, rows=2),
    "chain 256/4 x4": lister("chain", 256, 4, rows=4),
    "chain 256/2 w512": lister("chain", 256, 2, window=512),
    "chain 512/2": lister("chain", 512, 2),
    "chain 512/4": lister("chain", 512, 4),
    "chain 1024/4": lister("chain", 1024, 4),
    "chain 1024/8": lister("chain", 1024, 8),
    "deferred 256/2 x8": lister("deferred", 256, 2, per_sm=8),
    "slots 256/1": lister("slots", 256, 1),
    "slots 256/2": lister("slots", 256, 2),
    "slots 512/4": lister("slots", 512, 4),
}

SMALL = {f"{kind} 32/1": lister(kind, 32, 1, window=8, per_sm=4) for kind in ("chain", "deferred", "slots")}

SHAPES = [
    ("tall", 4096, 65536, 72, torch.bfloat16, 1024),
    ("few", 32, 65536, 64, torch.float32, 1024),
    ("narrow", 16384, 5632, 29, torch.bfloat16, 128),
]


def sparse(m: int, n: int, nnz: float, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.zeros(m, n, dtype=dtype, device=device)
    step = max(1, (1 << 26) // n)
    for first in range(0, m, step):
        piece = x[first : first + step]
        chosen = torch.rand(piece.shape, device=device, generator=generator) < nnz / n
        piece.copy_(torch.where(chosen, torch.randn(piece.shape, device=device, generator=generator), 0))
    return x


def expect(x: Tensor, got: tuple[Tensor, ...], room: int, chained: bool) -> str:
    """ "" or what is wrong."""
    values, indices, starts, counts = got
    row, column = x.nonzero(as_tuple=True)
    true = torch.bincount(row, minlength=x.shape[0])
    if not torch.equal(counts.long(), true):
        return "counts"
    first = true.cumsum(0) - true
    if chained and not torch.equal(starts, first):
        return "starts"
    slot = starts[row] + torch.arange(row.numel(), device=x.device) - first[row]
    fits = slot < room
    if not torch.equal(indices[slot[fits]].long(), column[fits]):
        return "indices"
    bits = torch.int16 if x.element_size() == 2 else torch.int32
    if not torch.equal(values[slot[fits]].view(bits), x[row, column][fits].view(bits)):
        return "values"
    return ""


def check(device: torch.device, only: str = "") -> bool:
    good = True
    shapes = [(7, 64, 5), (3, 2048, 300), (3, 520, 520), (50, 96, 8)]
    if device.type == "cuda":
        shapes = [(7, 64, 5), (16384, 5632, 29), (32, 65536, 64), (600, 65536, 72), (3, 1 << 20, 5000)]
        shapes += [(9, 65536, 65536), (50000, 64, 8)]
    for m, n, nnz in shapes:
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.float16):
            x = sparse(m, n, nnz, dtype, device, m + n)
            if m > 2:
                x[m // 2] = 0
                x[1, n // 3] = float("nan")
                x[0, : n // 2] = 1.5
            for name, run in (CANDIDATES if device.type == "cuda" else SMALL).items():
                if only and name != only:
                    continue
                chained = not name.startswith("slots")
                full = int((x != 0).sum(1).max())
                for capacity in {n} | ({max(1, full // 2)} if chained else set()):
                    wrong = expect(x, run(x, capacity), m * capacity, chained)
                    again = run(x, capacity)
                    wrong = wrong or expect(x, again, m * capacity, chained)
                    if wrong:
                        good = False
                        print("WRONG", name, (m, n, nnz), dtype, capacity, wrong, flush=True)
    return good


def timed(call: Callable[[int], Any], inputs: int, rounds: int = 5) -> Any:
    """A replayable graph of `rounds` x inputs calls, and how many calls those are."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(inputs):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(rounds * inputs):
            call(k % inputs)
    return graph, rounds * inputs


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" or len(sys.argv) > 1:
        only = list(CANDIDATES)[int(sys.argv[1])] if len(sys.argv) > 1 else ""
        good = check(device, only)
        print(only, "correct" if good else "NOT CORRECT", flush=True)
        sys.exit(not good)
    lines: list[str] = []
    records: list[dict[str, Any]] = []
    for shape, m, n, nnz, dtype, capacity in SHAPES:
        copies = max(1, min(12, int(150e6 / (m * n * dtype.itemsize)) + 1))
        xs = [sparse(m, n, nnz, dtype, device, seed) for seed in range(copies)]
        calls: dict[str, Any] = {
            "pack today": lambda x, c: rowsparse.pack(x, capacity=c),
        }
        calls |= CANDIDATES
        graphs = {}
        for name, call in calls.items():
            graphs[name] = timed(lambda i, call=call, xs=xs: call(xs[i], capacity), len(xs), 5 if m < 1000 else 2)
        times: dict[str, list[float]] = {name: [] for name in calls}
        eager: dict[str, list[float]] = {name: [] for name in calls}
        host: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(15):
            random.Random(turn).shuffle(names)
            for name in names:
                graph, count = graphs[name]
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                torch.cuda.synchronize()
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3 / count)
        for turn in range(7):
            random.Random(turn).shuffle(names)
            for name in names:
                loops = 40 if m < 1000 else 8
                call = calls[name]
                call(xs[0], capacity)
                torch.cuda.synchronize()
                t = time.perf_counter()
                for k in range(loops):
                    call(xs[k % len(xs)], capacity)
                middle = time.perf_counter()
                torch.cuda.synchronize()
                eager[name].append((time.perf_counter() - t) * 1e6 / loops)
                host[name].append((middle - t) * 1e6 / loops)
        moved = m * n * dtype.itemsize
        for name in calls:
            us = median(times[name])
            record = {"shape": shape, "name": name, "graph": us, "low": min(times[name])}
            record |= {"eager": median(eager[name]), "host": median(host[name]), "TB/s": moved / us / 1e6}
            records.append(record)
            lines.append(
                f"{shape:7s} {name:20s} graph {us:7.2f} (min {min(times[name]):7.2f})  eager {record['eager']:7.1f}  "
                f"host {record['host']:6.1f}  {record['TB/s']:.2f} TB/s"
            )
        graphs.clear()
        xs.clear()
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    print("\n".join(lines))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "lister.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
