"""Softmax along the rows of block-sparse matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.blocksparse._torch import softmax as _cpu
from gossamer.blocksparse.records import BlocksparseSoftmax, BlocksparseSoftmaxBwd
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

_NAME = "blocksparse.softmax"


def softmax(
    x: BlockSparseTensor, *, mask: Tensor | BlockSparseTensor | None = None, scale: float = 1.0
) -> BlockSparseTensor:
    """softmax(scale * x) along each row; absent blocks take no part, as if they held -inf.

    Args:
        x: `[..., M, N]` with any layout; float32, float16 or bfloat16 (float64 on the CPU). Elements that a pattern's
            cut blocks leave out (`Layout.elements`) take no part.
        mask: bool, True takes part: dense, broadcasting to `[..., M, N]`, or a `BlockSparseTensor` of x's layout.
            Elements that take no part are 0 in the result.
        scale: a factor of x.

    Returns:
        `BlockSparseTensor` with x's layout and dtype, computed in float32. A row in which nothing takes part is zeros.
        Differentiable once in x; the same bits in each run.

    Raises:
        ValueError: mask has another shape, device or layout, or scale is not finite.
        TypeError: x is no `BlockSparseTensor` or not floating, or mask is not bool.

    Source: Schön and Tompits, blksprs, section 3.2.2.

    >>> x = from_dense(torch.zeros(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> softmax(x).to_dense()[0].sum().item(), softmax(x).values[0, 0, 0].item()
    (1.0, 0.0625)
    """
    check_blocks(_NAME, "floating", x=x)
    layout = x.layout
    scale = checks.finite(_NAME, "scale", scale, "1.0 leaves x as it is.")
    given = None if mask is None else _mask(x, mask)
    call = BlocksparseSoftmax(x.values, given, layout.buffer, layout.form, scale)
    return replace(x, values=_softmax(call))


def _mask(x: BlockSparseTensor, mask: Any) -> Tensor:
    """`[1 or Z, 1 or M, 1 or N]`, or blocks with one dimension more, `[1, capacity, height, width]`."""
    blocks = isinstance(mask, BlockSparseTensor)
    if blocks:
        if not mask.layout.is_same(x.layout):
            raise ValueError(f"{_NAME}: mask must have the layout of x, got another one.")
        mask = mask.values
    checks.tensors(_NAME, mask=mask)
    checks.same_device(_NAME, "x", x.device, mask=mask)
    if mask.dtype is not torch.bool:
        raise TypeError(f"{_NAME}: mask must be bool, True takes part, got {checks.name_of(mask.dtype)}.")
    if blocks:
        return mask[None]
    hint = "Give blocks as a BlockSparseTensor of x's layout."
    own = checks.broadcast(_NAME, "mask", mask.shape, x.shape, "[..., M, N] = ", hint)
    mask = mask.reshape(own)
    if any(n > 1 for n in own[:-2]):
        mask = mask.expand(*x.shape[:-2], *own[-2:])
    return mask.reshape(math.prod(mask.shape[:-2]), *own[-2:])


def _backward(call: BlocksparseSoftmax, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    (out,) = kept
    return {"values": _softmax_bwd(BlocksparseSoftmaxBwd(grads[0], out, call.layout, call.form, call.scale))}


@register(
    BlocksparseSoftmax,
    cpu=_cpu.softmax,
    fake=lambda call: torch.empty_like(call.values, memory_format=torch.contiguous_format),
    backward=_backward,
    saved=("layout",),
    keep=lambda call, out: (out,),
    once_differentiable=_NAME,
    repeats=True,
)
def _softmax() -> Any:
    from gossamer.blocksparse._triton.softmax import softmax

    return softmax


@register(
    BlocksparseSoftmaxBwd,
    cpu=_cpu.softmax_bwd,
    fake=lambda call: torch.empty_like(call.out, memory_format=torch.contiguous_format),
    once_differentiable=_NAME,
    repeats=True,
)
def _softmax_bwd() -> Any:
    from gossamer.blocksparse._triton.softmax import softmax_bwd

    return softmax_bwd
