"""Element by element: what block-sparse tensors share with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.blocksparse.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self


def _of_one(function: Callable[..., Tensor]) -> Callable[..., Any]:
    name = function.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replace(self, values=function(self.values, *args, **kwargs))

    method.__name__ = name
    method.__doc__ = f"`torch.{name}` of each element of the present blocks."
    return method


def _of_two(name: str, function: Callable[[Any, Any], Any], turned: bool = False) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        operand = self.paired(name, other)
        if operand is NotImplemented:
            return NotImplemented
        return replace(self, values=function(operand, self.values) if turned else function(self.values, operand))

    method.__name__ = name
    return method


class Arithmetic:
    """Operators and functions on the elements of present blocks; absent blocks stay absent, whatever the function.

    The other operand is a number, a tensor of one element, or a block-sparse tensor that shares the layout.
    """

    values: Tensor
    layout: Layout

    def paired(self, name: str, other: Any) -> Any:
        """What an operator takes of its other operand; NotImplemented where it is none of those."""
        if isinstance(other, Arithmetic):
            if not self.layout.is_same(other.layout):
                raise ValueError(
                    f"blocksparse.BlockSparseTensor.{name}: both operands must share one Layout, got "
                    f"{self.layout.summary()} and {other.layout.summary()}. Bring both to a.layout.union(b.layout): "
                    "from_dense(x.to_dense(), union)."
                )
            return other.values
        if isinstance(other, Tensor) and other.numel() == 1 and other.dim() == 0:
            return other
        return other if isinstance(other, int | float) else NotImplemented

    __add__ = _of_two("__add__", torch.add)
    __radd__ = _of_two("__radd__", torch.add)
    __sub__ = _of_two("__sub__", torch.sub)
    __rsub__ = _of_two("__rsub__", torch.sub, turned=True)
    __mul__ = _of_two("__mul__", torch.mul)
    __rmul__ = _of_two("__rmul__", torch.mul)
    __truediv__ = _of_two("__truediv__", torch.div)
    __rtruediv__ = _of_two("__rtruediv__", torch.div, turned=True)
    __pow__ = _of_two("__pow__", torch.pow)
    __neg__ = _of_one(torch.neg)
    __abs__ = _of_one(torch.abs)
    abs = _of_one(torch.abs)
    clamp = _of_one(torch.clamp)
    cos = _of_one(torch.cos)
    exp = _of_one(torch.exp)
    gelu = _of_one(torch.nn.functional.gelu)
    log = _of_one(torch.log)
    neg = _of_one(torch.neg)
    reciprocal = _of_one(torch.reciprocal)
    relu = _of_one(torch.relu)
    rsqrt = _of_one(torch.rsqrt)
    sigmoid = _of_one(torch.sigmoid)
    silu = _of_one(torch.nn.functional.silu)
    sin = _of_one(torch.sin)
    sqrt = _of_one(torch.sqrt)
    square = _of_one(torch.square)
    tanh = _of_one(torch.tanh)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The blocks after `function`, which maps values `[capacity, height, width]` element by element.

        >>> x = from_dense(torch.ones(16, 16), Layout.from_mask(torch.ones(1, 1).bool(), 16))
        >>> x.apply(torch.erf).values.max().item() < 1
        True
        """
        return replace(self, values=function(self.values))  # type: ignore[type-var]

    def detach(self) -> Self:
        """The same blocks, cut from the autograd graph."""
        return replace(self, values=self.values.detach())  # type: ignore[type-var]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether values collect gradients, in place."""
        self.values.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """On another device or in another dtype, with the arguments of `torch.Tensor.to`."""
        values = self.values.to(*args, **kwargs)
        layout = self.layout if values.device == self.layout.device else self.layout.to(values.device)
        return replace(self, values=values, layout=layout)  # type: ignore[type-var]
