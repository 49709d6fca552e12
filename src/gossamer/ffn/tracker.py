"""The counts by which a feed-forward block knows its own sparsity, and the path that it takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.recompute import recomputed
from gossamer.rowsparse import Density, DensityTracker

EVERY = 8
_MOST = 256
"""Answers that are kept: of so many numbers of rows."""


class BlockTracker:
    """Follows how many entries the rows of one block have.

    A tracker has the promises of `rowsparse.DensityTracker`: nothing waits for the device, and the same calls take the
    same paths. A block that has one is called with `density=tracker` and `method="auto"`.

    Args:
        lag: how many calls late statistics are read, of those that are recorded.
        pinned: the name of a path that is always taken, or None.
        rows: the tracker of entries, or None for a new one.

    Attributes:
        last_path: the name of the path last taken, or None.
        repeats: whether the owner repeats launches of few rows without a check, so that they add nothing to the host.
        rows: the `rowsparse.DensityTracker` of the entries of rows, under gradients beside those of hot neurons.
        settled: the number of elements, or another key, of each x whose path follows from what is known now -> that
            path, and of how many calls one is due. A module that finds its x there, and no call due, adds 1 to
            `looked`, the number of calls, and needs neither `due` nor `path`. It clears this where it is moved.
        hot: that of the number of hot neurons, under gradients: "rows" are calls.

    Raises:
        ValueError, TypeError: lag is no int of at least 1.

    >>> BlockTracker().last_path is None
    True
    """

    def __init__(self, lag: int = 4, pinned: str | None = None, rows: DensityTracker | None = None) -> None:
        checks.positive("ffn.BlockTracker", "lag", lag, "It is a number of calls.")
        self.rows = DensityTracker(lag, pinned) if rows is None else rows
        self.hot = DensityTracker(self.rows.lag)
        self.last_path: str | None = None
        self.repeats = True
        self.looked = self._trained = 0
        self._seen: Density | None = None
        self._paths: dict[Hashable, str] = {}
        self.settled: dict[Hashable, tuple[str, int]] = {}
        self._on_device: str | None = None

    def due(self, every: int) -> bool:
        """Whether this call, if its entries are recorded, shall be: each until something is known, and one of `every`
        from then on. None that is compiled is."""
        if torch.compiler.is_compiling():
            # Nothing is recorded there, and a number that moves with each call would compile each anew.
            return False
        self.looked += 1
        return self._seen is None or self.looked % every == 1

    def settle(self, x: Tensor, path: str, every: int) -> None:
        """Adds x to `settled`, if anything is known."""
        # A compiled region looks at nothing that changes from call to call: each look is a guard.
        if not (torch.compiler.is_compiling() or checks.capturing()) and self._seen is not None:
            self.settled[x.numel()] = path, every

    def due_in_training(self) -> bool:
        """Whether a call with gradients that computes everything counts the entries of some rows: the first few, and
        then one of EVERY."""
        if torch.compiler.is_compiling() or checks.capturing() or recomputed():
            return False
        self._trained += 1
        return self._trained <= self.rows.lag or self._trained % EVERY == 0

    def path(
        self,
        choose: Callable[[Density | None, bool], str],
        *,
        due: bool = True,
        key: Hashable = None,
    ) -> str:
        """The name of the path that this call takes; to a call that is due, one of `record` belongs.

        Args:
            choose: from what is known, or None, and whether the host launches the path now, to the path's name; pure.
                A graph and a compiled region take the path that the device alone would.
            due: false where nothing is recorded, so that nothing new is known either.
            key: the other facts that `choose` follows, as the number of rows: its answers are kept until more is known.
        """
        if torch.compiler.is_compiling():
            # A string is a guard that rarely changes; statistics would be one that always does.
            self.last_path = self.rows.pinned or self._on_device or choose(None, False)
            return self.last_path
        if checks.capturing():
            self.last_path = self.rows.pinned or choose(self.rows.known(training=False), False)
            return self.last_path
        if due:
            self.rows.path(lambda _: "", training=False)
            known = self.rows.known(training=False)
            if known is not self._seen:
                self._seen = known
                self._forget()
        path = self.rows.pinned or self._paths.get(key)
        if path is None:
            if len(self._paths) >= _MOST:
                self._forget()
            known = self.rows.known(training=False)
            path, self._on_device = choose(known, True), choose(known, False)
            self._paths[key] = path
        self.last_path = path
        return path

    def _forget(self) -> None:
        self._paths.clear()
        self.settled.clear()

    def record(self, nnz: Tensor, limit: int) -> None:
        """Takes the entries of rows, of all or of some; rows over `limit` are counted."""
        self.rows.record(nnz, training=False, limit=limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockTracker, (self.rows.lag, self.rows.pinned), {"repeats": self.repeats}

    def __repr__(self) -> str:
        return f"BlockTracker(rows={self.rows!r})"
