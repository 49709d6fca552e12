"""A feed-forward block whose gate is packed as it is computed, and what its rows need after that.

The gate is packed tile by tile (`gemm.linear_pack`). Then one of two kernels computes a row, by counts that only the
device knows: it gathers the weights of the row's entries (`gather`), or multiplies in dense tiles (`heavy`). Both are
launched, and the second leaves at once where no row is left to it. Few rows have kernels of their own (`few`). Calls
that launch the same are repeated (`replay`).
"""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton import few, gather, heavy, replay
from gossamer.ffn._triton.gather import SLOTS, TILE
from gossamer.ffn._triton.heavy import LISTED
from gossamer.ffn._triton.replay import Launched
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
    results = (out, nnz) if counted else (out,)
    known = None
    # Many rows are counted in one call of several; that one is not repeated.
    if not launch.INTERPRET and (is_few or (not counted and m <= BLOCK)):
        known = launch.call_of(operands, squared, counted)
        if replay.repeat(known, operands, results):
            return out, nnz
    read = _readable(operands, is_few)
    if is_few:
        launched = few.project(read, out, nnz if counted else None, squared)
    else:
        launched = _many(read, out, nnz if counted else nnz.new_empty(m), squared)
    if known is not None and all(a is b for a, b in zip(operands, read, strict=True)):
        replay.record(known, operands, results, launched)
    return out, nnz


def again(operands: Operands, squared: bool) -> Tensor | None:
    """The result of a call whose like was computed before, so that nothing has to be checked; else None."""
    x, down_weight = operands[0], operands[6]
    out = x.new_empty(x.shape[0], down_weight.shape[0])  # type: ignore[union-attr]
    return out if replay.repeat(launch.call_of(operands, squared, False), operands, (out,)) else None


def _readable(operands: Operands, is_few: bool) -> Operands:
    """The operands, or copies of what kernels do not read as it lies: few rows read W_down in any layout, and rows of x
    and of the other weights that are contiguous each."""
    *first, down_weight, down_bias = operands
    rows = rows_contiguous if is_few else Tensor.contiguous
    read = [None if t is None else rows(t) if t.dim() == 2 else t.contiguous() for t in (*first, down_bias)]
    return *read[:-1], down_weight, read[-1]


def _many(operands: Operands, out: Tensor, nnz: Tensor, squared: bool) -> list[Launched | None]:
    """Writes out and nnz for any number of rows, BLOCK at a time."""
    x, *gate, up_weight, up_bias, down_weight, down_bias = operands
    assert x is not None and down_weight is not None
    launched: list[Launched | None] = []
    by_columns = down_weight.t().is_contiguous()
    down_rows = down_weight.t() if by_columns else down_weight.new_empty(down_weight.shape[1], out.shape[1])
    up = None if up_weight is None else (up_weight, up_bias)
    for first in range(0, x.shape[0], BLOCK):
        part = slice(first, min(first + BLOCK, x.shape[0]))
        source = None if by_columns or first else down_weight
        launched += _block(x[part], tuple(gate), up, (down_rows, down_bias), source, squared, out[part], nnz[part])
    return launched


def _block(
    x: Tensor,
    gate: tuple[Any, ...],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    source: Tensor | None,
    squared: bool,
    out: Tensor,
    nnz: Tensor,
) -> list[Launched | None]:
    """The launches of one block of rows. The weight of down is [N, D] here, the transpose of `source` where that is
    given: this fills it."""
    (m, k), n = x.shape, gate[0].shape[0]
    limit = costs_of(n, k, out.shape[1], up is not None, x).limit
    listed = torch.empty(LISTED.value + m, dtype=torch.int32, device=x.device)
    packed, packs = pack(x, *gate, words=(listed, limit))
    if packs.bound is None:
        heavy.start(listed, limit)
    launched: list[Launched | None] = [packs]
    if source is not None:
        launched.append(_turned(source, down[0], packs.bound is not None))
    launched += gather.gather(packed, x, up, down, out, nnz, listed, squared)
    return [*launched, heavy.project(listed, x, (*gate, *(up or (None, None)), *down), out, squared)]


def _turned(weight: Tensor, out: Tensor, beside: bool) -> Launched:
    """Fills out with weight.t(); where Hopper packs, on the multiprocessors that have no more tiles."""
    if weight.stride(1) == 1:
        return Launched(launch_dense_transpose(weight, out, beside), (weight, out))
    out.copy_(weight.t())
    return Launched(None, ())


def pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    *,
    words: tuple[Tensor | None, int] = (None, 0),
) -> tuple[tuple[Tensor, Tensor, Tensor], Launched]:
    """The active entries of act(x @ weight.T + bias). Words as of `launch_linear_pack`; they are left alone where the
    launch is None."""
    out = empty_twell(x, x.shape[0], weight.shape[0], TILE.value, SLOTS.value)
    bound = launch_linear_pack(x, weight, bias, threshold, TILE.value, out, words=words)
    heads: tuple[Any, ...] = ()
    if bound is not None:
        from gossamer.gemm._gluon.linear_pack import descriptors

        heads = (*descriptors(x, weight), bias, threshold, None, None, *out, words[0])
    return out, Launched(bound, heads)
