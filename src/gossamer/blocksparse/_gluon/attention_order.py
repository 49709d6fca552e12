"""In which order programs of the backward pass of `blocksparse.attention` begin on Hopper, each of which owns a line of
blocks: the last ones longest first. A kernel in plain Triton.

Programs begin in the order of their numbers, as others end. A long line that begins last leaves the GPU waiting; but
to begin with all long lines would let programs end together, wave after wave, and spread them over all heads, whose
keys no cache holds. So lines keep their order, head by head, but for the last two waves of programs: of these the
longest begin first. Program (LINES of them) counts for each how many of the others come before it; all fit in one tile.
On one H200 (T 8,192, 16 heads, densities of 10 to 50%) both passes took 0.97 to 0.99 of the time; the forward pass
alone, whose programs are shorter, won nothing, and keeps the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse.attention_path import Problem

RESIDENT = 3
"""Programs of a warpgroup that share an SM."""
LINES, MOST = 16, 1024
"""Lines that a program places, and the power of two that all of them fit in."""


@triton.jit
def _lengths(offsets_ptr, entry, exists, heads, GROUP, lines, LAYOUT_BATCH: tl.constexpr, LAYOUT_HEAD: tl.constexpr):
    """Blocks of line `entry`, counted over batches and heads; of GROUP neighbouring heads where these share it."""
    pair = entry // lines
    blocks = tl.zeros_like(entry)
    for member in range(GROUP):
        matrix = tl.zeros_like(entry)
        if LAYOUT_HEAD:
            matrix += pair % heads * GROUP + member
            if LAYOUT_BATCH:
                matrix += pair // heads * (heads * GROUP)
        elif LAYOUT_BATCH:
            matrix += pair // heads
        at = offsets_ptr + (matrix * lines + entry % lines)
        blocks += tl.load(at + 1, mask=exists, other=0) - tl.load(at, mask=exists, other=0)
    return blocks


@launch.kernel(do_not_specialize=["first", "count"])
def _attention_order_kernel(
    offsets_ptr, order_ptr, heads, GROUP, lines, first, count,
    LAYOUT_BATCH: tl.constexpr, LAYOUT_HEAD: tl.constexpr, LINES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * LINES + tl.arange(0, LINES)
    every = tl.arange(0, MOST)
    length = _lengths(offsets_ptr, first + own, own < count, heads, GROUP, lines, LAYOUT_BATCH, LAYOUT_HEAD)[:, None]
    others = _lengths(offsets_ptr, first + every, every < count, heads, GROUP, lines, LAYOUT_BATCH, LAYOUT_HEAD)
    # What does not exist has no blocks and stands behind all that does.
    before = (others[None, :] > length) | ((others[None, :] == length) & (every[None, :] < own[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), first + own, mask=own < count)


def ordered(total: int, split: int, device: torch.device) -> int:
    """How many of the last of `total` lines, of `split` programs each, are put in order."""
    wave = RESIDENT * tuning.programs(device) // split
    return 0 if total <= wave else min(total, 2 * wave, MOST)


class Order(NamedTuple):
    """Numbers of the last lines, longest first; how many lines come before these in their own order; and what puts
    them in order again, from the addresses of a layout's offsets and of the numbers."""

    last: Tensor | None
    unsorted: int
    again: launch.Bound | None


def launch_order(problem: Problem, offsets: Tensor, lines: int, split: int, group: int = 1) -> Order:
    """No numbers below a diagonal, where the last lines are the longest, and where all programs begin at once.

    `offsets` are a layout's, of its rows or columns, `lines` a matrix; `group` heads share a program.
    """
    p, heads = problem, problem.h // group
    total = p.b * heads * lines
    count = 0 if p.causal else ordered(total, split, offsets.device)
    if count == 0:
        return Order(None, total, None)
    order = torch.empty(count, dtype=torch.int32, device=offsets.device)
    args = (offsets, order, heads, group, lines, total - count, count)
    meta = {"LAYOUT_BATCH": p.own[0], "LAYOUT_HEAD": p.own[1], "LINES": LINES, "MOST": MOST}
    again = _attention_order_kernel((launch.cdiv(count, LINES), 1, 1), args, meta, num_warps=8, head=2)
    return Order(order, total - count, again)


EXAMPLES = {
    _attention_order_kernel: {"LAYOUT_BATCH": True, "LAYOUT_HEAD": True, "LINES": LINES, "MOST": MOST, "num_warps": 8},
}
