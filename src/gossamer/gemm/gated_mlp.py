"""The gated feed-forward block of a transformer as one step of autograd."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.ops import directly
from gossamer.gemm._torch.linear_glu import linear
from gossamer.gemm.linear_glu import (
    _linear_glu,
    check_dtypes,
    check_operands,
    glu_bwd_hidden,
    linear_glu,
    refuse_second,
)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    *,
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """`linear_glu` and the product that brings its result back to the size of x.

    A backward pass keeps gate and up, and makes what they gated again, while a chain of `linear_glu` and `F.linear`
    keeps all three. What it keeps it lets go as soon as it is read, unless the graph is retained.

    Args:
        x, gate_weight, up_weight, activation, gate_bias, up_bias: as in `linear_glu`.
        down_weight: `[D, N]` as in `nn.Linear`; the dtype and device of x.
        down_bias: `[D]`, or None.
        recompute: True keeps what they gated alone, and computes gate and up again.

    Returns:
        `[..., D]`, differentiable in x, weights and biases.

    Raises:
        ValueError, TypeError: as `linear_glu`, and where down_weight or down_bias do not fit.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; the seed on fused gated MLPs.

    >>> gated_mlp(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(3, 4)).shape
    torch.Size([2, 3])
    """
    operator = "gemm.gated_mlp"
    activation = check_operands(operator, x, gate_weight, up_weight, gate_bias, up_bias, activation)
    n = gate_weight.shape[0] // (2 if up_weight is None else 1)
    biases = {} if down_bias is None else {"down_bias": down_bias}
    checks.floating(operator, down_weight=down_weight, **biases)
    if down_weight.dim() != 2 or down_weight.shape[1] != n:
        raise ValueError(
            f"{operator}: down_weight must have shape [D, N] with N = {n} like gate_weight, "
            f"got {list(down_weight.shape)}."
        )
    if down_bias is not None:
        checks.shape(operator, "down_bias", down_bias, (down_weight.shape[0],), "[D]", "like down_weight")
    checks.same_device(operator, "x", x.device, down_weight=down_weight, **biases)
    if autocast.enabled(x.device):
        x, gate_weight, up_weight, down_weight = autocast.cast(  # type: ignore[assignment]
            x, gate_weight, up_weight, down_weight
        )
    check_dtypes(operator, x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    operands = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if recompute or not grads:
        hidden = linear_glu(
            x,
            gate_weight,
            up_weight,
            activation=activation,
            gate_bias=gate_bias,
            up_bias=up_bias,
            recompute=recompute,
        )
        return linear(hidden, down_weight, down_bias)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _GatedMLP.apply(flat, *operands[1:], activation)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


class _GatedMLP(torch.autograd.Function):
    """No operator of its own: all it computes with is one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        call = directly(_linear_glu, x, gate_weight, up_weight, gate_bias, up_bias)
        hidden, gates = call(x, gate_weight, up_weight, gate_bias, up_bias, activation, True)
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight, gates)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias, down_bias)]
        ctx.activation = activation
        with torch.autocast(x.device.type, enabled=False):
            return linear(hidden, down_weight, down_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second("gemm.gated_mlp")
        x, gate_weight, up_weight, down_weight, gates = ctx.saved_tensors
        if not torch.compiler.is_compiling() and hasattr(ctx, "maybe_clear_saved_tensors"):
            # Nothing that is kept outlives its last use, unless the graph is retained.
            ctx.maybe_clear_saved_tensors()
        need_x, need_gate, need_up, need_down, *need_biases = ctx.needs_input_grad[:7]
        wide = torch.promote_types(grad.dtype, torch.float32)

        def bias(of: Tensor, index: int) -> Tensor | None:
            return of.sum(0, dtype=wide).to(ctx.bias_dtypes[index]) if need_biases[index] else None

        with torch.autocast(grad.device.type, enabled=False):
            grad_up = grad @ down_weight
            grad_gate, hidden = directly(glu_bwd_hidden, grad_up, gates)(grad_up, gates, ctx.activation)
            del gates
            grad_down = grad.t() @ hidden if need_down else None
            del hidden
            grad_biases = (bias(grad_gate, 0), bias(grad_up, 1), bias(grad, 2))
            n = grad_up.shape[1]
            w_gate, w_up = (gate_weight[:n], gate_weight[n:]) if up_weight is None else (gate_weight, up_weight)
            grad_x = grad_gate @ w_gate if need_x else None
            both = gate_weight.new_empty(gate_weight.shape) if need_gate and up_weight is None else None
            if both is not None:
                torch.mm(grad_gate.t(), x, out=both[:n])
            grad_w_gate = both if both is not None else grad_gate.t() @ x if need_gate else None
            del grad_gate
            # The sum is made in the second product's accumulators.
            grad_x = torch.addmm(grad_x, grad_up, w_up) if grad_x is not None else None
            if both is not None:
                torch.mm(grad_up.t(), x, out=both[n:])
            grad_w_up = grad_up.t() @ x if need_up and up_weight is not None else None
        return grad_x, grad_w_gate, grad_w_up, grad_down, *grad_biases, None
