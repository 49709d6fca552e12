"""Block-sparse tensors: values of present blocks and the layout that says which these are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.ops import register, undispatched
from gossamer.blocksparse._torch import tensor as _cpu
from gossamer.blocksparse.arithmetic import Arithmetic
from gossamer.blocksparse.layout import Layout, check_layouts


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparseTensor(Arithmetic):
    """Matrices of which only the blocks of a layout are stored.

    Args:
        values: `[capacity, height, width]`, float, or integer or bool for what moves data: an ordinary tensor,
            differentiable, the blocks in the layout's order. What stands behind the last block, or beyond the matrix
            in a block that it cuts, takes no part.
        layout: which blocks these are; shared between tensors.

    Raises:
        ValueError: values have another shape than the layout asks for, or live on another device.
        TypeError: values are neither floating, integer nor bool, or layout is no `Layout`.

    Source: Schön and Tompits, blksprs, Definition 3 (compressed representation).

    >>> layout = Layout.from_mask(torch.eye(2).bool(), 16)
    >>> BlockSparseTensor(torch.ones(2, 16, 16), layout).to_dense().sum().item()
    512.0
    """

    values: Tensor
    layout: Layout

    def __post_init__(self) -> None:
        operator = "blocksparse.BlockSparseTensor"
        check_layouts(operator, layout=self.layout)
        check_values(operator, values=self.values)
        expected = (self.layout.capacity, *self.layout.block_size)
        checks.shape(operator, "values", self.values, expected, "[capacity, height, width]", "like layout")
        checks.same_device(operator, "layout", self.layout.device, values=self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(..., M, N)`: the shape of the matrices in elements."""
        return self.layout.dense_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    def to_dense(self, fill: float = 0.0) -> Tensor:
        """The dense `[..., M, N]` tensor, with `fill` where no block is; differentiable in values."""
        layout, (m, n) = self.layout, self.layout.size
        out = undispatched(_to_dense, self.values)(self.values, *layout.places, layout.batch, m, n, fill)
        return out.view(self.shape)

    @property
    def mT(self) -> BlockSparseTensor:
        """The transposed matrices, `transpose(self)`. Products need no such copy: `matmul(..., transpose_a=True)`."""
        from gossamer.blocksparse.transpose import transpose

        return transpose(self)

    def sum(self, dim: int = -1) -> Tensor:
        """The sum of each row (`dim=-1`), `[..., M]`, or column (`dim=-2`), `[..., N]`; absent blocks are zeros.

        It has this tensor's dtype and is added up in float32; that of integers and bool is int64, exact. It is
        differentiable, and has the same bits in each run.

        Raises:
            ValueError: dim is another one.

        Source: Schön and Tompits, blksprs (row-wise operations).

        >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
        >>> x.sum()[0].item(), x.mean()[0].item(), (x - 3).amax()[0].item()
        (16.0, 0.5, -2.0)
        """
        from gossamer.blocksparse.rows import sum

        return sum(self, dim)

    def mean(self, dim: int = -1) -> Tensor:
        """The mean of each row or column, absent blocks counted as zeros, as `sum`; of floats."""
        from gossamer.blocksparse.rows import mean

        return mean(self, dim)

    def amax(self, dim: int = -1) -> Tensor:
        """The largest stored element of each row or column, as `sum`, in this tensor's dtype.

        Absent blocks take no part, as in `softmax`: a row without blocks gives -inf, of integers the lowest number.
        Elements that share the maximum share the gradient, as in `torch.amax`.
        """
        from gossamer.blocksparse.rows import amax

        return amax(self, dim)

    def __matmul__(self, other: Any) -> Tensor:
        """`matmul(self, other)` with a dense result, of a dense or a block-sparse other."""
        if not isinstance(other, Tensor | BlockSparseTensor):
            return NotImplemented
        from gossamer.blocksparse.matmul import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        if not isinstance(other, Tensor):
            return NotImplemented
        from gossamer.blocksparse.matmul import matmul

        return matmul(other, self)

    def __repr__(self) -> str:
        return (
            f"BlockSparseTensor(shape={self.shape}, dtype={checks.name_of(self.dtype)}, device={self.device}, "
            f"layout={self.layout.summary()})"
        )


