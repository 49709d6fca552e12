"""The squared distance of each row to its reconstruction."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import register, save_inputs, undispatched
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae._torch import squared_error as _cpu


def squared_error(x: Tensor, y: Tensor) -> Tensor:
    """The sum of (x - y)^2 over the last dimension, computed in float32 at least: no difference is kept for backward.

    Args:
        x: `[..., D]`, float.
        y: of the same shape, of the same or another float dtype.

    Returns:
        `[...]` in float32, float64 if x or y is. Differentiable in both, any number of times.

    Raises:
        ValueError: x and y differ in shape or device, or are scalars.
        TypeError: one is not floating.

    Source: Bricken et al. 2023, "Towards Monosemanticity", the reconstruction error of an autoencoder.

    >>> squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])).tolist()
    [5.0]
    """
    checks.floating("sae.squared_error", x=x, y=y)
    checks.same_device("sae.squared_error", "x", x.device, y=y)
    if x.shape != y.shape or x.dim() == 0:
        raise ValueError(
            f"sae.squared_error: x and y must have one shape [..., D], got {list(x.shape)} and {list(y.shape)}."
        )
    flat = (x.shape[:-1].numel(), x.shape[-1])
    given = x.reshape(flat), y.reshape(flat)
    return undispatched(_squared_error, *given)(*given).view(x.shape[:-1])


def _wide(x: Tensor, y: Tensor) -> torch.dtype:
    return threshold_dtype(torch.promote_types(x.dtype, y.dtype))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    call, needs = undispatched(_bwd, grad, x, y), ctx.needs_input_grad
    return call(grad, y, x) if needs[0] else None, call(grad, x, y) if needs[1] else None


def _bwd_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of -2 * grad * (x - y), in each of its three factors."""
    grad, x, y = ctx.saved_tensors
    wide = _wide(x, y)
    grad_y = -2 * grad_y.to(wide)
    grad_x = grad.to(wide)[:, None] * grad_y
    return (grad_y * (x.to(wide) - y.to(wide))).sum(1).to(grad.dtype), grad_x.to(x.dtype), -grad_x.to(y.dtype)


_squared_error = register(
    "sae_squared_error(Tensor x, Tensor y) -> Tensor",
    cpu=_cpu.squared_error,
    strided=("x", "y"),
    fake=lambda x, y: x.new_empty(x.shape[0], dtype=_wide(x, y)),
    setup_context=save_inputs,
    backward=_backward,
)
_bwd = register(
    "sae_squared_error_bwd(Tensor grad, Tensor x, Tensor y) -> Tensor",
    cpu=_cpu.bwd,
    strided=("grad", "x", "y"),
    fake=lambda grad, x, y: y.new_empty(y.shape),
    setup_context=save_inputs,
    backward=_bwd_backward,
)
