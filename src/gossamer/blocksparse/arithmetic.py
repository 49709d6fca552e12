"""Element by element: the operators and methods that block-sparse tensors share with PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gossamer._core.ops import needs_gradient
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.rows import check_floats, fill_outside, reduced, with_vector

if TYPE_CHECKING:
    from typing_extensions import Self


def _of_one(function: Callable[..., Tensor]) -> Callable[..., Any]:
    name = function.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        values = self.taken(needs_gradient(self.values, *tensors))
        return replace(self, values=function(values, *args, **kwargs))

    method.__name__ = name
    method.__doc__ = f"`torch.{name}` of each element of the present blocks."
    return method


def _of_two(word: str, function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator, and the one whose left operand is the other one."""

    def of(name: str, turned: bool) -> Callable[..., Any]:
        vectors = f"__{word}__" if turned and word != "sub" else name

        def method(self: Any, other: Any) -> Any:
            if vectors in VECTORS and isinstance(other, Tensor) and other.dim() > 0:
                return replace(self, values=with_vector(vectors, self.values, self.layout, other))
            operand = self.paired(name, other)
            if operand is NotImplemented:
                return NotImplemented
            differentiable = needs_gradient(self.values, operand if isinstance(operand, Tensor) else None)
            values = self.taken(differentiable)
            if isinstance(other, Arithmetic):
                operand = other.taken(differentiable)
            return replace(self, values=function(operand, values) if turned else function(values, operand))

        method.__name__ = name
        return method

    return of(f"__{word}__", False), of(f"__r{word}__", True)


