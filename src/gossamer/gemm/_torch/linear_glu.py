"""Gated linear layers on the CPU: two products of PyTorch's, gated in float32 in one go."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.gemm.activations import ClampedSwiGLU
from gossamer.gemm.records import GatedMlpBwd, GluBwd, LinearGlu, LinearGluBwd, LinearGluOut
from gossamer.rowsparse.formats import linear as linear

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "identity": lambda z: z,
}


_aten = torch.ops.aten
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, z: _aten.gelu_backward(grad, z, approximate="tanh"),
    "relu": lambda grad, z: torch.where(z <= 0, 0, grad),
    "relu2": lambda grad, z: torch.where(z <= 0, 0, 2 * grad * z),
    "sigmoid": lambda grad, z: _aten.sigmoid_backward(grad, torch.sigmoid(z)),
    "identity": lambda grad, z: grad,
}
"""(gradient of the activation, what it was of) -> gradient of what it was of."""


def linear_glu(call: LinearGlu) -> tuple[Tensor, Tensor, Tensor]:
    """(out, gate, up), [M, N] or, without `keep`, the latter two [0, N]."""
    gate, up = products(*call[:5])
    kept = (gate, up) if call.keep else (gate.new_empty(0, gate.shape[1]), up.new_empty(0, up.shape[1]))
    dtype = gate.dtype
    if dtype.itemsize == 2:
        gate, up = gate.float(), up.float()
    active = GATES[call.activation](gate)
    out = active * up if active is kept[0] else active.mul_(up)
    return out.to(dtype) if dtype.itemsize == 2 else out, *kept


def linear_glu_out(call: LinearGluOut) -> None:
    """Fills out."""
    call.out.copy_(linear_glu(LinearGlu(*call[:6], False))[0])


def gated(
    operator: str, activation: str | Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(activation of the gate, its product with up), by PyTorch's operators."""
    active = (GATES[activation] if isinstance(activation, str) else activation)(gate)
    if not isinstance(active, Tensor) or active.shape != gate.shape:
        got = list(active.shape) if isinstance(active, Tensor) else type(active).__name__
        raise ValueError(f"{operator}: activation must return the gate's shape {list(gate.shape)}, got {got}.")
    if up is None:
        return active, active
    return active, active * (activation.factor(up) if isinstance(activation, ClampedSwiGLU) else up)


def linear_glu_bwd(call: LinearGluBwd) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [M, N]; both are computed again."""
    return glu_bwd(GluBwd(call.grad, *products(*call[1:6]), call.activation))


def glu_bwd(call: GluBwd) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [M, N]."""
    grad_gate, grad_up, _ = gradients(*call)
    return grad_gate.to(call.gate.dtype), grad_up.to(call.up.dtype)


def gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate, that of up, what they gated), new tensors in float32 or wider."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    grad, gate, up = grad.to(wide), gate.to(wide), up.to(wide)
    active = GATES[activation](gate)
    return SLOPES[activation](grad * up, gate), grad * active, active * up


def gated_mlp_bwd(call: GatedMlpBwd) -> Tensor:
    """The product of activated gate and up, [M, N]."""
    hidden = call.grad @ call.down_weight
    for old, new in zip((call.gate, call.up, hidden), gradients(hidden, call.gate, call.up, call.activation)):
        old.copy_(new)
    return hidden


def products(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    return linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
