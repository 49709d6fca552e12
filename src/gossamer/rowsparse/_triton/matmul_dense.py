"""The dense way of products of rows: unpack and multiply, or multiply and pick.

cuBLAS multiplies a hundred times faster than rows of a weight are gathered, so where a row holds a few percent of the
columns it is faster to compute all. Unpacked rows and products that are only picked from exist `rows_at_once` at a
time. A program of the kernel picks one row's entries out of its products.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer._core.ranges import span
from gossamer.rowsparse._triton._rows import row_span
from gossamer.rowsparse._triton.unpack import unpack
from gossamer.rowsparse.dense_product import dense_product, padded
from gossamer.rowsparse.matmul_path import rows_at_once


@launch.kernel
def _pick_kernel(
    products_ptr, indices_ptr, offsets_ptr, out_ptr, stride_pm, N, capacity, BLOCK: tl.constexpr, IS_CSR: tl.constexpr
):  # fmt: skip
    """Program (row): the products at its entries' columns, to their slots; those of rows that overflowed stay 0."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(offsets_ptr, row, capacity, IS_CSR)
    if not overflowed:
        products_ptr += row.to(tl.int64) * stride_pm
        for at in range(0, count, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
            product = tl.load(products_ptr + index, mask=(index >= 0) & (index < N), other=0.0).to(tl.float32)
            # An index that no weight row has must not vanish silently.
            product = tl.where((index < -1) | (index >= N), float("nan"), product)
            tl.store(out_ptr + start + entry, product, mask=entry < count)


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
    values = x.new_zeros(indices.shape)
    dense = x.new_empty(m if source is not None else 0, n)
    step = rows_at_once(m, n, x.element_size(), x, weight, indices, values, dense)
    with span("gossamer::rowsparse.sampled_matmul/dense"):
        for first, last, part in _parts(m, step, values, indices, offsets, source):
            to, at, counts, held = part
            products = dense_product(x[first:last], weight.t(), None, None)
            block = min(1024, max(32, launch.next_power_of_2(indices.numel() // m)))
            args = (products, at, counts, to, products.stride(0), n, capacity)
            _pick_kernel((last - first, 1, 1), args, {"BLOCK": block, "IS_CSR": is_csr}, num_warps=max(1, block // 128))
            if held is not None:
                wanted = (counts[is_csr:] > capacity)[:, None]
                dense[first:last] = torch.where(wanted & (held != 0) if masked else wanted, products, 0)
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


EXAMPLES = {
    _pick_kernel: {"BLOCK": 1024, "IS_CSR": False, "num_warps": 8},
}
