"""Functions of whole rows: norms of rows of which only some blocks are stored, and any other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks, check_floating, from_dense


def apply_rowwise(x: BlockSparseTensor, function: Callable[[Tensor], Tensor]) -> BlockSparseTensor:
    """A function of dense rows applied to x, whose absent blocks are zeros to it; of its result x's blocks are kept.

    The rows are dense for the time of the call, and need that memory. What works element by element needs none of that:
    apply it to `x.values`. `layer_norm` and `rms_norm` have ways of their own.

    Args:
        x: `[..., M, N]`, floating.
        function: takes and returns a dense `[..., M, N]`; that each row depends on itself alone is up to it.

    Returns:
        `BlockSparseTensor` of x's layout, differentiable in x.

    Raises:
        ValueError: the function returned another shape.
        TypeError: x is no `BlockSparseTensor`, or the function returned no floating tensor.

    Source: Schön and Tompits, blksprs, section 3.3 (row-wise functions).

    >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> apply_rowwise(x, lambda rows: rows / rows.sum(-1, keepdim=True)).to_dense()[0, 0].item()
    0.0625
    """
    operator = "blocksparse.apply_rowwise"
    check_blocks(operator, x=x)
    rows = function(x.to_dense())
    checks.floating(operator, result=rows)
    checks.shape(operator, "what function returns", rows, x.shape, "[..., M, N]", "like x")
    return from_dense(rows, x.layout)


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
    rows = _Rows("blocksparse.layer_norm", x, weight=weight, bias=bias)
    n = x.shape[-1]
    mean = rows.sum(rows.values) / n
    centred = torch.where(rows.held, rows.values - rows.spread(mean), 0)
    # Absent elements are as far from the mean as zero is.
    variance = (rows.sum(centred.square()) + (n - rows.sum(rows.held.to(mean.dtype))) * mean.square()) / n
    return rows.result(centred * rows.spread(torch.rsqrt(variance + eps)), weight, bias)


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
    rows = _Rows("blocksparse.rms_norm", x, weight=weight)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = rows.sum(rows.values.square()) / x.shape[-1]
    return rows.result(rows.values * rows.spread(torch.rsqrt(square + eps)), weight, None)


class _Rows:
    """The values of a tensor, zero where nothing is held, with sums over rows, in float32 or float64."""

    def __init__(self, operator: str, x: BlockSparseTensor, **given: Tensor | None) -> None:
        check_floating(operator, x=x)
        checks.floating(operator, **{k: t for k, t in given.items() if t is not None})
        for name, tensor in given.items():
            if tensor is not None:
                checks.shape(operator, name, tensor, (x.shape[-1],), "[N]", "like x")
        checks.same_device(operator, "x", x.device, **given)
        layout, self._x = x.layout, x
        (m, n), (height, width), device = layout.size, layout.block_size, x.device
        self._row, self._col = layout.row_indices.clamp(min=0), layout.col_indices.clamp(min=0)
        i = (self._row % max(layout.rows, 1) * height)[:, None] + torch.arange(height, device=device)
        j = (self._col * width)[:, None] + torch.arange(width, device=device)
        exists = layout.row_indices >= 0
        self.held = ((i < m) & exists[:, None])[:, :, None] & (j < n)[:, None, :]
        wide = x.values.to(torch.promote_types(x.dtype, torch.float32))
        self.values = torch.where(self.held, wide, 0)

    def sum(self, values: Tensor) -> Tensor:
        """`[Z * rows, height]`: over the stored columns of each row, block by block in the order of columns."""
        layout: Layout = self._x.layout
        parts = values.sum(-1)
        at = layout.positions.clamp(min=0, max=layout.capacity - 1)
        grid = torch.where((layout.positions >= 0)[:, None], parts[at], 0)
        return grid.view(layout.batch * layout.rows, layout.cols, parts.shape[1]).sum(1)

    def spread(self, rows: Tensor) -> Tensor:
        """`[capacity, height, 1]`: a number a row, for each block."""
        if not rows.numel():
            return rows.new_zeros(self.values.shape[0], self.values.shape[1], 1)
        return rows[self._row][:, :, None]

    def result(self, values: Tensor, weight: Tensor | None, bias: Tensor | None) -> BlockSparseTensor:
        """The tensor of values times the weight of their columns, plus the bias."""
        if weight is not None:
            values = values * self._columns(weight)
        if bias is not None:
            values = values + self._columns(bias)
        lost = torch.where(self._x.layout.overflowed, torch.nan, 0.0).to(values.dtype)
        values = torch.where(self.held, values, 0) + lost
        return BlockSparseTensor(values.to(self._x.dtype), self._x.layout)

    def _columns(self, x: Tensor) -> Tensor:
        """`[capacity, 1, width]`: a number a column, for each block."""
        cols, width = max(self._x.layout.cols, 1), self.values.shape[2]
        padded = torch.nn.functional.pad(x.to(self.values.dtype), (0, cols * width - x.shape[0]))
        return padded.view(cols, width)[self._col][:, None, :]
