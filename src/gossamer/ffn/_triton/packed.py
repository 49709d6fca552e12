"""What the kernels of a block read: its active entries as they were packed."""

from dataclasses import dataclass

from torch import Tensor
from triton import language as tl

TILE, SLOTS = 256, 32
"""Columns of a tile, and slots that a row has for a tile's entries."""
_TILE, _SLOTS = tl.constexpr(TILE), tl.constexpr(SLOTS)


@dataclass(frozen=True)
class Packed:
    """Entries tile by tile, as in a `TwELL`, and how many a row may have before it is heavy.

    Args:
        values, indices: `[M, T, SLOTS]`.
        counts: `[M, T]`, int16; a row with a count above SLOTS is heavy as well.
        limit: entries of a row.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    limit: int


EXAMPLES: dict[object, dict[str, object]] = {}
"""No kernel."""
