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

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.attention import listed, span
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseSoftmax, BlocksparseSoftmaxBwd

LONGEST, STEP = 16384, 4096
"""Elements of a line that one program holds at once, and elements of a step where the average line has more."""


@triton.jit
def fill_rest(out_ptr, total, capacity, lost, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Zeros behind the last block, or NaN everywhere."""
    flat = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    fill = tl.zeros([HEIGHT, WIDTH], tl.float32) + tl.where(lost, float("nan"), 0.0)
    for block in range(tl.where(lost, 0, total) + tl.program_id(0), capacity, tl.num_programs(0)):
        at = tl.full([], 0, tl.int64) + block
        tl.store(out_ptr + at * (HEIGHT * WIDTH) + flat, fill.to(out_ptr.dtype.element_ty))


@triton.jit
def taken(elements_ptr, start, i, j, part, WIDTH: tl.constexpr):
    """`part`, without the elements that blocks leave out: lines i, columns j, words from `start` on, 0 of a whole
    block."""
    at = start[None, :] + i[:, None] * ((WIDTH + 31) // 32) + (j // 32)[None, :]
    word = tl.load(elements_ptr + at, mask=part & (start > 0)[None, :], other=-1)
    return part & ((word >> (j % 32)[None, :] & 1) != 0)


@triton.jit
def load_scores(
    x_ptr, mask_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, first, M, N,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(scores, -inf for what takes no part, what does, where it is stored)."""
    at = first + tl.arange(0, BLOCK_N)
    n, entry, exists = listed(columns_ptr, begin, count, at, WIDTH)
    place = entry.to(tl.int64)[None, :] * (HEIGHT * WIDTH) + (i[:, None] * WIDTH + (at % WIDTH)[None, :])
    part = (line < M)[:, None] & (exists & (n < N))[None, :]
    if elements_ptr is not None:
        start = tl.load(elements_ptr + entry, mask=exists, other=0)
        part = taken(elements_ptr, start, i, at % WIDTH, part, WIDTH)
    if MASK == "blocks":
        part = part & (tl.load(mask_ptr + place, mask=part, other=0) != 0)
    if MASK == "dense":
        at_mask = line.to(tl.int64)[:, None] * stride_mm + n.to(tl.int64)[None, :] * stride_mn
        part = part & (tl.load(mask_ptr + at_mask, mask=part, other=0) != 0)
    x = tl.load(x_ptr + place, mask=part, other=0.0).to(tl.float32)
    return tl.where(part, x * scale, float("-inf")), part, place, exists


@triton.jit
def add_exactly(total, lost, x):
    """total + x, and what the rounding of all additions so far has lost: a row of a million elements is hundreds of
    steps, whose rounding would show in every element of the row. Where a sum is not finite, neither is its loss."""
    new = total + x
    rest = new - total
    return new, lost + ((total - (new - rest)) + (x - rest))


@triton.jit
def softmax_at_once(
    x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, M, N,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Lines of up to BLOCK_N elements; those of the next step are on their way while these are computed."""
    BLOCK_M: tl.constexpr = i.shape[0]
    # What is not there takes no part: plain scores have that from their load, and are scaled when they are used.
    ABSENT: tl.constexpr = float("-inf") if MASK == "plain" else 0.0
    scale *= 1.4426950408889634
    later = scale if MASK == "plain" else 1.0
    at = tl.arange(0, BLOCK_N)
    n, entry, exists = listed(columns_ptr, begin, count, at, WIDTH)
    held = exists[None, :] if MASK == "plain" else (exists & (n < N))[None, :]
    place = (entry.to(tl.int64) * (HEIGHT * WIDTH) + at % WIDTH)[None, :]
    ahead = tl.load(x_ptr + (place + i[:, None] * WIDTH), mask=held & (line < M)[:, None], other=ABSENT)
    if elements_ptr is not None:
        start = tl.load(elements_ptr + entry, mask=exists, other=0)
    for first in range(0, LINES, BLOCK_M):
        x = ahead.to(tl.float32)
        follows = (first + BLOCK_M < LINES) & (line + (first + BLOCK_M) < M)
        behind = place + (i + (first + BLOCK_M))[:, None] * WIDTH
        ahead = tl.load(x_ptr + behind, mask=held & follows[:, None], other=ABSENT)
        to = place + (i + first)[:, None] * WIDTH
        part = held & (line + first < M)[:, None]
        if elements_ptr is not None:
            part = taken(elements_ptr, start, i + first, at % WIDTH, part, WIDTH)
        if MASK == "blocks":
            part = part & (tl.load(mask_ptr + to, mask=part, other=0) != 0)
        if MASK == "dense":
            at_mask = (line + first).to(tl.int64)[:, None] * stride_mm + n.to(tl.int64)[None, :] * stride_mn
            part = part & (tl.load(mask_ptr + at_mask, mask=part, other=0) != 0)
        if MASK != "plain":
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
        tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=exists[None, :])


@triton.jit
def softmax_in_two(
    x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, M, N,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Lines of any length, walked twice."""
    BLOCK_M: tl.constexpr = i.shape[0]
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lost_sum = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, count * WIDTH, BLOCK_N):
        x, part, _, _ = load_scores(
            x_ptr, mask_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, first, M, N,
            HEIGHT, WIDTH, BLOCK_N, MASK,
        )  # fmt: skip
        now = tl.maximum(most, tl.max(x, 1))
        # As long as there is nothing but -inf, nothing is added up, nor to be scaled.
        base = tl.where(now == float("-inf"), 0.0, now)
        rescale = tl.exp(most - base)
        weights = tl.where(part, tl.exp(x - base[:, None]), 0.0)
        total, lost_sum = add_exactly(total * rescale, lost_sum * rescale, tl.sum(weights, 1))
        most = now
    total += lost_sum
    for first in range(0, count * WIDTH, BLOCK_N):
        x, part, place, exists = load_scores(
            x_ptr, mask_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, first, M, N,
            HEIGHT, WIDTH, BLOCK_N, MASK,
        )  # fmt: skip
        y = tl.where(part, tl.exp(x - most[:, None]) / total[:, None], 0.0)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=exists[None, :])


