"""(x @ weight.T) at the entries of a pattern.

One program owns a row of x and every PARTS-th block of BLOCK_E entries of that row. It gathers the entries' weight
rows as [BLOCK_E, BLOCK_D] tiles, multiplies by x and folds along D, in float32.
"""

import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.matmul_dense import sampled_matmul_dense
from gossamer.rowsparse._triton.pack import row_span
from gossamer.rowsparse._triton.unpack import spread
from gossamer.rowsparse.matmul_path import choose_path
from gossamer.rowsparse.records import SampledMatmul


@launch.kernel
def _sampled_matmul_kernel(
    x_ptr, w_ptr, indices_ptr, spans_ptr, out_ptr, stride_xm, stride_wn, N, D, room,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the row's entries)."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    if not overflowed:
        x_ptr += row.to(tl.int64) * stride_xm
        for at in range(tl.program_id(1) * BLOCK_E, count, PARTS * BLOCK_E):
            entry = at + tl.arange(0, BLOCK_E)
            index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
            valid = (index >= 0) & (index < N)
            acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
            for first in range(0, D, BLOCK_D):
                columns = first + tl.arange(0, BLOCK_D)
                x = tl.load(x_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
                w = tl.load(
                    w_ptr + index.to(tl.int64)[:, None] * stride_wn + columns[None, :],
                    mask=valid[:, None] & (columns < D)[None, :],
                    other=0.0,
                )
                acc += w.to(tl.float32) * x[None, :]
            # An index that no weight row has must not vanish silently.
            out = tl.where((index < -1) | (index >= N), float("nan"), tl.sum(acc, axis=1))
            tl.store(out_ptr + start + entry, out, mask=entry < count)


def sampled_matmul(call: SampledMatmul) -> tuple[Tensor, Tensor]:
    """(values like indices, dense [M, N] that is right at overflowed rows).

    With `scatter` the second result is the whole masked product, zeros included, and the first is empty.
    Without, it is empty unless the pattern has a source, and zero but for the overflowed rows.
    There, `masked` says that the product is wanted only where the source differs from 0, and elsewhere anything. Where
    `products` (like indices) is given, it holds the products at entries already: the weight's gradient has read the
    same rows.
    """
    x, weight, indices, spans, source, scatter, masked, products = call
    ready = scatter or products is not None or x.dtype is not weight.dtype
    if not ready and choose_path(x.shape[0], indices.shape[0], source is not None, weight, False) == "dense":
        return sampled_matmul_dense(x, weight, indices, spans, source, masked)
    x, weight = rows_contiguous(x), rows_contiguous(weight)
    m, d = x.shape
    n, room = weight.shape[0], indices.shape[0]
    if products is None:
        values = x.new_zeros(room)
        if m and n and d and room:
            meta = {"BLOCK_E": 8, "BLOCK_D": 256 if x.element_size() == 2 else 64}
            blocks = launch.cdiv(launch.cdiv(room, m), meta["BLOCK_E"])
            meta["PARTS"] = max(1, min(blocks, launch.cdiv(64 * tuning.programs(x.device), m)))
            args = (x, weight, indices, spans, values, x.stride(0), weight.stride(0), n, d, room)
            _sampled_matmul_kernel((m, meta["PARTS"], 1), args, meta, num_warps=1)
    else:
        values = products if scatter else products.to(x.dtype, copy=True)
    if scatter:
        values, dense = x.new_empty(0), spread(values, indices, spans, None, n, dtype=x.dtype)
    else:
        # Zeros are wanted by a backward pass alone; to write them would be most of the time of a few entries.
        dense = (x.new_empty if masked else x.new_zeros)(m if source is not None else 0, n)
    if source is not None and m and n:
        rows = overflow.Overflow(source, spans, room)
        overflow.backward_source(rows, x, weight, dense, masked)
    return values, dense


EXAMPLES = {
    _sampled_matmul_kernel: {"BLOCK_E": 8, "BLOCK_D": 256, "PARTS": 1, "num_warps": 1},
}
