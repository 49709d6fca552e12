"""The indexer's scores as a matrix, and their gradients.

A score is the sum over heads of sigmoid(w) * sigmoid(q . k * scale + bias), or of w * relu(q . k * scale + bias).
Forward, a program owns a tile of queries by keys and adds up the heads in registers, so that nothing of size [heads,
Tq, Tk] exists. Backward, nothing of that size does either: one kernel owns (queries, head) and walks the keys for the
gradients of q, w and bias, the other owns keys and walks heads and queries for the gradient of k. Both compute the
products again. No sum's order depends on timing. Tiles are small where D is large: a tile of queries and two of keys
share the SM's memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.attention._triton._indexer import (
    activated,
    derivative,
    load_bias,
    load_gates,
    load_tile,
    valid_keys,
    visible_keys,
)
from gossamer.attention._triton._products import rows_product
from gossamer.attention.records import IndexerScores, IndexerScoresBackward


def fast(x: Tensor) -> bool:
    """Whether the GPU's own tanh is exact enough: where numbers have 16 bits."""
    return x.element_size() == 2 and not INTERPRET and not torch.version.hip


def kernel_activation(activation: str, x: Tensor) -> str:
    """The ACTIVATION of the kernels."""
    return "tanh" if activation == "sigmoid" and fast(x) else activation


def backward_tile(d: int, element_size: int) -> dict[str, int]:
    """How many queries and keys of so many columns share a program of the backward pass."""
    wide = max(16, launch.next_power_of_2(d)) * element_size
    # Of products of float32 without tensor cores registers hold fewer operands.
    edge = 64 if wide <= 512 and element_size == 2 else 32 if wide <= 1024 else 16
    return {"BLOCK_M": edge, "BLOCK_N": edge}


def check_width(operator: str, d: int, element_size: int) -> None:
    """Raises where a tile of queries and keys exceeds the SM's memory."""
    if launch.next_power_of_2(d) * element_size > 2048:
        raise NotImplementedError(
            f"{operator}: on the GPU q_idx may have at most {2048 // element_size} columns in this dtype, got {d}. "
            "Split the width over more heads."
        )


