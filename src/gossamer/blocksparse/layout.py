"""Which blocks of a block-sparse matrix are present."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.blocksparse import elements
from gossamer.blocksparse._torch.layout import layout as _cpu
from gossamer.blocksparse.lists import Form, Lists, length
from gossamer.blocksparse.records import BlocksparseLayout

BLOCKS = (16, 32, 64, 128)
"""Rows or columns that a block may have."""

BlockSize = int | tuple[int, int]


def _part(name: str) -> Any:
    """A number of the form, or a list of the buffer."""
    owner, _, part = name.partition(".")
    return property(lambda layout: getattr(getattr(layout, owner), part))


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The present blocks of Z matrices of rows x cols blocks, by rows and by columns. `from_mask` makes one.

    Immutable, and shared between tensors. Blocks are numbered along rows, matrix after matrix (CSR order); a block's
    number is its place in `BlockSparseTensor.values`. All lists are int32 views of one buffer on the device. The host
    does not know how many blocks there are, only how many there is room for.

    Args:
        lead: leading dimensions, whose product is Z.
        form: sizes, from which the host knows where in the buffer each list stands.
        buffer: int32, the lists of the matrices, of the transposed matrices, and the elements of cut blocks.
        filled: whether the host knows that there is no room behind the last block, because it has counted the blocks.

    Attributes:
        batch: Z, the number of matrices; rows, cols: of blocks of each.
        shape: `(..., rows, cols)` in blocks.
        block_size: `(height, width)` of a block in elements, each 16, 32, 64 or 128.
        size: `(M, N)` in elements; the blocks of the last row and column may reach beyond.
        capacity: blocks that there is room for.
        row_offsets: `[Z * rows + 1]`: row `z * rows + r` holds the blocks `row_offsets[row]` to `row_offsets[row + 1]`.
            These are true counts, which may exceed the capacity.
        col_indices: `[capacity]`: each block's column, ascending in a row; -1 behind the last block.
        row_indices: `[capacity]`: each block's row, `z * rows + r`; -1 behind the last block.
        col_offsets: `[Z * cols + 1]`: column `z * cols + c` holds the entries `col_offsets[column]` to
            `col_offsets[column + 1]` of `transpose_order`.
        transpose_order: `[capacity]`: the blocks' numbers, column by column, from top to bottom (CSC order).
        positions: `[Z * rows * cols]`: each block's number, -1 where it is absent. True numbers, which may lie beyond
            the capacity.
        elements: which elements of cut blocks take part in attention and softmax, int32, as `elements.py` has it; None
            where all do. Layouts of tensors that are moved (`repeat`, `split`, `cat`, `adapt`) and of products have
            whole blocks.

    Source: Schön and Tompits, blksprs, Definitions 1 to 4 (lookup table and reverse lookup table).

    >>> Layout.from_mask(torch.tensor([[True, False], [True, True]]), 16).col_indices.tolist()
    [0, 0, 1]
    """

    lead: tuple[int, ...]
    form: Form
    buffer: Tensor
    filled: bool = False

    @property
    def lists(self) -> Lists:
        """The views of the buffer."""
        return Lists(self.buffer, self.form)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.form.rows, self.form.cols)

    @property
    def block_size(self) -> tuple[int, int]:
        return self.form.height, self.form.width

    @property
    def size(self) -> tuple[int, int]:
        return self.form.m, self.form.n

    row_offsets, col_indices, row_indices = map(_part, ("lists.row_offsets", "lists.col_indices", "lists.row_indices"))
    col_offsets, transpose_order = map(_part, ("lists.col_offsets", "lists.transpose_order"))
    positions, elements = map(_part, ("lists.positions", "lists.elements"))
    batch, rows, cols, capacity = map(_part, ("form.z", "form.rows", "form.cols", "form.capacity"))

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def nnz(self) -> Tensor:
        """int32 `[]` on the device: how many blocks are present; more than the capacity if it overflowed."""
        return self.lists.nnz[0]

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether there are more blocks than there is room for. Results are NaN then."""
        return self.nnz > self.capacity

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """`(..., M, N)`: the shape of the matrices in elements."""
        return (*self.lead, *self.size)

    def to_dense(self) -> Tensor:
        """Bool `[..., rows, cols]`: the mask that this is the layout of."""
        return (self.positions >= 0).view(self.shape)

    def element_mask(self) -> Tensor:
        """Bool `[..., M, N]`: which elements take part in attention and softmax.

        >>> from gossamer.blocksparse import sliding_window
        >>> sliding_window((64, 64), 16, (2, 0)).element_mask().sum(-1).tolist()[:4]
        [1, 2, 3, 3]
        """
        (m, n), (height, width) = self.size, self.block_size
        whole = elements.to_dense(self).view(*self.shape, height, width).transpose(-3, -2)
        return whole.reshape(*self.lead, self.rows * height, self.cols * width)[..., :m, :n]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Layout:
        """The same on another device."""
        return replace(self, buffer=self.buffer.to(device, non_blocking=non_blocking))

    @staticmethod
    def from_mask(
        mask: Tensor, block_size: BlockSize, *, size: tuple[int, int] | None = None, capacity: int | None = None
    ) -> Layout:
        """The layout whose blocks a mask names.

        Args:
            mask: `[..., rows, cols]`, one element a block, present where it differs from 0; bool or an integer.
            block_size: 16, 32, 64 or 128, or `(height, width)`.
            size: `(M, N)` in elements, where the last row or column of blocks is cut; None takes whole blocks.
            capacity: how many blocks to make room for. An int costs no sync; `mask.numel()` is enough for any mask.
                Where more are present, `overflowed` is set and results are NaN. None makes room for the blocks that are
                present, and for one at least, which costs one device-to-host sync.

        Raises:
            ValueError: mask has fewer than two dimensions or 2^31 blocks, or sizes do not fit each other.
            TypeError: mask is no tensor, or holds floats.
            NotImplementedError: `capacity=None` under CUDA-graph capture.

        >>> Layout.from_mask(torch.eye(3).bool(), 64, size=(130, 192), capacity=4).row_offsets.tolist()
        [0, 1, 2, 3]
        """
        operator = "blocksparse.Layout.from_mask"
        checks.tensors(operator, mask=mask)
        block = check_block_size(operator, block_size)
        if mask.dim() < 2:
            raise ValueError(f"{operator}: mask must have shape [..., rows, cols], got {list(mask.shape)}.")
        if mask.numel() >= 1 << 31:
            raise ValueError(f"{operator}: mask must have fewer than 2^31 blocks, got {mask.numel()}. Use larger ones.")
        if mask.dtype.is_floating_point or mask.dtype.is_complex:
            raise TypeError(
                f"{operator}: mask must be bool or an integer, got {checks.name_of(mask.dtype)}. Say which numbers are "
                "blocks: mask.bool(), or mask > threshold; blocksparse.select_blocks chooses blocks by their scores."
            )
        rows, cols = mask.shape[-2:]
        if size is None:
            size = rows * block[0], cols * block[1]
        elif grid_of(check_size(operator, size), block) != (rows, cols):
            raise ValueError(
                f"{operator}: size must be of {rows} x {cols} blocks of {block[0]} x {block[1]} like mask, got {size}."
            )
        if mask.dtype is not torch.bool:
            mask = mask != 0
        if capacity is not None:
            checks.positive(operator, "capacity", capacity, "It is the number of blocks to make room for.")
        capacity, _, filled = room_for(operator, mask, None, capacity)
        lead = tuple(mask.shape[:-2])
        form = Form(math.prod(lead), rows, cols, *block, int(size[0]), int(size[1]), capacity)
        buffer = _layout(BlocksparseLayout(mask.reshape(form.z, rows, cols).contiguous(), form))
        return Layout(lead, form, buffer, filled)

    @staticmethod
    def from_dense(x: Tensor, block_size: BlockSize, *, capacity: int | None = None) -> Layout:
        """The layout of the blocks of x that hold anything but zeros; NaN is kept.

        Args:
            x: `[..., M, N]`, of any dtype; sizes that the block does not divide are padded.
            block_size, capacity: as in `from_mask`.

        Raises:
            ValueError: x has fewer than two dimensions, or as `from_mask`.

        >>> Layout.from_dense(torch.eye(48), 16).to_dense().sum().item()
        3
        """
        operator = "blocksparse.Layout.from_dense"
        checks.tensors(operator, x=x)
        height, width = block = check_block_size(operator, block_size)
        if x.dim() < 2:
            raise ValueError(f"{operator}: x must have shape [..., M, N], got {list(x.shape)}.")
        m, n = x.shape[-2:]
        rows, cols = grid_of((m, n), block)
        # NaN differs from everything.
        kept = torch.nn.functional.pad(x != 0, (0, cols * width - n, 0, rows * height - m))
        mask = kept.view(*x.shape[:-2], rows, height, cols, width).any(-1).any(-2)
        return Layout.from_mask(mask, block, size=(m, n), capacity=capacity)

    @staticmethod
    def full(
        shape: tuple[int, ...],
        block_size: BlockSize,
        *,
        size: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Layout:
        """The layout `(..., rows, cols)` in which every block is present. It costs no sync.

        >>> int(Layout.full((2, 3), 32).nnz)
        6
        """
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        layout = Layout.from_mask(mask, block_size, size=size, capacity=max(mask.numel(), 1))
        return replace(layout, filled=mask.numel() > 0)

    @staticmethod
    def random(
        shape: tuple[int, ...],
        block_size: BlockSize,
        density: float,
        *,
        size: tuple[int, int] | None = None,
        capacity: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Layout:
        """A layout `(..., rows, cols)` in which each block is present with the probability `density`.

        >>> Layout.random((2, 8, 8), 16, 0.5).shape
        (2, 8, 8)
        """
        checks.number("blocksparse.Layout.random", "density", density, "It is a probability.", zero=True)
        mask = torch.rand(shape, generator=generator, device=device) < density
        return Layout.from_mask(mask, block_size, size=size, capacity=capacity)

    @staticmethod
    def product(a: Layout, b: Layout, *, capacity: int | None = None) -> Layout:
        """The layout of a @ b: the blocks to which at least one pair of present blocks contributes, exactly these.

        Args:
            a: `(..., rows, inner)` of blocks, b: `(..., inner, cols)`; the leading dimensions broadcast.
            capacity: as in `from_mask`.

        Raises:
            ValueError: the inner sizes or blocks differ.

        >>> a = Layout.from_mask(torch.eye(3).bool(), 16)
        >>> Layout.product(a, a).col_indices.tolist()
        [0, 1, 2]
        """
        operator = "blocksparse.Layout.product"
        check_layouts(operator, a=a, b=b)
        if a.size[1] != b.size[0] or a.block_size[1] != b.block_size[0]:
            raise ValueError(
                f"{operator}: b must have {a.size[1]} rows in blocks of {a.block_size[1]} like the columns of a, got "
                f"{b.size[0]} in blocks of {b.block_size[0]}."
            )
        # A sum of zeros and ones is 0 only if all are, whatever the precision; 16 bits are the fastest there.
        dtype = torch.float16 if a.device.type == "cuda" else torch.float32
        mask = a.to_dense().to(dtype) @ b.to_dense().to(dtype) != 0
        block = a.block_size[0], b.block_size[1]
        return Layout.from_mask(mask, block, size=(a.size[0], b.size[1]), capacity=capacity)

    def transpose(self) -> Layout:
        """The layout of the transposed matrices, with the same buffer and capacity.

        >>> Layout.from_mask(torch.tensor([[1, 1, 0], [0, 0, 1]]), (16, 32)).transpose()
        Layout(shape=(3, 2), block_size=(32, 16), size=(96, 32), capacity=3, device=cpu)
        #.
        #.
        .#
        """
        return Layout(self.lead, self.form.mT, self.buffer, self.filled)

    def is_same(self, other: Layout) -> bool:
        """Whether both are one layout, or share its buffer; equal masks are not compared."""
        if self is other:
            return True
        if self.lead != other.lead or self.form != other.form:
            return False
        one, two = self.buffer, other.buffer
        if one is two or torch.compiler.is_compiling():
            return one is two
        return one.device == two.device and one.data_ptr() == two.data_ptr() != 0

    def union(self, *others: Layout, capacity: int | None = None) -> Layout:
        """The blocks of any of the layouts; leading dimensions broadcast. `capacity` is as in `from_mask`.

        >>> causal = Layout.from_mask(torch.ones(3, 3).bool().tril(), 16)
        >>> int(causal.union(causal.transpose()).nnz)
        9
        """
        return self._joined("union", others, capacity)

    def intersection(self, *others: Layout, capacity: int | None = None) -> Layout:
        """The blocks that all of the layouts have; leading dimensions broadcast. `capacity` is as in `from_mask`.

        >>> causal = Layout.from_mask(torch.ones(3, 3).bool().tril(), 16)
        >>> int(causal.intersection(causal.transpose()).nnz)
        3
        """
        return self._joined("intersection", others, capacity)

    def _joined(self, name: str, others: tuple[Layout, ...], capacity: int | None) -> Layout:
        operator = f"blocksparse.Layout.{name}"
        for other in others:
            check_layouts(operator, other=other)
            if (other.size, other.block_size) != (self.size, self.block_size):
                raise ValueError(
                    f"{operator}: layouts must have one size and block size, got {self.size} in blocks of "
                    f"{self.block_size}, and {other.size} in blocks of {other.block_size}."
                )
        union, given = name == "union", (self, *others)
        starts = torch.broadcast_tensors(*(elements.starts_of(layout) for layout in given))
        mask = functools.reduce(torch.logical_or if union else torch.logical_and, [x >= 0 for x in starts])
        # A block that one of them has whole is whole in a union; that one of them cuts is cut in an intersection.
        some = functools.reduce(torch.logical_or, [x == 0 if union else x > 0 for x in starts])
        cuts = mask & ~some if union else mask & some
        cells = self.rows * self.cols
        room = sum(layout.form.cut * (mask.numel() // max(layout.batch * cells, 1)) for layout in given)
        capacity, most, filled = room_for(operator, mask, cuts if room else None, capacity)
        layout = Layout.from_mask(mask, self.block_size, size=self.size, capacity=capacity)
        return replace(elements.joined(layout, cuts, min(room, most), given, union), filled=filled)

    def draw(self) -> str:
        """The first matrix as text, a character a block, `#` where it is present; at most 64 x 64 of its blocks.

        >>> print(Layout.from_mask(torch.ones(3, 3).bool().tril(), 16).draw())
        #..
        ##.
        ###
        """
        grid = self.to_dense().reshape(-1, *self.shape[-2:])[:1, :64, :64].tolist()
        return "\n".join("".join(".#"[block] for block in row) for matrix in grid for row in matrix)

    def __repr__(self) -> str:
        """The summary, and below it a small layout's first matrix, which waits for the device as a tensor's does."""
        drawn = 0 < self.rows <= 32 and 0 < self.cols <= 64 and self.batch and type(self.buffer) is Tensor
        return f"{self.summary()}\n{self.draw()}" if drawn and not checks.capturing() else self.summary()

    def summary(self) -> str:
        """One line, for which nothing is asked of the device."""
        height, width = self.block_size
        return (
            f"Layout(shape={self.shape}, block_size={height if height == width else self.block_size}, "
            f"size={self.size}, capacity={self.capacity}, device={self.device})"
        )


torch.serialization.add_safe_globals([Layout, Form])


def room_for(operator: str, mask: Tensor, cut: Tensor | None, capacity: int | None) -> tuple[int, int, bool]:
    """(room for the blocks of a mask, room for the cut ones among them, whether the host knows that blocks fill it).

    Without a capacity there is room for just those present, and for one at least; to count them costs a sync.
    """
    if capacity is not None:
        return capacity, min(mask.numel(), capacity), False
    checks.no_sync(operator, "capacity=None", "Give a capacity; mask.numel() is enough for any mask.")
    count, cuts = (int(mask.sum()), 0) if cut is None else torch.stack([mask.sum(), cut.sum()]).tolist()
    # A traced count is no number that Python could branch on.
    return max(count, 1), cuts, not torch.compiler.is_compiling() and count > 0


def check_block_size(operator: str, block_size: BlockSize) -> tuple[int, int]:
    """(height, width) of a block."""
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2 or any(not isinstance(b, int) or b not in BLOCKS for b in pair):
        raise ValueError(
            f"{operator}: block_size must be 16, 32, 64 or 128, or a pair of these, got {block_size!r}. A larger "
            "block is several of 128: repeat each element of the mask."
        )
    return pair


def check_size(operator: str, size: Any) -> tuple[int, int]:
    """(M, N) of matrices in elements."""
    whole = isinstance(size, tuple | list) and all(isinstance(n, int | torch.SymInt) for n in size)
    if not whole or len(size) != 2 or min(size) < 0:
        raise ValueError(f"{operator}: size must be (M, N), two ints of at least 0, got {size!r}.")
    return size[0], size[1]


def check_layouts(operator: str, **given: Any) -> None:
    """Every argument is a layout, on the device of the first."""
    first = next(iter(given))
    for argument, layout in given.items():
        if not isinstance(layout, Layout):
            raise TypeError(
                f"{operator}: {argument} must be a blocksparse.Layout, got {type(layout).__name__}. "
                "Make one with Layout.from_mask."
            )
        checks.same_device(operator, first, given[first].device, **{argument: layout.buffer})


def grid_of(size: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of blocks that cover a matrix."""
    return -(-size[0] // block[0]), -(-size[1] // block[1])


@register(BlocksparseLayout, cpu=_cpu, fake=lambda call: call.mask.new_empty(length(call.form), dtype=torch.int32))
def _layout() -> Any:
    from gossamer.blocksparse._triton.layout import layout

    return layout


_pytree.register_pytree_node(
    Layout,
    lambda layout: ([layout.buffer], (layout.lead, layout.form, layout.filled)),
    lambda buffers, given: Layout(tuple(given[0]), Form(*given[1]), next(iter(buffers)), given[2]),
    serialized_type_name="gossamer.blocksparse.Layout",
)
