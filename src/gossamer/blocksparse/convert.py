"""To and from PyTorch's block-sparse formats: BSR tensors, and the block masks of FlexAttention."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse.elements import of_rule, starts_of
from gossamer.blocksparse.layout import Layout, check_block_size, check_layouts, grid_of, room_for
from gossamer.blocksparse.lists import lost
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def from_sparse_bsr(x: Tensor) -> BlockSparseTensor:
    """A `BlockSparseTensor` of a BSR tensor of PyTorch's, without a sync: it knows how many blocks it has.

    Args:
        x: `[..., M, N]`, of layout `torch.sparse_bsr`, in blocks of 16, 32, 64 or 128 rows and columns. The block
            columns of a row may stand in any order; blocks of one place add up.

    Returns:
        `BlockSparseTensor`, differentiable in x. Every value is NaN (the lowest number of integers) where a GPU holds
        crow_indices or col_indices that break the rules of BSR.

    Raises:
        TypeError: x is no BSR tensor.
        ValueError: its blocks are of another size, or have dimensions of their own; or on the CPU crow_indices do not
            ascend from 0 to the number of blocks, or a block column is out of range.

    Source: `torch.sparse_bsr`.

    >>> from_sparse_bsr(torch.eye(32).to_sparse_bsr((16, 16))).layout.to_dense().tolist()
    [[True, False], [False, True]]
    """
    operator = "blocksparse.from_sparse_bsr"
    checks.tensors(operator, x=x)
    if x.layout is not torch.sparse_bsr:
        raise TypeError(
            f"{operator}: x must be of layout sparse_bsr, got {checks.name_of(x.layout)}. Use from_dense, or "
            "x.to_sparse_bsr."
        )
    crow, col, values = x.crow_indices(), x.col_indices(), x.values()
    if values.dim() != col.dim() + 2:
        raise ValueError(
            f"{operator}: x must have no dense dimensions, got blocks of {list(values.shape[col.dim() :])}."
        )
    block = check_block_size(operator, (values.shape[-2], values.shape[-1]))
    *lead, m, n = x.shape
    shape = (*lead, m // block[0], n // block[1])
    batch = math.prod(lead)
    crow, col = crow.reshape(batch, shape[-2] + 1), col.reshape(batch, col.shape[-1])
    place = torch.arange(col.shape[1], device=x.device).expand_as(col).contiguous()
    wrong = _check_bsr(operator, crow, col, shape[-1])
    row = torch.searchsorted(crow[:, 1:].contiguous().to(place.dtype), place, right=True)
    number = torch.arange(batch, device=x.device)[:, None] * shape[-2] + row.clamp(max=shape[-2] - 1)
    number = (number * shape[-1] + col.long().clamp(0, shape[-1] - 1)).view(-1)
    mask = torch.zeros(math.prod(shape), dtype=torch.bool, device=x.device)
    mask[number] = True
    layout = Layout.from_mask(mask.view(shape), block, size=(m, n), capacity=max(col.numel(), 1))
    given = values.reshape(-1, *block)
    if wrong is not None:
        given = torch.where(wrong, lost(given.dtype), given)
    # An assignment that accumulates adds in one order on a GPU, too.
    to = (layout.positions[number].long(),)
    if given.dtype is torch.bool:
        ones = given.new_zeros(layout.capacity, *block, dtype=torch.uint8).index_put(to, given.byte(), accumulate=True)
        return BlockSparseTensor(ones != 0, layout)
    zeros = given.new_zeros(layout.capacity, *block)
    return BlockSparseTensor(zeros.index_put(to, given, accumulate=True), layout)


def _check_bsr(operator: str, crow: Tensor, col: Tensor, cols: int) -> Tensor | None:
    """Raises on the CPU where a BSR tensor's metadata break their rules; bool `[]` on a GPU: whether they do."""
    count = col.shape[1]
    ascend = (crow[:, 0] == 0).all() & (crow[:, -1] == count).all() & (crow.diff() >= 0).all()
    inside = ((col >= 0) & (col < cols)).all()
    if crow.is_cuda:
        return ~(ascend & inside)
    if not ascend:
        raise ValueError(
            f"{operator}: crow_indices of x must ascend from 0 to the {count} blocks of a matrix, got "
            f"{crow[0].tolist()[:8]}. torch.sparse.check_sparse_tensor_invariants finds the mistake."
        )
    if not inside:
        raise ValueError(
            f"{operator}: col_indices of x must be from 0 to {cols - 1}, got {int(col.min())} to {int(col.max())}."
        )
    return None


