"""Lists of entries to dense rows.

One program owns a row of the result, or where rows are few a part of one: it writes zeros, and then a block of entries
at a time. Columns that ascend, as they should, are distinct. Where the program sees that one does not, it goes over the
row again, slowly: every entry compares its column with the row's others, a block at a time, and stores the whole sum,
so that equal entries store the same number and no atomic decides an order. An overflowed row is copied from the source.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.pack import row_span
from gossamer.rowsparse.records import Unpack


@triton.jit
def store_sums(values_ptr, indices_ptr, count, out_ptr, begin, end, BLOCK: tl.constexpr):
    """Stores at each entry's column from `begin` on and before `end` the sum of all entries there."""
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
        total = tl.zeros([BLOCK], tl.float32)
        for other in range(0, count, BLOCK):
            theirs = other + tl.arange(0, BLOCK)
            column = tl.load(indices_ptr + theirs, mask=theirs < count, other=-2)
            value = tl.load(values_ptr + theirs, mask=theirs < count, other=0.0).to(tl.float32)
            total += tl.sum(tl.where(index[:, None] == column[None, :], value[None, :], 0.0), axis=1)
        tl.store(out_ptr + index, total, mask=(index >= begin) & (index < end))


@launch.kernel
def _unpack_kernel(
    values_ptr, indices_ptr, spans_ptr, source_ptr, out_ptr, stride_sm, N, room,
    BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Program (row, share of its columns)."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    out_ptr += row.to(tl.int64) * N
    width = tl.cdiv(tl.cdiv(N, FILL), tl.num_programs(1)) * FILL
    begin = tl.program_id(1) * width
    end = tl.minimum(begin + width, N)
    if overflowed:
        for first in range(begin, end, FILL):
            at = first + tl.arange(0, FILL)
            if source_ptr is not None:
                x = tl.load(source_ptr + row.to(tl.int64) * stride_sm + at, mask=at < end, other=0.0)
            else:
                # A row that nothing restores must not pass for zeros.
                x = tl.full([FILL], float("nan"), tl.float32)
            tl.store(out_ptr + at, x, mask=at < end)
    else:
        for first in range(begin, end, FILL):
            at = first + tl.arange(0, FILL)
            tl.store(out_ptr + at, tl.zeros([FILL], out_ptr.dtype.element_ty), mask=at < end)
        # Another thread's zeros must not come after an entry.
        tl.debug_barrier()
        values_ptr += start
        indices_ptr += start
        unordered = tl.zeros([BLOCK], tl.int32)
        lost = tl.zeros([BLOCK], tl.int32)
        for at in range(0, count, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            held = entry < count
            index = tl.load(indices_ptr + entry, mask=held, other=0)
            before = tl.load(indices_ptr + entry - 1, mask=held & (entry > 0), other=-1)
            inside = held & (index >= begin) & (index < end)
            tl.store(out_ptr + index, tl.load(values_ptr + entry, mask=inside, other=0.0), mask=inside)
            unordered |= (held & (index <= before)).to(tl.int32)
            lost |= (held & ((index < -1) | (index >= N))).to(tl.int32)
        if tl.max(unordered, axis=0) > 0:
            # The sums are stored over the values.
            tl.debug_barrier()
            store_sums(values_ptr, indices_ptr, count, out_ptr, begin, end, 32)
        if (tl.max(lost, axis=0) > 0) & (begin == 0):
            # An index with no column must not vanish silently: the row says so, after whatever is stored there.
            tl.debug_barrier()
            tl.store(out_ptr, float("nan"))


FILL = 1024
"""Columns that a warp writes at a time."""


def unpack(call: Unpack) -> Tensor:
    """[M, N]"""
    return spread(*call)


def spread(
    values: Tensor,
    indices: Tensor,
    spans: Tensor,
    source: Tensor | None,
    n: int,
    part: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of n columns. `part`: which part these rows are of those that share the buffers."""
    m, room = spans.shape[1], indices.shape[0]
    out = values.new_empty(m, n, dtype=dtype)
    if m and n:
        source = None if source is None else rows_contiguous(source)
        stride = 0 if source is None else source.stride(0)
        args = (values, indices, spans, source, out, stride, n, room)
        block = min(1024, max(32, launch.next_power_of_2(int(part * room) // m)))
        warps = max(1, block // 128)
        meta = {"BLOCK": block, "FILL": FILL * warps}
        # Every share reads all of the row's indices: no more programs than fill the GPU.
        shares = max(1, min(launch.cdiv(n, meta["FILL"]), launch.cdiv(4 * tuning.programs(out.device), m)))
        _unpack_kernel((m, shares, 1), args, meta, num_warps=warps)
    return out


EXAMPLES = {
    _unpack_kernel: {
        "values_ptr": "*fp32", "source_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": 1024, "FILL": 8192,
        "num_warps": 8,
    },
}  # fmt: skip
