"""The squared distance of each row to its reconstruction, and its gradient, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse.formats import threshold_dtype


def squared_error(x: Tensor, y: Tensor) -> Tensor:
    """Operator `sae_squared_error` -> [M]."""
    wide = threshold_dtype(torch.promote_types(x.dtype, y.dtype))
    return (x.to(wide) - y.to(wide)).square_().sum(1)


def bwd(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Operator `sae_squared_error_bwd` -> the gradient [M, D] of y."""
    residual = y.to(grad.dtype) - x.to(grad.dtype)
    return residual.mul_(2 * grad[:, None]).to(y.dtype).contiguous()
