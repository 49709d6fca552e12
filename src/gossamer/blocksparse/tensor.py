"""Block-sparse tensors: values of present blocks and the layout that says which these are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.blocksparse._torch import tensor as _cpu
from gossamer.blocksparse.arithmetic import Arithmetic
from gossamer.blocksparse.layout import Layout, check_layouts
from gossamer.blocksparse.lists import Form
from gossamer.blocksparse.records import BlocksparseFromDense, BlocksparseToDense, BlocksparseTranspose
from gossamer.blocksparse.rows import check_floats


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparseTensor(Arithmetic):
    """Matrices of which only the blocks of a layout are stored.

    Args:
        values: `[capacity, height, width]`, float, or integer or bool for functions that move data: an ordinary
            tensor, differentiable, the blocks in the layout's order. Numbers behind the last block, or beyond the
            matrix in a block that it cuts, take no part.
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
        call = BlocksparseToDense(self.values, self.layout.buffer, self.layout.form, fill)
        return _to_dense(call).view(self.shape)

    @property
    def mT(self) -> BlockSparseTensor:
        """The transposed matrices, blocks and the elements in them, with the layout `layout.transpose()`.

        Products need no such copy: `matmul(..., transpose_a=True)`. Source: Schön and Tompits, blksprs, section 3.2.

        >>> x = from_dense(torch.ones(16, 2), Layout.from_mask(torch.ones(1, 1).bool(), 16, size=(16, 2)))
        >>> x.mT.shape
        (2, 16)
        """
        call = BlocksparseTranspose(self.values, self.layout.buffer, self.layout.form)
        return BlockSparseTensor(_transpose(call), self.layout.transpose())

    if TYPE_CHECKING:
        # Bound in `matmul.py`, which knows tensors.
        def __matmul__(self, other: Tensor | BlockSparseTensor) -> Tensor: ...
        def __rmatmul__(self, other: Tensor) -> Tensor: ...

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
    return BlockSparseTensor(_from_dense(BlocksparseFromDense(flat, layout.buffer, layout.form)), layout)


def check_blocks(operator: str, kind: Any = "any", **given: Any) -> None:
    """Every argument is a block-sparse tensor, of floats if it must be "floating". "computed" takes whole numbers and
    bool too, and of floats those that kernels compute with."""
    for argument, x in given.items():
        if not isinstance(x, BlockSparseTensor):
            raise TypeError(
                f"{operator}: {argument} must be a BlockSparseTensor, got {type(x).__name__}. Make one with from_dense."
            )
        if kind == "floating" or (kind == "computed" and x.dtype.is_floating_point):
            check_floats(operator, argument, x.values)


def check_values(operator: str, **given: Tensor) -> None:
    """Every tensor has a dtype that blocks may have."""
    for argument, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.dtype not in _MOVED:
            checks.floating(operator, **{argument: tensor})


# Whole numbers; and float64, in which blocks are held and moved on a GPU too.
_MOVED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64)


def _from_dense_backward(call: BlocksparseFromDense, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    return {"x": _to_dense(BlocksparseToDense(grads[0], call.layout, call.form, 0.0))}


def _to_dense_backward(call: BlocksparseToDense, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    return {"values": _from_dense(BlocksparseFromDense(grads[0], call.layout, call.form))}


def _transpose_backward(call: BlocksparseTranspose, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    return {"values": _transpose(BlocksparseTranspose(grads[0], call.layout, Form(*call.form).mT))}


@register(
    BlocksparseFromDense,
    cpu=_cpu.from_dense,
    fake=lambda call: call.x.new_empty(Form(*call.form).blocks),
    backward=_from_dense_backward,
    saved=("layout",),
    repeats=True,
)
def _from_dense() -> Any:
    from gossamer.blocksparse._triton.tensor import from_dense

    return from_dense


@register(
    BlocksparseToDense,
    cpu=_cpu.to_dense,
    fake=lambda call: call.values.new_empty(call.form[0], *call.form[5:7]),
    backward=_to_dense_backward,
    saved=("layout",),
    repeats=True,
)
def _to_dense() -> Any:
    from gossamer.blocksparse._triton.tensor import to_dense

    return to_dense


@register(
    BlocksparseTranspose,
    cpu=_cpu.transpose,
    fake=lambda call: call.values.new_empty(call.values.mT.shape),
    backward=_transpose_backward,
    saved=("layout",),
    repeats=True,
)
def _transpose() -> Any:
    from gossamer.blocksparse._triton.transpose import transpose

    return transpose


torch.serialization.add_safe_globals([BlockSparseTensor])

_pytree.register_pytree_node(
    BlockSparseTensor,
    lambda tensor: ([tensor.values, tensor.layout], None),
    lambda parts, _: BlockSparseTensor(*parts),
    serialized_type_name="gossamer.blocksparse.BlockSparseTensor",
)