def to_sparse_bsr(x: BlockSparseTensor) -> Tensor:
    """The BSR tensor of PyTorch's with the same blocks.

    Args:
        x: `[..., M, N]`, of whole blocks; the matrices of a batch need equally many, for BSR has no room for others.

    Returns:
        `[..., M, N]` of layout `torch.sparse_bsr`, differentiable in x. How many blocks there are is asked of the
        device, which costs one sync.

    Raises:
        TypeError: x is no `BlockSparseTensor`.
        ValueError: M or N is not of whole blocks, matrices have different numbers of them, or the layout overflowed.
        NotImplementedError: under CUDA-graph capture.

    Source: `torch.sparse_bsr`.

    >>> x = from_dense(torch.eye(32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> torch.equal(to_sparse_bsr(x).to_dense(), torch.eye(32))
    True
    """
    operator = "blocksparse.to_sparse_bsr"
    check_blocks(operator, x=x)
    layout, (height, width) = x.layout, x.layout.block_size
    if layout.size != (layout.rows * height, layout.cols * width):
        raise ValueError(
            f"{operator}: x must be of whole blocks of {height} x {width}, got {list(x.shape)}. BSR cuts none."
        )
    checks.no_sync(operator, "a BSR tensor", "Keep the BlockSparseTensor.")
    starts = layout.row_offsets[:: max(layout.rows, 1)] if layout.rows else layout.row_offsets.expand(layout.batch + 1)
    bounds = starts.tolist()
    counts = sorted({b - a for a, b in itertools.pairwise(bounds)})
    if bounds[-1] > layout.capacity:
        raise ValueError(f"{operator}: x must not have overflowed: {bounds[-1]} blocks, room for {layout.capacity}.")
    if len(counts) > 1:
        raise ValueError(
            f"{operator}: the matrices of x must have equally many blocks, got {counts[0]} to {counts[-1]}. "
            "Convert each."
        )
    lead, count = layout.shape[:-2], counts[0] if counts else 0
    within = layout.row_offsets[:-1].view(layout.batch, layout.rows) - starts[:-1, None]
    crow = torch.cat([within, within.new_full((layout.batch, 1), count)], 1)
    total = bounds[-1]
    values = x.values[:total].reshape(*lead, count, height, width)
    with warnings.catch_warnings():
        # PyTorch says at the first one that they are in beta.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_bsr_tensor(
            crow.view(*lead, layout.rows + 1), layout.col_indices[:total].view(*lead, count), values, size=x.shape
        )


