"""Norms of rows of which only some blocks are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks


def layer_norm(
    x: BlockSparseTensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> BlockSparseTensor:
    """`torch.nn.functional.layer_norm` over rows, whose absent blocks are zeros that count; x's blocks are kept.

    Args:
        x: `[..., M, N]`, floating. Mean and variance are taken in float32 at least, over all N columns.
        weight, bias: `[N]`, or None.
        eps: added to the variance.

    Returns:
        `BlockSparseTensor` of x's layout and dtype, differentiable in all three. Only stored blocks are read and
        written. If the layout overflowed, every value is NaN.

    Raises:
        ValueError: weight or bias has another shape, or lives on another device.
        TypeError: x is no `BlockSparseTensor`, or something is not floating.

    Source: Schön and Tompits, blksprs, section 3.3 (wrappers); `torch.nn.functional.layer_norm`.

    >>> x = from_dense(torch.arange(32.0).expand(32, 32), Layout.from_mask(torch.ones(2, 2).bool(), 16))
    >>> abs(layer_norm(x).to_dense().mean().item()) < 1e-6
    True
    """
    wide = _wide("blocksparse.layer_norm", x, weight=weight, bias=bias)
    checks.finite("blocksparse.layer_norm", "eps", eps, "It is added to the variance.")
    mean, n = wide.mean(-1)[..., None], x.shape[-1]
    centred = wide - mean
    stored = replace(wide, values=torch.ones_like(wide.values)).sum(-1)[..., None]
    # Absent elements are as far from the mean as zero is.
    variance = (centred.square().sum(-1)[..., None] + (n - stored) * mean.square()) / n
    return _scaled(centred * torch.rsqrt(variance + eps), x, weight, bias)


def rms_norm(x: BlockSparseTensor, weight: Tensor | None = None, eps: float | None = None) -> BlockSparseTensor:
    """`torch.nn.functional.rms_norm` over rows, whose absent blocks are zeros that count; x's blocks are kept.

    Args:
        x: `[..., M, N]`, floating. The mean square is taken in float32 at least, over all N columns.
        weight: `[N]`, or None.
        eps: added to the mean square; None takes x's dtype's.

    Returns, Raises: as in `layer_norm`.

    Source: Schön and Tompits, blksprs, section 3.3 (wrappers); `torch.nn.functional.rms_norm`.

    >>> x = from_dense(torch.full((32, 32), 3.0), Layout.from_mask(torch.ones(2, 2).bool(), 16))
    >>> round(rms_norm(x).to_dense().mean().item(), 4)
    1.0
    """
    wide = _wide("blocksparse.rms_norm", x, weight=weight)
    hint = "None takes that of x's dtype."
    eps = torch.finfo(x.dtype).eps if eps is None else checks.finite("blocksparse.rms_norm", "eps", eps, hint)
    square = wide.square().sum(-1)[..., None] / x.shape[-1]
    return _scaled(wide * torch.rsqrt(square + eps), x, weight, None)


def _wide(operator: str, x: BlockSparseTensor, **given: Tensor | None) -> BlockSparseTensor:
    """x in float32 or float64, after checks of it and of what is given for its columns."""
    check_blocks(operator, "floating", x=x)
    checks.floating(operator, **{k: t for k, t in given.items() if t is not None})
    for name, tensor in given.items():
        if tensor is not None:
            checks.shape(operator, name, tensor, (x.shape[-1],), "[N]", "like x")
    checks.same_device(operator, "x", x.device, **given)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(wide: BlockSparseTensor, x: BlockSparseTensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """The result in the dtype of x, its columns multiplied and moved."""
    wide = wide if weight is None else wide * weight
    return (wide if bias is None else wide + bias).to(x.dtype)
