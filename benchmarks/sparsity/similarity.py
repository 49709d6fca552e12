"""What groups of similar tokens would have in common, beside groups of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.sparsity.order import propose, seconds, tiles
from gossamer._core import checks
from gossamer.ffn.block import Block, activated, run
from gossamer.ffn.costs import GROUP
from gossamer.sparsity.statistics import Batch, Recorder, run_batches, sparse_blocks

_OPERATOR = "similarity"


@dataclass(frozen=True)
class TokenGroups:
    """Of one block: how many neurons 32 tokens have in all, on average, by how they are put together.

    Args:
        tokens: how many were looked at.
        mean: entries of a token.
        neighbours: neurons in all of 32 tokens that follow each other.
        similar: of 32 that were put together by the neurons that they share, within windows.
        chance: of 32 that were drawn at random from a window.
        path: the way that the block goes, and was measured, or None.
        seconds_neighbours, seconds_similar: of the block on the last window, its tokens in either order; NaN where it
            was not measured. Putting them in order, and their results back, is not counted.
    """

    tokens: int
    mean: float
    neighbours: float
    similar: float
    chance: float
    path: str | None = None
    seconds_neighbours: float = float("nan")
    seconds_similar: float = float("nan")

    @property
    def predicted(self) -> float:
        """How many times fewer neurons a group of similar tokens has."""
        return self.neighbours / self.similar if self.similar else 1.0

    @property
    def measured(self) -> float:
        """How many times less time the block takes; NaN where it was not measured."""
        return self.seconds_neighbours / self.seconds_similar


@dataclass(frozen=True)
class Similarity:
    """What `similarity` found. `print` it for its table.

    Args:
        layers: `TokenGroups` by the name of the block's module.
        window: tokens among which similar ones were put together.
        missed: blocks that were not called, or not as sparse ones, or with fewer tokens.
    """

    layers: dict[str, TokenGroups]
    window: int
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{'layer':<32} {'mean':>8} {'neighbours':>10} {'similar':>9} {'chance':>9} {'predicted':>9} "
            f"{'way':>8} {'neighbours':>11} {'similar':>11} {'measured':>9}"
        ]
        for name, found in self.layers.items():
            lines.append(
                f"{name:<32} {found.mean:>8.1f} {found.neighbours:>10.1f} {found.similar:>9.1f} {found.chance:>9.1f} "
                f"{found.predicted:>8.2f}x {found.path or '-':>8} {found.seconds_neighbours * 1e6:>8.1f} us "
                f"{found.seconds_similar * 1e6:>8.1f} us {found.measured:>8.2f}x"
            )
        if self.missed:
            lines.append(f"nothing to group in: {', '.join(self.missed)}")
        return "\n".join(lines)


class _Windows(Recorder):
    """Keeps windows of what the blocks let through, and the last window's operands, instead of counting."""

    def __init__(self, model: nn.Module, window: int, each: int) -> None:
        super().__init__(model)
        self.active: dict[str, list[np.ndarray]] = {}
        self.last: dict[str, Block] = {}
        self._window, self._each = window, each

    def _count(self, name: str, block: Block) -> None:
        x = block.x.reshape(-1, block.x.shape[-1])
        mask = self._tokens(name, x.shape[0], x.device)[1]
        if mask is not None:
            x = x[mask.flatten()]
        whole = x.shape[0] // self._window
        step = max(1, whole // self._each)
        for number in range(0, whole, step)[: self._each]:
            part = block._replace(x=x[number * self._window : (number + 1) * self._window].clone())
            self.active.setdefault(name, []).append((activated(part) != 0).cpu().numpy())
            self.last[name] = part


def similarity(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    window: int = 1024,
    windows: int = 8,
    measure: bool = True,
    progress: Callable[[int, int | None], Any] | None = None,
) -> Similarity:
    """How many neurons groups of 32 similar tokens have in all, beside groups of 32 neighbours.

    The ways that load a neuron's weights once for a group of tokens take neighbours together. This says what it would
    gain to put similar tokens together instead: greedily, one group after the other, each token by how many of its
    neurons the group has already. A device that had to group them in time would find less; where even this gains
    little, neighbours are as good. Orders by entries, and as the tokens are, are tried too, so that it never loses.

    Args:
        model, batches: as in `statistics`; tokens that an `attention_mask` leaves out are in no group.
        window: tokens that are put in order together, a multiple of 32; they may be of several sequences.
        windows: how many at most are looked at, spread over the batches, at least one of each.
        measure: whether the blocks are timed on tokens in both orders.
        progress: called with (steps done, steps in all): a step is a batch, and then a block.

    Returns:
        A `Similarity`.

    Raises:
        ValueError: no sparse block in model, a batch brings no block a whole window, window is no multiple of 32, or
            windows below 1.

    Source: this package's own.

    >>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
    >>> found = similarity(mlp, [torch.randn(2, 64, 8)], window=128).layers[""]
    >>> found.similar <= found.neighbours
    True
    """
    checks.positive(_OPERATOR, "windows", windows, "It is a number of windows of tokens.")
    checks.positive(_OPERATOR, "window", window, "It is a number of tokens.")
    if window % GROUP:
        raise ValueError(f"{_OPERATOR}: window must be a multiple of {GROUP}, the tokens of a group, got {window}.")
    blocks, given = sparse_blocks(_OPERATOR, model), list(batches)
    steps = len(given) + len(blocks)
    with _Windows(model, window, -(-windows // max(len(given), 1))) as recorder:
        run_batches(model, given, recorder.read, None if progress is None else lambda done, _: progress(done, steps))
    if not recorder.active:
        raise ValueError(
            f"{_OPERATOR}: a batch must bring {window} tokens to a block, but none did. Use a smaller window."
        )
    layers = {}
    for number, (name, held) in enumerate(recorder.active.items(), len(given) + 1):
        layers[name], order = _grouped(held)
        path = blocks[name].last_path
        if measure and path is not None:
            layers[name] = _measured(layers[name], recorder.last[name], order, path)
        if progress is not None:
            progress(number, steps)
    return Similarity(layers, window, tuple(name for name in blocks if name not in layers))


def _grouped(windows: list[np.ndarray]) -> tuple[TokenGroups, np.ndarray]:
    """(the unions of windows `[window, N]` bool in each order, the order of the last window's tokens)"""
    generator = np.random.default_rng(0)
    found = np.zeros(3)
    for active in windows:
        tokens = active.shape[0]
        # Tokens are to neurons what neurons are to groups of tokens: a tile is a group, and its rows are its union.
        fired = np.ascontiguousarray(active[:, active.any(0)].T)
        order = propose(fired, GROUP)
        orders = (np.arange(tokens), order, generator.permutation(tokens))
        found += [tiles(fired[:, each], GROUP) * len(fired) / (tokens // GROUP) for each in orders]
    neighbours, similar, chance = found / len(windows)
    mean = float(np.mean([active.sum(1).mean() for active in windows]))
    tokens = sum(len(active) for active in windows)
    return TokenGroups(tokens, mean, float(neighbours), float(similar), float(chance)), order


def _measured(found: TokenGroups, block: Block, order: np.ndarray, path: str) -> TokenGroups:
    """With the times of a block on its rows as they are and in an order."""
    moved = block._replace(x=block.x[torch.from_numpy(order).to(block.x.device)])
    with torch.no_grad():
        calls = [lambda b=b: run(_OPERATOR, b, path, None) for b in (block, moved)]
        neighbours, similar = seconds(calls, block.x.device)
    return replace(found, path=path, seconds_neighbours=neighbours, seconds_similar=similar)
