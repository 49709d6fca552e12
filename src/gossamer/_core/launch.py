"""Kernel launches: device guard, and a short path for repeated calls.

A small operator is bound by host time. Triton's own launcher rebinds and respecialises every argument on every call
(6 to 13 us); a `Kernel` does that once for all launches that compile to the same code, and afterwards hands integers
straight to the compiled kernel.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gossamer._core.compiling import NotCompiled, walk, walking
from gossamer._core.ops import INTERPRET
from gossamer._core.stream_memory import Epoch, recorder, recorders
from gossamer._core.stream_memory import counters as counters
from gossamer._core.stream_memory import flags as flags
from gossamer._core.stream_memory import scratch as scratch
from gossamer._core.stream_memory import zeros as zeros

_HIP = torch.version.hip is not None
_INT32 = (1 << 31) - 1


_COUNTS = {"B", "G", "M", "T", "Tq", "ahead", "first", "groups", "heads", "lines", "padded", "parts", "room", "rows"}
_COUNTS |= {"slots", "tokens"}
"""The names of kernel arguments that count rows, tokens or room, and change from call to call. Triton would compile a
kernel three times: for 1, for multiples of 16 and for all others. The three have the same code but for a program's few
words of lists, one for each of its rows. A kernel says `specialize` where the name is the pitch or the bound of
neighbouring elements in any of its variants, so that these are read and written 16 bytes at a time: where rows are
stored side by side, or one program goes through the words of all rows."""


def kernel(fn: Any = None, specialize: tuple[str, ...] = (), **options: Any) -> Any:
    """Decorates a kernel that the host launches: `@triton.jit` with these options, and the short path of `Kernel`.

    The kernel is compiled once for all values of its `_COUNTS`, but for those that `specialize` names.
    """
    if fn is None:
        return partial(kernel, specialize=specialize, **options)
    # Here, for much of this file serves on machines without it.
    import triton

    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    counts = [name for name in names if name in _COUNTS and name not in {*specialize, *fn.__annotations__}]
    given = options.pop("do_not_specialize", ())
    return Kernel(triton.jit(fn, do_not_specialize=[*given, *counts], **options))


class Kernel:
    """A function of `@triton.jit` or `@gluon.jit` whose constexpr parameters come last, in the order of `meta`.

    The key of a compiled launch holds the properties for which Triton compiles: the dtypes of pointers, whether
    integers are 1, multiples of 16 or beyond 32 bits, `meta` and options. Making the key takes some 2 us of the host,
    0.5 us more than looking up a key written by hand. Pointers that `do_not_specialize` or
    `do_not_specialize_on_alignment` names may have any alignment.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._compiled: dict[Hashable, Any] = {}
        self._loose = _named(fn, "do_not_specialize")
        self._unaligned = self._loose | _named(fn, "do_not_specialize_on_alignment")

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        meta: dict[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 2,
        maxnreg: int | None = None,
        launch_pdl: bool = False,
    ) -> None:
        """Launches over `grid` on the current stream of the device that holds the first argument.

        `maxnreg` bounds a thread's registers on NVIDIA GPUs, where more programs at once matter more than a spill.
        With `launch_pdl` the kernel may start while the kernel before it on the stream drains (programmatic dependent
        launch); it must then call `gdc_wait` before it reads the results of that kernel.
        """
        # A tensor descriptor names its tensor `base`.
        device = getattr(args[0], "base", args[0]).device.index
        given = args
        if recorders:
            args = [int(arg) if type(arg) is Epoch else arg for arg in args]
        pointers: list[Any] = []
        kinds: list[Any] = []
        bits = 0
        # The cheapest tests first: `isinstance(arg, Tensor)` takes longest for arguments that are no tensors.
        for at, arg in enumerate(args):
            if type(arg) is int:
                if at in self._loose:
                    kinds.append(arg > _INT32)
                else:
                    kinds.append(1 if arg == 1 else (3 if arg % 16 else 16) + (arg > _INT32))
            elif arg is None:
                kinds.append(None)
            elif isinstance(arg, Tensor):
                # On AMD Triton also asks whether 32 bits reach all of a tensor's memory.
                kinds.append((arg.dtype, arg.untyped_storage().size() > _INT32) if _HIP else arg.dtype)
                arg = arg.data_ptr()
                if at not in self._unaligned:
                    bits |= arg
            else:
                kinds.append(_kind(arg))
            pointers.append(arg)
        misaligned = bits % 16 != 0
        key = (*kinds, *meta.values(), device, misaligned, num_warps, num_stages, maxnreg, launch_pdl)
        if INTERPRET:
            hash(key)
            # The interpreter calls PyTorch, which is no step of the launcher.
            with _disable_current_modes() if recorders else nullcontext():
                self.fn[grid](*args, **meta)
            if recorders:
                _record((self._interpret, (tuple(meta),)), grid, given, meta, misaligned)
            return
        previous = torch._C._cuda_getDevice()
        guard = device != previous
        if guard:
            torch.cuda.set_device(device)
        try:
            launch = self._compiled.get(key)
            if launch is None or misaligned or walking:
                # A misaligned pointer keeps Triton's own launcher, which specialises on each pointer's alignment.
                options = {"num_warps": num_warps, "num_stages": num_stages}
                if launch_pdl:
                    options["launch_pdl"] = True
                if maxnreg is not None and not _HIP:
                    options["maxnreg"] = maxnreg
                if walk.raises and launch is None and not torch._C._cuda_isCurrentStreamCapturing():
                    raise NotCompiled
                if walk.pool is not None:
                    if launch is None:
                        walk.submit((self, key), self._compile, key, device, args, {**meta, **options})
                    return
                launch = self._keep(key, self.fn[grid](*args, **meta, **options))
            else:
                run, arguments = launch
                run(*grid, torch._C._cuda_getCurrentRawStream(device), *arguments, *pointers, *meta.values())
            if recorders:
                _record(launch, grid, given, meta, misaligned)
        finally:
            if guard:
                torch.cuda.set_device(previous)

    def _interpret(self, x: int, y: int, z: int, _: int, names: tuple[str, ...], *args: Any) -> None:
        first = len(args) - len(names)
        self.fn[x, y, z](*args[:first], **dict(zip(names, args[first:])))

    def _keep(self, key: Hashable, compiled: Any) -> tuple[Any, tuple[Any, ...]]:
        """The functions of later launches. Reading `run` loads the kernel, and builds its launcher if it has one."""
        # No launch metadata and no profiler hooks: the CUDA profilers see the kernel all the same.
        self._compiled[key] = _direct(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None))
        return self._compiled[key]

    def _compile(self, key: Hashable, device: int, args: Sequence[Any], options: dict[str, Any]) -> None:
        """In a thread of its own, without a launch. A failing compilation fails again, and raises, at the launch."""
        torch.cuda.set_device(device)
        self._keep(key, self.fn.run(*args, grid=(1,), warmup=True, **options))


