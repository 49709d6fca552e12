"""Autocast for public functions: operands of a product take the autocast dtype, everything else stays as it is."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def cast(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands in the dtype autocast asks for on their device, unchanged where it is off. None passes through."""
    device = next(operand.device for operand in operands if operand is not None)
    if not enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in operands)


def enabled(device: torch.device) -> bool:
    """Whether autocast is on for the device; the meta device has none."""
    # One question about all devices is answered faster than one about a device by its name.
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def disabled(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
