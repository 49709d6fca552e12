"""Tensor descriptors of a kind that was checked before: Triton's checks of one take longer than some kernels."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_kinds: dict[Hashable, dict[str, Any]] = {}


def describe(
    tensor: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Callable[[], Any]
) -> TensorDescriptor:
    """The descriptor of a tensor, read in tiles of `block`, in the layout that dtype and block have here.

    Triton checks the first of a kind. Of those that follow the caller knows that address and strides are multiples of
    16 bytes.
    """
    kind = tensor.dtype, *block
    fields = _kinds.get(kind)
    if fields is None:
        descriptor = TensorDescriptor(tensor, shape, strides, block, layout())
        # A launch knows the kind by this object: to look into a layout takes longer than all else that it asks.
        vars(descriptor)["kind"] = object()
        _kinds[kind] = {**vars(descriptor), "base": None}
        return descriptor
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor, shape=shape, strides=strides)
    return descriptor
