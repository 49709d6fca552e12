"""What the kernels of a block read: its active entries as they were packed."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Entries tile by tile, as in a `TwELL`, and how many a row may have before it is heavy.

    Args:
        values, indices: `[M, T, slots]`.
        counts: `[M, T]`, int16; a row with a count above `slots` is heavy as well.
        tile: columns per tile.
        limit: entries of a row.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    tile: int
    limit: int


EXAMPLES: dict[object, dict[str, object]] = {}
"""No kernel."""
