"""Layouts of the attention patterns that are known in advance; `Layout.union` puts them together.

A pattern is defined element by element, query i standing at the position i + N - M of the N keys (the last query is
aligned with the last key). A block is present where any of its elements belongs to the pattern, and cut where not all
do: the layout stores which elements a cut block has, and `attention` and `softmax` take no others. The host counts
blocks by itself, from sizes and numbers; lengths, tokens and borders that are tensors only the device knows.

With lengths, query i stands at the position i + max(length - M, min(N - M, 0)): the last one beside key length - 1,
unless a query of a square or wide matrix would stand in front of the first key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gossamer._core import checks
from gossamer.blocksparse.attention_path import first_key
from gossamer.blocksparse.elements import Rule, of_rule
from gossamer.blocksparse.layout import BlockSize, Layout, check_block_size, check_size, grid_of, room_for


def causal(
    size: tuple[int, int],
    block_size: BlockSize,
    *,
    lengths: Tensor | None = None,
    elements: bool = True,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Each query meets the keys up to its own position.

    Args:
        size: `(M, N)`: queries and keys.
        block_size: 16, 32, 64 or 128, or `(height, width)`.
        lengths: int `[...]`, positions of each sequence that are in use: positions beyond are absent, among queries
            and among keys, and the layout is `(..., rows, cols)`.
        elements: whether the layout stores which elements of cut blocks belong to the pattern; False makes every
            present block a whole one.
        capacity: as in `Layout.from_mask`. None makes room for just those present: the host counts them, without a
            sync, and the device does with lengths, which costs one.
        device: where to; None is that of lengths, else the CPU.

    Returns:
        `Layout` of `(M, N)`, or with lengths of `(..., M, N)`.

    Raises:
        ValueError, TypeError: sizes, or as `Layout.from_mask`.

    Source: Child et al. 2019, Generating Long Sequences with Sparse Transformers (arXiv 1904.10509).

    >>> layout = causal((64, 64), 16)
    >>> print(layout.draw(), bool(layout.element_mask().equal(torch.ones(64, 64).bool().tril())))
    #...
    ##..
    ###.
    #### True
    """
    grid = Grid("blocksparse.causal", size, block_size, lengths, device)
    # Every distance behind.
    return grid.layout(_near, (sum(grid.size), 0, 1), elements, capacity)


def sliding_window(
    size: tuple[int, int],
    block_size: BlockSize,
    window: int | tuple[int, int],
    *,
    dilation: int = 1,
    lengths: Tensor | None = None,
    elements: bool = True,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Each query meets the keys near its own position, all or every `dilation`-th of them.

    Args:
        window: how far behind and ahead of the query a key may stand, one number or `(behind, ahead)`; ahead 0 is
            causal. A window of W keys, the query's own among them, is `(W - 1, 0)`.
        dilation: keys stand at a multiple of this distance from the query. It leaves out blocks where it is larger
            than a block, and elements of every other one.
        size, block_size, lengths, elements, capacity, device: as in `causal`.

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
    pair = window if isinstance(window, tuple) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"{operator}: window must be a number of keys, or (behind, ahead), got {window!r}.")
    behind, ahead = pair
    checks.number(operator, "window", behind, "It is a number of keys.", zero=True)
    checks.number(operator, "window", ahead, "It is a number of keys.", zero=True)
    checks.positive(operator, "dilation", dilation, "It is the distance of neighbouring keys.")
    grid = Grid(operator, size, block_size, lengths, device)
    return grid.layout(_near, (behind, ahead, dilation), elements, capacity)


