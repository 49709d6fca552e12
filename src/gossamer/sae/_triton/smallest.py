"""The smallest value of each row: a warp a row, over its entries or, where it overflowed, over its dense activation."""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton._rows import row_span
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous


@launch.kernel
def _smallest_kernel(
    values_ptr, indices_ptr, spans_ptr, source_ptr, scale_ptr, out_ptr, stride_sm, N, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    start, count, over = row_span(spans_ptr, row, tl.num_programs(0), room)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    if not over:
        for first in range(0, count, BLOCK):
            slots = first + tl.arange(0, BLOCK)
            index = tl.load(indices_ptr + start + slots, mask=slots < count, other=-1)
            value = tl.load(values_ptr + start + slots, mask=index >= 0, other=0.0).to(tl.float32)
            if scale_ptr is not None:
                value *= tl.load(scale_ptr + index, mask=index >= 0, other=0.0).to(tl.float32)
            least = tl.where(value > 0, tl.minimum(least, value), least)
    elif source_ptr is not None:
        for first in range(0, N, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            value = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0).to(tl.float32)
            if scale_ptr is not None:
                value *= tl.load(scale_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
            least = tl.where(value > 0, tl.minimum(least, value), least)
    found = tl.min(least, 0)
    if source_ptr is None:
        # Nothing restores a row that overflowed.
        found = tl.where(over, float("nan"), found)
    tl.store(out_ptr + row, found)


def smallest(values: Tensor, indices: Tensor, spans: Tensor, source: Tensor | None, scale: Tensor | None) -> Tensor:
    """Operator `sae_smallest` -> float32 [M], inf where a row has no value above 0."""
    m, room = spans.shape[1], values.shape[0]
    out = torch.empty(m, dtype=torch.float32, device=values.device)
    if m:
        source = None if source is None else rows_contiguous(source)
        n, stride = (0, 0) if source is None else (source.shape[1], source.stride(0))
        args = (values, indices, spans, source, scale, out, stride, n, room)
        _smallest_kernel((m, 1, 1), args, {"BLOCK": 128}, num_warps=1)
    return out


EXAMPLES = {_smallest_kernel: {"out_ptr": "*fp32", "BLOCK": 128, "num_warps": 1}}
