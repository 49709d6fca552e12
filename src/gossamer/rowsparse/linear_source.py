"""A linear layer as the source of rows that overflowed, which operators compute again, and no others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core.operator import register
from gossamer.rowsparse._torch import linear_source as _cpu
from gossamer.rowsparse.formats import sums_over_rows
from gossamer.rowsparse.records import LinearRows, Matmul, TransposeKeys


@dataclass(frozen=True, eq=False)
class LinearSource:
    """The rows max(x @ weight.T + bias, 0), or 0 up to a threshold, or squared, by the operands of the product.

    The source of a container that was packed while the product was computed: the dense matrix never existed.

    Args:
        x: `[M, K]`, float, any strides.
        weight: `[N, K]`, any strides; the dtype and device of x.
        bias: `[N]`, added in float32, or None.
        threshold: `[N]`, compared in float32, or None for 0. z is kept where not z <= max(threshold, 0).
        squared: whether the square of z is kept instead.

    Source: this package's own; "Sparser, Faster, Lighter Transformer Language Models" keeps a dense backup of them.

    >>> LinearSource(torch.ones(2, 3), torch.ones(5, 3)).shape
    (2, 5)
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    threshold: Tensor | None = None
    squared: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.weight, self.bias, self.threshold

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.x.shape[0], self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.tensors[:3])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "LinearSource":
        mapped: Any = [None if t is None else function(t) for t in self.tensors]
        x, weight, bias, threshold = mapped
        return LinearSource(x, weight, bias, threshold, self.squared)

    def of_rows(self, key: Any) -> "LinearSource":
        """The same of some rows of x."""
        return replace(self, x=self.x[key])

    def dense(self, spans: Tensor, room: int, dtype: torch.dtype) -> Tensor:
        """`[M, N]`, right at rows whose spans end beyond `room`, differentiable in x, weight and bias."""
        out: Tensor = _linear_source(LinearRows(self.x, self.weight, self.bias, self.threshold, spans, room))
        return (out * out if self.squared else out).to(dtype)


def _backward(call: LinearRows, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    # Both modules read sources, and so need this one.
    from gossamer.rowsparse.matmul import gradients, matmul_operator
    from gossamer.rowsparse.transpose import transpose_keys

    x, weight, bias, _, spans, room = call
    (grad,), (out,) = grads, kept
    flagged = spans.sum(0) > room
    dense = torch.where(flagged[:, None] & (out != 0), grad, 0).to(weight.dtype)
    # Buffers without a slot: rows without an entry, and rows that overflowed.
    values, indices = weight.new_empty(0), spans.new_empty(0, dtype=torch.int32)
    spans = torch.stack([torch.zeros_like(spans[0]), flagged.long()])
    found: dict[str, Tensor | None] = {}
    if needs.x:
        found["x"] = matmul_operator(Matmul(values, indices, spans, dense, weight, None, x.dtype))
    if needs.weight:
        columns = transpose_keys(TransposeKeys(indices, spans, weight.shape[0]))
        found["weight"] = gradients(x, indices, columns, values, spans, dense, None, weight.dtype)[0]
    if bias is not None and needs.bias:
        found["bias"] = sums_over_rows(dense).to(bias.dtype)
    return found


@register(
    LinearRows,
    cpu=_cpu.linear_source,
    fake=lambda call: call.x.new_empty(call.x.shape[0], call.weight.shape[0]),
    backward=_backward,
    saved=("x", "weight", "bias", "spans"),
    keep=lambda call, out: (out,),
    repeats=True,
)
def _linear_source() -> Any:
    from gossamer.rowsparse._triton.overflow import linear_source

    return linear_source


_pytree.register_pytree_node(
    LinearSource,
    lambda source: ([*source.tensors], source.squared),
    lambda tensors, squared: LinearSource(*tensors, squared=squared),  # type: ignore[misc]
    serialized_type_name="gossamer.rowsparse.LinearSource",
)