def from_dense(x: Tensor, layout: Layout) -> BlockSparseTensor:
    """The blocks of a dense tensor that a layout names.

    Args:
        x: `[..., M, N]`, float32, float16 or bfloat16 (float64 on the CPU), integer or bool, any strides.
        layout: of shape `(..., rows, cols)` and size `(M, N)`.

    Returns:
        `BlockSparseTensor`, differentiable in x: elements outside of the layout's blocks get no gradient. Beyond M or
        N a block is filled with zeros. If the layout overflowed, every value is NaN; integers, which have none, are
        their lowest number.

    Raises:
        ValueError: x has another shape or device than the layout.
        TypeError: x is neither floating, integer nor bool, or layout is no `Layout`.

    Source: Schön and Tompits, blksprs, Definition 3.

    >>> blocks = from_dense(torch.ones(20, 20), Layout.from_mask(torch.eye(2).bool(), 16, size=(20, 20)))
    >>> blocks.values.sum(dim=(1, 2)).tolist()
    [256.0, 16.0]
    """
    operator = "blocksparse.from_dense"
    check_layouts(operator, layout=layout)
    check_values(operator, x=x)
    checks.shape(operator, "x", x, layout.dense_shape, "[..., M, N]", "like layout")
    checks.same_device(operator, "layout", layout.device, x=x)
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    values = undispatched(_from_dense, flat)(flat, *layout.places, *layout.block_size)
    return BlockSparseTensor(values, layout)


def check_blocks(operator: str, **given: Any) -> None:
    """Every argument is a block-sparse tensor."""
    for argument, value in given.items():
        if not isinstance(value, BlockSparseTensor):
            raise TypeError(
                f"{operator}: {argument} must be a BlockSparseTensor, got {type(value).__name__}. "
                "Make one with from_dense."
            )


def check_values(operator: str, **given: Tensor) -> None:
    """Every tensor has a dtype that blocks may have."""
    for argument, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.dtype not in _MOVED:
            checks.floating(operator, **{argument: tensor})


def check_computed(operator: str, **given: BlockSparseTensor) -> None:
    """Every block-sparse tensor that holds floats holds some that kernels compute with; integers and bool pass."""
    check_blocks(operator, **given)
    for argument, x in given.items():
        if x.dtype.is_floating_point:
            checks.floating(operator, **{f"{argument}.values": x.values})


def check_floating(operator: str, **given: BlockSparseTensor) -> None:
    """Every block-sparse tensor holds floats that kernels compute with."""
    check_computed(operator, **given)
    for argument, x in given.items():
        if not x.dtype.is_floating_point:
            raise TypeError(
                f"{operator}: {argument} must be float32, float16 or bfloat16 (float64 on the CPU), got "
                f"{checks.name_of(x.dtype)}. Convert it with {argument}.to(torch.float32)."
            )


# Whole numbers; and float64, in which blocks are held and moved on a GPU too.
_MOVED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.shape = inputs[0].shape


def _from_dense_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (undispatched(_to_dense, grad)(grad, *ctx.saved_tensors, *ctx.shape, 0.0), *[None] * 6)


def _to_dense_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (undispatched(_from_dense, grad)(grad, *ctx.saved_tensors, *ctx.shape[1:]), *[None] * 8)


_from_dense = register(
    "blocksparse_from_dense(Tensor x, Tensor nnz, Tensor row_indices, Tensor col_indices, Tensor positions, "
    "SymInt height, SymInt width) -> Tensor",
    cpu=_cpu.from_dense,
    fake=lambda x, nnz, row_indices, col_indices, positions, height, width: x.new_empty(
        col_indices.shape[0], height, width
    ),
    setup_context=_keep,
    backward=_from_dense_backward,
)
_to_dense = register(
    "blocksparse_to_dense(Tensor values, Tensor nnz, Tensor row_indices, Tensor col_indices, Tensor positions, "
    "SymInt z, SymInt m, SymInt n, float fill) -> Tensor",
    cpu=_cpu.to_dense,
    fake=lambda values, nnz, row_indices, col_indices, positions, z, m, n, fill: values.new_empty(z, m, n),
    setup_context=_keep,
    backward=_to_dense_backward,
)

torch.serialization.add_safe_globals([BlockSparseTensor])

_pytree.register_pytree_node(
    BlockSparseTensor,
    lambda tensor: ([tensor.values, tensor.layout], None),
    lambda parts, _: BlockSparseTensor(*parts),
    serialized_type_name="gossamer.blocksparse.BlockSparseTensor",
)
