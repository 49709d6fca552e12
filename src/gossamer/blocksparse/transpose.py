"""Transposed block-sparse matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.blocksparse._torch import transpose as _cpu
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks


def transpose(x: BlockSparseTensor) -> BlockSparseTensor:
    """The transposed matrices, blocks and what is in them.

    Products need no transposed copy: `matmul` has `transpose_a` and `transpose_b`.

    Args:
        x: `[..., M, N]`.

    Returns:
        `BlockSparseTensor` `[..., N, M]`, differentiable in x, with the layout `x.layout.transpose()`, which is made
        once.

    Raises:
        TypeError: x is no `BlockSparseTensor`.

    Source: Schön and Tompits, blksprs, section 3.2 (transpose).

    >>> x = from_dense(torch.arange(2.0).expand(16, 2), Layout.from_mask(torch.ones(1, 1).bool(), 16, size=(16, 2)))
    >>> transpose(x).to_dense()[:, 0].tolist()
    [0.0, 1.0]
    """
    check_blocks("blocksparse.transpose", x=x)
    layout = x.layout.transpose()
    order, back = x.layout.transpose_order, layout.transpose_order
    call = undispatched(_transpose, x.values)
    return BlockSparseTensor(call(x.values, x.layout.row_offsets[-1:], order, back), layout)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    nnz, order, back = ctx.saved_tensors
    return undispatched(_transpose, grad)(grad, nnz, back, order), None, None, None


_transpose = register(
    "blocksparse_transpose(Tensor values, Tensor nnz, Tensor order, Tensor back) -> Tensor",
    cpu=_cpu.transpose,
    fake=lambda values, nnz, order, back: values.new_empty(values.shape[0], values.shape[2], values.shape[1]),
    setup_context=_context,
    backward=_backward,
)
