"""What the kernels share: how a row finds its entries."""

import triton
import triton.language as tl


@triton.jit
def row_span(offsets_ptr, row, capacity, IS_CSR: tl.constexpr):
    """(start, count, overflowed) of a row's list: row_offsets and buffer length for CSR, counts and slots for ELL."""
    if IS_CSR:
        start = tl.load(offsets_ptr + row)
        end = tl.load(offsets_ptr + row + 1)
        return start, (end - start).to(tl.int32), end > capacity
    else:
        count = tl.load(offsets_ptr + row)
        return row.to(tl.int64) * capacity, count, count > capacity
