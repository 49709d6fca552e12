"""Every operator with its tensors strided, turned, offset and expanded, among memory that holds NaN.

A kernel that takes a pointer without its stride reads neighbours of an element, and shows them.
"""

import mmap
import tempfile
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from gossamer._core.operator import OPERATORS, Strided
from tests.recorded import operator_of, recorded, registered


def _poisoned(shape: Any, like: Tensor) -> Tensor:
    bits = 8 * like.element_size() - 1
    value = float("nan") if like.is_floating_point() else True if like.dtype is torch.bool else (1 << bits) // 3
    return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)


def steps(x: Tensor) -> Tensor:
    """x as every second element of each dimension."""
    view = _poisoned([2 * n + 1 for n in x.shape], x)[tuple([slice(1, None, 2)] * x.dim())]
    return view.copy_(x)


def turned(x: Tensor) -> Tensor:
    """x as a transposed part of a matrix."""
    around = _poisoned([n + 2 for n in reversed(x.shape)], x)[tuple([slice(1, -1)] * x.dim())]
    return around.permute(*reversed(range(x.dim()))).copy_(x)


def offset(x: Tensor) -> Tensor:
    """x contiguous, one element behind the beginning of its memory."""
    return _poisoned([x.numel() + 2], x)[1:-1].view(x.shape).copy_(x)


LIES: tuple[Callable[[Tensor], Tensor], ...] = (steps, turned, offset)


def repeated(x: Tensor, dim: int) -> Tensor:
    """The first element along a dimension, expanded."""
    return x.narrow(dim, 0, 1).expand(x.shape)


def contiguous(arg: Any) -> Any:
    return arg.clone(memory_format=torch.contiguous_format) if isinstance(arg, Tensor) else arg


def run(name: str, args: list[Any]) -> tuple[Tensor, ...]:
    """The results of an operator, and the arguments that it writes."""
    operator = operator_of(name)
    written = [place for place, argument in enumerate(operator._schema.arguments) if argument.alias_info is not None]
    args = [arg.clone() if place in written else arg for place, arg in enumerate(args)]
    with torch.no_grad():
        out = operator(*args)
    found = out if isinstance(out, tuple | list) else () if out is None else (out,)
    return (*found, *(args[place] for place in written))


def compare(
    name: str, args: list[Any], lying: dict[int, Tensor], what: str, wanted: tuple[Tensor, ...] | None = None
) -> None:
    """The operator's results from `lying` arguments, by place, are those from contiguous copies of them, `wanted`."""
    if wanted is None:
        wanted = run(name, [contiguous(lying.get(i, a)) for i, a in enumerate(args)])
    found = run(name, [lying.get(i, a) for i, a in enumerate(args)])
    for one, other in zip(found, wanted, strict=True):
        # Another memory layout may take another path, which sums in another order.
        close = (
            {}
            if not one.is_floating_point()
            else {"rtol": 1e-4, "atol": 1e-4}
            if one.element_size() > 2
            else {"rtol": 2e-2, "atol": 2e-2}
        )
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text: f"{name}, {what}: {text}", **close)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", registered())
def test_memory_layouts(name: str, first: bool, device: torch.device, mode: str) -> None:
    """The first kinds of an operator's calls, or the others: kernels compile for each, and the interpreter is slow."""
    arguments = operator_of(name)._schema.arguments
    record = OPERATORS[name.split("::")[1]].record if name.split("::")[1] in OPERATORS else None
    hints = [Strided] * len(arguments) if record is None else get_type_hints(record, include_extras=True).values()
    # A launcher gets all others contiguous.
    strided = {place for place, hint in enumerate(hints) if "strided" in str(hint)}
    calls, few = recorded(device)[name], 1 if mode == "interpreter" else 2
    for args in calls[:few] if first else calls[few:]:
        args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        places = [
            place
            for place, (arg, argument) in enumerate(zip(args, arguments))
            if isinstance(arg, Tensor) and arg.numel() > 0 and argument.alias_info is None
        ]
        # The values are the same in each layout: one run serves all of them.
        wanted = run(name, [contiguous(arg) for arg in args])
        for lie in LIES:
            together = {place: lie(args[place]) for place in places}
            compare(name, args, together, lie.__name__, wanted)
            # One alone may take a path that several together do not.
            for place in set(places) & strided if mode != "interpreter" else ():
                compare(name, args, {place: together[place]}, f"{lie.__name__} {arguments[place].name}")
        for place in set(places) & strided:
            # Lists of places have to differ.
            if mode != "interpreter" and args[place].is_floating_point():
                for dim in range(args[place].dim()):
                    lying = {place: repeated(args[place], dim)}
                    compare(name, args, lying, f"{arguments[place].name} expanded along {dim}")


LIMIT = 1 << 31


def far_apart(x: Tensor, dim: int) -> Tensor:
    """x with its items along a dimension so far apart that the last begins beyond 2^31 elements, by a stride below.

    Its memory is that of a file of which only the pages that x fills exist.
    """
    stride = (LIMIT // (x.shape[dim] - 1) + 1) // 16 * 16 + 16
    strides, each = [0] * x.dim(), 1
    for other in reversed(range(x.dim())):
        if other != dim:
            strides[other] = each
            each *= x.shape[other]
    strides[dim] = stride
    size = (x.shape[dim] - 1) * stride + each
    with tempfile.TemporaryFile() as file:
        file.truncate(size * x.element_size())
        memory = mmap.mmap(file.fileno(), size * x.element_size())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("name", registered())
def test_offsets_beyond_32_bits(name: str, device: torch.device, mode: str) -> None:
    if mode != "interpreter":
        pytest.skip("kernels in the interpreter: on a GPU all of the memory would have to exist")
    arguments, args = operator_of(name)._schema.arguments, recorded(device)[name][0]
    args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    wanted = None
    for dim in range(max(arg.dim() for arg in args if isinstance(arg, Tensor))):
        lying = {
            place: far_apart(arg, dim)
            for place, (arg, argument) in enumerate(zip(args, arguments))
            if isinstance(arg, Tensor)
            and dim < arg.dim()
            and arg.shape[dim] > 2
            and argument.alias_info is None
            and arg.numel() > 0
        }
        if lying:
            wanted = wanted or run(name, [contiguous(arg) for arg in args])
            compare(name, args, lying, f"far apart along {dim}", wanted)