def _compared(name: str, function: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        operand = self.paired(name, other)
        if operand is NotImplemented:
            if not isinstance(other, Tensor):
                # An object that is neither number nor tensor differs, says Python.
                return NotImplemented
            raise TypeError(
                f"blocksparse.BlockSparseTensor.{name}: the other operand must be a number, a tensor of one element or "
                f"a BlockSparseTensor of the same Layout, got a tensor {list(other.shape)}. Compare with "
                "from_dense(other, x.layout), or x.to_dense()."
            )
        return replace(self, values=function(self.values, operand))

    method.__name__ = name
    method.__doc__ = "A bool tensor of the same layout."
    return method


ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (
    *(torch.abs, torch.clamp, torch.cos, torch.exp, functional.gelu, torch.log, torch.neg, torch.reciprocal),
    *(torch.relu, torch.rsqrt, torch.sigmoid, functional.silu, torch.sin, torch.sqrt, torch.square, torch.tanh),
)
"""PyTorch's functions that take block-sparse tensors as methods do."""
VECTORS = ("__add__", "__sub__", "__rsub__", "__mul__")
"""Operators whose other operand may be a vector."""
MOVES = (
    *("bfloat16", "bool", "double", "float", "half", "int", "long"),
    *("clone", "contiguous", "cpu", "cuda", "pin_memory"),
)
"""Methods of tensors that change where elements are, or their dtype, and no shape."""
_REDUCTIONS = ("sum", "mean", "amax")
_METHODS = {*(function.__name__ for function in ELEMENTWISE), *MOVES, *_REDUCTIONS}


def _operators() -> Iterator[tuple[Any, tuple[str, str]]]:
    for names in ("add", "sub", "mul", "pow", "matmul", "truediv div", "mod remainder", "floordiv floor_divide"):
        word, name = names.split()[0], names.split()[-1]
        pair = f"__{word}__", f"__r{word}__"
        yield from ((function, pair) for function in (getattr(torch, name), getattr(Tensor, name)))
        yield from ((pair[0], pair), (pair[1], (pair[1], pair[0])))


_OPERATORS = dict(_operators())
"""PyTorch's functions of two operands, or their names: the operators of a block-sparse left and of a right one."""


class Arithmetic:
    """Operators and functions on the elements of present blocks; absent blocks stay absent, whatever the function.

    The other operand is a number, a tensor of one element, or a block-sparse tensor that shares the layout; of `+`, `-`
    and `*` also a vector, `[..., M, 1]` with a number for each row, or `[..., 1, N]` with one for each column, whose
    gradient is summed in float32 over all blocks.
    """

    values: Tensor
    layout: Layout

    def paired(self, name: str, other: Any) -> Any:
        """The other operand as an operator takes it; NotImplemented where the operator cannot take it."""
        if isinstance(other, Arithmetic):
            if not self.layout.is_same(other.layout):
                raise ValueError(
                    f"blocksparse.BlockSparseTensor.{name}: both operands must share one Layout, got "
                    f"{self.layout.summary()} and {other.layout.summary()}. Layouts are compared as objects, not by "
                    "their blocks: make one and give it to both. Else bring both to union = a.layout.union(b.layout), "
                    "with adapt(x, union); where they have the same blocks, adapt(b, a.layout) is enough."
                )
            return other.values
        if isinstance(other, Tensor) and other.numel() == 1 and other.dim() == 0:
            return other
        return other if isinstance(other, int | float) else NotImplemented

    def taken(self, differentiable: bool) -> Tensor:
        """The values that an operator takes: with 1 for what stands for no element, if its gradient is to be 0."""
        return fill_outside(self.values, self.layout, 1) if differentiable else self.values

    __add__, __radd__ = _of_two("add", torch.add)
    __sub__, __rsub__ = _of_two("sub", torch.sub)
    __mul__, __rmul__ = _of_two("mul", torch.mul)
    __truediv__, __rtruediv__ = _of_two("truediv", torch.div)
    __pow__, __rpow__ = _of_two("pow", torch.pow)
    __mod__, __rmod__ = _of_two("mod", torch.remainder)
    __floordiv__, __rfloordiv__ = _of_two("floordiv", torch.floor_divide)
    __eq__, __ne__ = _compared("__eq__", torch.eq), _compared("__ne__", torch.ne)
    __lt__, __le__ = _compared("__lt__", torch.lt), _compared("__le__", torch.le)
    __gt__, __ge__ = _compared("__gt__", torch.gt), _compared("__ge__", torch.ge)
    # As a tensor's: a key is the object.
    __hash__ = object.__hash__
    abs, clamp, cos, exp, gelu, log, neg, reciprocal = map(_of_one, ELEMENTWISE[:8])
    relu, rsqrt, sigmoid, silu, sin, sqrt, square, tanh = map(_of_one, ELEMENTWISE[8:])
    __abs__, __neg__ = abs, neg

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """`torch.exp(x)` is `x.exp()`, and `torch.add(x, 1)` is `x + 1`, for what there is; every other one raises."""
        name = getattr(func, "__name__", str(func))
        # A compiler knows no names of the functions themselves.
        pair = _OPERATORS.get(func) or _OPERATORS.get(name)
        if pair is not None and len(args) == 2 and not kwargs:
            left, right = args
            return getattr(left, pair[0])(right) if isinstance(left, cls) else getattr(right, pair[1])(left)
        # Options that a reduction does not have are refused below.
        fits = name not in _REDUCTIONS or {*(kwargs or ())} <= {"dim"}
        if args and isinstance(args[0], cls) and name in _METHODS and fits:
            # Functions of `torch.nn.functional` hand their defaults on.
            options = {
                option: value for option, value in (kwargs or {}).items() if (option, value) != ("inplace", False)
            }
            return getattr(args[0], name)(*args[1:], **options)
        raise TypeError(
            f"torch.{name}: no argument may be a {cls.__name__}. For a function of single elements use "
            f"x.apply(torch.{name}); rows and columns have x.sum(dim), mean, amax and blocksparse.softmax; all "
            "else takes x.to_dense()."
        )

    def __getattr__(self, name: str) -> Any:
        if name in MOVES:
            return lambda *args, **kwargs: self._moved(getattr(self.values, name)(*args, **kwargs))
        # Dunder names are looked for by protocols, which go without.
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        other = "x.amax(dim)" if name == "max" else f"x.to_dense().{name}"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}. Use {other}.")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"blocksparse.BlockSparseTensor: a {type(self).__name__} has no elements to be indexed. Use "
            "blocksparse.split(x, sizes, dim) for parts of it, or x.to_dense()[...]."
        )

    def __bool__(self) -> bool:
        raise TypeError(
            f"blocksparse.BlockSparseTensor: a {type(self).__name__} is neither true nor false; it has many elements. "
            "Ask x.to_dense().any() or .all(), which waits for the device, or compare objects with `is`."
        )

    def apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The blocks after `function`, which maps values `[capacity, height, width]` element by element.

        Where gradients are recorded it gets 1 for what stands for no element, whose gradient is 0.

        >>> x = from_dense(torch.ones(16, 16), Layout.from_mask(torch.ones(1, 1).bool(), 16))
        >>> x.apply(torch.erf).values.max().item() < 1
        True
        """
        # The function may hold parameters of its own.
        values = self.taken(torch.is_grad_enabled() and self.values.is_floating_point())
        return replace(self, values=function(values))  # type: ignore[type-var]

    def sum(self, dim: int | None = None) -> Tensor:
        """The sum of all elements, or of each row (`dim=-1`), `[..., M]`, or column (`dim=-2`), `[..., N]`; absent
        blocks are zeros.

        It has this tensor's dtype and is added up in float32; that of integers and bool is int64, exact. It is
        differentiable, and has the same bits in each run.

        Raises:
            ValueError: dim is another one.

        Source: Schön and Tompits, blksprs (row-wise operations).

        >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
        >>> x.sum().item(), x.mean(-1)[0].item(), (x - 3).amax(-1)[0].item()
        (512.0, 0.5, -2.0)
        """
        return self._reduced("sum", dim, "sum")

    def mean(self, dim: int | None = None) -> Tensor:
        """The mean of all elements, or of each row or column, absent blocks counted as zeros, as `sum`; of floats."""
        check_floats("blocksparse.BlockSparseTensor.mean", "x", self.values)
        shape = self.layout.dense_shape
        return self._reduced("mean", dim, "sum") / (math.prod(shape) if dim is None else shape[dim])

    def amax(self, dim: int | None = None) -> Tensor:
        """The largest stored element, of all or of each row or column, as `sum`, in this tensor's dtype.

        Absent blocks take no part, as in `softmax`: a row without blocks gives -inf, of integers the lowest number.
        Elements that share the maximum share the gradient, as in `torch.amax`.
        """
        return self._reduced("amax", dim, "max")

    def _reduced(self, name: str, dim: int | None, how: str) -> Tensor:
        operator = f"blocksparse.BlockSparseTensor.{name}"
        if self.values.is_floating_point():
            check_floats(operator, "x", self.values)
        return reduced(operator, self.values, self.layout, dim, how)

    def detach(self) -> Self:
        """The same blocks, cut from the autograd graph."""
        return replace(self, values=self.values.detach())  # type: ignore[type-var]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether values collect gradients, in place."""
        self.values.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """On another device or in another dtype, with the arguments of `torch.Tensor.to`; so are `cpu()`, `float()` and
        their like, and `clone()`."""
        return self._moved(self.values.to(*args, **kwargs))

    def _moved(self, values: Tensor) -> Self:
        layout = self.layout if values.device == self.layout.device else self.layout.to(values.device)
        return replace(self, values=values, layout=layout)  # type: ignore[type-var]
