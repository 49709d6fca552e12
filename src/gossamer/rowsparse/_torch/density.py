"""Sums over the counts of rows."""

from torch import Tensor


def row_density(counts: Tensor, sums: Tensor, limit: int) -> None:
    """sums[0] = (sum, largest, how many exceed `limit`, sum of those that do not); the other parts stay 0."""
    sums[0, 0] = counts.sum()
    sums[0, 1] = counts.max() if counts.numel() else 0
    over = counts > limit
    sums[0, 2] = over.sum()
    sums[0, 3] = counts.masked_fill(over, 0).sum()