def _direct(run: Any, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The function in C that Triton's launcher `run` calls, and its arguments between the stream and those of the
    kernel; or `run` and `given`, which it takes there. The launcher takes as long as the launch, and differs between
    versions: so it is called here with a function that looks at its arguments."""
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return run, given
    seen: list[Any] = []
    probe = copy.copy(run)
    probe.launch = lambda *args: seen.extend(args)
    ends = object(), object()
    probe(1, 2, 3, 4, *given, *ends)
    if seen[:4] == [1, 2, 3, 4] and tuple(seen[-2:]) == ends:
        return run.launch, tuple(seen[4:-2])
    if seen[:4] == [1, 2, 3, 4] and seen[-1] == ends:
        return _joined(run.launch, *seen[4:-1]), ()
    return run, given


def _joined(launch: Any, *between: Any) -> Callable[..., None]:
    """A launch that takes the arguments of the kernel as one."""
    return lambda x, y, z, stream, *args: launch(x, y, z, stream, *between, args)


def _record(launch: Any, grid: tuple[int, int, int], args: Any, meta: dict[str, Any], misaligned: bool) -> None:
    found = recorder()
    if found is not None:
        found.add(launch, grid, args, meta)
        if misaligned:
            found.refuse()


class Tile(NamedTuple):
    """The tile of a kernel: the sizes it is compiled with, warps and stages, and the most registers of a thread."""

    sizes: dict[str, int]
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch beside the sizes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def _named(fn: Any, option: str) -> frozenset[int]:
    """The places of the parameters that an option of `@triton.jit` names or counts."""
    # Functions for the interpreter keep their options as they were given.
    given = fn.kwargs[option] if hasattr(fn, "kwargs") else getattr(fn, option)
    return frozenset(fn.arg_names.index(name) if isinstance(name, str) else name for name in given or ())


def _kind(arg: Any) -> Any:
    """The part of a kernel's key for an argument that is a tuple, a tensor descriptor, a float or a bool."""
    if isinstance(arg, tuple):
        return tuple(map(_kind, arg))
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0, _HIP and arg.untyped_storage().size() > _INT32
    if hasattr(arg, "block_shape"):
        # One object for all descriptors of a kind, if their maker has set it.
        return vars(arg).get("kind") or (arg.base.dtype, *arg.block_shape, arg.layout)
    return arg if type(arg) is int else type(arg)


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`, and at least 1."""
    # Triton's own, which kernels may call too, takes twenty times as long.
    return 1 << max(n - 1, 0).bit_length()
