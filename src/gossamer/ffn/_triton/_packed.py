"""What the kernels of a block read: its active entries as they were packed."""

from dataclasses import dataclass

from torch import Tensor
from triton import language as tl

TILE, SLOTS = tl.constexpr(256), tl.constexpr(16)
"""Columns of a tile, and slots that a row has for a tile's entries."""

LISTED = tl.constexpr(4)
"""Words before the rows of a list of heavy ones: how many they are, how many entries a row has that is not, and of the
tiles of their products how many are drawn, and done."""


@dataclass(frozen=True)
class Packed:
    """Entries tile by tile, as `empty_twell` has them. A row with a count above SLOTS, or too many in all, is heavy.

    Args:
        values, indices: `[M, T, SLOTS]`.
        counts: `[M, T]`, int16.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
