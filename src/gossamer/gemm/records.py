"""The arguments of the room's operators: each operator is one record (`_core/operator.py`)."""

from typing import NamedTuple

from torch import Tensor

from gossamer._core.operator import Strided, Written


class LinearGlu(NamedTuple):
    """x `[M, K]`; weights `[N, K]`, or gate_weight `[2N, K]` without up_weight; biases `[N]`."""

    x: Strided
    gate_weight: Strided
    up_weight: Strided | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str
    keep: bool


class LinearGluOut(NamedTuple):
    """Operands of `LinearGlu`, and the contiguous `[M, N]` that the result is written to."""

    x: Strided
    gate_weight: Strided
    up_weight: Strided | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str
    out: Written


class LinearGluBwd(NamedTuple):
    """The gradient of the result, `[M, N]`, and operands of `LinearGlu`."""

    grad: Strided
    x: Strided
    gate_weight: Strided
    up_weight: Strided | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str


class GluBwd(NamedTuple):
    """All `[M, N]`: the gradient of the result, and gate and up as they were kept."""

    grad: Strided
    gate: Tensor
    up: Tensor
    activation: str


class GatedMlpBwd(NamedTuple):
    """grad `[M, D]`, down_weight `[D, N]`, gate and up `[M, N]`; the gradients of gate and up take their places."""

    grad: Strided
    down_weight: Strided
    gate: Written
    up: Written
    activation: str


class LinearPack(NamedTuple):
    """x `[M, K]`, weight `[N, K]`, bias and threshold `[N]`, and the slots of a row."""

    x: Strided
    weight: Strided
    bias: Tensor | None
    threshold: Tensor | None
    capacity: int
    squared: bool
