"""Gated linear units in one product (SwiGLU, GEGLU, ReGLU, GLU, bilinear)."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient
from gossamer.gemm._torch import linear_glu as _cpu
from gossamer.gemm._torch.linear_glu import GATES as GATES
from gossamer.gemm.linear_glu_path import PATHS, choose_path
from gossamer.gemm.records import GluBwd, LinearGlu, LinearGluBwd
from gossamer.rowsparse.formats import sums_over_rows

ALIASES = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "linear": "identity"}
"""Hugging Face's names for the same activations."""

_checked: Checked[str] = Checked()


def linear_glu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias), writing the result alone.

    Args:
        x: `[..., K]`, float, any strides.
        gate_weight: `[N, K]` as in `nn.Linear`, any strides; the dtype and device of x. `[2N, K]` without up_weight:
            the gate's rows, then the rows of up.
        up_weight: `[N, K]`, or None where gate_weight has both. Nothing is copied to bring two parameters together.
        activation: of the gate: `"silu"`, `"gelu"`, `"gelu_tanh"`, `"relu"`, `"relu2"` (squared), `"sigmoid"`,
            `"identity"`, or Hugging Face's names `"swish"`, `"gelu_new"`, `"gelu_pytorch_tanh"`, `"linear"`.
        gate_bias, up_bias: `[N]`, added in float32, or None.
        recompute: False keeps gate and up for the backward pass, twice the size of the result; True keeps nothing but
            x and the weights, and computes the two again.

    Returns:
        `[..., N]` in the dtype of the weights, differentiable in x, weights and biases. Sums and gating are float32
        (float64 for float64). The result is rounded once on a GPU with few rows, and on Hopper from M * N * K of 2e10
        on; where the library multiplies (docs/gemm.md) its products are rounded before they are gated.

    Raises:
        ValueError: shapes or devices do not fit, or an unknown activation.
        TypeError: dtypes differ or are not floating.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Tantaru 2025, "Towards Better Kernels for Gated MLP".

    >>> linear_glu(torch.tensor([[2.0, 3.0]]), torch.eye(2), activation="relu").tolist()
    [[6.0]]
    """
    operator = "gemm.linear_glu"
    autocasts = autocast.enabled(x.device) if isinstance(x, Tensor) else False
    key = None if autocasts else key_of((x, gate_weight, up_weight, gate_bias, up_bias), (activation,))
    name = _checked.get(key)
    if name is None:
        name = check_operands(operator, x, gate_weight, up_weight, gate_bias, up_bias, activation)
        if autocasts:
            x, gate_weight, up_weight = autocast.cast(x, gate_weight, up_weight)  # type: ignore[assignment]
        checks.same_dtype(operator, "x", x, gate_weight=gate_weight, up_weight=up_weight)
        _checked.keep(key, name)
    operands = (x, gate_weight, up_weight, gate_bias, up_bias)
    keep = not recompute and needs_gradient(*operands)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = linear_glu_operator(LinearGlu(flat, gate_weight, up_weight, gate_bias, up_bias, name, keep))[0]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def check_operands(
    operator: str,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> str:
    """The activation's name here; raises where an operand does not fit."""
    optional = {"up_weight": up_weight, "gate_bias": gate_bias, "up_bias": up_bias}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    checks.floating(operator, x=x, gate_weight=gate_weight, **given)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., K], got a scalar.")
    letters = "[2N, K]" if up_weight is None else "[N, K]"
    checks.matrix(operator, "gate_weight", gate_weight, letters, 1, x.shape[-1], "x")
    n, k = gate_weight.shape
    if up_weight is not None:
        checks.shape(operator, "up_weight", up_weight, (n, k), "[N, K]", "like gate_weight")
    elif n % 2:
        raise ValueError(
            f"{operator}: gate_weight must have an even number of rows, gate and up, got {n}. "
            "Pass up_weight where it is a parameter of its own."
        )
    else:
        n //= 2
    for name in ("gate_bias", "up_bias"):
        if name in given:
            checks.shape(operator, name, given[name], (n,), "[N]", "like the weights")
    checks.same_device(operator, "x", x.device, gate_weight=gate_weight, **given)
    return activation_name(operator, activation)


