"""Lists of entries to dense rows.

One program owns a row of the zeroed result. Entries of one column add up: every entry compares its column with the
row's others, a block at a time, and stores the whole sum, so that equal entries store the same number and no atomic
decides an order. An overflowed row is copied from the source.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton._rows import row_span


@triton.jit
def _unpack_kernel(
    values_ptr, indices_ptr, offsets_ptr, source_ptr, out_ptr, stride_sm, N, capacity,
    BLOCK: tl.constexpr, COPY: tl.constexpr, IS_CSR: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(offsets_ptr, row, capacity, IS_CSR)
    out_ptr += row.to(tl.int64) * N
    if overflowed:
        if source_ptr is not None:
            for first in range(0, N, COPY):
                columns = first + tl.arange(0, COPY)
                x = tl.load(source_ptr + row.to(tl.int64) * stride_sm + columns, mask=columns < N, other=0.0)
                tl.store(out_ptr + columns, x, mask=columns < N)
        else:
            # What nothing restores must not pass for zeros.
            for first in range(0, N, COPY):
                columns = first + tl.arange(0, COPY)
                tl.store(out_ptr + columns, tl.full([COPY], float("nan"), tl.float32), mask=columns < N)
    else:
        for at in range(0, count, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
            total = tl.zeros([BLOCK], tl.float32)
            for other in range(0, count, BLOCK):
                theirs = other + tl.arange(0, BLOCK)
                column = tl.load(indices_ptr + start + theirs, mask=theirs < count, other=-2)
                value = tl.load(values_ptr + start + theirs, mask=theirs < count, other=0.0).to(tl.float32)
                total += tl.sum(tl.where(index[:, None] == column[None, :], value[None, :], 0.0), axis=1)
            tl.store(out_ptr + index, total, mask=(index >= 0) & (index < N))
            # An index with no column must not vanish silently: the row says so.
            tl.store(out_ptr + index * 0, float("nan"), mask=(index < -1) | (index >= N))


_unpack = launch.Kernel(_unpack_kernel)


def unpack(values: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None, n: int) -> Tensor:
    """Operator `unpack`."""
    is_csr = indices.dim() == 1
    m = offsets.shape[0] - is_csr
    out = torch.zeros(m, n, dtype=values.dtype, device=values.device)
    if m and n and indices.numel():
        capacity = indices.shape[-1]
        if source is not None and source.stride(1) != 1:
            source = source.contiguous()
        stride = 0 if source is None else source.stride(0)
        values = values.contiguous()
        args = (values, indices, offsets, source, out, stride, n, capacity)
        _unpack((m, 1, 1), args, {"BLOCK": 32, "COPY": 1024, "IS_CSR": is_csr}, num_warps=4)
    elif source is not None and m and n:
        out = torch.where((offsets[is_csr:] > 0)[:, None], source.to(out.dtype), out)
    return out


EXAMPLES = {
    _unpack_kernel: {
        "signature": {
            "values_ptr": "*fp32", "indices_ptr": "*i32", "offsets_ptr": "*i32", "source_ptr": "*fp32",
            "out_ptr": "*fp32",
        },
        "constexprs": {"BLOCK": 32, "COPY": 1024, "IS_CSR": False},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
