"""Gated linear units in one product (SwiGLU, GEGLU, ReGLU, GLU, bilinear)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import increment_version
from torch.utils.checkpoint import checkpoint

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient
from gossamer.gemm._torch import linear_glu as _cpu
from gossamer.gemm._torch.linear_glu import GATES as GATES
from gossamer.gemm._torch.linear_glu import gated as gated
from gossamer.gemm.linear_glu_path import PATHS, choose_path
from gossamer.gemm.records import GluBwd, LinearGlu, LinearGluBwd, LinearGluOut
from gossamer.rowsparse.formats import sums_over_rows

ALIASES = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "linear": "identity"}
"""Hugging Face's names for the same activations."""

Gate = str | Callable[[Tensor], Tensor]
_checked: Checked[Any] = Checked()


def linear_glu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    *,
    activation: Gate = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    recompute: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias), writing the result alone.

    Args:
        x: `[..., K]`, float, any strides.
        gate_weight: `[N, K]` as in `nn.Linear`, any strides; the dtype and device of x. `[2N, K]` without up_weight:
            the gate's rows, then the rows of up.
        up_weight: `[N, K]`, or None where gate_weight has both. Nothing is copied to bring two parameters together.
        activation: of the gate: `"silu"`, `"gelu"`, `"gelu_tanh"`, `"relu"`, `"relu2"` (squared), `"sigmoid"`,
            `"identity"`, or Hugging Face's names `"swish"`, `"gelu_new"`, `"gelu_pytorch_tanh"`, `"linear"`. PyTorch's
            operators compute all of a call with a `ClampedSwiGLU`, or any other function of a tensor, such as an
            `nn.Module` or `torch.tanh`: no kernel fuses them.
        gate_bias, up_bias: `[N]`, added in float32, or None.
        recompute: False keeps gate and up for the backward pass, twice the size of the result; True keeps nothing but
            x and the weights, and computes the two again.
        out: a contiguous tensor that the result is written to, `[..., N]` in the dtype of the weights, with memory of
            its own; for a named activation, where no gradient is needed. None makes a new tensor.

    Returns:
        `[..., N]` in the dtype of the weights, differentiable in x, weights and biases; or `out`. Sums are float32
        (float64 for float64), and so is gating by a named activation; PyTorch rounds each step of a function. The
        result is rounded once on a GPU with few rows, and by Hopper's kernel; where the library multiplies
        (docs/gemm.md) its products are rounded before they are gated.

    Raises:
        ValueError: shapes or devices do not fit, an unknown activation, a function that returns another shape, or out
            is not contiguous, shares memory with an operand, or comes with a function as activation.
        TypeError: dtypes differ or are not floating.
        NotImplementedError: out where a gradient is needed.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Tantaru 2025, "Towards Better Kernels for Gated MLP".

    >>> linear_glu(torch.tensor([[2.0, 3.0]]), torch.eye(2), activation="relu").tolist()
    [[6.0]]
    """
    operator = "gemm.linear_glu"
    operands = (x, gate_weight, up_weight, gate_bias, up_bias)
    # A kept key would keep a module.
    key = None if callable(activation) else key_of(operands, (activation,))
    name = _checked.get(key)
    if name is None:
        name = check_operands(operator, *operands, activation)
        x, gate_weight, up_weight = autocast.cast(x, gate_weight, up_weight)  # type: ignore[assignment]
        operands = (x, gate_weight, up_weight, gate_bias, up_bias)
        checks.same_dtype(operator, "x", x, gate_weight=gate_weight, up_weight=up_weight)
        _checked.keep(key, name)
    needed = needs_gradient(*operands)
    if out is not None:
        _check_out(operator, out, operands, needed, name)
    if callable(name):
        return by_pytorch(operator, operands, name, recompute)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if out is not None:
        _linear_glu_out(LinearGluOut(flat, *operands[1:], name, out.view(flat.shape[0], out.shape[-1])))
        if not torch.compiler.is_compiling() and not out.is_inference():
            # Kernels write behind autograd's back.
            increment_version(out)
        return out
    made = linear_glu_operator(LinearGlu(flat, *operands[1:], name, needed and not recompute))[0]
    return made if x.dim() == 2 else made.view(*x.shape[:-1], made.shape[1])


def by_pytorch(
    operator: str, operands: Any, activation: Callable[[Tensor], Tensor], recompute: bool, *down: Tensor | None
) -> Tensor:
    """The gated result of a function as activation, or its product with `down`, a weight and a bias."""

    def compute() -> Tensor:
        gate, up = _cpu.products(*operands)
        hidden = gated(operator, activation, gate, up)[1].to(up.dtype)
        return _cpu.linear(hidden, *down) if down else hidden  # type: ignore[arg-type]

    return checkpoint(compute, use_reentrant=False) if recompute else compute()


def _check_out(operator: str, out: Tensor, operands: tuple[Any, ...], needed: bool, activation: Gate) -> None:
    x, gate_weight, up_weight, *_ = operands
    if callable(activation):
        raise ValueError(f"{operator}: out must be None with a function as activation. Copy the result instead.")
    checks.floating(operator, out=out)
    if needed or out.requires_grad:
        raise NotImplementedError(
            f"{operator}: out has no gradient. Leave it out, or call under torch.no_grad() with an out that needs none."
        )
    n = gate_weight.shape[0] // (2 if up_weight is None else 1)
    checks.shape(operator, "out", out, (*x.shape[:-1], n), "[..., N]", "like x and the weights")
    checks.same_device(operator, "x", x.device, out=out)
    checks.same_dtype(operator, "x", x, out=out)
    if not out.is_contiguous():
        raise ValueError(f"{operator}: out must be contiguous, got strides {list(out.stride())}.")
    if torch.compiler.is_compiling():
        return
    if any(t is not None and is_functorch_wrapped_tensor(t) for t in (out, *operands)):
        raise NotImplementedError(f"{operator}: out has no torch.func.vmap. Leave it out.")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{operator}: out must be no inference tensor outside inference mode. Clone it.")
    storage = out.untyped_storage().data_ptr()
    if storage and any(t is not None and t.untyped_storage().data_ptr() == storage for t in operands):
        raise ValueError(f"{operator}: out must have memory of its own, got a view of that of an operand.")


def check_operands(
    operator: str,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Gate,
) -> Gate:
    """The activation's name here, or the function itself; raises where an operand does not fit."""
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


def activation_name(operator: str, activation: Gate) -> Any:
    """The name of an activation here, or the function itself; ValueError where it is none that a gate may have."""
    if callable(activation) and not isinstance(activation, type):
        return activation
    name = ALIASES.get(activation, activation) if isinstance(activation, str) else None
    if name not in GATES:
        known = ", ".join((*GATES, *ALIASES))
        raise ValueError(f"{operator}: activation must be one of {known}, or a function, got {activation!r}.")
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


@register(LinearGluOut, cpu=_cpu.linear_glu_out, fake=lambda call: None, repeats=True)
def _linear_glu_out() -> Any:
    from gossamer.gemm._triton.linear_glu import linear_glu_out

    return linear_glu_out


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
