"""Rows that overflowed, computed again from what a linear layer had made them of."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.rowsparse._torch import linear_source as _cpu
from gossamer.rowsparse.container import LinearSource


def dense_rows(source: LinearSource, counts: Tensor, limit: int) -> Tensor:
    """`[M, N]`, right at rows whose count exceeds `limit`, differentiable in x, weight and bias of the source."""
    parts = (source.x, source.weight, source.bias, source.threshold)
    out = undispatched(_linear_source, *parts)(*parts, counts, limit)
    return out * out if source.squared else out


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, counts, ctx.limit = inputs
    ctx.save_for_backward(x, weight, counts, output)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Those modules read sources, and so need this one.
    from gossamer.rowsparse.matmul import gradients, matmul_operator
    from gossamer.rowsparse.transpose import transpose_keys

    x, weight, counts, out = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    flagged = counts > ctx.limit
    dense = torch.where(flagged[:, None] & (out != 0), grad, 0).to(weight.dtype)
    # Lists of one slot: rows without an entry, and rows that overflowed.
    m = x.shape[0]
    values = weight.new_zeros(m, 1)
    indices = torch.full((m, 1), -1, dtype=torch.int32, device=x.device)
    counts = torch.where(flagged, 2, 0).int()
    grad_x = grad_weight = grad_bias = None
    if need_x:
        grad_x = matmul_operator(values, indices, counts, dense, weight, None, x.dtype)
    if need_weight:
        columns = transpose_keys(indices, counts, weight.shape[0])
        grad_weight = gradients(x, indices, columns, values, counts, dense, None, weight.dtype)[0]
    if need_bias:
        grad_bias = dense.sum(0, dtype=torch.promote_types(dense.dtype, torch.float32)).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None, None


def _fake_matmul(values: Tensor, *rest: Any) -> Tensor:
    weight, _, out_dtype = rest[-3:]
    return weight.new_empty(values.shape[0], weight.shape[1], dtype=out_dtype or weight.dtype)


_linear_source = register(
    "linear_source(Tensor x, Tensor weight, Tensor? bias, Tensor? threshold, Tensor counts, SymInt limit) -> Tensor",
    cpu=_cpu.linear_source,
    strided=("x", "weight"),
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
    setup_context=_context,
    backward=_backward,
)
matmul_linear = register(
    "matmul_linear(Tensor values, Tensor indices, Tensor counts, Tensor x, Tensor source_weight, Tensor? source_bias, "
    "Tensor? threshold, Tensor weight, Tensor? bias, ScalarType? out_dtype) -> Tensor",
    cpu=_cpu.matmul_linear,
    strided=("x", "source_weight", "weight"),
    fake=_fake_matmul,
    # With gradients `rowsparse.matmul` takes the dense rows of the source.
    once_differentiable="rowsparse.matmul",
)
