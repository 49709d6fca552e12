"""Softmax along the rows of block-sparse matrices: bound by memory.

A program owns BLOCK_M lines of a block row and reads them across all of its blocks, laid end to end, in one step of up
to BLOCK_N elements, so that nothing is read twice; the step is cut to a half or a quarter where the row has no more,
for instructions bound this as much as memory does, and idle lanes have theirs. Half a step is about what a line holds
on average, which the host knows from the layout's capacity: wider steps would have fewer lines on their way at once.
LINES follow each other, and the next are asked for before these are computed: a program of one line waits for its
lists, its elements and two reductions in turn, which took 2.3 times as long as the bytes (one H200, n 8,192, half of
the blocks). Longer lines, and all beyond LONGEST, are walked twice, first for the running maximum and sum, then to
write. The backward pass takes BLOCK_M lines a program. Programs also fill what stands behind the last block: with
zeros, or NaN where blocks are lost.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.attention import listed
from gossamer.blocksparse._triton.tensor import fill_behind
from gossamer.blocksparse.attention_lists import span
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseSoftmax, BlocksparseSoftmaxBwd

LONGEST, STEP = 16384, 4096
"""Elements of a line that one program holds at once, and elements of a step where the average line has more."""


@triton.jit
def columns_at(lists, at, SHAPE: tl.constexpr):
    """(column of a line's elements, column in their block, where its first line stores them, whether there are any,
    where the words of their block begin) of the listed blocks, laid end to end."""
    columns_ptr, elements_ptr, begin, count = lists
    n, entry, exists = listed(columns_ptr, begin, count, at, SHAPE[1])
    start = n * 0
    if elements_ptr is not None:
        start = tl.load(elements_ptr + entry, mask=exists, other=0)
    inside = at % SHAPE[1]
    return n, inside, entry.to(tl.int64) * (SHAPE[0] * SHAPE[1]) + inside, exists, start


@triton.jit
def taking_part(source, elements_ptr, columns, line, i, SHAPE: tl.constexpr, MASK: tl.constexpr):
    """(which elements of lines i take part, where they are stored)."""
    _, mask_ptr, stride_mm, stride_mn, M, N = source
    n, inside, base, exists, start = columns
    WIDTH: tl.constexpr = SHAPE[1]
    place = base[None, :] + i[:, None] * WIDTH
    part = (line < M)[:, None] & (exists & (n < N))[None, :]
    if elements_ptr is not None:
        word = elements_ptr + (start[None, :] + i[:, None] * ((WIDTH + 31) // 32) + (inside // 32)[None, :])
        # A block whose words begin at 0 is whole.
        bits = tl.load(word, mask=part & (start > 0)[None, :], other=-1)
        part = part & ((bits >> (inside % 32)[None, :] & 1) != 0)
    if MASK == "blocks":
        part = part & (tl.load(mask_ptr + place, mask=part, other=0) != 0)
    if MASK == "dense":
        at_mask = line.to(tl.int64)[:, None] * stride_mm + n.to(tl.int64)[None, :] * stride_mn
        part = part & (tl.load(mask_ptr + at_mask, mask=part, other=0) != 0)
    return part, place


@triton.jit
def add_exactly(total, lost, x):
    """total + x, and what the rounding of all additions so far has lost: a row of a million elements is hundreds of
    steps, whose rounding would show in every element of the row. Where a sum is not finite, neither is its loss."""
    new = total + x
    rest = new - total
    return new, lost + ((total - (new - rest)) + (x - rest))


@triton.jit
def softmax_at_once(
    source, out_ptr, lists, scale, line, i, SHAPE: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Lines of up to STEP elements; the next lines are on their way while these are computed."""
    BLOCK_M: tl.constexpr = i.shape[0]
    WIDTH: tl.constexpr = SHAPE[1]
    # Absent elements take no part: plain scores have that from their load, and are scaled when they are used.
    ABSENT: tl.constexpr = float("-inf") if MASK == "plain" else 0.0
    scale *= 1.4426950408889634
    later = scale if MASK == "plain" else 1.0
    M = source[4]
    columns = columns_at(lists, tl.arange(0, STEP), SHAPE)
    exists = columns[3]
    place = columns[2][None, :] + i[:, None] * WIDTH
    ahead = tl.load(source[0] + place, mask=exists[None, :] & (line < M)[:, None], other=ABSENT)
    for first in range(0, LINES, BLOCK_M):
        x = ahead.to(tl.float32)
        follows = (first + BLOCK_M < LINES) & (line + (first + BLOCK_M) < M)
        behind = source[0] + (place + (first + BLOCK_M) * WIDTH)
        ahead = tl.load(behind, mask=exists[None, :] & follows[:, None], other=ABSENT)
        if MASK != "plain":
            part, _ = taking_part(source, lists[1], columns, line + first, i + first, SHAPE, MASK)
            x = tl.where(part, x * scale, float("-inf"))
        most = tl.max(x, 1)
        base = tl.where(most == float("-inf"), 0.0, most) * later
        weights = tl.exp2(x * later - base[:, None])
        # Where something takes part that is nothing but -inf, 0 times infinity is the NaN that it should be.
        share = 1.0 / tl.sum(weights, 1)
        if MASK == "plain":
            y = weights * tl.where(line + first < M, share, 0.0)[:, None]
        else:
            y = tl.where(part, weights * share[:, None], 0.0)
        tl.store(out_ptr + (place + first * WIDTH), y.to(out_ptr.dtype.element_ty), mask=exists[None, :])


