"""Dense transposition, for gradients that are computed in the other layout than their parameter has."""

from typing import Any

from gossamer._core.ops import register


def _launcher() -> Any:
    from gossamer.rowsparse._triton import dense_transpose as kernels

    return kernels.dense_transpose


dense_transpose: Any = register(
    "dense_transpose(Tensor x) -> Tensor",
    cpu=lambda x: x.new_empty(x.shape[1], x.shape[0]).copy_(x.t()),
    strided=("x",),
    gpu=_launcher,
    fake=lambda x: x.new_empty(x.shape[1], x.shape[0]),
    backward=lambda ctx, grad: dense_transpose(grad),
)
