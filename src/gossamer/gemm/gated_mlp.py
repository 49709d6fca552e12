"""The gated feed-forward block of a transformer as one step of autograd."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient, refuse_second
from gossamer.gemm._torch.linear_glu import gated_mlp_bwd as _cpu
from gossamer.gemm._torch.linear_glu import linear
from gossamer.gemm.linear_glu import Gate, by_pytorch, check_operands, linear_glu_operator, products_bwd
from gossamer.gemm.records import GatedMlpBwd, LinearGlu
from gossamer.rowsparse.formats import sums_over_rows

_checked: Checked[Any] = Checked()


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    *,
    activation: Gate = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """`linear_glu` and the product that brings its result back to the size of x.

    A backward pass keeps gate and up, and makes what they gated again, while a chain of `linear_glu` and `F.linear`
    keeps all three. Their gradients take their places, unless the graph is retained or hooks see what is saved.

    Args:
        x, gate_weight, up_weight, activation, gate_bias, up_bias: as in `linear_glu`.
        down_weight: `[D, N]` as in `nn.Linear`; the dtype and device of x.
        down_bias: `[D]`, or None.
        recompute: True keeps nothing but x and the weights, and computes gate and up again.

    Returns:
        `[..., D]`, differentiable in x, weights and biases.

    Raises:
        ValueError, TypeError: as `linear_glu`, and where down_weight or down_bias do not fit.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Tantaru 2025, "Towards Better Kernels for Gated MLP".

    >>> gated_mlp(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(3, 4)).shape
    torch.Size([2, 3])
    """
    operands = (x, gate_weight, up_weight, gate_bias, up_bias, down_weight, down_bias)
    key = None if callable(activation) else key_of(operands, (activation,))
    name = _checked.get(key)
    if name is None:
        name = _check(operands, activation)
        x, gate_weight, up_weight, down_weight = autocast.cast(  # type: ignore[assignment]
            x, gate_weight, up_weight, down_weight
        )
        weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
        checks.same_dtype("gemm.gated_mlp", "x", x, **weights)
        _checked.keep(key, name)
    if callable(name):
        given = (x, gate_weight, up_weight, gate_bias, up_bias)
        return by_pytorch("gemm.gated_mlp", given, name, recompute, down_weight, down_bias)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if needs_gradient(*operands):
        out = _GatedMLP.apply(flat, gate_weight, up_weight, gate_bias, up_bias, down_weight, down_bias, name, recompute)
    else:
        hidden = linear_glu_operator(LinearGlu(flat, gate_weight, up_weight, gate_bias, up_bias, name, False))[0]
        out = linear(hidden, down_weight, down_bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def _check(operands: tuple[Any, ...], activation: Gate) -> Gate:
    """The activation as `linear_glu` takes it; raises where an operand does not fit."""
    operator = "gemm.gated_mlp"
    x, gate_weight, up_weight, gate_bias, up_bias, down_weight, down_bias = operands
    name = check_operands(operator, x, gate_weight, up_weight, gate_bias, up_bias, activation)
    n = gate_weight.shape[0] // (2 if up_weight is None else 1)
    biases = {} if down_bias is None else {"down_bias": down_bias}
    checks.floating(operator, down_weight=down_weight, **biases)
    checks.matrix(operator, "down_weight", down_weight, "[D, N]", 1, n, "gate_weight")
    if down_bias is not None:
        checks.shape(operator, "down_bias", down_bias, (down_weight.shape[0],), "[D]", "like down_weight")
    checks.same_device(operator, "x", x.device, down_weight=down_weight, **biases)
    return name


class _GatedMLP(torch.autograd.Function):
    """No operator of its own: all it computes with is one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        activation: str,
        recompute: bool,
    ) -> Tensor:
        call = LinearGlu(x, gate_weight, up_weight, gate_bias, up_bias, activation, not recompute)
        hidden, *kept = linear_glu_operator(call)
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight, *((gate_bias, up_bias) if recompute else kept))
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias, down_bias)]
        ctx.activation, ctx.recompute = activation, recompute
        # Hooks that see saved tensors now may have them still when they are overwritten.
        hooks = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(True)
        ctx.hooked = hooks is not None
        with autocast.disabled(x.device):
            return linear(hidden, down_weight, down_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second("gemm.gated_mlp")
        x, gate_weight, up_weight, down_weight, first, second = ctx.saved_tensors
        need_down, need_down_bias = ctx.needs_input_grad[5:7]
        grad_down = grad_bias = None
        with autocast.disabled(grad.device):
            if ctx.recompute:
                call = LinearGlu(x, gate_weight, up_weight, first, second, ctx.activation, True)
                gate, up = linear_glu_operator(call)[1:]
                del call
            # A compiled backward pass may leave the graph for another one.
            elif ctx.hooked or torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
                gate, up = (kept.clone(memory_format=torch.contiguous_format) for kept in (first, second))
            else:
                gate, up = first, second
                # Nothing that is kept outlives its last use.
                ctx.maybe_clear_saved_tensors()
            del first, second
            hidden = _gated_mlp_bwd(GatedMlpBwd(grad, down_weight, gate, up, ctx.activation))
            if need_down:
                grad_down = grad.t() @ hidden
            del hidden
            grads = [gate, up]
            del gate, up
            found = products_bwd(grads, x, gate_weight, up_weight, ctx.bias_dtypes, ctx.needs_input_grad)
        if need_down_bias:
            grad_bias = sums_over_rows(grad).to(ctx.bias_dtypes[2])
        return *found.values(), grad_down, grad_bias, None, None


@register(GatedMlpBwd, cpu=_cpu, fake=lambda call: torch.empty_like(call.gate), repeats=True)
def _gated_mlp_bwd() -> Any:
    from gossamer.gemm._triton.linear_glu import gated_mlp_bwd

    return gated_mlp_bwd