def from_block_mask(mask: BlockMask, *, elements: bool = True, capacity: int | None = None) -> Layout:
    """The layout of the blocks that a block mask of FlexAttention's visits, cut as its `mask_mod` cuts partial ones.

    Args:
        mask: in blocks of 16, 32, 64 or 128. Its `mask_mod` is asked for each element of partial blocks, and has no say
            in full ones, as in FlexAttention.
        elements: False takes partial blocks whole.
        capacity: as in `Layout.from_mask`.

    Returns:
        `Layout` of `(B, H, M, N)`.

    Raises:
        TypeError: mask is no `BlockMask`.
        ValueError: its blocks are of another size.
        NotImplementedError: `capacity=None` under CUDA-graph capture.

    Source: `torch.nn.attention.flex_attention.BlockMask`.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
    >>> from_block_mask(mask).to_dense().tolist(), int(from_block_mask(mask).element_mask().sum())
    ([[[[True, False], [True, True]]]], 32896)
    """
    operator = "blocksparse.from_block_mask"
    if not hasattr(mask, "BLOCK_SIZE"):
        raise TypeError(f"{operator}: mask must be a BlockMask of FlexAttention's, got {type(mask).__name__}.")
    block = check_block_size(operator, (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1]))
    m, n = mask.seq_lengths
    grid = grid_of((m, n), block)
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, grid)
    present, cut = partial, partial
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, grid)
        present, cut = partial | full, partial & ~full
    if not elements:
        return Layout.from_mask(present, block, size=(m, n), capacity=capacity)
    takes, heads = torch.vmap(mask.mask_mod), present.shape[1]

    def rule(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # A mask_mod may look its indices up: none lies beyond the matrix.
        given = z // heads, z % heads, i.clamp(max=m - 1), j.clamp(max=n - 1)
        wide = torch.broadcast_tensors(*given)
        return takes(*(x.flatten() for x in wide)).view(wide[0].shape)

    capacity, room, filled = room_for(operator, present, cut, capacity)
    layout = Layout.from_mask(present, block, size=(m, n), capacity=capacity)
    return replace(of_rule(layout, cut, room, rule), filled=filled)


def _listed(counts: Tensor, indices: Tensor, grid: tuple[int, int]) -> Tensor:
    """Bool `[B, H, rows, cols]`: the first counts of the listed blocks of each row."""
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    width = max(indices.shape[3], grid[1])
    # One column more takes entries that are not listed.
    blocks = torch.zeros(*indices.shape[:3], width + 1, dtype=torch.bool, device=indices.device)
    blocks.scatter_(3, torch.where(listed, indices, width).long(), True)
    return blocks[:, :, : grid[0], : grid[1]]


def to_block_mask(layout: Layout, mask_mod: Callable[..., Any] | None = None) -> BlockMask:
    """The block mask of FlexAttention's that visits the layout's blocks; it costs no sync.

    Args:
        layout: `(B, H, rows, cols)` in blocks, or without H, or without both.
        mask_mod: which elements of these blocks take part, as FlexAttention has it, beside those that the layout leaves
            out; None takes all others. Blocks of which all take part are full ones, for which nothing is asked. The
            result's `mask_mod` knows the layout too: where FlexAttention is not compiled it looks at nothing else.

    Returns:
        `BlockMask` of `(B, H, M, N)`, with 1 for a leading dimension that the layout lacks.

    Raises:
        TypeError: layout is no `Layout`.
        ValueError: it has more than two leading dimensions.

    Source: `torch.nn.attention.flex_attention.BlockMask`.

    >>> mask = to_block_mask(Layout.from_mask(torch.ones(2, 2).bool().tril(), 128))
    >>> mask.to_dense().tolist()
    [[[[1, 0], [1, 1]]]]
    """
    operator = "blocksparse.to_block_mask"
    check_layouts(operator, layout=layout)
    if len(layout.shape) > 4:
        raise ValueError(f"{operator}: layout must be (B, H, rows, cols) at most, got {layout.shape}.")
    from torch.nn.attention.flex_attention import BlockMask, and_masks

    starts = starts_of(layout)
    starts = starts.view(*layout.shape[:-2], *[1] * (4 - len(layout.shape)), *layout.shape[-2:])
    (b, h), (height, width), buffer = starts.shape[:2], layout.block_size, layout.elements

    def stored(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = starts[batch % b, head % h, query // height, key // width]
        if buffer is None:
            return start >= 0
        word = buffer[start.clamp(min=0) + query % height * -(-width // 32) + key % width // 32]
        return (start == 0) | (start > 0) & ((word >> (key % width % 32)) & 1 != 0)

    def kinds(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)

    options: dict[str, Any] = {"BLOCK_SIZE": layout.block_size, "seq_lengths": layout.size}
    if mask_mod is not None:
        return BlockMask.from_kv_blocks(*kinds(starts >= 0), mask_mod=and_masks(stored, mask_mod), **options)
    return BlockMask.from_kv_blocks(*kinds(starts > 0), *kinds(starts == 0), mask_mod=stored, **options)
