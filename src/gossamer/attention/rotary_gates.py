"""Steps between an attention layer's one big projection and attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.attention._torch import rotary_gates as _cpu
from gossamer.attention.records import RotaryGates, RotaryGatesBwd


def rotary_gates(
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    value_gate: bool = True,
    output_gate: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rotary embeddings of q and k, v times its gate, and the gate of the output, out of one projection.

    Args:
        y: `[B, T, N]`, float: side by side q (H heads of D columns), k and v (G heads each), with value_gate the gates
            of v (G heads), and with output_gate those of the output (H heads), both before their sigmoid.
        cos, sin: float32 `[T, D]` or `[B, T, D]`, D even, of the angles; the second half of the columns repeats the
            first.
        num_heads, num_kv_heads: H and G.
        value_gate, output_gate: whether y has these sections.

    Returns:
        q `[B, T, H, D]`, k and v `[B, T, G, D]`, and the gate `[B, T, H * D]` after its sigmoid, or None; the dtype of
        y. Differentiable in y once.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: y is not floating, or cos and sin are not float32.
        NotImplementedError: a second derivative.

    Source: Su et al. 2021 (RoFormer), in the halves of Hugging Face's models; Gated Sparse Attention
        (arXiv 2601.15305).

    >>> angles = torch.zeros(3, 4)
    >>> _, _, v, _ = rotary_gates(torch.zeros(1, 3, 28) + 2, angles.cos(), angles.sin(), 2, 1)
    >>> round(v[0, 0, 0, 0].item(), 4)
    1.7616
    """
    checks.floating(OPERATOR, y=y, cos=cos, sin=sin)
    checks.same_device(OPERATOR, "y", y.device, cos=cos, sin=sin)
    if y.dim() != 3 or cos.dim() not in (2, 3) or cos.shape[-1] % 2 or cos.shape[-1] == 0:
        raise ValueError(
            f"{OPERATOR}: y must have shape [B, T, N], and cos [T, D] or [B, T, D] with an even D, got {list(y.shape)} "
            f"and {list(cos.shape)}."
        )
    d = cos.shape[-1]
    checks.shape(OPERATOR, "cos", cos, (*y.shape[3 - cos.dim() : 2], d), "[T, D] or [B, T, D]", "like y")
    checks.shape(OPERATOR, "sin", sin, tuple(cos.shape), "[T, D] or [B, T, D]", "like cos")
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        raise TypeError(f"{OPERATOR}: cos and sin must be float32, got {checks.name_of(cos.dtype)}.")
    columns = d * (num_heads * (1 + output_gate) + num_kv_heads * (2 + value_gate))
    checks.shape(OPERATOR, "y", y, (*y.shape[:2], columns), "[B, T, N]", "by the heads and gates")
    cos, sin = cos.detach(), sin.detach()
    call = RotaryGates(y, cos, sin, num_heads, num_kv_heads, value_gate, output_gate)
    q, k, v, gate = _rotary_gates(call)
    return q, k, v, gate if output_gate else None


OPERATOR = "attention.rotary_gates"


def _fake(call: RotaryGates) -> Any:
    y, cos, _, heads, groups, _, output_gate = call
    b, t, d = *y.shape[:2], cos.shape[-1]
    q, k, v = (y.new_empty(b, t, n, d) for n in (heads, groups, groups))
    return q, k, v, y.new_empty(b, t, heads * d if output_gate else 0)


def _shapes(call: RotaryGates, results: Any) -> tuple[Any, ...]:
    return tuple(result.shape for result in results)


def _backward(call: RotaryGates, kept: Any, grads: Any, needs: Any) -> Mapping[str, Tensor]:
    dq, dk, dv, dgate = (call.y.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, kept))
    return {"y": _rotary_gates_bwd(RotaryGatesBwd(dq, dk, dv, dgate, call.y, call.cos, call.sin, call.value_gate))}


@register(
    RotaryGates, cpu=_cpu.rotary_gates, fake=_fake, backward=_backward, saved=("y", "cos", "sin"), keep=_shapes,
    once_differentiable=OPERATOR, repeats=True,
)  # fmt: skip
def _rotary_gates() -> Any:
    from gossamer.attention._triton.rotary_gates import rotary_gates

    return rotary_gates


@register(
    RotaryGatesBwd,
    cpu=_cpu.rotary_gates_bwd,
    fake=lambda call: call.y.new_empty(call.y.shape),
    once_differentiable=OPERATOR,
    repeats=True,
)
def _rotary_gates_bwd() -> Any:
    from gossamer.attention._triton.rotary_gates import rotary_gates_bwd

    return rotary_gates_bwd
