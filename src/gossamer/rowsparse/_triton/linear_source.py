"""Overflowed rows of a linear layer, computed again, and their product with a weight.

The dense matrix of such a source never existed, and which of its rows are wanted only the device knows. So the kernel
of `overflow` is always launched, and leaves at once where a block of rows has none. To multiply them, blocks of rows
take turns in a buffer of an eighth of the matrix, or 64 MiB.
"""

from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.matmul import launch_matmul
from gossamer.rowsparse._triton.overflow import Overflow
from gossamer.rowsparse.records import LinearRows, MatmulLinear


def linear_source(call: LinearRows) -> Tensor:
    """As its record says."""
    x, weight, bias, threshold, spans, room = call
    out = x.new_empty(x.shape[0], weight.shape[0])
    launch_linear_source(x, weight, bias, threshold, spans, room, out)
    return out


def launch_linear_source(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None, spans: Tensor, room: int, out: Tensor
) -> None:
    """Writes the layer into the rows of `out` whose spans end beyond `room`."""
    if out.numel():
        overflow.forward(Overflow(x, spans, room), weight.t(), bias, out, (threshold,))


def matmul_linear(call: MatmulLinear) -> Tensor:
    """Rows times weight, with overflowed rows from a linear source."""
    values, indices, spans, x, source_weight, source_bias, threshold, weight, bias, out_dtype = call
    weight = rows_contiguous(weight)
    m, n, room = spans.shape[1], weight.shape[0], values.shape[0]
    out = weight.new_empty((m, weight.shape[1]), dtype=out_dtype)
    launch_matmul(values, indices, spans, None, weight, bias, out)
    if m == 0 or n == 0 or out.shape[1] == 0:
        return out
    # Few blocks, for each costs two launches, and of those no more than an eighth of the matrix where that is large.
    blocks = min(8, launch.cdiv(m * n * x.element_size(), 64 << 20))
    block = min(m, max(256, launch.cdiv(launch.cdiv(m, blocks), 128) * 128))
    source = x.new_empty(block, n)
    for first in range(0, m, block):
        rows = slice(first, min(first + block, m))
        part, held = source[: rows.stop - first], spans[:, rows].contiguous()
        launch_linear_source(x[rows], source_weight, source_bias, threshold, held, room, part)
        overflow.forward(Overflow(part, held, room), weight, bias, out[rows])
    return out
