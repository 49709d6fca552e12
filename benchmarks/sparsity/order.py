"""An order of neurons in which those that fire together are neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from gossamer.sparsity.report import pairs


def tiles(groups: np.ndarray, tile: int) -> float:
    """Tiles of `tile` neighbouring neurons in which a group has any, on average; groups `[S, N]` bool."""
    s, n = groups.shape
    padded = np.zeros((s, -(-n // tile), tile), bool)
    padded.reshape(s, padded.shape[1] * tile)[:, :n] = groups
    return float(padded.any(2).sum() / max(s, 1))


def propose(groups: np.ndarray, tile: int) -> np.ndarray:
    """The order, `[N]` int64, in which groups `[S, N]` have neurons in the fewest tiles: that of `cluster`, by how
    often neurons fire, or as they are."""
    n = groups.shape[1]
    orders = [np.arange(n), np.argsort(-groups.sum(0), kind="stable"), cluster(groups, tile)]
    return min(orders, key=lambda order: tiles(groups[:, order], tile))


def cluster(groups: np.ndarray, tile: int) -> np.ndarray:
    """Fills one tile after another. It begins with the neuron that fires most; then comes, again and again, the one of
    whose groups the most are among those that the tile has already, and the fewest are not."""
    n = groups.shape[1]
    fired = groups.sum(0, dtype=np.int64)
    left = np.ones(n, bool)
    order = []
    for first in range(0, n, tile):
        reached = np.zeros(len(groups), bool)
        shared = np.zeros(n, np.int64)
        chosen = int(np.where(left, fired, -1).argmax())
        for _ in range(min(tile, n - first)):
            order.append(chosen)
            left[chosen] = False
            new = groups[:, chosen] & ~reached
            reached |= new
            shared += groups[new].sum(0, dtype=np.int64)
            # No score is below -S.
            chosen = int(np.where(left, 2 * shared - fired, -len(groups) - 1).argmax())
    return np.array(order, np.int64)


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median seconds of the first call, and of each other one beside it."""
    taken = [pairs(calls[0], call, device) for call in calls[1:]]
    return [median(first for first, _ in taken[0]), *(median(other for _, other in some) for some in taken)]
