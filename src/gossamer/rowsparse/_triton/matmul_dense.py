"""The dense way of products of rows: unpack and multiply, or multiply and pick.

cuBLAS multiplies a hundred times faster than rows of a weight are gathered, so where a row holds a few percent of the
columns it is faster to compute all. Unpacked rows and products that are only picked from exist `rows_at_once` at a
time. The kernel picks a row's entries out of its products, and the products wanted of a row that overflowed: beside the
product there is one launch, for a small product takes hardly longer than that.
"""

from collections.abc import Iterator

import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ranges import span
from gossamer.rowsparse._triton._rows import row_span
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.unpack import unpack
from gossamer.rowsparse.dense_product import dense_product, padded
from gossamer.rowsparse.matmul_path import rows_at_once


@launch.kernel
def _pick_kernel(
    products_ptr, indices_ptr, offsets_ptr, source_ptr, out_ptr, dense_ptr, stride_pm, stride_sm, N, capacity,
    BLOCK: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, IS_CSR: tl.constexpr,
):  # fmt: skip
    """Program (row, share of it): the products at its entries' columns, to their slots, and 0 to the other slots of an
    ELL. A row that overflowed has 0 in its slots, and if there is a source its products in `dense_ptr`; MASKED leaves
    0 there where the source is 0."""
    row = tl.program_id(0).to(tl.int64)
    start, count, overflowed = row_span(offsets_ptr, row, capacity, IS_CSR)
    products_ptr += row * stride_pm
    slots = count if IS_CSR else capacity
    if overflowed:
        count = 0
        if IS_CSR:
            # A CSR's slots are zeros already.
            slots = 0
        if source_ptr is not None:
            for first in range(tl.program_id(1) * COPY, N, tl.num_programs(1) * COPY):
                columns = first + tl.arange(0, COPY)
                product = tl.load(products_ptr + columns, mask=columns < N, other=0.0)
                if MASKED:
                    x = tl.load(source_ptr + row * stride_sm + columns, mask=columns < N, other=0.0)
                    product = tl.where(x != 0, product, 0.0)
                tl.store(dense_ptr + row * N + columns, product, mask=columns < N)
    for at in range(tl.program_id(1) * BLOCK, slots, tl.num_programs(1) * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
        product = tl.load(products_ptr + index, mask=(index >= 0) & (index < N), other=0.0).to(tl.float32)
        # An index that no weight row has must not vanish silently.
        product = tl.where((index < -1) | (index >= N), float("nan"), product)
        tl.store(out_ptr + start + entry, product, mask=entry < slots)


def matmul_dense(
    values: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Operator `matmul`, in the weight's dtype."""
    n, d = weight.shape
    m, columns = offsets.shape[0] - (values.dim() == 1), padded(n, values)
    step = rows_at_once(m, columns, values.element_size(), values, indices, weight)
    with span("gossamer::rowsparse.matmul/dense"):
        if step >= m:
            return dense_product(unpack(values, indices, offsets, source, n, columns), weight, bias, None)
        out = weight.new_empty(m, d)
        for first, last, part in _parts(m, step, values, indices, offsets, source):
            out[first:last] = dense_product(unpack(*part, n, columns), weight, bias, None)
    return out


def sampled_matmul_dense(
    x: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None, masked: bool
) -> tuple[Tensor, Tensor]:
    """Operator `sampled_matmul` without `scatter` and without products that are ready."""
    is_csr = indices.dim() == 1
    (m, _), n, capacity = x.shape, weight.shape[0], indices.shape[-1]
    # Which slots of a CSR hold nothing only the offsets know.
    values = (x.new_zeros if is_csr else x.new_empty)(indices.shape)
    dense = (x.new_empty if masked else x.new_zeros)(m if source is not None else 0, n)
    source = None if source is None else rows_contiguous(source)
    stride = 0 if source is None else source.stride(0)
    step = rows_at_once(m, n, x.element_size(), x, weight, indices, values, dense)
    block = min(1024, max(32, launch.next_power_of_2(indices.numel() // max(m, 1))))
    meta = {"BLOCK": block, "COPY": 1024, "MASKED": masked, "IS_CSR": is_csr}
    with span("gossamer::rowsparse.sampled_matmul/dense"):
        for first, last, part in _parts(m, step, values, indices, offsets, source):
            to, at, counts, held = part
            products = dense_product(x[first:last], weight.t(), None, None, wide=True)
            # Rows that do not fill the GPU are shared.
            most = launch.cdiv(4 * tuning.programs(x.device), last - first)
            shares = max(1, min(most, launch.cdiv(indices.numel() // m, block)))
            args = (products, at, counts, held, to, dense[first:last], products.stride(0), stride, n, capacity)
            _pick_kernel((last - first, shares, 1), args, meta, num_warps=max(1, block // 128))
    return values, dense


def _parts(
    m: int, step: int, values: Tensor, indices: Tensor, offsets: Tensor, source: Tensor | None
) -> Iterator[tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor | None]]]:
    """(first row, row after the last, (values, indices, offsets, source) of those) of `step` rows at a time."""
    for first in range(0, m, max(step, 1)):
        last = min(first + step, m)
        held = None if source is None else source[first:last]
        if values.dim() == 1:
            yield first, last, (values, indices, offsets[first : last + 1], held)
        else:
            yield first, last, (values[first:last], indices[first:last], offsets[first:last], held)


EXAMPLES = {_pick_kernel: {"BLOCK": 1024, "COPY": 1024, "MASKED": True, "IS_CSR": False, "num_warps": 8}}
