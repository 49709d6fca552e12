"""Results of earlier checks. Host time is most of a small call, so a function spends it on equal checks only once.

The checks of a public function, and many of its choices, depend only on the shapes, dtypes and devices of its tensors
and on its other arguments. A function keeps the result of its checks in one `Checked`, and a later call with the same
key finds it there.
"""

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# Looked up once: every call asks.
_STRIDED = torch.strided
_transforms = torch._C._functorch.peek_interpreter_stack
_autocasts = torch._C._is_any_autocast_enabled
Found = TypeVar("Found")
Key = tuple[Any, ...]


def key_of(operands: tuple[Any, ...], options: tuple[Any, ...] = (), sizes: tuple[Any, ...] = ()) -> Key | None:
    """The properties of a call that its checks depend on. In `sizes` 2.0 differs from 2, and True from 1.

    The key is None if every call has to be checked: under `torch.compile`, under autocast, which changes dtypes, in
    forward-mode differentiation, in transforms of torch.func, and if an operand is neither None nor a strided tensor or
    parameter.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _transforms() is not None or _autocasts():
        return None
    parts: list[Any] = [options]
    for operand in operands:
        if operand is None:
            parts.append(None)
        elif type(operand) in _PLAIN and operand.layout is _STRIDED:
            parts += operand.shape, operand.dtype, operand.device
        else:
            return None
    if sizes:
        parts += sizes
        parts += map(type, sizes)
    return tuple(parts)


class Checked(Generic[Found]):
    """Results of the checks of a function's calls, by `key_of`. Their number is bounded."""

    __slots__ = ("_found",)
    _MOST = 1024

    def __init__(self) -> None:
        self._found: dict[Key, Found] = {}

    def get(self, key: Key | None) -> Found | None:
        """The result that `keep` stored under this key, or None."""
        if key is None:
            # A look into the dict would make torch.compile compile anew whenever another call was kept.
            return None
        try:
            return self._found.get(key)
        except TypeError:  # an argument that cannot be hashed, a list for instance: the checks that follow name it
            return None

    def keep(self, key: Key | None, found: Found) -> None:
        """Stores the result of checks, after all checks have passed. None as a key stores nothing."""
        if key is None:
            return
        if len(self._found) >= self._MOST:
            self._found.clear()
        self._found[key] = found