@launch.kernel(do_not_specialize=["last", "capacity"])
def _blocksparse_softmax_fwd_kernel(
    x_ptr, mask_ptr, out_ptr, offsets_ptr, columns_ptr, elements_ptr, stride_mz, stride_mm, stride_mn, rows, last,
    capacity, M, N, scale, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, ONCE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Program (block row, LINES of it)."""
    parts: tl.constexpr = HEIGHT // LINES
    row = tl.program_id(0) // parts
    i = tl.program_id(0) % parts * LINES + tl.arange(0, BLOCK_M)
    line = row % rows * HEIGHT + i
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    if MASK == "dense":
        mask_ptr += (row // rows).to(tl.int64) * stride_mz
    if BLOCK_N >= 1024 and count * WIDTH <= BLOCK_N // 4:
        softmax_at_once(
            x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, M,
            N, HEIGHT, WIDTH, BLOCK_N // 4, LINES, MASK,
        )  # fmt: skip
    elif BLOCK_N >= 1024 and count * WIDTH <= BLOCK_N // 2:
        softmax_at_once(
            x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, M,
            N, HEIGHT, WIDTH, BLOCK_N // 2, LINES, MASK,
        )  # fmt: skip
    elif ONCE or count * WIDTH <= BLOCK_N:
        softmax_at_once(
            x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count, line, i, M,
            N, HEIGHT, WIDTH, BLOCK_N, LINES, MASK,
        )  # fmt: skip
    else:
        for step in range(0, LINES, BLOCK_M):
            softmax_in_two(
                x_ptr, mask_ptr, out_ptr, columns_ptr, elements_ptr, stride_mm, stride_mn, scale, begin, count,
                line + step, i + step, M, N, HEIGHT, WIDTH, BLOCK_N, MASK,
            )  # fmt: skip
    fill_rest(out_ptr, tl.load(offsets_ptr + last), capacity, lost, HEIGHT, WIDTH)


@triton.jit
def load_products(
    grad_ptr, out_ptr, begin, count, i, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(results, their products with the gradient, where these are stored, whether they are)."""
    at = first + tl.arange(0, BLOCK_N)
    exists = (at < count * WIDTH)[None, :]
    entry = (begin + at // WIDTH).to(tl.int64)
    place = entry[None, :] * (HEIGHT * WIDTH) + (i[:, None] * WIDTH + (at % WIDTH)[None, :])
    y = tl.load(out_ptr + place, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=exists, other=0.0).to(tl.float32)
    return y, tl.where(y == 0, 0.0, y * grad), place, exists


@triton.jit
def gradient_at_once(
    grad_ptr, out_ptr, dx_ptr, scale, begin, count, i,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Lines of up to BLOCK_N elements."""
    y, product, place, exists = load_products(grad_ptr, out_ptr, begin, count, i, 0, HEIGHT, WIDTH, BLOCK_N)
    dx = tl.where(y == 0, 0.0, scale * (product - y * tl.sum(product, 1)[:, None]))
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=exists)


@launch.kernel(do_not_specialize=["last", "capacity"])
def _blocksparse_softmax_bwd_kernel(
    grad_ptr, out_ptr, dx_ptr, offsets_ptr, last, capacity, scale,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Program (block row, BLOCK_M lines of it)."""
    parts: tl.constexpr = HEIGHT // BLOCK_M
    row = tl.program_id(0) // parts
    i = tl.program_id(0) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    if BLOCK_N >= 1024 and count * WIDTH <= BLOCK_N // 4:
        gradient_at_once(grad_ptr, out_ptr, dx_ptr, scale, begin, count, i, HEIGHT, WIDTH, BLOCK_N // 4)
    elif BLOCK_N >= 1024 and count * WIDTH <= BLOCK_N // 2:
        gradient_at_once(grad_ptr, out_ptr, dx_ptr, scale, begin, count, i, HEIGHT, WIDTH, BLOCK_N // 2)
    elif ONCE or count * WIDTH <= BLOCK_N:
        gradient_at_once(grad_ptr, out_ptr, dx_ptr, scale, begin, count, i, HEIGHT, WIDTH, BLOCK_N)
    else:
        inner = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, count * WIDTH, BLOCK_N):
            _, product, _, _ = load_products(grad_ptr, out_ptr, begin, count, i, first, HEIGHT, WIDTH, BLOCK_N)
            inner += tl.sum(product, 1)
        for first in range(0, count * WIDTH, BLOCK_N):
            y, product, place, exists = load_products(
                grad_ptr, out_ptr, begin, count, i, first, HEIGHT, WIDTH, BLOCK_N
            )  # fmt: skip
            dx = tl.where(y == 0, 0.0, scale * (product - y * inner[:, None]))
            tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=exists)
    fill_rest(dx_ptr, tl.load(offsets_ptr + last), capacity, lost, HEIGHT, WIDTH)


def softmax(call: BlocksparseSoftmax) -> Tensor:
    """Operator `blocksparse_softmax`."""
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
    grid = (max(last * height // meta["LINES"], 1), 1, 1)
    _blocksparse_softmax_fwd_kernel(grid, (*args, scale), meta | {"MASK": kind}, num_warps=warps)
    return out


def softmax_bwd(call: BlocksparseSoftmaxBwd) -> Tensor:
    """Operator `blocksparse_softmax_bwd`."""
    out, lists = call.out, Lists(call.layout, call.form)
    z, rows, _, height, width, _, n, capacity, *_ = lists.form
    dx, last = torch.empty_like(out), z * rows
    if not last:
        return dx.zero_()
    meta, _ = tile_of(height, width, n, capacity * width // last, last, tuning.programs(out.device), out.element_size())
    # Two operands a line, whose next ones would find no registers: half as many lines.
    meta["BLOCK_M"] = max(1, min(height, 4096 // meta["BLOCK_N"]))
    del meta["LINES"]
    args = (call.grad, out, dx, lists.row_offsets, last, capacity, call.scale)
    grid, warps = (last * height // meta["BLOCK_M"], 1, 1), meta["BLOCK_M"] * meta["BLOCK_N"] // 1024
    _blocksparse_softmax_bwd_kernel(grid, args, meta, num_warps=max(4, min(16, warps)))
    return dx


def tile_of(
    height: int, width: int, n: int, average: int, rows: int, units: int, size: int
) -> tuple[dict[str, int | bool], int]:
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
    meta = {"HEIGHT": height, "WIDTH": width, "BLOCK_M": block_m, "BLOCK_N": block_n, "LINES": lines, "ONCE": once}
    return meta, max(4, min(16, max(block_m // 2, 1) * block_n // 1024))


SHORT = 256
"""Elements that a step has room for however short lines are."""
_SHAPE = {"HEIGHT": 64, "WIDTH": 64, "BLOCK_M": 1, "BLOCK_N": 4096, "ONCE": False}
EXAMPLES = {
    _blocksparse_softmax_fwd_kernel: {**_SHAPE, "LINES": 8, "MASK": "blocks", "num_warps": 8},
    _blocksparse_softmax_bwd_kernel: _SHAPE,
}
