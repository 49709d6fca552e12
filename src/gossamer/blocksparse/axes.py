"""Where each row, column or matrix of a rearranged tensor comes from, and what becomes of the mask of its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[torch.device], Tensor]


@dataclass(frozen=True)
class Axis:
    """One dimension of a rearrangement. The host knows all of it.

    Args:
        source: length of the source.
        length: of the result.
        forward: int64 `[length]`, each element's source; None where that is its own number.
        step: the starts of pieces that stay together are multiples of it; 0 divides nothing up.
        copies: how often a source occurs, at most.
    """

    source: int
    length: int
    forward: Map | None = None
    step: int = 0
    copies: int = 1

    def inverse(self, device: torch.device) -> Tensor | None:
        """int64 `[source, copies]`: the elements of the result that come from each source, -1 for none."""
        if self.forward is None:
            return None
        sources = self.forward(device)
        found = sources.new_full((self.source, self.copies), -1)
        if self.copies == 1:
            return found.scatter_(0, sources[:, None], torch.arange(self.length, device=device)[:, None])
        # A source's elements follow each other in their order, which begins where the first of them stands.
        ordered, order = sources.sort(stable=True)
        rank = torch.arange(self.length, device=device) - torch.searchsorted(ordered, ordered)
        return found.index_put_((ordered, rank), order)

    def tile(self, *blocks: int) -> int:
        """The largest of what stays together within blocks of both sizes; 1 where that is less than a block may be."""
        tile = math.gcd(self.step, *blocks)
        return tile if tile >= 16 else 1

    def spread(self, source: int, target: int) -> int:
        """How many blocks of `target` elements one block of `source` elements reaches, at most."""
        whole = self.tile(source, target) == min(source, target) or self.step == 0
        return self.copies * (max(source // target, 1) if whole else -(-source // target) + 1)

    def reach(self, mask: Tensor, dim: int, source: int, target: int) -> Tensor:
        """The mask of the blocks of `target` elements that hold any of a present block of `source` elements."""
        if self.forward is None and source == target:
            return mask.narrow(dim, 0, -(-self.length // target))
        tile = self.tile(source, target)
        at = torch.arange(self.length, device=mask.device) if self.forward is None else self.forward(mask.device)
        found = mask.index_select(dim, at[::tile] // source)
        blocks = -(-self.length // target)
        missing = blocks * (target // tile) - found.shape[dim]
        shape = list(found.shape)
        shape[dim] = missing
        found = torch.cat([found, found.new_zeros(shape)], dim) if missing else found
        return found.unflatten(dim, (blocks, target // tile)).any(dim + 1) if target > tile else found


Axes = tuple[Axis, Axis, Axis]
"""The rearrangement of matrices, of rows and of columns."""


def maps(moved: Axes, device: torch.device) -> list[Tensor | None]:
    """int64 `[result's length, 1]` of each axis: sources."""
    return [None if axis.forward is None else axis.forward(device)[:, None] for axis in moved]


def inverses(moved: Axes, device: torch.device) -> list[Tensor | None]:
    """int64 `[source's length, copies]` of each axis, such that copy k of a source is at place k of all three."""
    counts = [axis.copies for axis in moved]
    number = torch.arange(math.prod(counts), device=device)
    found = []
    for k, x in enumerate(axis.inverse(device) for axis in moved):
        copy = number // math.prod(counts[k + 1 :]) % counts[k]
        found.append(None if x is None else x.index_select(1, copy))
    return found


def whole(length: int) -> Axis:
    """All of it, as it is."""
    return Axis(length, length)


def part(total: int, start: int, length: int) -> Axis:
    """From `start` on."""
    if (start, length) == (0, total):
        return whole(total)
    return Axis(total, length, lambda device: torch.arange(start, start + length, device=device), start)


def repeated(length: int, times: int, interleave: bool = False) -> Axis:
    """All of it several times, or each several times."""
    if times == 1:
        return whole(length)

    def forward(device: torch.device) -> Tensor:
        if interleave:
            return torch.arange(length * times, device=device) // times
        return torch.arange(length, device=device).repeat(times)

    return Axis(length, length * times, forward, 1 if interleave else length, times)


def joined(lengths: Sequence[int], block: int) -> Axis:
    """Several one after the other, of which each begins with a block of its own."""
    padded = [-(-length // block) * block for length in lengths]
    begins = [sum(padded[:k]) for k in range(len(padded))]
    step = math.gcd(*(sum(lengths[:k]) for k in range(len(lengths))))
    if math.gcd(step, block) == block:
        return whole(sum(lengths))

    def forward(device: torch.device) -> Tensor:
        return torch.cat([torch.arange(b, b + n, device=device) for b, n in zip(begins, lengths)])

    return Axis(sum(padded), sum(lengths), forward, step)


def along(lead: Sequence[int], dim: int, axis: Axis) -> Axis:
    """The rearrangement of one of the leading dimensions, for matrices counted through."""
    forward, count = axis.forward, math.prod(lead)
    if forward is None:
        return whole(count)

    def forwards(device: torch.device) -> Tensor:
        return torch.arange(count, device=device).view(*lead).index_select(dim, forward(device)).reshape(-1)

    return Axis(count, math.prod([*lead[:dim], axis.length, *lead[dim + 1 :]]), forwards, 1, axis.copies)


def tiled(lead: Sequence[int], times: Sequence[int], interleave: bool) -> Axis:
    """Leading dimensions of which each is repeated, for matrices counted through."""
    count, copies = math.prod(lead), math.prod(times)
    if all(each == 1 for each in times):
        return whole(count)

    def forward(device: torch.device) -> Tensor:
        at = torch.arange(count, device=device).view(*lead)
        if not interleave:
            return at.repeat(*times).view(-1)
        for dim, each in enumerate(times):
            at = at.repeat_interleave(each, dim)
        return at.view(-1)

    return Axis(count, count * copies, forward, 1, copies)
