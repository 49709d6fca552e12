"""Dense transposition, for gradients that are computed in the other layout than their parameter has."""

from typing import Any

from torch import Tensor

from gossamer._core.ops import register


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return dense_transpose(grad)


dense_transpose = register(
    "dense_transpose(Tensor x) -> Tensor",
    cpu=lambda x: x.new_empty(x.shape[1], x.shape[0]).copy_(x.t()),
    gpu="gossamer.rowsparse._triton.dense_transpose:dense_transpose",
    fake=lambda x: x.new_empty(x.shape[1], x.shape[0]),
    setup_context=lambda ctx, inputs, output: None,
    backward=_backward,
)
