"""Values that stand for no element: those behind the last block, and those beyond the matrix in a block that it cuts.

Values of no element take no part, NaN included, and their gradient is 0. The derivative of a root or a logarithm at 0
is infinite, and times a gradient of 0 it is NaN: functions of single elements get another number in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.blocksparse._torch import tensor as _cpu
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.records import BlocksparseFillOutside


def fill_outside(values: Tensor, layout: Layout, fill: float, behind: bool = True) -> Tensor:
    """Values with `fill` where they stand for no element, and a gradient of 0 there; the values themselves where the
    host knows that all of them stand for elements.

    Without `behind` blocks behind the last count as blocks, for operators that do not read these.
    """
    form = layout.form
    if not ((behind and not layout.filled) or form.m % form.height or form.n % form.width):
        return values
    call = BlocksparseFillOutside(values, layout.buffer, form, float(fill), behind)
    # A compiler fuses PyTorch's own functions with those that follow.
    return _cpu.fill_outside(call) if torch.compiler.is_compiling() else _fill_outside(call)


def _backward(call: BlocksparseFillOutside, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    return {"values": _fill_outside(call._replace(values=grads[0], fill=0.0))}


@register(
    BlocksparseFillOutside,
    cpu=_cpu.fill_outside,
    fake=lambda call: torch.empty_like(call.values, memory_format=torch.contiguous_format),
    backward=_backward,
    saved=("layout",),
)
def _fill_outside() -> Any:
    from gossamer.blocksparse._triton.tensor import fill_outside

    return fill_outside