@triton.jit
def softmax_in_two(
    source, out_ptr, lists, scale, line, i, SHAPE: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Lines of any length, walked twice."""
    BLOCK_M: tl.constexpr = i.shape[0]
    end = lists[3] * SHAPE[1]
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lost_sum = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, end, STEP):
        columns = columns_at(lists, first + tl.arange(0, STEP), SHAPE)
        part, place = taking_part(source, lists[1], columns, line, i, SHAPE, MASK)
        x = tl.where(part, tl.load(source[0] + place, mask=part, other=0.0).to(tl.float32) * scale, float("-inf"))
        now = tl.maximum(most, tl.max(x, 1))
        # As long as there is nothing but -inf, nothing is added up, nor to be scaled.
        base = tl.where(now == float("-inf"), 0.0, now)
        rescale = tl.exp(most - base)
        weights = tl.where(part, tl.exp(x - base[:, None]), 0.0)
        total, lost_sum = add_exactly(total * rescale, lost_sum * rescale, tl.sum(weights, 1))
        most = now
    total += lost_sum
    for first in range(0, end, STEP):
        columns = columns_at(lists, first + tl.arange(0, STEP), SHAPE)
        part, place = taking_part(source, lists[1], columns, line, i, SHAPE, MASK)
        x = tl.load(source[0] + place, mask=part, other=0.0).to(tl.float32) * scale
        y = tl.where(part, tl.exp(x - most[:, None]) / total[:, None], 0.0)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=columns[3][None, :])


@launch.kernel(specialize=("M",), do_not_specialize=["last", "capacity"])
def _blocksparse_softmax_fwd_kernel(
    x_ptr, mask_ptr, out_ptr, offsets_ptr, columns_ptr, elements_ptr, stride_mz, stride_mm, stride_mn, rows, last,
    capacity, M, N, scale, SHAPE: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, ONCE: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Program (block row, LINES of it). SHAPE is that of a block, TILE the lines and elements of a step."""
    STEP: tl.constexpr = TILE[1]
    AREA: tl.constexpr = SHAPE[0] * SHAPE[1]
    parts: tl.constexpr = SHAPE[0] // LINES
    row = tl.program_id(0) // parts
    i = tl.program_id(0) % parts * LINES + tl.arange(0, TILE[0])
    line = row % rows * SHAPE[0] + i
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    if MASK == "dense":
        mask_ptr += (row // rows).to(tl.int64) * stride_mz
    source = (x_ptr, mask_ptr, stride_mm, stride_mn, M, N)
    lists = (columns_ptr, elements_ptr, begin, count)
    size = count * SHAPE[1]
    # One chain: what a later condition needs would stay in registers.
    if STEP >= 1024 and size <= STEP // 4:
        softmax_at_once(source, out_ptr, lists, scale, line, i, SHAPE, STEP // 4, LINES, MASK)
    elif STEP >= 1024 and size <= STEP // 2:
        softmax_at_once(source, out_ptr, lists, scale, line, i, SHAPE, STEP // 2, LINES, MASK)
    elif ONCE or size <= STEP:
        softmax_at_once(source, out_ptr, lists, scale, line, i, SHAPE, STEP, LINES, MASK)
    else:
        for first in range(0, LINES, TILE[0]):
            softmax_in_two(source, out_ptr, lists, scale, line + first, i + first, SHAPE, STEP, MASK)
    fill_behind(out_ptr, tl.load(offsets_ptr + last), capacity, lost, AREA, AREA)


@triton.jit
def load_products(sources, begin, count, i, first, SHAPE: tl.constexpr, STEP: tl.constexpr):
    """(results, their products with the gradient, where these are stored, whether they are)."""
    grad_ptr, out_ptr = sources
    at = first + tl.arange(0, STEP)
    exists = (at < count * SHAPE[1])[None, :]
    entry = (begin + at // SHAPE[1]).to(tl.int64)
    place = entry[None, :] * (SHAPE[0] * SHAPE[1]) + (i[:, None] * SHAPE[1] + (at % SHAPE[1])[None, :])
    y = tl.load(out_ptr + place, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=exists, other=0.0).to(tl.float32)
    return y, tl.where(y == 0, 0.0, y * grad), place, exists


@launch.kernel(do_not_specialize=["last", "capacity"])
def _blocksparse_softmax_bwd_kernel(
    grad_ptr, out_ptr, dx_ptr, offsets_ptr, last, capacity, scale, SHAPE: tl.constexpr, TILE: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Program (block row, lines of a step)."""
    BLOCK_M: tl.constexpr = TILE[0]
    STEP: tl.constexpr = TILE[1]
    AREA: tl.constexpr = SHAPE[0] * SHAPE[1]
    parts: tl.constexpr = SHAPE[0] // BLOCK_M
    row = tl.program_id(0) // parts
    i = tl.program_id(0) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    sources = (grad_ptr, out_ptr)
    size = count * SHAPE[1]
    for part in tl.static_range(0 if STEP >= 1024 else 2, 3):
        if (size <= STEP >> 2 - part) & ((size > STEP >> 3 - part) | (part == 0) | (STEP < 1024)):
            y, product, place, exists = load_products(sources, begin, count, i, 0, SHAPE, STEP >> 2 - part)
            dx = tl.where(y == 0, 0.0, scale * (product - y * tl.sum(product, 1)[:, None]))
            tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=exists)
    if not ONCE:
        if size > STEP:
            inner = tl.zeros([BLOCK_M], tl.float32)
            for first in range(0, size, STEP):
                _, product, _, _ = load_products(sources, begin, count, i, first, SHAPE, STEP)
                inner += tl.sum(product, 1)
            for first in range(0, size, STEP):
                y, product, place, exists = load_products(sources, begin, count, i, first, SHAPE, STEP)
                dx = tl.where(y == 0, 0.0, scale * (product - y * inner[:, None]))
                tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=exists)
    fill_behind(dx_ptr, tl.load(offsets_ptr + last), capacity, lost, AREA, AREA)


def softmax(call: BlocksparseSoftmax) -> Tensor:
    values, mask, scale, lists = call.values, call.mask, call.scale, Lists(call.layout, call.form)
    z, rows, _, height, width, m, n, capacity, *_ = lists.form
    out, last, elements = torch.empty_like(values), z * rows, lists.elements
    if not last:
        return out.zero_()
    kind, strides = "plain" if scale > 0 and n % width == 0 and elements is None else "none", (0, 0, 0)
    if mask is not None and mask.dim() == 4:
        kind, mask = "blocks", mask.contiguous().view(torch.uint8)
    elif mask is not None:
        kind = "dense"
        strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride()))
        mask = mask.view(torch.uint8)
    average, units = capacity * width // last, tuning.programs(values.device)
    meta, warps = tile_of(height, width, n, average, last, units, values.element_size())
    args = (values, mask, out, lists.row_offsets, lists.col_indices, elements, *strides, rows, last, capacity, m, n)
    # A mask takes registers.
    warps = warps if mask is None else min(16, 2 * warps)
    grid = (last * height // meta["LINES"], 1, 1)
    _blocksparse_softmax_fwd_kernel(grid, (*args, scale), meta | {"MASK": kind}, num_warps=warps)
    return out


def softmax_bwd(call: BlocksparseSoftmaxBwd) -> Tensor:
    out, lists = call.out, Lists(call.layout, call.form)
    z, rows, _, height, width, _, n, capacity, *_ = lists.form
    dx, last = torch.empty_like(out), z * rows
    if not last:
        return dx.zero_()
    meta, _ = tile_of(height, width, n, capacity * width // last, last, tuning.programs(out.device), out.element_size())
    # Two operands a line, whose next ones would find no registers: half as many lines.
    step = meta["TILE"][1]
    lines = max(1, min(height, 4096 // step))
    meta = {"SHAPE": (height, width), "TILE": (lines, step), "ONCE": meta["ONCE"]}
    args = (call.grad, out, dx, lists.row_offsets, last, capacity, call.scale)
    grid = (last * height // lines, 1, 1)
    _blocksparse_softmax_bwd_kernel(grid, args, meta, num_warps=max(4, min(16, lines * step // 1024)))
    return dx


def tile_of(
    height: int, width: int, n: int, average: int, rows: int, units: int, size: int
) -> tuple[dict[str, Any], int]:
    """(meta, warps) for lines of up to n elements of `size` bytes, rounded up to whole blocks, of which they have room
    for so many on average, in so many rows of blocks, on so many multiprocessors: a step of twice a power of two that
    is at most a quarter above the average, 16 KB of lines a step where the longest fits in one, and half of that where
    it does not; and up to eight lines a program, or four steps of short ones, where there are programs enough."""
    longest = launch.cdiv(n, width) * width
    held = min(longest, max(launch.next_power_of_2(average + average // 4 + 1), SHORT))
    once = held == longest <= LONGEST
    block_n = launch.next_power_of_2(held) if held <= LONGEST else STEP
    most = (16384 if once else 8192) // size
    block_m = max(1, min(height, (most if block_n < 8192 else 2 * most) // block_n))
    lines = block_m
    while lines < min(height, max(8, 4 * block_m)) and rows * (height // (2 * lines)) >= 8 * units:
        lines *= 2
    meta = {"SHAPE": (height, width), "TILE": (block_m, block_n), "LINES": lines, "ONCE": once}
    return meta, max(4, min(16, max(block_m // 2, 1) * block_n // 1024))


SHORT = 256
"""Elements that a step has room for however short lines are."""
_SHAPE = {"SHAPE": (64, 64), "TILE": (1, 4096), "ONCE": False}
EXAMPLES = {
    _blocksparse_softmax_fwd_kernel: {**_SHAPE, "LINES": 8, "MASK": "blocks", "num_warps": 8},
    _blocksparse_softmax_bwd_kernel: _SHAPE,
}