def activation_name(operator: str, activation: str) -> str:
    """The name of an activation here; ValueError where it is none that a gate may have."""
    name = ALIASES.get(activation, activation) if isinstance(activation, str) else None
    if name not in GATES:
        known = ", ".join((*GATES, *ALIASES))
        raise ValueError(f"{operator}: activation must be one of {known}, got {activation!r}.")
    return name


def _fake(call: LinearGlu) -> tuple[Tensor, Tensor, Tensor]:
    x, m, n = call.x, call.x.shape[0], call.gate_weight.shape[0] // (2 if call.up_weight is None else 1)
    kept = m if call.keep else 0
    return x.new_empty(m, n), x.new_empty(kept, n), x.new_empty(kept, n)


def _backward(call: LinearGlu, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    x, gate_weight, up_weight, *biases, activation, keep = call
    if keep:
        both = list(_glu_bwd(GluBwd(grads[0], kept[0], kept[1], activation)))
    else:
        both = list(_linear_glu_bwd(LinearGluBwd(grads[0], *call[:6])))
    dtypes = [None if bias is None else bias.dtype for bias in biases]
    return products_bwd(both, x, gate_weight, up_weight, dtypes, needs)


def products_bwd(
    grads: list[Tensor], x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, bias_dtypes: list[Any], needs: Any
) -> dict[str, Tensor | None]:
    """Gradients of x, both weights and both biases from `grads`, those of gate and up, which this empties.

    `needs` begins with one bool for each of the five.
    """
    need_x, need_gate, need_up, *need_biases = needs[:5]
    if up_weight is None:
        n = gate_weight.shape[0] // 2
        weights, need_up = (gate_weight[:n], gate_weight[n:]), need_gate
        both = gate_weight.new_empty(gate_weight.shape) if need_gate else None
        out: tuple[Tensor | None, ...] = (None, None) if both is None else (both[:n], both[n:])
    else:
        weights, both, out = (gate_weight, up_weight), None, (None, None)
    grad_x, found, biases = None, [], []
    for weight, needed, place, dtype, need_bias in zip(weights, (need_gate, need_up), out, bias_dtypes, need_biases):
        # One after the other: what is used is let go. The sum over both is made in the second product's accumulators.
        grad = grads.pop(0)
        if need_x:
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        found.append(torch.mm(grad.t(), x, out=place) if needed else None)
        biases.append(sums_over_rows(grad).to(dtype) if need_bias else None)
        del grad
    if up_weight is None:
        found = [both, None]
    return dict(zip(("x", "gate_weight", "up_weight", "gate_bias", "up_bias"), (grad_x, *found, *biases)))


@register(
    LinearGlu,
    cpu=_cpu.linear_glu,
    fake=_fake,
    choose_path=choose_path,
    paths=PATHS,
    backward=_backward,
    saved=("x", "gate_weight", "up_weight", "gate_bias", "up_bias"),
    keep=lambda call, results: results[1:],
    differentiable=1,
    once_differentiable="gemm.linear_glu",
    repeats=True,
)
def linear_glu_operator() -> Any:
    from gossamer.gemm._triton.linear_glu import linear_glu

    return linear_glu


@register(
    LinearGluBwd,
    cpu=_cpu.linear_glu_bwd,
    fake=lambda call: (call.x.new_empty(call.grad.shape), call.x.new_empty(call.grad.shape)),
    once_differentiable="gemm.linear_glu",
    repeats=True,
)
def _linear_glu_bwd() -> Any:
    from gossamer.gemm._triton.linear_glu import linear_glu_bwd

    return linear_glu_bwd


@register(
    GluBwd,
    cpu=_cpu.glu_bwd,
    fake=lambda call: (torch.empty_like(call.gate), torch.empty_like(call.up)),
    once_differentiable="gemm.linear_glu",
    repeats=True,
)
def _glu_bwd() -> Any:
    from gossamer.gemm._triton.linear_glu import glu_bwd

    return glu_bwd