def global_tokens(
    size: tuple[int, int],
    block_size: BlockSize,
    tokens: int | Tensor,
    *,
    lengths: Tensor | None = None,
    elements: bool = True,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Some tokens meet all others, and are met by all.

    Args:
        tokens: int `[..., G]`, positions among the keys, -1 for none, with the leading dimensions of lengths where
            both have any; or a number, the first so many positions.
        size, block_size, lengths, elements, capacity, device: as in `causal`; the device of tokens goes first, and
            where they are a tensor `capacity=None` costs a sync.

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
    grid = Grid(operator, size, block_size, lengths, device)
    if not isinstance(tokens, Tensor):
        if not isinstance(tokens, int):
            raise TypeError(f"{operator}: tokens must be an int or a tensor of positions, got {type(tokens).__name__}.")
        checks.number(operator, "tokens", tokens, "It is a number of tokens, or their positions.", zero=True)
    return grid.layout(_of_tokens, (tokens,), elements, capacity)


def documents(
    size: tuple[int, int],
    block_size: BlockSize,
    borders: Tensor,
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    elements: bool = True,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Each query meets the keys of its own document, of several that are packed into one sequence.

    Args:
        borders: int `[documents + 1]`, ascending from 0: document d has the positions borders[d] to borders[d + 1] - 1
            (`cu_seqlens` of kernels for sequences of any length). Positions from the last border on belong to none.
        causal: whether a query meets only keys up to its own position.
        size, block_size, lengths, elements, capacity, device: as in `causal`; the device of borders goes first, and
            `capacity=None` costs a sync there.

    Returns:
        `Layout`, as in `causal`.

    Raises:
        ValueError: borders have another shape, or on the CPU do not ascend from 0.
        TypeError: borders are not int32 or int64.

    Source: Krell et al. 2021, Efficient Sequence Packing without Cross-contamination (arXiv 2107.02027).

    >>> print(documents((64, 64), 16, torch.tensor([0, 20, 64])).draw())
    ##..
    ####
    .###
    .###
    """
    operator = "blocksparse.documents"
    checks.tensors(operator, borders=borders)
    checks.whole(operator, borders=borders)
    if borders.dim() != 1 or not borders.numel():
        raise ValueError(f"{operator}: borders must have shape [documents + 1], got {list(borders.shape)}.")
    known = borders.device.type == "cpu" and not torch.compiler.is_compiling()
    if known and (int(borders[0]) != 0 or bool((borders.diff() < 0).any())):
        raise ValueError(f"{operator}: borders must ascend from 0, got {borders.tolist()[:8]}.")
    grid = Grid(operator, size, block_size, lengths, borders.device)
    given, count = borders.contiguous().long(), borders.shape[0] - 1

    def document(position: Tensor) -> Tensor:
        # -1 and count stand for none.
        return torch.searchsorted(given, position.contiguous(), right=True) - 1

    def pattern(grid: Grid) -> _Pattern:
        (least, most), (first, last, key, last_key) = grid.apart(), grid.ends()
        low = torch.maximum(document(first), document(key))
        high = torch.minimum(document(last), document(last_key))
        present = low.clamp(min=0) <= high.clamp(max=count - 1)
        whole = (document(first) == document(last)) & (document(key) == document(last_key)) & present

        def rule(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
            position = grid.position(z, i)
            own = document(position)
            inside = (own == document(j)) & (own >= 0) & (own < count)
            return inside & (position >= j) if causal else inside

        if causal:
            present, whole = present & (most >= 0), whole & (least >= 0)
        return _Pattern(present, whole, rule)

    return grid.layout(pattern, (), elements, capacity)


@dataclass(frozen=True)
class _Pattern:
    """Blocks that hold any element and blocks that hold nothing else, bool `[..., rows, cols]`, and the elements."""

    present: Tensor
    whole: Tensor
    rule: Rule


def _near(grid: Grid, behind: int, ahead: int, dilation: int) -> _Pattern:
    """Keys that stand -ahead to behind from the query, at multiples of the dilation."""
    least, most = grid.apart()
    # A block holds every distance between its least and its most.
    first, last = least.clamp(min=-ahead), most.clamp(max=behind)
    multiple = last.div(dilation, rounding_mode="floor") * dilation
    whole = (least >= -ahead) & (most <= behind) & (dilation == 1)

    def rule(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = grid.position(z, i) - j
        near = (apart >= -ahead) & (apart <= behind)
        return near if dilation == 1 else near & (apart % dilation == 0)

    return _Pattern(multiple >= first, whole, rule)


def _of_tokens(grid: Grid, tokens: int | Tensor) -> _Pattern:
    """Queries and keys that are among the tokens, with all others."""
    at = tokens.long() if isinstance(tokens, Tensor) else torch.arange(tokens, device=grid.device)
    (m, n), shift = grid.size, grid.shift if isinstance(grid.shift, int) else grid.shift[..., 0]
    flags: list[Tensor] = []
    some: list[Tensor] = []
    every: list[Tensor] = []
    for place, limit, block in ((at - shift, m, grid.block[0]), (at, n, grid.block[1])):
        # Whether a query or a key is global; positions outside of the matrix go behind the last.
        inside = torch.where((at >= 0) & (place >= 0) & (place < limit), place, limit)
        flag = torch.zeros(*inside.shape[:-1], limit + 1, dtype=torch.bool, device=grid.device)
        flags.append(flag.scatter(-1, inside, True)[..., :limit])
        for found, fill in ((some, False), (every, True)):
            padded = torch.nn.functional.pad(flags[-1], (0, -limit % block), value=fill).unflatten(-1, (-1, block))
            found.append(padded.all(-1) if fill else padded.any(-1))

    def rule(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        of_query, of_key = (flag.expand(1, *grid.lead, -1).flatten(0, -2) for flag in flags)
        return of_query[z, i.clamp(max=m - 1)] | of_key[z, j.clamp(max=n - 1)]

    present, whole = (rows[..., :, None] | columns[..., None, :] for rows, columns in (some, every))
    return _Pattern(present, whole, rule)


_CELLS = 1 << 16
"""Blocks that are counted together."""


class Grid:
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
        self.size, self.block = check_size(operator, size), check_block_size(operator, block_size)
        self.lengths, self.shape = lengths, grid_of(self.size, self.block)
        self.device: Any = lengths.device if device is None and lengths is not None else device
        self.lead: tuple[int, ...] = ()
        self.shift: Any = size[1] - size[0]
        if lengths is not None:
            self.shift = first_key(lengths.long(), size[0], size[1])[..., None, None]

    def ends(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions of the first and the last query of blocks, `[..., rows, 1]`, and of their first and last key,
        `[cols]`."""
        (m, n), (height, width) = self.size, self.block
        query, key = (torch.arange(count, device=self.device) * block for count, block in zip(self.shape, self.block))
        last, last_key = (query + height).clamp(max=m) - 1, (key + width).clamp(max=n) - 1
        return query[:, None] + self.shift, last[:, None] + self.shift, key, last_key

    def apart(self) -> tuple[Tensor, Tensor]:
        """`[..., rows, cols]`: the least and the most that a query of the block stands behind a key."""
        first, last, key, last_key = self.ends()
        return first - last_key, last - key

    def position(self, z: Tensor, i: Tensor) -> Tensor:
        """Where queries i of matrices z stand among the keys."""
        return i + (self.shift if isinstance(self.shift, int) else self.shift.reshape(-1)[self.own(z)])

    def own(self, z: Tensor) -> Tensor:
        """Which sequence of `lengths` matrices z belong to, where the layout has leading dimensions of `lead`."""
        assert self.lengths is not None
        if self.lengths.shape == self.lead:
            return z
        numbers = torch.arange(self.lengths.numel(), device=z.device).view(self.lengths.shape)
        return numbers.expand(self.lead).reshape(-1)[z]

    def layout(
        self, make: Callable[..., _Pattern], numbers: tuple[Any, ...], elements: bool, capacity: int | None
    ) -> Layout:
        """The layout of the pattern that `make` makes with these numbers."""
        pattern, limit = make(self, *numbers), self.lengths
        mask, whole, rule = pattern.present, pattern.whole, pattern.rule
        if limit is not None:
            first, last, key, last_key = self.ends()
            bound = limit[..., None, None]
            mask = mask & (first < bound) & (key < bound)
            whole, inner = whole & (last < bound) & (last_key < bound), rule

            def within(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
                most = limit.reshape(-1)[self.own(z)]
                return inner(z, i, j) & (self.position(z, i) < most) & (j < most)

            rule = within
        cut, self.lead = mask & ~whole, tuple(mask.shape[:-2])
        if capacity is None and limit is None and numbers and not isinstance(numbers[0], Tensor):
            known, room = _counted(make.__name__, self.size, self.block, numbers)
            capacity, filled = max(known, 1), known > 0
        else:
            capacity, room, filled = room_for("blocksparse pattern", mask, cut, capacity)
        layout = replace(Layout.from_mask(mask, self.block, size=self.size, capacity=capacity), filled=filled)
        return of_rule(layout, cut, room, rule) if elements else layout


@lru_cache(maxsize=64)
def _count(name: str, size: tuple[int, int], block: tuple[int, int], numbers: tuple[int, ...]) -> tuple[int, int]:
    """How many blocks the pattern that `name` makes has, and how many of these are cut: counted on the CPU, in bands of
    block rows, and apart from traces and fake tensors, which have no number."""
    (m, n), make, found, cut = size, globals()[name], 0, 0
    band = max(1, _CELLS // max(1, grid_of(size, block)[1])) * block[0]
    with _disable_current_modes():
        for row in range(0, m, band):
            grid = Grid("", (min(band, m - row), n), block, None, "cpu")
            grid.shift = row + n - m
            pattern = make(grid, *numbers)
            found += int(pattern.present.sum())
            cut += int((pattern.present & ~pattern.whole).sum())
    return found, cut


# A compiler looks into the cache, but takes a constant from a function.
_counted = torch.compiler.assume_constant_result(lambda *given: _count(*given))
