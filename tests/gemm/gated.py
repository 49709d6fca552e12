"""Gated layers in tests: operands by name, and what a model computes of them without gossamer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import gemm
from gossamer.gemm._torch.linear_glu import GATES
from gossamer.testing import assert_close

Leaves = dict[str, Tensor]
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear_glu": gemm.linear_glu,
    "gated_mlp": lambda **given: gemm.gated_mlp(**{"up_weight": None} | given),
}


def leaves_of(
    m: int,
    n: int,
    k: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    stacked: bool = False,
    operator: str = "linear_glu",
) -> Leaves:
    """Numbers of the size that activations and initialised weights have."""
    draw = lambda *size: torch.randn(*size, device=generator.device, generator=generator)  # noqa: E731
    weight = (draw(2 * n, k) / max(k, 1) ** 0.5).to(dtype)
    leaves = {"x": draw(m, k).to(dtype), "gate_weight": weight}
    if not stacked:
        leaves |= {"gate_weight": weight[:n].clone(), "up_weight": weight[n:].clone()}
    if operator == "gated_mlp":
        leaves["down_weight"] = (draw(k, n) / n**0.5).to(dtype)
    if bias:
        leaves |= {"gate_bias": draw(n).to(dtype), "up_bias": draw(n).to(dtype)}
        leaves |= {"down_bias": draw(k).to(dtype)} if operator == "gated_mlp" else {}
    return leaves


def doubled(leaves: Leaves) -> Leaves:
    return {name: leaf.double() for name, leaf in leaves.items()}


def needing(leaves: Leaves) -> Leaves:
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def plain(activation: str | Callable[[Tensor, Tensor], Tensor], leaves: Leaves) -> Tensor:
    """Of an activation by its name, or of a function of gate and up."""
    gate_weight, up_weight = leaves["gate_weight"], leaves.get("up_weight")
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    gate = F.linear(leaves["x"], gate_weight, leaves.get("gate_bias"))
    up = F.linear(leaves["x"], up_weight, leaves.get("up_bias"))
    hidden = GATES[activation](gate) * up if isinstance(activation, str) else activation(gate, up)
    return F.linear(hidden, leaves["down_weight"], leaves.get("down_bias")) if "down_weight" in leaves else hidden


def gradients(function: Callable[..., Tensor], leaves: Leaves, grad: Tensor, frozen: Any = ()) -> Leaves:
    """The result of a function of named operands as `out`, and gradients of those that are not frozen."""
    leaves = {name: leaf.detach().clone().requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    out = function(**leaves)
    out.backward(grad.to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(
    function: Callable[..., Tensor], activation: Any, leaves: Leaves, grad: Tensor, *, of_biases: float = 2.0
) -> None:
    """Result and gradients, with the factor that gradients of biases are allowed."""
    usual = lambda **given: plain(activation, given)  # noqa: E731
    got, by_torch = gradients(function, leaves, grad), gradients(usual, leaves, grad)
    wanted = gradients(usual, doubled(leaves), grad)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert tensor.dtype is grad.dtype
        factor = of_biases if name.endswith("bias") else 2.0
        assert_close(tensor, reference64=wanted[name], plain=by_torch[name], factor=factor, name=name)
