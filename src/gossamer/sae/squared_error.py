"""The squared distance of each row to its reconstruction."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae._torch import squared_error as _cpu
from gossamer.sae.records import SaeSquaredError, SaeSquaredErrorBwd


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
    return _squared_error(SaeSquaredError(x.reshape(flat), y.reshape(flat))).view(x.shape[:-1])


def _wide(x: Tensor, y: Tensor) -> torch.dtype:
    return threshold_dtype(torch.promote_types(x.dtype, y.dtype))


def _backward(call: SaeSquaredError, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    (x, y), (grad,) = call, grads
    return {
        "x": _bwd(SaeSquaredErrorBwd(grad, y, x)) if needs.x else None,
        "y": _bwd(SaeSquaredErrorBwd(grad, x, y)) if needs.y else None,
    }


def _bwd_backward(call: SaeSquaredErrorBwd, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """Of -2 * grad * (x - y), in each of its three factors."""
    grad, x, y = call
    wide = _wide(x, y)
    grad_y = -2 * grads[0].to(wide)
    grad_x = grad.to(wide)[:, None] * grad_y
    return {
        "grad": (grad_y * (x.to(wide) - y.to(wide))).sum(1).to(grad.dtype),
        "x": grad_x.to(x.dtype),
        "y": -grad_x.to(y.dtype),
    }


@register(
    SaeSquaredError,
    cpu=_cpu.squared_error,
    fake=lambda call: call.x.new_empty(call.x.shape[0], dtype=_wide(*call)),
    backward=_backward,
    saved=("x", "y"),
)
def _squared_error() -> Any:
    from gossamer.sae._triton.squared_error import squared_error

    return squared_error


@register(
    SaeSquaredErrorBwd,
    cpu=_cpu.bwd,
    fake=lambda call: call.y.new_empty(call.y.shape),
    backward=_bwd_backward,
    saved=("grad", "x", "y"),
)
def _bwd() -> Any:
    from gossamer.sae._triton.squared_error import bwd

    return bwd
