"""Dense transposition, for gradients that are computed in the other layout than their parameter has."""

from typing import Any

from torch import Tensor

from gossamer._core.operator import register
from gossamer.rowsparse.records import DenseTranspose


def _cpu(call: DenseTranspose) -> Tensor:
    return _fake(call).copy_(call.x.t())


def _fake(call: DenseTranspose) -> Tensor:
    return call.x.new_empty(call.x.shape[1], call.x.shape[0])


def _backward(call: DenseTranspose, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    return {"x": dense_transpose(DenseTranspose(grads[0]))}


@register(DenseTranspose, cpu=_cpu, fake=_fake, backward=_backward, repeats=True)
def dense_transpose() -> Any:
    from gossamer.rowsparse._triton.dense_transpose import dense_transpose

    return dense_transpose
