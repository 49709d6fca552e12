"""The dense way of products of rows: unpack and multiply, or multiply and pick.

Unpacked rows and products that are only picked from exist `rows_at_once` at a
time. The kernel picks a row's entries out of its products, and the products wanted of a row that overflowed: beside the
product there is one launch, for a small product takes hardly longer than that.
"""

from collections.abc import Iterator

import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ranges import span
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.pack import row_span
from gossamer.rowsparse._triton.unpack import spread
from gossamer.rowsparse.dense_product import multiply_into
from gossamer.rowsparse.matmul_path import rows_at_once


@launch.kernel
def _pick_kernel(
    products_ptr, indices_ptr, spans_ptr, source_ptr, out_ptr, dense_ptr, stride_pm, stride_sm, N, room,
    BLOCK: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Program (row, share of it): the products at its entries' columns, to their slots. A row that overflowed has its
    products in `dense_ptr`, if there is a source; MASKED leaves 0 there where the source is 0."""
    row = tl.program_id(0).to(tl.int64)
    start, count, over = row_span(spans_ptr, row, tl.num_programs(0), room)
    products_ptr += row * stride_pm
    if over:
        count = 0
        if source_ptr is not None:
            for first in range(tl.program_id(1) * COPY, N, tl.num_programs(1) * COPY):
                columns = first + tl.arange(0, COPY)
                product = tl.load(products_ptr + columns, mask=columns < N, other=0.0)
                if MASKED:
                    x = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0)
                    product = tl.where(x != 0, product, 0.0)
                tl.store(dense_ptr + row * N + columns, product, mask=columns < N)
    for at in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
        product = tl.load(products_ptr + index, mask=(index >= 0) & (index < N), other=0.0).to(tl.float32)
        # An index that no weight row has must not vanish silently.
        product = tl.where((index < -1) | (index >= N), float("nan"), product)
        tl.store(out_ptr + start + entry, product, mask=entry < count)


def matmul_dense(
    values: Tensor, indices: Tensor, spans: Tensor, source: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Operator `matmul`, in the weight's dtype."""
    n, d = weight.shape
    m = spans.shape[1]
    step = rows_at_once(m, n, values.element_size(), values, indices, weight)
    with span("gossamer::rowsparse.matmul/dense"):
        out = weight.new_empty(m, d)
        for rows, held, dense in _parts(m, step, spans, source):
            x = spread(values, indices, held, dense, n, held.shape[1] / m, weight.dtype)
            multiply_into(out[rows], x, weight, bias)
    return out


def sampled_matmul_dense(
    x: Tensor, weight: Tensor, indices: Tensor, spans: Tensor, source: Tensor | None, masked: bool
) -> tuple[Tensor, Tensor]:
    """Operator `sampled_matmul` without `scatter` and without products that are ready."""
    (m, _), n, room = x.shape, weight.shape[0], indices.shape[0]
    values = x.new_zeros(room)
    dense = (x.new_empty if masked else x.new_zeros)(m if source is not None else 0, n)
    source = None if source is None else rows_contiguous(source)
    stride = 0 if source is None else source.stride(0)
    step = rows_at_once(m, n, x.element_size(), x, weight, indices, values, dense)
    block = min(1024, max(32, launch.next_power_of_2(room // max(m, 1))))
    meta = {"BLOCK": block, "COPY": 1024, "MASKED": masked}
    with span("gossamer::rowsparse.sampled_matmul/dense"):
        for rows, held, part in _parts(m, step, spans, source):
            products = x.new_empty(held.shape[1], n)
            multiply_into(products, x[rows], weight.t(), None)
            # Rows that do not fill the GPU are shared.
            size = held.shape[1]
            most = launch.cdiv(4 * tuning.programs(x.device), size)
            shares = max(1, min(most, launch.cdiv(room // m, block)))
            args = (products, indices, held, part, values, dense[rows], products.stride(0), stride, n, room)
            _pick_kernel((size, shares, 1), args, meta, num_warps=max(1, block // 128))
    return values, dense


def _parts(m: int, step: int, spans: Tensor, source: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """(which rows, their spans, their source) of `step` rows at a time."""
    for first in range(0, m, max(step, 1)):
        rows = slice(first, min(first + step, m))
        yield rows, spans[:, rows].contiguous(), None if source is None else source[rows]


EXAMPLES = {_pick_kernel: {"BLOCK": 1024, "COPY": 1024, "MASKED": True, "num_warps": 8}}
