"""Calls that have been checked, so that host time, which is most of a small call, is spent on checks once.

What a public function checks, and much of what it chooses, follows from the shapes, dtypes and devices of its tensors
and from its other arguments. Such a function has one `Checked`, keeps there what it found for a call, and finds it
again when a call like it comes.
"""

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_transforms = torch._C._functorch.peek_interpreter_stack
Found = TypeVar("Found")
Key = tuple[Any, ...]


def key_of(operands: tuple[Any, ...], options: tuple[Any, ...] = (), sizes: tuple[Any, ...] = ()) -> Key | None:
    """What checks of a call depend on. Of `sizes` 2.0 is another than 2, and True than 1.

    None where each call has to be checked: under `torch.compile`, in forward-mode differentiation and what torch.func
    transforms, and where an operand is anything but None or a strided tensor or parameter. Callers make none under
    autocast, which changes dtypes.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _transforms() is not None:
        return None
    parts: list[Any] = [options]
    for operand in operands:
        if operand is None:
            parts.append(None)
        elif type(operand) in _PLAIN and operand.layout is torch.strided:
            parts.append((operand.shape, operand.dtype, operand.device))
        else:
            return None
    if sizes:
        parts += sizes
        parts += map(type, sizes)
    return tuple(parts)


class Checked(Generic[Found]):
    """What the checks of a function's calls have found, by `key_of`; as many as fit a bound."""

    __slots__ = ("_found",)
    _MOST = 1024

    def __init__(self) -> None:
        self._found: dict[Key, Found] = {}

    def get(self, key: Key | None) -> Found | None:
        """What `keep` was given, or None."""
        if key is None:
            # Compiled code that had looked would be compiled anew whenever another call was kept.
            return None
        try:
            return self._found.get(key)
        except TypeError:  # an argument that no call may have, such as a list: the checks that follow say which
            return None

    def keep(self, key: Key | None, found: Found) -> None:
        """Once nothing has raised; None is no key."""
        if key is None:
            return
        if len(self._found) >= self._MOST:
            self._found.clear()
        self._found[key] = found
