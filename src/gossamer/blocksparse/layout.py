"""Which blocks of a block-sparse matrix are present."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.ops import register, undispatched
from gossamer.blocksparse._torch import layout as _cpu
from gossamer.blocksparse.elements import joined as joined_elements
from gossamer.blocksparse.elements import starts_of, words_of
from gossamer.blocksparse.elements import to_dense as to_dense_elements
from gossamer.blocksparse.elements import transposed as transposed_elements

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
        filled: whether the host knows that there is no room behind the last block, because it has counted the blocks.
            Gradients of operators on single elements are cheaper then.
        elements: which elements of blocks take part in attention and softmax, int32, as `elements.py` has it: patterns
            cut blocks at their edges. None where all do. Layouts of tensors that are moved (`repeat`, `split`, `cat`,
            `adapt`, ...) and of products have whole blocks.

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
    filled: bool = False
    elements: Tensor | None = None

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
    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """nnz `[1]`, each block's row and column, and the number of each place's block, as operators take them."""
        return self.row_offsets[-1:], self.row_indices, self.col_indices, self.positions

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """`(..., M, N)`: the shape of the matrices in elements."""
        return (*self.shape[:-2], *self.size)

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
        whole = to_dense_elements(self).view(*self.shape, height, width).transpose(-3, -2)
        return whole.reshape(*self.shape[:-2], self.rows * height, self.cols * width)[..., :m, :n]

    @property
    def cut_room(self) -> int:
        """How many blocks there are words for in `elements`."""
        return 0 if self.elements is None else (self.elements.shape[0] - self.capacity) // words_of(self.block_size)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Layout:
        """The same on another device."""
        names = PARTS if self.elements is None else (*PARTS, "elements")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        return replace(self, **moved)

    @staticmethod
    def from_mask(
        mask: Tensor, block_size: BlockSize, *, size: tuple[int, int] | None = None, capacity: int | None = None
    ) -> Layout:
        """The layout whose blocks a mask names.

        Args:
            mask: `[..., rows, cols]`, one element a block, present where it differs from 0; bool or an integer.
            block_size: 16, 32, 64 or 128, or `(height, width)`.
            size: `(M, N)` in elements, where the last row or column of blocks is cut; None takes whole blocks.
            capacity: how many blocks to make room for. An int costs no sync: the host need not know the count, and
                `mask.numel()` is enough for any mask. Where more are present, `overflowed` is set and whatever is
                computed with the layout is NaN. None makes room for just those present, and for one at
                least, which costs one device-to-host sync.

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
        elif grid_of(size, block) != (rows, cols):
            raise ValueError(
                f"{operator}: size must be of {rows} x {cols} blocks of {block[0]} x {block[1]} like mask, got {size}."
            )
        if mask.dtype is not torch.bool:
            mask = mask != 0
        filled = False
        if capacity is None:
            checks.no_sync(operator, "capacity=None", "Give a capacity; mask.numel() is enough for any mask.")
            count = int(mask.sum())
            capacity = max(count, 1)
            # A traced count is no number that Python could branch on.
            filled = not torch.compiler.is_compiling() and count == capacity
        else:
            checks.positive(operator, "capacity", capacity, "It is the number of blocks to make room for.")
        parts = _layout(mask.reshape(math.prod(mask.shape[:-2]), rows, cols).contiguous(), capacity)
        whole = Layout(tuple(mask.shape), block, (int(size[0]), int(size[1])), *parts)
        return replace(whole, filled=filled)

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
        """The layout of the transposed matrices, with the same capacity. It costs no sync, and is made once: what the
        layout gives again is the same object, and the transposed one's transpose is the layout.

        >>> Layout.from_mask(torch.tensor([[1, 1, 0], [0, 0, 1]]), (16, 32)).transpose()
        Layout(shape=(3, 2), block_size=(32, 16), size=(96, 32), capacity=3, device=cpu)
        #.
        #.
        .#
        """
        kept = None if torch.compiler.is_compiling() else self.__dict__.get("_transposed")
        layout = kept() if isinstance(kept, weakref.ref) else kept
        if layout is not None:
            return layout
        block, size = self.block_size[::-1], self.size[::-1]
        given = self.col_indices, self.row_indices, self.transpose_order, self.positions
        call = undispatched(_layout_transpose, self.positions)
        columns, lines, order, positions = call(self.row_offsets[-1:], *given, self.rows, self.cols)
        shape, offsets = (*self.shape[:-2], self.cols, self.rows), (self.col_offsets, self.row_offsets)
        lists = offsets[0], columns, lines, offsets[1], order, positions
        layout = Layout(shape, block, size, *lists, filled=self.filled, elements=transposed_elements(self))
        # What a graph makes is there only when it is replayed.
        if not torch.compiler.is_compiling() and not checks.capturing():
            self.__dict__["_transposed"] = layout
            # No cycle: it would hold device memory until the garbage collector comes.
            layout.__dict__["_transposed"] = weakref.ref(self)
        return layout

    def is_same(self, other: Layout) -> bool:
        """Whether both are one layout, or share its metadata; equal masks are not compared."""
        if self is other:
            return True
        if (self.shape, self.block_size, self.size) != (other.shape, other.block_size, other.size):
            return False
        if self.positions is other.positions and self.capacity == other.capacity:
            return True
        if torch.compiler.is_compiling() or self.capacity != other.capacity:
            return False
        return self.device == other.device and self.positions.data_ptr() == other.positions.data_ptr() != 0

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

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
        starts = torch.broadcast_tensors(*(starts_of(layout) for layout in given))
        mask = functools.reduce(torch.logical_or if union else torch.logical_and, [x >= 0 for x in starts])
        # A block that one of them has whole is whole in a union; that one of them cuts is cut in an intersection.
        some = functools.reduce(torch.logical_or, [x == 0 if union else x > 0 for x in starts])
        cuts = mask & ~some if union else mask & some
        room = sum(layout.cut_room * (mask.numel() // max(layout.positions.numel(), 1)) for layout in given)
        filled = False
        if capacity is None:
            checks.no_sync(operator, "capacity=None", "Give a capacity; mask.numel() is enough for any mask.")
            count, room = torch.stack([mask.sum(), cuts.sum()]).tolist() if room else (int(mask.sum()), 0)
            capacity, filled = max(count, 1), not torch.compiler.is_compiling() and count > 0
        layout = Layout.from_mask(mask, self.block_size, size=self.size, capacity=capacity)
        elements = joined_elements(layout, cuts, min(room, capacity), given, union)
        return replace(layout, filled=filled, elements=elements)

    def plot(self, ax: Any = None) -> Any:
        """Draws the first matrix, present blocks dark, into a Matplotlib axis, a new one if None, and returns it.

        Raises:
            ImportError: Matplotlib is not installed (`pip install gossamer[cli]` installs it).
        """
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        (m, n), (rows, cols), (height, width) = self.size, self.shape[-2:], self.block_size
        grid = self.to_dense().reshape(-1, rows, cols)[0].cpu().numpy()
        extent = (0, cols * width, rows * height, 0)
        ax.imshow(grid, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", extent=extent, aspect="auto")
        ax.set(xlim=(0, n), ylim=(m, 0), xlabel=f"{n} columns", ylabel=f"{m} rows")
        return ax

    def draw(self) -> str:
        """The first matrix as text, a character a block, `#` where it is present; at most 64 x 64 of its blocks.

        >>> print(Layout.from_mask(torch.ones(3, 3).bool().tril(), 16).draw())
        #..
        ##.
        ###
        """
        grid = self.to_dense().reshape(-1, *self.shape[-2:])[:1, :64, :64].tolist()
        return "\n".join("".join(".#"[block] for block in row) for matrix in grid for row in matrix)

    def adapt(self, block_size: BlockSize, *, capacity: int | None = None) -> Layout:
        """The layout in blocks of another size that covers this one; `adapt_layout` takes values there.

        Args:
            block_size: 16, 32, 64 or 128, or `(height, width)`.
            capacity: as in `from_mask`, but for smaller blocks None makes room for all that there can be, and costs no
                sync.

        >>> Layout.from_mask(torch.eye(4).bool(), 16).adapt(32).to_dense().tolist()
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
        >>> indices = from_dense(torch.full((16, 16), 40), Layout.from_mask(torch.ones(1, 1).bool(), 16))
        >>> Layout.from_indices(indices, -1, 64).to_dense().tolist()
        [[False, False, True, False]]
        """
        from gossamer.blocksparse.indexed import layout_of

        return layout_of(indices, dim, size, capacity)

    def __repr__(self) -> str:
        """The summary, and below it a small layout's first matrix, which waits for the device as a tensor's does."""
        rows, cols = self.shape[-2:]
        drawn = 0 < rows <= 32 and 0 < cols <= 64 and self.batch and type(self.positions) is Tensor
        if not drawn or checks.capturing():
            return self.summary()
        return f"{self.summary()}\n{self.draw()}"

    def summary(self) -> str:
        """One line, for which nothing is asked of the device."""
        height, width = self.block_size
        return (
            f"Layout(shape={self.shape}, block_size={height if height == width else self.block_size}, "
            f"size={self.size}, capacity={self.capacity}, device={self.device})"
        )


torch.serialization.add_safe_globals([Layout])

PARTS = ("row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_order", "positions")
"""The lists of a layout, in the order in which operators take them."""
_STATIC = ("shape", "block_size", "size", "filled")


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
    cpu=_cpu.layout,
    fake=_fake,
)


_layout_transpose = register(
    "blocksparse_layout_transpose(Tensor nnz, Tensor col_indices, Tensor row_indices, Tensor transpose_order, "
    "Tensor positions, SymInt rows, SymInt cols) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.layout_transpose,
    fake=lambda nnz, *given: tuple(x.new_empty(x.shape) for x in given[:4]),
)


def _flatten(layout: Layout) -> tuple[list[Any], Any]:
    tensors = [getattr(layout, name) for name in (*PARTS, "elements")]
    return tensors, tuple(getattr(layout, name) for name in _STATIC)


def _unflatten(tensors: Iterable[Any], given: Any) -> Layout:
    *lists, elements = tensors
    shape, block, size, filled = given
    return replace(Layout(shape, block, size, *lists), filled=filled, elements=elements)


_pytree.register_pytree_node(
    Layout,
    _flatten,
    _unflatten,
    serialized_type_name="gossamer.blocksparse.Layout",
)