@launch.kernel
def _indexer_scores_fwd_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, out_ptr, Tq, Tk, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, tile of queries, batch)."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(D, 16))
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(2).to(tl.int64)
    visible = visible_keys(rows, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if tl.program_id(0) * BLOCK_N < tl.max(visible, axis=0):
        k_ptr += batch * Tk * D
        k = load_tile(k_ptr, keys, D, Tk, D, BLOCK_D)
        for h in range(HEADS):
            of_head = q_ptr + (batch * HEADS + h) * Tq * D
            q = load_tile(of_head, rows, D, Tq, D, BLOCK_D)
            x = rows_product(q, k, of_head, rows, D, Tq, k_ptr, keys, Tk, D, PRECISION)
            x = x * scale + load_bias(bias_ptr, h)
            gate = load_gates(w_ptr + batch * Tq * HEADS, rows, h, Tq, HEADS, ACTIVATION)
            total += gate[:, None] * activated(x, ACTIVATION)
    out = tl.where(keys[None, :] < visible[:, None], total, float("-inf"))
    at = (batch * Tq + rows)[:, None] * Tk + keys[None, :]
    tl.store(out_ptr + at, out, mask=(rows < Tq)[:, None] & (keys < Tk)[None, :])


@triton.jit
def head_terms(
    q, k, q_ptr, k_ptr, grad_ptr, rows, keys, end, visible, gate, bias, Tq, Tk, scale, D: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """(grad * activation, gradient with respect to the activation's argument), both float32 [rows, keys]."""
    inside = (keys[None, :] < visible[:, None]) & (rows < Tq)[:, None]
    # A key that is not seen may hold NaN.
    x = rows_product(q, k, q_ptr, rows, D, Tq, k_ptr, keys, end, D, PRECISION) * scale + bias
    active = tl.where(inside, activated(x, ACTIVATION), 0.0)
    at = rows.to(tl.int64)[:, None] * Tk + keys[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return grad * active, gate[:, None] * grad * derivative(active, ACTIVATION)


@launch.kernel
def _indexer_scores_bwd_q_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, grad_ptr, dq_ptr, dw_ptr, dbias_ptr, Tq, Tk, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, head, batch)."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(D, 16))
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    visible = visible_keys(rows, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    plane = (batch * HEADS + head) * Tq
    q = load_tile(q_ptr + plane * D, rows, D, Tq, D, BLOCK_D)
    gate = load_gates(w_ptr + batch * Tq * HEADS, rows, head, Tq, HEADS, ACTIVATION)
    bias = load_bias(bias_ptr, head)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dgate = tl.zeros([BLOCK_M], tl.float32)
    dbias = tl.zeros([BLOCK_M], tl.float32)
    end = tl.max(visible, axis=0)
    for first in range(0, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        # A key that no query sees may hold NaN.
        k = load_tile(k_ptr + batch * Tk * D, keys, D, end, D, BLOCK_D)
        through, dx = head_terms(
            q, k, q_ptr + plane * D, k_ptr + batch * Tk * D, grad_ptr + batch * Tq * Tk, rows, keys, end, visible, gate,
            bias, Tq, Tk, scale, D, PRECISION, ACTIVATION,
        )  # fmt: skip
        dgate += tl.sum(through, axis=1)
        dbias += tl.sum(dx, axis=1)
        dq += tl.dot(dx.to(k.dtype), k, input_precision=PRECISION)
    columns = tl.arange(0, BLOCK_D)
    at = (plane + rows)[:, None] * D + columns[None, :]
    tl.store(dq_ptr + at, dq * scale, mask=(rows < Tq)[:, None] & (columns < D)[None, :])
    dw = dgate if ACTIVATION == "relu" else dgate * gate * (1.0 - gate)
    tl.store(dw_ptr + (batch * Tq + rows) * HEADS + head, dw, mask=rows < Tq)
    part = (batch * HEADS + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(dbias_ptr + part, tl.sum(dbias, axis=0))


@launch.kernel
def _indexer_scores_bwd_k_kernel(
    q_ptr, k_ptr, w_ptr, bias_ptr, lengths_ptr, grad_ptr, dk_ptr, Tq, Tk, ahead, scale,
    HEADS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, batch)."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(D, 16))
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    length = valid_keys(lengths_ptr, batch, Tk)
    k = load_tile(k_ptr + batch * Tk * D, keys, D, Tk, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Queries that see no key may hold NaN.
    seeing = tl.where(length > 0, Tq, 0)
    # The first query that sees a key of this tile.
    begin = tl.maximum(tl.program_id(0) * BLOCK_N + 1 - ahead - tl.maximum(length - Tq, 0), 0) // BLOCK_M * BLOCK_M
    for head in range(HEADS):
        bias = load_bias(bias_ptr, head)
        for first in range(begin, seeing, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            of_head = q_ptr + (batch * HEADS + head) * Tq * D
            q = load_tile(of_head, rows, D, Tq, D, BLOCK_D)
            gate = load_gates(w_ptr + batch * Tq * HEADS, rows, head, Tq, HEADS, ACTIVATION)
            visible = visible_keys(rows, length, Tq, ahead)
            _, dx = head_terms(
                q, k, of_head, k_ptr + batch * Tk * D, grad_ptr + batch * Tq * Tk, rows, keys, Tk, visible, gate, bias,
                Tq, Tk, scale, D, PRECISION, ACTIVATION,
            )  # fmt: skip
            dk += tl.dot(dx.T.to(q.dtype), q, input_precision=PRECISION)
    columns = tl.arange(0, BLOCK_D)
    at = (batch * Tk + keys)[:, None] * D + columns[None, :]
    tl.store(dk_ptr + at, dk * scale, mask=(keys < Tk)[:, None] & (columns < D)[None, :])


def _options(q: Tensor, activation: str) -> dict[str, Any]:
    precision = tuning.dot_precision(q, q.shape[3])["PRECISION"]
    meta = {"HEADS": q.shape[1], "D": q.shape[3], "PRECISION": precision}
    return {**meta, "ACTIVATION": kernel_activation(activation, q)}


def _ahead(causal: bool, tk: int) -> int:
    return 1 if causal else tk + 1


def indexer_scores(call: IndexerScores) -> Tensor:
    """Operator `indexer_scores` -> [B, Tq, Tk]."""
    q, k, w, bias, lengths, scale, causal, activation, out_dtype = call
    check_width("attention.indexer_scores", q.shape[3], q.element_size())
    b, _, tq, _ = q.shape
    tk = k.shape[1]
    out = q.new_empty((b, tq, tk), dtype=out_dtype)
    if out.numel():
        meta = _options(q, activation) | {"BLOCK_M": 64, "BLOCK_N": 64}
        grid = (launch.cdiv(tk, 64), launch.cdiv(tq, 64), b)
        _indexer_scores_fwd_kernel(grid, (q, k, w, bias, lengths, out, tq, tk, _ahead(causal, tk), scale), meta)
    return out


def indexer_scores_backward(call: IndexerScoresBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_scores_backward` -> gradients of q, k, w and bias (in the dtype that is computed in)."""
    grad, q, k, w, bias, lengths, scale, causal, activation = call
    b, heads, tq, d = q.shape
    tk = k.shape[1]
    dq, dk, dw = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, w))
    if not (grad.numel() and heads):
        return dq, dk, dw, torch.zeros(heads, dtype=torch.float32, device=q.device)
    meta = _options(q, activation) | backward_tile(d, q.element_size())
    blocks = launch.cdiv(tq, meta["BLOCK_M"])
    dbias = torch.empty(b, heads, blocks, dtype=torch.float32, device=q.device)
    tensors = (q, k, w, bias, lengths, grad)
    sizes = (tq, tk, _ahead(causal, tk), scale)
    _indexer_scores_bwd_q_kernel((blocks, heads, b), (*tensors, dq, dw, dbias, *sizes), meta)
    _indexer_scores_bwd_k_kernel((launch.cdiv(tk, meta["BLOCK_N"]), b, 1), (*tensors, dk, *sizes), meta)
    return dq, dk, dw, dbias.sum((0, 2))


_TILE = {"HEADS": 4, "D": 64, "BLOCK_M": 64, "BLOCK_N": 64, "PRECISION": "ieee", "ACTIVATION": "sigmoid"}
EXAMPLES = {
    _indexer_scores_fwd_kernel: _TILE,
    _indexer_scores_bwd_q_kernel: {"dbias_ptr": "*fp32", **_TILE},
    _indexer_scores_bwd_k_kernel: _TILE,
}
