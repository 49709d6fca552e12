"""Layouts of the attention patterns that are known in advance; `Layout.union` puts them together.

A pattern is defined element by element, query i standing at the position i + N - M of the N keys (the last query is
aligned with the last key), and a block is present where any of its elements belongs to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse.layout import BlockSize, Layout, check_block_size, grid_of


def causal(
    size: tuple[int, int],
    block_size: BlockSize,
    *,
    lengths: Tensor | None = None,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Each query meets the keys up to its own position.

    Args:
        size: `(M, N)`: queries and keys.
        block_size: 16, 32, 64 or 128, or `(height, width)`.
        lengths: int `[...]`, positions of each sequence that are in use: blocks beyond are absent, among queries and
            among keys, and the layout is `(..., rows, cols)`.
        capacity: as in `Layout.from_mask`; None costs one sync.
        device: where to; None is that of lengths, else the CPU.

    Returns:
        `Layout` of `(M, N)`, or with lengths of `(..., M, N)`.

    Raises:
        ValueError, TypeError: sizes, or as `Layout.from_mask`.

    Source: Child et al. 2019, Generating Long Sequences with Sparse Transformers (arXiv 1904.10509).

    >>> print(causal((64, 64), 16).draw())
    #...
    ##..
    ###.
    ####
    """
    grid = _Grid("blocksparse.causal", size, block_size, lengths, device)
    return grid.layout(grid.apart()[1] >= 0, capacity)


def sliding_window(
    size: tuple[int, int],
    block_size: BlockSize,
    window: int | tuple[int, int],
    *,
    dilation: int = 1,
    lengths: Tensor | None = None,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Each query meets the keys near its own position, all or every `dilation`-th of them.

    Args:
        window: how far behind and ahead of the query a key may stand, one number or `(behind, ahead)`; ahead 0 is
            causal.
        dilation: keys stand at a multiple of this distance from the query. It leaves out blocks where it is larger
            than a block.
        size, block_size, lengths, capacity, device: as in `causal`.

    Returns:
        `Layout`, as in `causal`.

    Raises:
        ValueError, TypeError: window is below 0 or no number, dilation is no int of at least 1, or as `causal`.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), sliding and dilated windows; Child et al. 2019 (arXiv
    1904.10509): the strided pattern is a causal window and one of dilation `stride` and window `(M, 0)`.

    >>> print(sliding_window((96, 96), 16, 17).draw())
    ###...
    ####..
    #####.
    .#####
    ..####
    ...###
    >>> print(sliding_window((96, 96), 16, (96, 0), dilation=48).draw())
    #.....
    .#....
    ..#...
    #..#..
    .#..#.
    ..#..#
    """
    operator = "blocksparse.sliding_window"
    behind, ahead = window if isinstance(window, tuple) else (window, window)
    checks.number(operator, "window", behind, "It is a number of keys.", zero=True)
    checks.number(operator, "window", ahead, "It is a number of keys.", zero=True)
    checks.positive(operator, "dilation", dilation, "It is the distance of neighbouring keys.")
    grid = _Grid(operator, size, block_size, lengths, device)
    least, most = grid.apart()
    # A block holds every distance between its least and its most.
    first, last = least.clamp(min=-ahead), most.clamp(max=behind)
    multiple = last.div(dilation, rounding_mode="floor") * dilation
    return grid.layout(multiple >= first, capacity)


def global_tokens(
    size: tuple[int, int],
    block_size: BlockSize,
    tokens: int | Tensor,
    *,
    lengths: Tensor | None = None,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Some tokens meet all others, and are met by all.

    Args:
        tokens: int `[..., G]`, positions among the keys, -1 for none, with the leading dimensions of lengths where
            both have any; or a number, the first so many positions.
        size, block_size, lengths, capacity, device: as in `causal`; the device of tokens goes first.

    Returns:
        `Layout` of `(M, N)`, or with the leading dimensions of tokens or lengths.

    Raises:
        ValueError, TypeError: as `causal`.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), global attention.

    >>> print(global_tokens((64, 64), 16, 1).draw())
    ####
    #...
    #...
    #...
    """
    operator = "blocksparse.global_tokens"
    if isinstance(tokens, Tensor):
        checks.whole(operator, tokens=tokens)
        device = tokens.device
    grid = _Grid(operator, size, block_size, lengths, device)
    if not isinstance(tokens, Tensor):
        tokens = torch.arange(tokens, device=grid.device)
    (m, n), (height, width), (rows, cols) = size, grid.block, grid.shape
    tokens = tokens.long()
    query = tokens - (n - m)
    chosen = []
    for at, limit, count, block in ((query, m, rows, height), (tokens, n, cols, width)):
        # What is no position of the matrix goes into a block behind the last.
        number = torch.where((tokens >= 0) & (at >= 0) & (at < limit), at.div(block, rounding_mode="floor"), count)
        flags = torch.zeros(*number.shape[:-1], count + 1, dtype=torch.bool, device=grid.device)
        chosen.append(flags.scatter(-1, number, True)[..., :count])
    return grid.layout(chosen[0][..., :, None] | chosen[1][..., None, :], capacity)


class _Grid:
    """The blocks of queries and keys."""

    def __init__(
        self,
        operator: str,
        size: tuple[int, int],
        block_size: BlockSize,
        lengths: Tensor | None,
        device: torch.device | str | None,
    ) -> None:
        checks.whole(operator, lengths=lengths)
        if not isinstance(size, tuple | list | torch.Size) or len(size) != 2:
            raise ValueError(f"{operator}: size must be (M, N), queries and keys, got {size!r}.")
        self.size, self.block = size, check_block_size(operator, block_size)
        self.lengths, self.shape = lengths, grid_of(size, self.block)
        self.device: Any = lengths.device if device is None and lengths is not None else device

    def _starts(self) -> tuple[Tensor, Tensor]:
        """First query `[rows, 1]` and first key `[cols]` of blocks."""
        query, key = (torch.arange(count, device=self.device) * block for count, block in zip(self.shape, self.block))
        return query[:, None], key

    def apart(self) -> tuple[Tensor, Tensor]:
        """`[rows, cols]`: the least and the most that a query of the block stands behind a key."""
        (m, n), (height, width) = self.size, self.block
        query, key = self._starts()
        last_query, last_key = (query + height).clamp(max=m) - 1, (key + width).clamp(max=n) - 1
        return query + (n - m) - last_key, last_query + (n - m) - key

    def layout(self, mask: Tensor, capacity: int | None) -> Layout:
        if self.lengths is not None:
            (m, n), (query, key) = self.size, self._starts()
            limit = self.lengths[..., None, None]
            mask = mask & (query + (n - m) < limit) & (key < limit)
        return Layout.from_mask(mask, self.block, size=self.size, capacity=capacity)
