"""Overflowed rows of a linear layer, computed again.

The dense matrix of such a source never existed, and which of its rows are wanted only the device knows. So the kernel
of `overflow` is always launched, and leaves at once where a block of rows has none.
"""

from torch import Tensor

from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton.overflow import Overflow
from gossamer.rowsparse.records import LinearRows


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
