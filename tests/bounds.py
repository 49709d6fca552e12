"""Kernels in Triton's interpreter may touch no memory but that of their arguments.

The interpreter reads and writes raw host memory, where an address beyond an allocation mostly goes unnoticed; a GPU
faults there, or only where the neighbouring page belongs to nobody.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.language.core import is_builtin
from triton.runtime import interpreter


class Bounds:
    """The interpreter's memory. Each address of a load or store is looked up among the storages of the arguments."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.starts, self.ends = memory, np.zeros(1, np.uint64), np.zeros(1, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def allow(self, args: Any) -> None:
        """Sets the arguments of the launch that follows."""
        storages = {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, _tensors(args))}
        self.starts = np.array(sorted({0: 0, **storages}), np.uint64)
        self.ends = self.starts + np.array([storages.get(int(start), 0) for start in self.starts], np.uint64)

    def check(self, access: str, pointers: Any, mask: Any, size: int) -> None:
        at = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        outside = at[at + np.uint64(size) > self.ends[np.searchsorted(self.starts, at, "right") - 1]]
        if outside.size:
            near = [int(outside[0]) - int(start) for start in self.starts[1:]]
            raise IndexError(
                f"{access} of {outside.size} elements beyond every argument: {near} bytes behind where they begin"
            )

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self.memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check("store", pointers, mask, value.itemsize)
        return self.memory.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check("atomic", pointers, mask, value.itemsize)
        return self.memory.atomic_rmw(op, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, order: Any) -> Any:
        self.check("atomic", pointers, True, value.itemsize)
        return self.memory.atomic_cas(pointers, compared, value, order)


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument that is one, a tuple, a descriptor or anything else."""
    if isinstance(arg, (tuple, list)):
        for part in arg:
            yield from _tensors(part)
    elif isinstance(tensor := getattr(arg, "base", arg), torch.Tensor):
        yield tensor


def install() -> None:
    """From now on every launch in the interpreter is checked, and takes a third of the time."""
    builder = interpreter.interpreter_builder
    # The interpreter computes each sum of integers once more in int64, and raises nothing without `debug`.
    builder.options = replace(builder.options, sanitize_overflow=False)
    kinds, find = {}, interpreter._get_np_dtype

    def np_dtype(kind: Any) -> np.dtype[Any]:
        if kind.scalar.name not in kinds:
            kinds[kind.scalar.name] = find(kind)
        return kinds[kind.scalar.name]

    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, *rest: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._get_np_dtype, interpreter._patch_builtin = np_dtype, patch_builtin
    bounds = interpreter._interpreter = Bounds(interpreter._interpreter)
    prepare = interpreter.GridExecutor._init_args_hst

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        made = prepare(self, args, kwargs)
        bounds.allow([*made[0], *made[1].values()])
        return made

    interpreter.GridExecutor._init_args_hst = arguments
