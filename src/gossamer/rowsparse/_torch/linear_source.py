"""Overflowed rows of a linear layer, computed again on the CPU."""

from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows
from gossamer.rowsparse.formats import linear
from gossamer.rowsparse.records import LinearRows


def activate_(z: Tensor, threshold: Tensor | None) -> Tensor:
    """0 in z wherever it is up to max(threshold, 0)."""
    return z.masked_fill_(z <= (0 if threshold is None else threshold.clamp(min=0)), 0)


def linear_source(call: LinearRows) -> Tensor:
    """[M, N], written at rows whose spans end beyond `room`."""
    x, weight, bias, threshold, spans, room = call
    out = x.new_empty(x.shape[0], weight.shape[0])
    over = overflowed_rows(spans, room)
    if over.numel():
        out[over] = activate_(linear(x[over], weight, bias), threshold)
    return out
