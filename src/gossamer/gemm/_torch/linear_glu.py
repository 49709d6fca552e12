"""Gated linear layers on the CPU: two products of PyTorch's, gated in float32 in one go."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.rowsparse._torch.linear_source import linear as linear

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda z: z,
}


_aten = torch.ops.aten
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, z: _aten.gelu_backward(grad, z, approximate="tanh"),
    "relu": lambda grad, z: torch.where(z <= 0, 0, grad),
    "sigmoid": lambda grad, z: _aten.sigmoid_backward(grad, torch.sigmoid(z)),
    "identity": lambda grad, z: grad,
}
"""(gradient of the activation, what it was of) -> gradient of what it was of."""


def linear_glu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Operator `linear_glu` -> (out [M, N], gates [M, 2N] or [0, 2N])."""
    gate, up = _products(x, gate_weight, up_weight, gate_bias, up_bias)
    gates = torch.cat((gate, up), 1) if keep else gate.new_empty(0, 2 * gate.shape[1])
    dtype = gate.dtype
    if dtype.itemsize == 2:
        gate, up = gate.float(), up.float()
    # Both factors are ours alone.
    out = GATES[activation](gate).mul_(up)
    return out.to(dtype) if dtype.itemsize == 2 else out, gates


def linear_glu_bwd(
    grad: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Operator `linear_glu_bwd` -> gradients of gate and up side by side, [M, 2N], computing the two again."""
    return glu_bwd(grad, torch.cat(_products(x, gate_weight, up_weight, gate_bias, up_bias), 1), activation)


def glu_bwd(grad: Tensor, gates: Tensor, activation: str) -> Tensor:
    """Operator `glu_bwd` -> gradients of gate and up side by side, [M, 2N], from the two as they were kept."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    gate, up = gates.to(wide).chunk(2, 1)
    grad = grad.to(wide)
    return torch.cat((SLOPES[activation](grad * up, gate), grad * GATES[activation](gate)), 1).to(gates.dtype)


def glu_bwd_hidden(grad: Tensor, gates: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Operator `glu_bwd_hidden` -> (gradient of gate, what was gated), [M, N]; that of up replaces grad."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    gate, up = gates.to(wide).chunk(2, 1)
    active, flow = GATES[activation](gate), grad.to(wide)
    out = SLOPES[activation](flow * up, gate).to(gates.dtype)
    grad.copy_(flow * active)
    # A new tensor, whatever the activation is: nothing returned may be an input.
    return out, (active * up).to(gates.dtype)


def _products(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    return linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
