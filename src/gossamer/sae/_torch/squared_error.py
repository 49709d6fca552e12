"""The squared distance of each row to its reconstruction, and its gradient, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae.records import SaeSquaredError, SaeSquaredErrorBwd


def squared_error(call: SaeSquaredError) -> Tensor:
    """[M]."""
    x, y = call
    wide = threshold_dtype(torch.promote_types(x.dtype, y.dtype))
    return (x.to(wide) - y.to(wide)).square_().sum(1)


def bwd(call: SaeSquaredErrorBwd) -> Tensor:
    """The gradient [M, D] of y."""
    grad, x, y = call
    residual = y.to(grad.dtype) - x.to(grad.dtype)
    return residual.mul_(2 * grad[:, None]).to(y.dtype).contiguous()
