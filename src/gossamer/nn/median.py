"""A mean that outliers do not drag along."""

import torch
from torch import Tensor


def geometric_median(x: Tensor) -> Tensor:
    """The point with the smallest sum of distances to the rows of x: a mean that outliers do not drag along.

    Args:
        x: `[M, D]`, float, M at least 1.

    Returns:
        `[D]`, in float32 at least, without a host sync or a gradient.

    Raises:
        ValueError: x is no matrix, or has no row.

    Source: Weiszfeld 1937, with the step of Vardi and Zhang 2000 where the point is one of the rows; for autoencoders
    Bricken et al. 2023, "Towards Monosemanticity".

    >>> geometric_median(torch.tensor([[0.0], [1.0], [100.0]])).round().tolist()
    [1.0]
    """
    if x.dim() != 2 or not x.shape[0]:
        raise ValueError(f"geometric_median: x must have shape [M, D] with M of at least 1, got {list(x.shape)}.")
    rows = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    # Around the mean, because far from 0 the distances would be lost to rounding.
    mean = rows.mean(0)
    rows = rows - mean
    median = torch.zeros_like(mean)
    for _ in range(100):
        distances = torch.linalg.vector_norm(rows - median, dim=1)
        weights = torch.where(distances > 0, 1 / distances, 0)
        total = weights.sum()
        towards = torch.where(total > 0, weights @ rows / total, median)
        # Rows at the very point pull neither way, but hold it back: by as much as they are many.
        pull = total * torch.linalg.vector_norm(towards - median)
        held = ((distances == 0).sum() / pull).nan_to_num().clamp(max=1)
        median = torch.lerp(towards, median, held)
    return mean + median
