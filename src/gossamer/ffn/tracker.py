"""What a feed-forward block knows of its own sparsity, and the way it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gossamer.rowsparse import Density, DensityTracker


@dataclass(frozen=True)
class Known:
    """rows: of the entries of rows; unions: of the columns that groups of neighbouring rows have in all."""

    rows: Density
    unions: Density | None


class BlockTracker:
    """Follows how many entries the rows of one block have, and how many columns groups of neighbours have in all.

    Made of two `rowsparse.DensityTracker`s, and with their promises: nothing waits for the device, and the same calls
    take the same ways. A block that has one is called with `density=tracker` and `method="auto"`.

    Args:
        lag: how many calls late statistics are read.
        pinned: the name of a way that is always taken, or None.

    Attributes:
        last_path: the name of the way last taken, or None.
        rows, unions: the trackers.

    Raises:
        ValueError, TypeError: lag is no int of at least 1.

    >>> BlockTracker().last_path is None
    True
    """

    def __init__(self, lag: int = 4, pinned: str | None = None) -> None:
        self.rows, self.unions = DensityTracker(lag, pinned), DensityTracker(lag)
        self.last_path: str | None = None
        self._dense_calls = 0

    def due(self) -> bool:
        """Whether a call whose entries have to be looked for shall look: each until something is known, and one of 8
        from then on."""
        self._dense_calls += 1
        return self.rows.known(training=False) is None or self._dense_calls % 8 == 1

    def path(self, choose: Callable[[Known | None], str], *, grouped: bool = True) -> str:
        """The name of the way this call goes, from what is known; one call of `record` belongs to each call. Not
        `grouped` are few rows, of whose unions nothing is recorded."""
        if grouped:
            self.unions.path(lambda _: "", training=False)
        unions = self.unions.known(training=False)
        self.last_path = self.rows.path(
            lambda known: choose(None if known is None else Known(known, unions)), training=False
        )
        return self.last_path

    def record(self, nnz: Tensor, sizes: Tensor | None, limit: int) -> None:
        """Takes the entries of rows and, where they are grouped, the columns of groups, of all or of some; rows over
        `limit` are counted."""
        self.rows.record(nnz, training=False, limit=limit)
        if sizes is not None:
            self.unions.record(sizes, training=False)

    def __repr__(self) -> str:
        return f"BlockTracker(rows={self.rows!r}, unions={self.unions!r})"
