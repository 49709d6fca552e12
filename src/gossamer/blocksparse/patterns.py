"""Layouts of the attention patterns that are known in advance; `Layout.union` puts them together.

A pattern is defined element by element, query i standing at the position i + N - M of the N keys (the last query is
aligned with the last key), and a block is present where any of its elements belongs to it. How many blocks that makes
the host counts by itself, from sizes and numbers; lengths and tokens that are tensors only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
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
        capacity: as in `Layout.from_mask`. None makes room for just those present: the host counts them, without a
            sync, and the device does with lengths, which costs one.
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
    # Every distance behind.
    window = size[0] + size[1], 0, 1
    return grid.layout(grid.apart()[1] >= 0, capacity, lambda: _once(_near, grid, window))


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
    return grid.layout(multiple >= first, capacity, lambda: _once(_near, grid, (behind, ahead, dilation)))


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
        size, block_size, lengths, capacity, device: as in `causal`; the device of tokens goes first, and where they are
            a tensor `capacity=None` costs a sync.

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
    counted: Callable[[], int] | None = None
    if not isinstance(tokens, Tensor):
        if not isinstance(tokens, int):
            raise TypeError(f"{operator}: tokens must be an int or a tensor of positions, got {type(tokens).__name__}.")
        checks.number(operator, "tokens", tokens, "It is a number of tokens, or their positions.", zero=True)
        first = tokens
        tokens, counted = torch.arange(first, device=grid.device), lambda: _once(_first, grid, first)
    (m, n), (height, width), (rows, cols) = size, grid.block, grid.shape
    tokens = tokens.long()
    query = tokens - (n - m)
    chosen = []
    for at, limit, count, block in ((query, m, rows, height), (tokens, n, cols, width)):
        # What is no position of the matrix goes into a block behind the last.
        number = torch.where((tokens >= 0) & (at >= 0) & (at < limit), at.div(block, rounding_mode="floor"), count)
        flags = torch.zeros(*number.shape[:-1], count + 1, dtype=torch.bool, device=grid.device)
        chosen.append(flags.scatter(-1, number, True)[..., :count])
    return grid.layout(chosen[0][..., :, None] | chosen[1][..., None, :], capacity, counted)


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
        self.size, self.block = (size[0], size[1]), check_block_size(operator, block_size)
        self.lengths, self.shape = lengths, grid_of(self.size, self.block)
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

    def layout(self, mask: Tensor, capacity: int | None, count: Callable[[], int] | None) -> Layout:
        """The layout of a mask, of which `count` says how many blocks it has without lengths; None cannot say."""
        known = None
        if self.lengths is not None:
            (m, n), (query, key) = self.size, self._starts()
            limit = self.lengths[..., None, None]
            mask = mask & (query + (n - m) < limit) & (key < limit)
        elif capacity is None and count is not None:
            known = count()
            capacity = max(known, 1)
        layout = Layout.from_mask(mask, self.block, size=self.size, capacity=capacity)
        return layout if known is None else replace(layout, filled=known == capacity)


def _once(count: Any, grid: _Grid, rule: Any) -> int:
    # torch.compile calls it once by itself, and warns of caches.
    call = count.__wrapped__ if torch.compiler.is_compiling() else count
    found: int = call(grid.size, grid.block, rule)
    return found


@lru_cache(maxsize=64)
def _near(size: tuple[int, int], block: tuple[int, int], window: tuple[int, int, int]) -> int:
    """How many blocks hold a distance of -ahead to behind that is a multiple of the dilation.

    Whole blocks that lie equally far apart are alike, so that sums along one line of them give the count of every row;
    those of the last row and column, which may be cut, are looked at one by one.
    """
    (m, n), (height, width), (behind, ahead, dilation) = size, block, window

    def present(apart: int, rows: int, columns: int) -> bool:
        least, most = apart - columns + 1, apart + rows - 1
        return min(most, behind) // dilation * dilation >= max(least, -ahead)

    last, right = (count - 1 for count in grid_of(size, block))
    if last < 0 or right < 0:
        return 0
    least = n - m - right * width
    sums: dict[int, int] = {}
    for apart in range(least, n - m + last * height + 1, min(height, width)):
        sums[apart] = sums.get(apart - width, 0) + present(apart, height, width)
    total = 0
    for first in range(n - m, n - m + last * height, height):
        total += sums[first] - sums[first - right * width]
        total += present(first - right * width, height, n - right * width)
    first, rows = n - m + last * height, m - last * height
    total += sum(present(first - column * width, rows, width) for column in range(right))
    return total + present(first - right * width, rows, n - right * width)


@lru_cache(maxsize=64)
def _first(size: tuple[int, int], block: tuple[int, int], tokens: int) -> int:
    """How many blocks hold a query or a key of the first tokens."""
    (m, n), (height, width) = size, block
    rows, cols = grid_of(size, block)
    queries = range(max(m - n, 0), min(tokens + m - n, m))
    chosen = queries[-1] // height - queries[0] // height + 1 if queries else 0
    taken = -(-min(tokens, n) // width)
    return chosen * cols + taken * rows - chosen * taken
