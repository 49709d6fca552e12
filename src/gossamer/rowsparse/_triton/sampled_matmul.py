"""(x @ weight.T) at the entries of a pattern.

One program owns a row of x and every PARTS-th block of BLOCK_E entries of that row. It gathers the entries' weight
rows as [BLOCK_E, BLOCK_D] tiles, multiplies by x and folds along D, in float32. The result goes to the entry's slot
(SCATTER off) or to its column in a dense row (SCATTER on: the gradient of dense activations). With FILL the program
writes the row's zeros as well, FILL columns at a time, just ahead of the entries, whose columns ascend: zeroing the
dense rows is bound by device memory, gathering by the L2, and so the two overlap.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.matmul_dense import sampled_matmul_dense
from gossamer.rowsparse._triton.spans import row_span
from gossamer.rowsparse.matmul_path import choose_path
from gossamer.rowsparse.records import SampledMatmul


@triton.jit
def fill_zeros(out_ptr, filled, until, N, BLOCK: tl.constexpr):
    """Zeroes a row's blocks from the `filled`-th past column `until`; how many are filled then.

    It counts blocks, not columns, so that the compiler sees that a block is aligned and stores 16 bytes at a time.
    """
    blocks = tl.cdiv(until, BLOCK)
    for block in range(filled, blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=columns < N, cache_modifier=".cs")
    return tl.maximum(filled, blocks)


@launch.kernel
def _sampled_matmul_kernel(
    x_ptr, w_ptr, indices_ptr, spans_ptr, products_ptr, out_ptr, stride_xm, stride_wn, N, D, room,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    SCATTER: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the row's entries). Where `products_ptr` holds the products, they are only put in place."""
    row = tl.program_id(0)
    start, count, overflowed = row_span(spans_ptr, row, tl.num_programs(0), room)
    if not overflowed:
        x_ptr += row.to(tl.int64) * stride_xm
        filled = 0
        for at in range(tl.program_id(1) * BLOCK_E, count, PARTS * BLOCK_E):
            entry = at + tl.arange(0, BLOCK_E)
            index = tl.load(indices_ptr + start + entry, mask=entry < count, other=-1)
            valid = (index >= 0) & (index < N)
            if products_ptr is not None:
                product = tl.load(products_ptr + start + entry, mask=valid, other=0.0)
            else:
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
                product = tl.sum(acc, axis=1)
            # An index that no weight row has must not vanish silently.
            out = tl.where((index < -1) | (index >= N), float("nan"), product)
            if SCATTER:
                if FILL > 0:
                    filled = fill_zeros(out_ptr + row.to(tl.int64) * N, filled, tl.max(index, axis=0) + 1, N, FILL)
                    tl.debug_barrier()
                tl.store(out_ptr + row.to(tl.int64) * N + index, out, mask=valid)
            else:
                tl.store(out_ptr + start + entry, out, mask=entry < count)
        if FILL > 0:
            fill_zeros(out_ptr + row.to(tl.int64) * N, filled, N, N, FILL)


GATHER = {size: launch.Tile({"BLOCK_E": 8, "BLOCK_D": 256 if size == 2 else 64}, warps=1) for size in (2, 4)}
SCATTER = launch.Tile({"BLOCK_E": 32, "BLOCK_D": 16}, warps=8)
"""Of products that are put among zeros: warps enough to write at memory bandwidth."""


def sampled_matmul(call: SampledMatmul) -> tuple[Tensor, Tensor]:
    """(values like indices, dense [M, N] that is right at overflowed rows).

    With `scatter` the second result is the whole masked product, zeros included, and the first is empty; columns must
    ascend in each row. Without, it is empty unless the pattern has a source, and zero but for the overflowed rows.
    There, `masked` says that the product is wanted only where the source differs from 0, and elsewhere anything. Where
    `products` (like indices) is given, it holds the products at entries already: the weight's gradient has read the
    same rows.
    """
    x, weight, indices, spans, source, scatter, masked, products = call
    ready = scatter or products is not None or x.dtype is not weight.dtype
    if not ready and choose_path(x.shape[0], indices.shape[0], source is not None, weight) == "dense":
        return sampled_matmul_dense(x, weight, indices, spans, source, masked)
    x, weight = rows_contiguous(x), rows_contiguous(weight)
    m, d = x.shape
    n, room = weight.shape[0], indices.shape[0]
    work = m > 0 and n > 0 and d > 0 and room > 0
    # With many rows the programs write the zeros themselves; with few, a row is shared and they must be there before.
    fill = scatter and work and m >= 512
    if scatter:
        values, dense = x.new_empty(0), (x.new_empty if fill else x.new_zeros)(m, n)
    else:
        values = x.new_zeros(indices.shape) if products is None else products.to(x.dtype, copy=True)
        # Zeros are wanted by a backward pass alone; to write them would be most of the time of a few entries.
        dense = (x.new_empty if masked else x.new_zeros)(m if source is not None else 0, n)
    if work and (scatter or products is None):
        tile = GATHER[x.element_size()] if products is None else SCATTER
        blocks = launch.cdiv(launch.cdiv(room, m), tile.sizes["BLOCK_E"])
        parts = max(1, min(blocks, launch.cdiv(64 * tuning.programs(x.device), m)))
        meta = {**tile.sizes, "PARTS": 1 if fill else parts, "SCATTER": scatter}
        meta["FILL"] = tile.warps * 4096 // x.element_size() if fill else 0
        out = dense if scatter else values
        args = (x, weight, indices, spans, products, out, x.stride(0), weight.stride(0), n, d, room)
        _sampled_matmul_kernel((m, meta["PARTS"], 1), args, meta, **tile.options)
    if source is not None and m and n:
        rows = overflow.Overflow(source, spans, room)
        overflow.backward_source(rows, x, weight, dense, masked)
    return values, dense


EXAMPLES = {
    _sampled_matmul_kernel: {
        "products_ptr": None, "BLOCK_E": 8, "BLOCK_D": 256, "PARTS": 1, "SCATTER": True, "FILL": 2048,
        "num_warps": 1,
    },
}  # fmt: skip
