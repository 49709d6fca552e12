"""How many rows each latent fires in: integer atomics, whose order does not show."""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.pack import row_span
from gossamer.sae.records import SaeCountFired


@launch.kernel
def _count_fired_kernel(
    values_ptr, indices_ptr, spans_ptr, source_ptr, out_ptr, stride_sm, N, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row). Where nothing restores a row that overflowed, every column's count falls far below 0."""
    row = tl.program_id(0).to(tl.int64)
    start, count, over = row_span(spans_ptr, row, tl.num_programs(0), room)
    if not over:
        for first in range(0, count, BLOCK):
            slots = first + tl.arange(0, BLOCK)
            index = tl.load(indices_ptr + start + slots, mask=slots < count, other=-1)
            value = tl.load(values_ptr + start + slots, mask=slots < count, other=0.0)
            fired = (value != 0) & (index >= 0) & (index < N)
            tl.atomic_add(out_ptr + index, tl.full([BLOCK], 1, tl.int64), mask=fired, sem="relaxed")
    elif source_ptr is not None:
        for first in range(0, N, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            value = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0)
            tl.atomic_add(out_ptr + columns, tl.full([BLOCK], 1, tl.int64), mask=value != 0, sem="relaxed")
    else:
        for first in range(0, N, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            tl.atomic_add(out_ptr + columns, tl.full([BLOCK], -(1 << 40), tl.int64), mask=columns < N, sem="relaxed")


def count_fired(call: SaeCountFired) -> Tensor:
    """Int64 [N]."""
    values, indices, spans, source, n = call
    m, room = spans.shape[1], values.shape[0]
    out = torch.zeros(n, dtype=torch.int64, device=values.device)
    if m and n:
        source = None if source is None else rows_contiguous(source)
        stride = 0 if source is None else source.stride(0)
        args = (values, indices, spans, source, out, stride, n, room)
        _count_fired_kernel((m, 1, 1), args, {"BLOCK": 128}, num_warps=1)
    return out


EXAMPLES = {_count_fired_kernel: {"out_ptr": "*i64", "BLOCK": 128, "num_warps": 1}}
