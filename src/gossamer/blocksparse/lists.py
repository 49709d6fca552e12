"""Where the lists of a layout stand in its one buffer.

The buffer, int32, has a half for the matrices' rows, the same for those of the transposed matrices, and the elements of
cut blocks: `[half of rows | half of columns | elements]`. A half is `[row_offsets | col_indices | row_indices |
transpose_order | positions]`, each list on 16 bytes, for kernels. The transposed layout is the same buffer with both
halves exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core import checks


class Form(NamedTuple):
    """The numbers of a layout that the host knows. Operators take them beside the buffer.

    Args:
        z: matrices; rows, cols: of blocks; height, width: of a block; m, n: of a matrix, in elements.
        capacity: blocks that there is room for; cut: of these, blocks that there are words for.
        turned: whether the buffer begins with the half of the columns.
    """

    z: int
    rows: int
    cols: int
    height: int
    width: int
    m: int
    n: int
    capacity: int
    cut: int = 0
    turned: bool | int = False

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The shape of the values."""
        return self.capacity, self.height, self.width

    @property
    def mT(self) -> Form:
        """The form of the transposed layout."""
        z, rows, cols, height, width, m, n, capacity, cut, turned = self
        return Form(z, cols, rows, width, height, n, m, capacity, cut, not turned)


def aligned(count: int) -> int:
    """int32 that a list of `count` takes in a buffer."""
    return count + -count % 4


class Lists:
    """The lists of a layout, views of its buffer, made when they are asked for. `Layout` explains them."""

    __slots__ = ("_entries", "_other", "_own", "_room", "buffer", "form")

    def __init__(self, buffer: Tensor, given: tuple[int, ...]) -> None:
        form = given if type(given) is Form else Form(*given)
        self.buffer, self.form, self._room = buffer, form, aligned(form.capacity)
        entries = 3 * self._room + aligned(form.z * form.rows * form.cols)
        own, other = aligned(form.z * form.rows + 1), aligned(form.z * form.cols + 1)
        # Where the half of these lists begins, and that of the transposed ones; and the first list of entries.
        self._own, self._other = (other + entries, 0) if form.turned else (0, own + entries)
        self._entries = self._own + own

    def _list(self, place: int) -> Tensor:
        start = self._entries + place * self._room
        return self.buffer[start : start + self.form.capacity]

    @property
    def mT(self) -> Lists:
        """The lists of the transposed layout."""
        return Lists(self.buffer, self.form.mT)

    @property
    def row_offsets(self) -> Tensor:
        return self.buffer[self._own : self._own + self.form.z * self.form.rows + 1]

    @property
    def col_offsets(self) -> Tensor:
        """The `row_offsets` of the transposed layout."""
        return self.buffer[self._other : self._other + self.form.z * self.form.cols + 1]

    @property
    def nnz(self) -> Tensor:
        """int32 `[1]`."""
        at = self._own + self.form.z * self.form.rows
        return self.buffer[at : at + 1]

    @property
    def col_indices(self) -> Tensor:
        return self._list(0)

    @property
    def row_indices(self) -> Tensor:
        return self._list(1)

    @property
    def transpose_order(self) -> Tensor:
        return self._list(2)

    @property
    def positions(self) -> Tensor:
        form, start = self.form, self._entries + 3 * self._room
        return self.buffer[start : start + form.z * form.rows * form.cols]

    @property
    def elements(self) -> Tensor | None:
        """The bits by which `elements.py` marks elements of cut blocks; None where every element takes part."""
        if not self.form.cut:
            return None
        return self.buffer[length(self.form) + (self._room if self.form.turned else 0) :]

    def by(self, columns: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """(offsets, order, index) of rows, or of columns: a line's entries are blocks, in their own order if None, and
        the index says of each block which column, or row, it stands in."""
        if columns:
            return self.col_offsets, self.transpose_order, self.row_indices
        return self.row_offsets, None, self.col_indices

    @property
    def density(self) -> float:
        """Share of the blocks that there is room for."""
        form = self.form
        return min(1.0, form.capacity / max(form.z * form.rows * form.cols, 1))

    def overflowed(self) -> bool:
        """Whether there are more blocks than room; of lists on the CPU."""
        return int(self.nnz) > self.form.capacity


def length(form: tuple[int, ...]) -> int:
    """int32 of a buffer without elements."""
    z, rows, cols, *_, capacity, _, _ = form
    lists = 3 * aligned(capacity) + aligned(z * rows * cols)
    return aligned(z * rows + 1) + aligned(z * cols + 1) + 2 * lists


def half_of(form: Form, nnz: Tensor, columns: Tensor, lines: Tensor, positions: Tensor) -> Tensor:
    """A half of rows from its parts, whose order nobody reads: blocks that stand elsewhere than their numbers say."""
    room = aligned(form.capacity)
    entries = [torch.nn.functional.pad(x, (0, room - form.capacity)) for x in (columns, lines)]
    parts = nnz.expand(aligned(form.z * form.rows + 1)), *entries, entries[0], positions.reshape(-1)
    return torch.cat([part.to(torch.int32) for part in parts])


def lost(dtype: torch.dtype) -> float | int:
    """The value of every element where a layout overflowed: NaN, or the lowest of integers."""
    return float("nan") if dtype in checks.FLOATS else False if dtype is torch.bool else torch.iinfo(dtype).min
