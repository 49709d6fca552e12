"""The squared distance of each row to its reconstruction."""

import torch
from torch import Tensor

from gossamer.rowsparse.formats import threshold_dtype


def squared_error(x: Tensor, y: Tensor) -> Tensor:
    """The sum of (x - y)^2 over the last dimension, `[..., D]` to `[...]`, in float32 at least. The backward pass keeps
    the difference, `[..., D]` of that dtype."""
    return (x.to(threshold_dtype(torch.promote_types(x.dtype, y.dtype))) - y).square().sum(-1)
