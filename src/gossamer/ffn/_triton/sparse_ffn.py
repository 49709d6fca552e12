"""A feed-forward block whose gate is packed as it is computed, and what its rows need after that.

The gate is packed tile by tile (`gemm.linear_pack`). Then one of two kernels computes a row, by counts that only the
device knows: it gathers the weights of the row's entries (`gather`), or multiplies in dense tiles (`heavy`). Both are
launched, and the second leaves at once where no row is left to it. Few rows have kernels of their own (`few`).
"""

import torch
from torch import Tensor

from gossamer.ffn._triton import few, gather, heavy
from gossamer.ffn._triton.entry_lists import Weights
from gossamer.ffn._triton.gather import SLOTS, TILE
from gossamer.ffn._triton.heavy import LISTED
from gossamer.ffn.costs import costs_of
from gossamer.ffn.records import SparseFfn
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse._triton.dense_transpose import launch_dense_transpose, rows_contiguous
from gossamer.rowsparse.formats import empty_twell

BLOCK = 1 << 16
"""Rows that are on their way at one time."""

Operands = tuple[Tensor | None, ...]
"""x [M, K]; weight [N, K], bias and threshold of the gate; weight [N, K] and bias of up; weight [D, N] and bias of
down."""


def sparse_ffn(call: SparseFfn) -> tuple[Tensor, Tensor]:
    """(out [M, D], entries of each row [M], or [0])"""
    operands, (squared, counted) = call[:8], call[8:]
    x, down_bias = call.x, call.down_bias
    m, n, d = x.shape[0], call.gate_weight.shape[0], call.down_weight.shape[0]
    is_few, out = m <= few.ROWS, x.new_empty(m, d)
    nnz = torch.empty(m if counted else 0, dtype=torch.int32, device=x.device)
    if m == 0 or n == 0 or d == 0:
        out.copy_(out.new_zeros(d) if down_bias is None else down_bias)
        return out, nnz.zero_()
    read = _readable(operands, is_few)
    if is_few:
        few.project(read, out, nnz if counted else None, squared)
    else:
        _many(read, out, nnz if counted else nnz.new_empty(m), squared)
    return out, nnz


def _readable(operands: Operands, is_few: bool) -> Operands:
    """The operands, or copies of what kernels do not read as it lies: few rows read W_down in any layout, and rows of x
    and of the other weights that are contiguous each."""
    x, *first, down_weight, down_bias = operands
    assert x is not None
    rows = rows_contiguous if is_few else Tensor.contiguous
    # Kernels of few rows count elements of x in 32 bits.
    x = x.contiguous() if x.stride(0) >= (1 << 31) // few.ROWS else x
    read = [None if t is None else rows(t) if t.dim() == 2 else t.contiguous() for t in (x, *first, down_bias)]
    return *read[:-1], down_weight, read[-1]


def _many(operands: Operands, out: Tensor, nnz: Tensor, squared: bool) -> None:
    """Writes out and nnz for any number of rows, BLOCK at a time."""
    x, gate, gate_bias, threshold, up, up_bias, source, down_bias = operands
    assert x is not None and gate is not None and source is not None
    (d, n), k = source.shape, x.shape[1]
    by_columns = source.t().is_contiguous()
    down = source.t() if by_columns else source.new_empty(n, d)
    weights = Weights(gate, gate_bias, threshold, up, up_bias, down)
    limit = costs_of(n, k, d, up is not None, x).limit
    for first in range(0, x.shape[0], BLOCK):
        rows, result = (t[first : first + BLOCK] for t in (x, out))
        listed = torch.empty(LISTED.value + rows.shape[0], dtype=torch.int32, device=x.device)
        packed, listing = pack(rows, gate, gate_bias, threshold, words=(listed, limit))
        if not listing:
            heavy.start(listed, limit)
        if first == 0 and not by_columns and source.stride(1) == 1:
            # Where Hopper packs, on the multiprocessors that have no more tiles.
            launch_dense_transpose(source, down, listing)
        elif first == 0 and not by_columns:
            down.copy_(source.t())
        gather.gather(packed, rows, weights, down_bias, result, nnz[first : first + BLOCK], listed, squared)
        heavy.project(listed, rows, (*weights, down_bias), result, squared)


def pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    *,
    words: tuple[Tensor | None, int] = (None, 0),
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """(the active entries of act(x @ weight.T + bias), whether words are seen to, as by `launch_linear_pack`)."""
    out = empty_twell(x, x.shape[0], weight.shape[0], TILE.value, SLOTS.value)
    return out, launch_linear_pack(x, weight, bias, threshold, TILE.value, out, words=words)
