"""Tensors that a cast of their module to 16 bits leaves wide."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WideTensors(nn.Module):
    """The base of modules with tensors for which 16 bits are too few: steps that an optimizer or a running mean adds
    would be rounded to 0, and angles at large positions be others."""

    _wide_tensors: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        tensors = [getattr(self, name, None) for name in self._wide_tensors]
        wide = {id(part) for tensor in tensors if tensor is not None for part in (tensor, tensor.grad)}

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if id(tensor) in wide and new.itemsize < 4 else new

        return super()._apply(moved, recurse)
