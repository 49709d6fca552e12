"""Which blocks of a block-sparse matrix are present."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.ops import register
from gossamer.blocksparse._torch.layout import layout as _cpu

if TYPE_CHECKING:
    from gossamer.blocksparse.tensor import BlockSparseTensor

BLOCKS = (16, 32, 64, 128)
"""Rows or columns that a block may have."""

BlockSize = int | tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The present blocks of Z matrices of rows x cols blocks, by rows and by columns. Make one with `from_mask`.

    Immutable, and shared between tensors. Blocks are numbered along rows, matrix after matrix (CSR order); a block's
    number is its place in `BlockSparseTensor.values`. Everything is int32 and on the device, and nothing was asked of
    it: how many blocks there are the host does not know, only how many there is room for.

    Args:
        shape: `(..., rows, cols)` in blocks; Z is the product of the leading dimensions.
        block_size: `(height, width)` of a block in elements, each 16, 32, 64 or 128.
        size: `(M, N)` in elements; the blocks of the last row and column may reach beyond.
        row_offsets: `[Z * rows + 1]`: row `z * rows + r` holds the blocks `row_offsets[row]` to `row_offsets[row + 1]`.
            These are true counts, which may exceed the capacity.
        col_indices: `[capacity]`: each block's column, ascending in a row; -1 behind the last block.
        row_indices: `[capacity]`: each block's row, `z * rows + r`; -1 behind the last block.
        col_offsets: `[Z * cols + 1]`: column `z * cols + c` holds the entries `col_offsets[column]` to
            `col_offsets[column + 1]` of `transpose_order`.
        transpose_order: `[capacity]`: the blocks' numbers, column by column, from top to bottom (CSC order).
        positions: `[Z * rows * cols]`: each block's number, -1 where it is absent. True numbers, which may lie beyond
            the capacity.

    Source: Schön and Tompits, blksprs, Definitions 1 to 4 (lookup table and reverse lookup table).

    >>> Layout.from_mask(torch.tensor([[True, False], [True, True]]), 16).col_indices.tolist()
    [0, 0, 1]
    """

    shape: tuple[int, ...]
    block_size: tuple[int, int]
    size: tuple[int, int]
    row_offsets: Tensor
    col_indices: Tensor
    row_indices: Tensor
    col_offsets: Tensor
    transpose_order: Tensor
    positions: Tensor

    @property
    def batch(self) -> int:
        """Z: the number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """Rows of blocks of a matrix."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of blocks of a matrix."""
        return self.shape[-1]

    @property
    def capacity(self) -> int:
        """How many blocks there is room for."""
        return self.col_indices.shape[0]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def nnz(self) -> Tensor:
        """int32 `[]` on the device: how many blocks are present; more than the capacity if it overflowed."""
        return self.row_offsets[-1]

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether there are more blocks than there is room for. Results are NaN then."""
        return self.nnz > self.capacity

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """`(..., M, N)`: the shape of the matrices in elements."""
        return (*self.shape[:-2], *self.size)

    def to_dense(self) -> Tensor:
        """Bool `[..., rows, cols]`: the mask that this is the layout of."""
        return (self.positions >= 0).view(self.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Layout:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _STATIC}
        return replace(self, **{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in moved.items()})

    def adapt(self, block_size: BlockSize, *, capacity: int | None = None) -> Layout:
        """The layout in blocks of another size that covers this one; `adapt_layout` takes values there.

        Args:
            block_size: 16, 32, 64 or 128, or `(height, width)`.
            capacity: as in `from_mask`, but for smaller blocks None makes room for all that there can be, and costs no
                sync.

        >>> Layout.from_mask(torch.eye(4), 16).adapt(32).to_dense().tolist()
        [[True, False], [False, True]]
        """
        from gossamer.blocksparse.rearrange import adapted

        return adapted(self, check_block_size("blocksparse.Layout.adapt", block_size), capacity)

    @staticmethod
    def from_indices(indices: BlockSparseTensor, dim: int, size: int, *, capacity: int | None = None) -> Layout:
        """The layout that a gather reads, and a scatter writes: the blocks in which there are elements that indices
        name.

        Args:
            indices: `[..., M, N]`, int32 or int64, a `BlockSparseTensor`; what is out of range names nothing.
            dim: the dimension along which they point, a leading one too.
            size: of that dimension; the others are those of indices.
            capacity: as in `from_mask`.

        Raises:
            ValueError: dim is none of the dimensions, or size is below 1.
            TypeError: indices are not int32 or int64.
            NotImplementedError: `capacity=None` under CUDA-graph capture.

        Source: Schön and Tompits, blksprs, section 3.3 (sparsity layout creation).

        >>> from gossamer.blocksparse import from_dense
        >>> indices = from_dense(torch.full((16, 16), 40), Layout.from_mask(torch.ones(1, 1), 16))
        >>> Layout.from_indices(indices, -1, 64).to_dense().tolist()
        [[False, False, True, False]]
        """
        from gossamer.blocksparse.indexed import layout_of

        return layout_of(indices, dim, size, capacity)

    @staticmethod
    def from_mask(
        mask: Tensor, block_size: BlockSize, *, size: tuple[int, int] | None = None, capacity: int | None = None
    ) -> Layout:
        """The layout whose blocks a mask names.

        Args:
            mask: `[..., rows, cols]`, one element a block, present where it differs from 0.
            block_size: 16, 32, 64 or 128, or `(height, width)`.
            size: `(M, N)` in elements, where the last row or column of blocks is cut; None takes whole blocks.
            capacity: how many blocks to make room for. An int costs no sync: the host need not know the count, and
                `mask.numel()` is enough for any mask. Where more are present, `overflowed` is set and whatever is
                computed with the layout is NaN. None makes room for just those present, and for one at
                least, which costs one device-to-host sync.

        Raises:
            ValueError: mask has fewer than two dimensions or 2^31 blocks, or sizes do not fit each other.
            TypeError: mask is no tensor.
            NotImplementedError: `capacity=None` under CUDA-graph capture.

        >>> Layout.from_mask(torch.eye(3), 64, size=(130, 192), capacity=4).row_offsets.tolist()
        [0, 1, 2, 3]
        """
        operator = "blocksparse.Layout.from_mask"
        checks.tensors(operator, mask=mask)
        block = check_block_size(operator, block_size)
        if mask.dim() < 2:
            raise ValueError(f"{operator}: mask must have shape [..., rows, cols], got {list(mask.shape)}.")
        if mask.numel() >= 1 << 31:
            raise ValueError(f"{operator}: mask must have fewer than 2^31 blocks, got {mask.numel()}. Use larger ones.")
        rows, cols = mask.shape[-2:]
        if size is None:
            size = rows * block[0], cols * block[1]
        elif grid_of(size, block) != (rows, cols):
            raise ValueError(
                f"{operator}: size must be of {rows} x {cols} blocks of {block[0]} x {block[1]} like mask, got {size}."
            )
        if mask.dtype is not torch.bool:
            mask = mask != 0
        if capacity is None:
            checks.no_sync(operator, "capacity=None", "Give a capacity; mask.numel() is enough for any mask.")
            capacity = max(int(mask.sum()), 1)
        else:
            checks.positive(operator, "capacity", capacity, "It is the number of blocks to make room for.")
        parts = _layout(mask.reshape(math.prod(mask.shape[:-2]), rows, cols).contiguous(), capacity)
        return Layout(tuple(mask.shape), block, (int(size[0]), int(size[1])), *parts)

    def __repr__(self) -> str:
        height, width = self.block_size
        return (
            f"Layout(shape={self.shape}, block_size={height if height == width else self.block_size}, "
            f"size={self.size}, capacity={self.capacity}, device={self.device})"
        )


_STATIC = ("shape", "block_size", "size")


def check_block_size(operator: str, block_size: BlockSize) -> tuple[int, int]:
    """(height, width) of a block."""
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2 or any(b not in BLOCKS for b in pair):
        raise ValueError(f"{operator}: block_size must be 16, 32, 64 or 128, or a pair of these, got {block_size!r}.")
    return pair


def check_layouts(operator: str, **given: Any) -> None:
    """Every argument is a layout, on the device of the first."""
    first = next(iter(given))
    for argument, layout in given.items():
        if not isinstance(layout, Layout):
            raise TypeError(
                f"{operator}: {argument} must be a blocksparse.Layout, got {type(layout).__name__}. "
                "Make one with Layout.from_mask."
            )
        checks.same_device(operator, first, given[first].device, **{argument: layout.positions})


def grid_of(size: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of blocks that cover a matrix."""
    return -(-size[0] // block[0]), -(-size[1] // block[1])


def _fake(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    z, rows, cols = mask.shape
    lengths = (z * rows + 1, capacity, capacity, z * cols + 1, capacity, z * rows * cols)
    return tuple(mask.new_empty(n, dtype=torch.int32) for n in lengths)  # type: ignore[return-value]


_layout = register(
    "blocksparse_layout(Tensor mask, SymInt capacity) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    gpu="gossamer.blocksparse._triton.layout:layout",
    fake=_fake,
)


def _flatten(layout: Layout) -> tuple[list[Any], Any]:
    tensors = [getattr(layout, f.name) for f in fields(layout) if f.name not in _STATIC]
    return tensors, tuple(getattr(layout, name) for name in _STATIC)


_pytree.register_pytree_node(
    Layout,
    _flatten,
    lambda tensors, given: Layout(*given, *tensors),
    serialized_type_name="gossamer.blocksparse.Layout",
)
