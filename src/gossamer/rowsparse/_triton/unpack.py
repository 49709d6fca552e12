"""Lists of entries to dense rows.

One program owns a row of the zeroed result, and stores a block of entries at a time. Columns that ascend, as they
should, are distinct. Where the program sees that one does not, it goes over the row again, slowly: every entry compares
its column with the row's others, a block at a time, and stores the whole sum, so that equal entries store the same
number and no atomic decides an order. An overflowed row is copied from the source.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton._rows import row_span
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous


@triton.jit
def store_sums(values_ptr, indices_ptr, count, out_ptr, N, BLOCK: tl.constexpr):
    """Stores at each entry's column the sum of all entries there; NaN in the row if an index has no column."""
    lost = tl.zeros([BLOCK], tl.int32)
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
        total = tl.zeros([BLOCK], tl.float32)
        for other in range(0, count, BLOCK):
            theirs = other + tl.arange(0, BLOCK)
            column = tl.load(indices_ptr + theirs, mask=theirs < count, other=-2)
            value = tl.load(values_ptr + theirs, mask=theirs < count, other=0.0).to(tl.float32)
            total += tl.sum(tl.where(index[:, None] == column[None, :], value[None, :], 0.0), axis=1)
        tl.store(out_ptr + index, total, mask=(index >= 0) & (index < N))
        lost |= ((index < -1) | (index >= N)).to(tl.int32)
    # An index with no column must not vanish silently: the row says so, after whatever is stored there.
    tl.debug_barrier()
    if tl.max(lost, axis=0) > 0:
        tl.store(out_ptr, float("nan"))


@launch.kernel
def _unpack_kernel(
    values_ptr, indices_ptr, offsets_ptr, source_ptr, out_ptr, stride_sm, stride_om, N, capacity,
    BLOCK: tl.constexpr, COPY: tl.constexpr, IS_CSR: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(offsets_ptr, row, capacity, IS_CSR)
    out_ptr += row.to(tl.int64) * stride_om
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
        values_ptr += start
        indices_ptr += start
        unordered = tl.zeros([BLOCK], tl.int32)
        for at in range(0, count, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            held = entry < count
            index = tl.load(indices_ptr + entry, mask=held, other=0)
            before = tl.load(indices_ptr + entry - 1, mask=held & (entry > 0), other=-1)
            value = tl.load(values_ptr + entry, mask=held, other=0.0)
            tl.store(out_ptr + index, value, mask=held & (index >= 0) & (index < N))
            unordered |= (held & ((index <= before) | (index >= N))).to(tl.int32)
        if tl.max(unordered, axis=0) > 0:
            # What has been stored so far is stored over.
            tl.debug_barrier()
            store_sums(values_ptr, indices_ptr, count, out_ptr, N, 32)


def unpack(
    values: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None, n: int, columns: int | None = None
) -> Tensor:
    """Operator `unpack`: rows of n columns, of values that are contiguous or not, among zeros up to `columns`."""
    columns = n if columns is None else columns
    is_csr = indices.dim() == 1
    m = offsets.shape[0] - is_csr
    out = torch.zeros(m, columns, dtype=values.dtype, device=values.device)
    if m and n and indices.numel():
        capacity = indices.shape[-1]
        source = None if source is None else rows_contiguous(source)
        strides = 0 if source is None else source.stride(0), columns
        args = (values.contiguous(), indices, offsets, source, out, *strides, n, capacity)
        block = min(1024, max(32, launch.next_power_of_2(indices.numel() // m)))
        meta = {"BLOCK": block, "COPY": 1024, "IS_CSR": is_csr}
        _unpack_kernel((m, 1, 1), args, meta, num_warps=max(1, block // 128))
    elif source is not None and m and n:
        out[:, :n] = torch.where((offsets[is_csr:] > 0)[:, None], source.to(out.dtype), 0)
    return out


EXAMPLES = {
    _unpack_kernel: {
        "values_ptr": "*fp32", "source_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": 1024, "COPY": 1024, "IS_CSR": False,
        "num_warps": 8,
    },
}  # fmt: skip
