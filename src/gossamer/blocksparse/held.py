"""Which of a tensor's values stand for elements: not those behind the last block, or beyond the matrix in a cut one.

What stands there takes no part, whatever it is, and its gradient is 0. A function of every value alone would not see to
that: the gradient that comes back is 0, and times the derivative of a root or a logarithm at 0 it is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer._core import checks

if TYPE_CHECKING:
    from gossamer.blocksparse.layout import Layout


def held(layout: Layout, behind: bool = True) -> list[Tensor]:
    """Bool masks that broadcast to `[capacity, height, width]`, all of them True at values that stand for an element.

    There are none where the host knows that every value does. They are made once. Without `behind`, blocks behind the
    last count as blocks: many operators read none of these.
    """
    if torch.compiler.is_compiling():
        return _masks(layout, behind)
    name = "_held" if behind else "_cut"
    kept: list[Tensor] | None = layout.__dict__.get(name)
    if kept is None:
        # A gradient may ask later for what inference made first.
        with torch.inference_mode(False):
            kept = _masks(layout, behind)
        # What a graph makes is there only when it is replayed.
        if type(layout.positions) is Tensor and not checks.capturing():
            layout.__dict__[name] = kept
    return kept


def filled(values: Tensor, layout: Layout, fill: float | int | bool, behind: bool = True) -> Tensor:
    """Values with `fill` where they stand for no element, and a gradient of 0 there."""
    for mask in held(layout, behind):
        values = torch.where(mask, values, fill)
    return values


def _masks(layout: Layout, behind: bool) -> list[Tensor]:
    (m, n), (height, width), device = layout.size, layout.block_size, layout.device
    lines = None if not behind or layout.filled else (layout.row_indices >= 0)[:, None]
    if m % height:
        at = (layout.row_indices % max(layout.rows, 1) * height)[:, None] + torch.arange(height, device=device)
        lines = at < m if lines is None else (at < m) & lines
    masks = [] if lines is None else [lines[:, :, None]]
    if n % width:
        at = (layout.col_indices * width)[:, None] + torch.arange(width, device=device)
        masks.append((at < n)[:, None, :])
    return masks
