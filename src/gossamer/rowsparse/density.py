"""The density of the rows that one layer packs, known without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import INTERPRET
from gossamer._core.recompute import recomputed, remembered

PARTS = 64
"""Parts into which the device sums up counts; the host adds them."""


@dataclass(frozen=True)
class Density:
    """The entries of the rows of one call.

    Args:
        rows: how many there were.
        mean: entries of a row, on average; 0 of no rows.
        largest: entries of the fullest.
        over: rows with more entries than the limit that their counts were recorded with.
        light: entries of all other rows, in all.
    """

    rows: int
    mean: float
    largest: int
    over: int
    light: int


class DensityTracker:
    """Follows how many entries the rows of one layer have, and which path the layer takes.

    Statistics of a call are written to pinned memory behind it. Call t reads those of call t - lag: the host waits only
    where it is that far ahead, so that the device always has work, and the same calls take the same paths whatever the
    host was doing. Training and inference have a history each, and the first `lag` calls of each know nothing.

    A call that `torch.utils.checkpoint(use_reentrant=False)` computes again takes the path of its first run, whatever
    has been computed in between. Any other call in a backward pass takes the path last taken. Neither is counted. Calls
    that a CUDA graph captures or `torch.compile` traces take the path last taken, and record nothing.
    Copies and pickles keep `lag` and `pinned`, and start anew.

    Args:
        lag: how many calls late statistics are read.
        pinned: the name of a path that is always taken, or None.

    Attributes:
        last_path: the name of the path last taken, or None.
        pinned: may be set at any time.

    Raises:
        ValueError, TypeError: lag is no int of at least 1.

    >>> tracker = DensityTracker(lag=1)
    >>> tracker.path(lambda known: "sparse" if known is None else "dense", training=False)
    'sparse'
    """

    def __init__(self, lag: int = 4, pinned: str | None = None) -> None:
        checks.positive("rowsparse.DensityTracker", "lag", lag, "It is a number of calls.")
        self.lag, self.pinned = lag, pinned
        self.last_path: str | None = None
        self._histories = {True: _History(lag), False: _History(lag)}
        self._basis_again: Density | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DensityTracker:
        return DensityTracker(self.lag, self.pinned)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return DensityTracker, (self.lag, self.pinned)

    def __repr__(self) -> str:
        known = self.known(training=True) or self.known(training=False)
        seen = f", {known.mean:.4g} entries a row" if known else ""
        pinned = ", pinned" if self.pinned else ""
        return f"DensityTracker(lag={self.lag}, last_path={self.last_path!r}{pinned}{seen})"

    def forget(self) -> None:
        """Starts anew, as a copy does."""
        self.__init__(self.lag, self.pinned)  # type: ignore[misc]

    def known(self, *, training: bool) -> Density | None:
        """The statistics last read, or None before the first."""
        return self._histories[training].known

    def check_pinned(self, *paths: str) -> None:
        """Raises where `pinned` is none of the paths that a call can take: a name with a slip in it would pin another.

        Raises:
            ValueError: then.
        """
        if self.pinned is not None and self.pinned not in paths:
            raise ValueError(
                f"rowsparse.DensityTracker: pinned must be None or name a path that the call can take, "
                f"{', '.join(paths)}, got {self.pinned!r}."
            )

    def path(self, choose: Callable[[Density | None], str], *, training: bool) -> str:
        """The name of the path of this call; one call of this and one of `record` belong to each call of the layer.

        Args:
            choose: from the statistics, or None, to the name of a path; pure.
            training: which history the call belongs to.
        """
        history = self._histories[training]
        if torch.compiler.is_compiling():
            # A string is a guard that rarely changes; statistics would be one that always does.
            if self.pinned is None:
                return history.path or choose(None)
            chosen = self.pinned
        elif checks.capturing():
            chosen = self.pinned or history.path or choose(history.known)
        elif training or recomputed():
            chosen, basis = remembered(
                self, lambda: self._decided(history, choose), lost=lambda: self._lost(history, choose)
            )
            if recomputed():
                self._basis_again = basis
                return chosen
        else:
            chosen, _ = self._decided(history, choose)
        history.path = self.last_path = chosen
        return chosen

    def _decided(self, history: _History, choose: Callable[[Density | None], str]) -> tuple[str, Density | None]:
        # Recorded statistics are read where the path is pinned, too, or they would pile up.
        history.read()
        history.basis = history.known
        return self.pinned or choose(history.known), history.known

    def _lost(self, history: _History, choose: Callable[[Density | None], str]) -> tuple[str, Density | None]:
        """The path last taken: nothing else is known of a first run that was not seen."""
        return self.pinned or history.path or choose(history.known), history.basis

    def basis(self, *, training: bool) -> Density | None:
        """The statistics by which the path last taken was chosen, or None: other choices by them stay when the path
        does. None to `torch.compile`, which would compile for each number anew."""
        if torch.compiler.is_compiling():
            return None
        return self._basis_again if recomputed() else self._histories[training].basis

    def record(self, counts: Tensor, *, training: bool, limit: int = 2**31 - 1) -> None:
        """Takes the counts of the call whose path was chosen last.

        Args:
            counts: `[...]`, int or float, the entries of each row.
            training: as in `path`.
            limit: above which a row counts as `over`.
        """
        if torch.compiler.is_compiling() or checks.capturing() or recomputed() or type(counts) is not Tensor:
            return
        self._histories[training].add(counts.detach().reshape(-1), limit)


class _History:
    """The statistics on their way, oldest first, and the last to arrive."""

    def __init__(self, lag: int) -> None:
        self.known: Density | None = None
        self.basis: Density | None = None
        self.path: str | None = None
        self._lag = lag
        self._pending: deque[tuple[Tensor, Any, int]] = deque()
        self._free: list[tuple[Tensor, Any]] = []
        self._device: torch.device | None = None

    def read(self) -> None:
        if len(self._pending) < self._lag:
            return
        sums, event, rows = self._pending.popleft()
        if event is not None:
            event.synchronize()
        # So few numbers are added up faster without an operator for each sum.
        total, largest, over, light = zip(*sums.tolist())
        self.known = Density(rows, sum(total) / max(rows, 1), max(largest), sum(over), sum(light))
        self._free.append((sums, event))

    def add(self, counts: Tensor, limit: int) -> None:
        device = counts.device
        if self._device != device:
            # A module that was moved: an event belongs to its device.
            self._device = device
            self._pending.clear()
            self._free.clear()
        if self._free:
            sums, event = self._free.pop()
        else:
            # Made in inference mode it could be written in no other.
            with torch.inference_mode(False):
                sums = torch.zeros(PARTS, 4, dtype=torch.int64, pin_memory=counts.is_cuda)
            event = torch.cuda.Event() if counts.is_cuda else None
        _summing(counts.is_cuda)(counts, sums, limit)
        if event is not None:
            event.record(torch.cuda.current_stream(device))
        self._pending.append((sums, event, counts.numel()))


def _row_density(counts: Tensor, sums: Tensor, limit: int) -> None:
    """sums[0] = (sum, largest, how many exceed `limit`, sum of those that do not); the other parts stay 0."""
    over = counts > limit
    largest = counts.max() if counts.numel() else counts.sum()
    sums[0] = torch.stack([counts.sum(), largest, over.sum(), counts.masked_fill(over, 0).sum()])


def _summing(on_gpu: bool) -> Callable[[Tensor, Tensor, int], None]:
    if not (on_gpu or INTERPRET):
        return _row_density
    from gossamer.rowsparse._triton.density import row_density

    return row_density
