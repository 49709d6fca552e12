"""Gather along any dimension of block-sparse matrices."""

from __future__ import annotations

from gossamer.blocksparse.indexed import indexed
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks


def gather(input: BlockSparseTensor, dim: int, index: BlockSparseTensor) -> BlockSparseTensor:
    """Elements of `input` that indices name along a dimension, as `torch.gather`: `out[z, i, j] = input[z, i,
    index[z, i, j]]` for `dim=-1`.

    Args:
        input: `[..., M, N]`, of any dtype. Blocks that its layout does not store are zero.
        dim: any dimension, a leading one too.
        index: `[..., M', N']`, int8, int16, int32 or int64, in blocks of the same size, and but for `dim` at most as
            long as input along each dimension. Its layout says where results are; -1 gives 0. Any other index that
            is out of range raises on the CPU; on a GPU it gives NaN, and of integers the lowest.

    Returns:
        `BlockSparseTensor` of input's dtype and index's layout, differentiable in input. If a layout overflowed,
        every value is NaN.

    Raises:
        ValueError: shapes, blocks or devices do not fit, or on the CPU an index is out of range.
        TypeError: index holds no such integers, or an argument is no `BlockSparseTensor`.

    Source: Schön and Tompits, blksprs, section 3.2.4; `torch.gather`.

    >>> layout = Layout.from_mask(torch.eye(2).bool(), 16)
    >>> x = from_dense(torch.arange(32.0).expand(32, 32), layout)
    >>> index = from_dense(torch.full((32, 32), 3), layout)
    >>> gather(x, -1, index).to_dense().unique().tolist()
    [0.0, 3.0]
    """
    operator = "blocksparse.gather"
    check_blocks(operator, "computed", input=input)
    return BlockSparseTensor(
        indexed(operator, input.layout, dim, index).gather(input.values, strict=True), index.layout
    )
