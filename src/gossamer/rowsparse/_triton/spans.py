"""The span of a row, as every kernel reads it."""

import triton
import triton.language as tl


@triton.jit
def row_span(spans_ptr, row, M, room):
    """(start int64, count int32, whether the span ends beyond the buffers) of one of M rows."""
    start, count = tl.load(spans_ptr + row), tl.load(spans_ptr + M + row)
    return start, count.to(tl.int32), start + count > room


@triton.jit
def overflowed(spans_ptr, rows, M, room):
    """Whether the spans of some rows end beyond the buffers."""
    starts = tl.load(spans_ptr + rows, mask=rows < M, other=0)
    return starts + tl.load(spans_ptr + M + rows, mask=rows < M, other=0) > room
