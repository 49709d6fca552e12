"""Kernel launches: device guard, a short path for repeated calls, and the flags that programs of one launch share.

A small operator is bound by host time. Triton's own launcher rebinds and respecialises every argument on every call
(6 to 13 us); a `Kernel` does that once for all launches that compile to the same code, and afterwards hands integers
straight to the compiled kernel.
"""

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gossamer._core.compiling import NotCompiled, walk, walking
from gossamer._core.ops import INTERPRET
from gossamer._core.replay import Epoch, Recorder, alone, recorders

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


def _recorder() -> Recorder | None:
    return recorders.get(threading.get_ident()) if recorders else None


def _recorded(maker: Callable[..., Tensor], *args: Any) -> Tensor:
    """Memory that a recorder asks the maker for anew."""
    recorder = _recorder()
    if recorder is None:
        return maker(*args)
    with _disable_current_modes():
        made = alone(maker(*args))
    recorder.keep(made, maker, *args)
    return made


def _record(launch: Any, grid: tuple[int, int, int], args: Any, meta: dict[str, Any], misaligned: bool) -> None:
    recorder = _recorder()
    if recorder is not None:
        recorder.add(launch, grid, args, meta)
        if misaligned:
            recorder.refuse()


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


def in_graph_pool(device: torch.device) -> bool:
    """Whether memory that is allocated now may not outlive the call, because it comes from the pool of a CUDA graph.

    The pool is in use during capture, and in the eager run with which Inductor warms up for its own graphs.
    """
    if device.type != "cuda":
        return True
    if device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return in_graph_pool(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # a thread that Inductor has never seen
        return False
    return manager is not None and manager.stream == torch.cuda.current_stream()


class Flags:
    """Words of device memory through which the programs of one launch signal each other.

    A program signals by writing the launch's epoch; a word that holds an older epoch is not yet set, so nothing has to
    be cleared between calls. One buffer serves one stream, because launches on one stream never overlap. A graph
    freezes the epoch, so there a fresh buffer is zeroed inside the graph instead.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], tuple[Tensor, Epochs]] = {}

    def get(self, words: int, device: torch.device) -> tuple[Tensor, int]:
        """(int64 buffer of at least `words`, epoch of this launch)"""
        recorder = _recorder()
        if recorder is None:
            return self._next(words, device)
        with _disable_current_modes():
            buffer, epoch = self._next(words, device)
            buffer = alone(buffer)
        return buffer, recorder.signals(buffer, epoch, self._next, words, device)

    def _next(self, words: int, device: torch.device) -> tuple[Tensor, int]:
        if in_graph_pool(device):
            return torch.zeros(words, dtype=torch.int64, device=device), 1
        key = (device, torch._C._cuda_getCurrentRawStream(device.index))
        buffer, epochs = self._streams.get(key, (None, None))
        if buffer is None or epochs is None or buffer.numel() < words:
            # Twice the need, so that a growing batch does not allocate at every step.
            buffer, epochs = torch.zeros(max(2 * words, 4096), dtype=torch.int64, device=device), Epochs()
            self._streams[key] = buffer, epochs
        return buffer, epochs.next()


class Epochs:
    """Numbers the launches that share one buffer of flags; `next` is one step of C code, so threads cannot collide."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = itertools.count()

    def next(self) -> int:
        """1, 2, ... 2^31 - 2, and again. To mistake an epoch for its successor of the same number, a word would have to
        be left alone for 2^31 launches and be looked at in the very next."""
        return next(self._count) % ((1 << 31) - 2) + 1


class Counters:
    """Words of device memory that are 0 between launches, because every launch that writes them leaves them at 0. A
    later launch cannot clear them: a call may end between two launches, as `together` ends calls, or by an error.

    One buffer serves one stream, as with `Flags`. A launch of a graph gets words of its own that were zeroed ahead, by
    a call outside of graphs on any stream: a capture begins after the device has finished, as `torch.cuda.graph` sees
    to, and by `CUDAGraph.capture_begin` the caller has to.
    """

    _AHEAD, _WORDS = 128, 1024
    """Launches in graphs to have words for, and how many of them each gets."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], Tensor] = {}
        self._ahead: dict[torch.device, list[Tensor]] = {}
        self._blocks: list[Tensor] = []

    def get(self, words: int, device: torch.device) -> Tensor:
        """int32 buffer of at least `words`, all 0."""
        return _recorded(self._get, words, device)

    def _get(self, words: int, device: torch.device) -> Tensor:
        ahead = self._ahead.setdefault(device, [])
        if in_graph_pool(device):
            # Not in the eager run with which Inductor warms up, for those words would be gone for good.
            if ahead and words <= self._WORDS and torch._C._cuda_isCurrentStreamCapturing():
                with suppress(IndexError):  # another thread took the last
                    return ahead.pop()
            return torch.zeros(words, dtype=torch.int32, device=device)
        if len(ahead) < self._AHEAD:
            block = torch.zeros(self._AHEAD, self._WORDS, dtype=torch.int32, device=device)
            ahead += block.unbind()
            # Kept for good: no callback tells when a graph is freed.
            self._blocks.append(block)
        key = (device, torch._C._cuda_getCurrentRawStream(device.index))
        buffer = self._streams.get(key)
        if buffer is None or buffer.numel() < words:
            buffer = self._streams[key] = torch.zeros(max(2 * words, 4096), dtype=torch.int32, device=device)
        return buffer


_blank: dict[tuple[int, torch.device, int | None], Tensor] = {}
"""Zeros by words, device and stream; under None are those of the first stream, for graphs."""


def zeros(words: int, device: torch.device) -> Tensor:
    """int32 zeros that no kernel writes. Each stream has its own, since no stream waits for another to zero them; a
    graph takes those of any stream, under the condition of `Counters`."""
    return _recorded(_zeros, words, device)


def _zeros(words: int, device: torch.device) -> Tensor:
    if in_graph_pool(device):
        # Memory of a graph is zeroed whenever the graph is replayed. Zeros of a call before it spare that step.
        known = _blank.get((words, device, None))
        if known is not None and torch._C._cuda_isCurrentStreamCapturing():
            return known
        return torch.zeros(words, dtype=torch.int32, device=device)
    key = (words, device, torch._C._cuda_getCurrentRawStream(device.index))
    if key not in _blank:
        _blank[key] = torch.zeros(words, dtype=torch.int32, device=device)
        _blank.setdefault((words, device, None), _blank[key])
    return _blank[key]


class Scratch:
    """Device memory that holds nothing between launches: one buffer a stream, as large as the largest need so far."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], Tensor] = {}

    def get(self, words: int, device: torch.device) -> Tensor:
        """float32 buffer of at least `words`, with anything in it."""
        return _recorded(self._get, words, device)

    def _get(self, words: int, device: torch.device) -> Tensor:
        if in_graph_pool(device):
            return torch.empty(words, dtype=torch.float32, device=device)
        key = (device, torch._C._cuda_getCurrentRawStream(device.index))
        buffer = self._streams.get(key)
        if buffer is None or buffer.numel() < words:
            size = max(words, 0 if buffer is None else 2 * buffer.numel())
            buffer = self._streams[key] = torch.empty(size, dtype=torch.float32, device=device)
        return buffer


flags = Flags()
scratch = Scratch()
counters = Counters()


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`, and at least 1."""
    # Triton's own, which kernels may call too, takes twenty times as long.
    return 1 << max(n - 1, 0).bit_length()
