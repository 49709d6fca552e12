"""Which tiles a product has whose result is block-sparse: strips of up to WIDTH present blocks of a block row.

One program lists the strips of a band of BAND block rows, in the order in which they are to be computed: all first
strips of the band, then all second ones, so that programs at work at one time share rows of A and, as present blocks
are spread alike in all rows, mostly columns of B. How many strips earlier bands have it sums up itself, so that there
is one launch and no exchange.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch

HELD = 4096
"""Of BAND x BAND x AHEAD a program holds so many at once."""


@launch.kernel(do_not_specialize=["rows", "capacity"])
def _strips_kernel(
    offsets_ptr, tiles_ptr, rows, capacity, WIDTH: tl.constexpr, BAND: tl.constexpr, BEFORE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (band). tiles is the number of strips, a gap, and of each its block row and its first listed block."""
    band = tl.program_id(0)
    before = tl.zeros([BEFORE], tl.int32)
    for first in range(0, band * BAND, BEFORE):
        row = first + tl.arange(0, BEFORE)
        held = row < band * BAND
        begin = tl.minimum(tl.load(offsets_ptr + row, mask=held, other=0), capacity)
        end = tl.minimum(tl.load(offsets_ptr + row + 1, mask=held, other=0), capacity)
        before += tl.cdiv(end - begin, WIDTH)
    base = tl.sum(before, 0)
    row = band * BAND + tl.arange(0, BAND)
    begin = tl.minimum(tl.load(offsets_ptr + row, mask=row < rows, other=0), capacity)
    end = tl.minimum(tl.load(offsets_ptr + row + 1, mask=row < rows, other=0), capacity)
    count = tl.cdiv(end - begin, WIDTH)
    i = tl.arange(0, BAND)
    # Once more along the other dimension, rather than exchanged between threads.
    other = band * BAND + i[None, :, None]
    other_begin = tl.minimum(tl.load(offsets_ptr + other, mask=other < rows, other=0), capacity)
    other_end = tl.minimum(tl.load(offsets_ptr + other + 1, mask=other < rows, other=0), capacity)
    other_count = tl.cdiv(other_end - other_begin, WIDTH)
    for first in range(0, tl.max(count, 0), AHEAD):
        strip = first + tl.arange(0, AHEAD)
        passed = strip[None, None, :] + (i[None, :, None] < i[:, None, None]).to(tl.int32)
        place = base + tl.sum(tl.minimum(other_count, passed), 1)
        held = strip[None, :] < count[:, None]
        at = tiles_ptr + 2 + 2 * place
        tl.store(at, tl.zeros_like(place) + row[:, None], mask=held)
        tl.store(at + 1, begin[:, None] + strip[None, :] * WIDTH, mask=held)
    if band == tl.num_programs(0) - 1:
        tl.store(tiles_ptr, base + tl.sum(count, 0))


def strips(offsets: Tensor, capacity: int, width: int, band: int) -> tuple[Tensor, int]:
    """(tiles, how many there are at most) of a layout's rows, or of its columns where these are their offsets."""
    rows = offsets.shape[0] - 1
    most = capacity // width + rows
    tiles = torch.empty(2 + 2 * most, dtype=torch.int32, device=offsets.device)
    meta = {"WIDTH": width, "BAND": band, "BEFORE": 1024, "AHEAD": max(1, HELD // band**2)}
    _strips_kernel((launch.cdiv(rows, band), 1, 1), (offsets, tiles, rows, capacity), meta, num_warps=4)
    return tiles, most


EXAMPLES = {_strips_kernel: {"WIDTH": 4, "BAND": 64, "BEFORE": 1024, "AHEAD": 1}}
