"""Sums over the counts of rows, written to memory of the host.

A program sums up every PARTS-th block of counts and writes its four numbers; the host adds those of all programs. They
go straight to pinned memory, 32 bytes a program: a copy would be a launch of its own.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch


# Counts are the second line of spans: those of an odd number of rows begin between two lines of 16 bytes.
@launch.kernel(do_not_specialize=["counts_ptr"])
def _row_density_kernel(counts_ptr, sums_ptr, M, limit, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Program (part): the sum, the largest, how many exceed `limit`, and the sum of those that do not."""
    part = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    over = tl.zeros([BLOCK], tl.int32)
    light = tl.zeros([BLOCK], tl.int64)
    for first in range(part * BLOCK, M, PARTS * BLOCK):
        rows = first + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + rows, mask=rows < M, other=0).to(tl.int32)
        total += count
        largest = tl.maximum(largest, count)
        over += (count > limit).to(tl.int32)
        light += tl.where(count > limit, 0, count)
    tl.store(sums_ptr + part * 4, tl.sum(total, axis=0))
    tl.store(sums_ptr + part * 4 + 1, tl.max(largest, axis=0).to(tl.int64))
    tl.store(sums_ptr + part * 4 + 2, tl.sum(over, axis=0).to(tl.int64))
    tl.store(sums_ptr + part * 4 + 3, tl.sum(light, axis=0))


def row_density(counts: Tensor, sums: Tensor, limit: int) -> None:
    """`sums`, int64 [parts, 4], is in pinned memory; `counts` `[M]`."""
    counts, parts = counts.contiguous(), sums.shape[0]
    _row_density_kernel(
        (parts, 1, 1), (counts, sums, counts.shape[0], limit), {"BLOCK": 256, "PARTS": parts}, num_warps=1
    )


EXAMPLES = {_row_density_kernel: {"sums_ptr": "*i64", "BLOCK": 256, "PARTS": 64, "num_warps": 1}}
