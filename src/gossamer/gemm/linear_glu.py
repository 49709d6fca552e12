"""Gated linear units in one product (SwiGLU, GEGLU, ReGLU, GLU, bilinear)."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.ops import needs_gradient, refuse_second, register, undispatched
from gossamer.gemm._torch import linear_glu as _cpu
from gossamer.gemm._torch.linear_glu import GATES as GATES
from gossamer.gemm.linear_glu_path import path_of

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
        recompute: what a backward pass finds. False keeps gate and up, twice the size of the result; True keeps
            nothing but x and the weights, and computes the two again.

    Returns:
        `[..., N]` in the dtype of the weights, differentiable in x, weights and biases. Sums and gating are float32
        (float64 for float64). On Hopper the result is rounded once; where the library multiplies (docs/gemm.md) its
        products are rounded before they are gated.

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
    call = linear_glu_operator if autocasts else undispatched(linear_glu_operator, flat, *operands[1:])
    out = call(flat, gate_weight, up_weight, gate_bias, up_bias, name, keep)[0]
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
    """What an activation is called here; ValueError where it is none that a gate may have."""
    name = ALIASES.get(activation, activation) if isinstance(activation, str) else None
    if name not in GATES:
        known = ", ".join((*GATES, *ALIASES))
        raise ValueError(f"{operator}: activation must be one of {known}, got {activation!r}.")
    return name


def _fake(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    n = gate_weight.shape[0] // (2 if up_weight is None else 1)
    kept = x.shape[0] if rest[-1] else 0
    return x.new_empty(x.shape[0], n), x.new_empty(kept, n), x.new_empty(kept, n)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    x, gate_weight, up_weight, gate_bias, up_bias, ctx.activation, ctx.keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_weight, up_weight, *(output[1:] if ctx.keep else (gate_bias, up_bias)))
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias)]


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    refuse_second("gemm.linear_glu")
    x, gate_weight, up_weight, *rest = ctx.saved_tensors
    # The forward pass has chosen the dtype, whatever a backward pass runs under.
    with autocast.disabled(grad.device):
        if ctx.keep:
            grads = list(undispatched(_glu_bwd, grad, *rest)(grad, *rest, ctx.activation))
        else:
            call = undispatched(_linear_glu_bwd, grad, x, gate_weight, up_weight)
            grads = list(call(grad, x, gate_weight, up_weight, *rest, ctx.activation))
        return *products_bwd(ctx, grads, x, gate_weight, up_weight), None, None


def products_bwd(
    ctx: Any, grads: list[Tensor], x: Tensor, gate_weight: Tensor, up_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of x, both weights and both biases from `grads`, those of gate and up, which this empties."""
    need_x, need_gate, need_up, *need_biases = ctx.needs_input_grad[:5]
    if up_weight is None:
        n = gate_weight.shape[0] // 2
        weights, need_up = (gate_weight[:n], gate_weight[n:]), need_gate
        both = gate_weight.new_empty(gate_weight.shape) if need_gate else None
        out: tuple[Tensor | None, ...] = (None, None) if both is None else (both[:n], both[n:])
    else:
        weights, both, out = (gate_weight, up_weight), None, (None, None)
    wide = torch.promote_types(x.dtype, torch.float32)
    grad_x, found, biases = None, [], []
    for weight, needed, place, dtype, need_bias in zip(
        weights, (need_gate, need_up), out, ctx.bias_dtypes, need_biases
    ):
        # One after the other: what is used is let go. The sum over both is made in the second product's accumulators.
        grad = grads.pop(0)
        if need_x:
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        found.append(torch.mm(grad.t(), x, out=place) if needed else None)
        biases.append(grad.sum(0, dtype=wide).to(dtype) if need_bias else None)
        del grad
    return grad_x, *((both, None) if up_weight is None else found), *biases


_OPERANDS = "Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor? gate_bias, Tensor? up_bias, str activation"
linear_glu_operator = register(
    f"linear_glu({_OPERANDS}, bool keep) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu.linear_glu,
    strided=("x", "gate_weight", "up_weight"),
    fake=_fake,
    setup_context=_context,
    backward=_backward,
    path=path_of,
)
_linear_glu_bwd = register(
    f"linear_glu_bwd(Tensor grad, {_OPERANDS}) -> (Tensor, Tensor)",
    cpu=_cpu.linear_glu_bwd,
    strided=("grad", "x", "gate_weight", "up_weight"),
    fake=lambda grad, x, *_: (x.new_empty(grad.shape), x.new_empty(grad.shape)),
    once_differentiable="gemm.linear_glu",
)
_glu_bwd = register(
    "glu_bwd(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    cpu=_cpu.glu_bwd,
    strided=("grad",),
    fake=lambda grad, gate, up, activation: (torch.empty_like(gate), torch.empty_like(up)),
    once_differentiable="gemm.linear_glu",
)
