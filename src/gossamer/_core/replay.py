"""Equal calls of an operator: the second one records its launches, and each later one runs these alone.

The host time of a launcher goes into views of its operands, choices, tensor descriptors, lists of arguments and keys of
compiled kernels. All of them follow from shapes, strides, dtypes and options, and take two to four times as long as the
launches. A `Recording` keeps the compiled launches, and for each of their pointers the operand or the allocation that
it points into, and its offset there. It holds no tensor, no memory and no stream, so it serves any operands of its key,
in eager calls and while a CUDA graph captures.

A launcher is recorded only if each of its steps is an allocation, a view, a copy, a product that the library writes
where it is told, or a launch: a mode of PyTorch's dispatcher looks on and refuses every other step, as it refuses a
pointer into memory that no step has made. Memory that launches of a stream share, `flags`, `scratch` and `counters` of
`launch`, is asked for anew.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer._core.compiling import walking
from gossamer._core.ops import INTERPRET, profiler_enabled
from gossamer._core.ranges import NVIDIA_LOOKS

_guards: Any = torch._C._dynamo.guards
EMPTY = {"cuda": _guards._empty_strided_cuda, "cpu": _guards._empty_strided_cpu}
"""Allocate (shape, strides, dtype) on the current device, in half the time of `torch.empty_strided`."""

_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_EMPTY |= {_aten.new_empty.default, _aten.new_empty_strided.default}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_WRITES: dict[Any, Callable[..., Any]] = {
    _aten.copy_.default: Tensor.copy_,
    _aten.zero_.default: Tensor.zero_,
    _aten.fill_.Scalar: Tensor.fill_,
    _aten.add_.Tensor: Tensor.add_,
    _aten.mm.out: lambda a, b, out: torch.mm(a, b, out=out),
    _aten.addmm.out: lambda bias, a, b, out: torch.addmm(bias, a, b, out=out),
}
"""Steps by PyTorch, and the functions that repeat them."""
_MOST_BYTES = 1 << 26
"""Of allocations that are no results. A recording holds them all until it ends, where a launcher may use memory again;
and calls that need more take the device longer than the host."""

Launch = tuple[Callable[..., Any], tuple[Any, ...]]
"""A compiled kernel's function, and its arguments between the stream and those of the kernel."""
recorders: "dict[int, Recorder]" = {}
"""The recorder of each thread that has one."""


class Epoch(int):
    """The epoch of a recorded launch, and its place in `Recorder.memory`, beside that of the flags."""

    place: int


class Memory(NamedTuple):
    """A place of memory: the tensor, None for a missing operand and for an epoch; and how a repetition makes it, by
    `maker(*given)`, None for operands and epochs."""

    tensor: Tensor | None
    maker: Callable[..., Any] | None = None
    given: tuple[Any, ...] = ()
    owned: bool = False


class Recorder(TorchDispatchMode):
    """Looks on while a launcher runs. `memory` begins with the operands; memory that steps make follows."""

    def __init__(self, operands: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.complete, self._bytes = True, 0
        # Allocations stay alive while others are made, so that no address comes twice.
        self.memory = [Memory(x) for x in operands]
        self.launches: list[tuple[Launch, tuple[int, int, int], list[Any], list[Any], list[Any]]] = []
        self._places = {_storage(x): place for place, x in enumerate(operands) if x is not None}
        self._device = next(x.device for x in operands if x is not None)

    def refuse(self) -> None:
        """The launcher cannot be recorded, and nothing of it is held any longer."""
        self.complete = False
        self.memory, self.launches, self._places = [], [], {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():
            # In inference mode, and below autograd, composite functions arrive whole.
            with self:
                return function.decompose(*args, **kwargs)
        made = function(*args, **kwargs)
        if not self.complete:
            return made
        if function in _EMPTY or function in _ZEROS or function in _COPIES:
            self._bytes += made.nbytes
            if made.device != self._device or self._bytes > 4 * _MOST_BYTES:
                self.refuse()
                return made
            self.keep(made, EMPTY[self._device.type], tuple(made.shape), made.stride(), made.dtype, owned=True)
        if function in _COPIES:
            self._write(Tensor.copy_, made, args[0])
        elif function in _ZEROS:
            self._write(Tensor.zero_, made)
        elif function in _WRITES and not kwargs.keys() - {"out"}:
            self._write(_WRITES[function], *args, *kwargs.values())
        elif function not in _EMPTY and not function.is_view:
            self.refuse()
        return made

    def keep(self, made: Tensor, maker: Callable[..., Any], *given: Any, owned: bool = False) -> None:
        """Memory that a step has made, and a repetition makes by `maker`; `owned` by this call alone."""
        self._places[_storage(made)] = len(self.memory)
        self.memory.append(Memory(made, maker, given, owned))

    def signals(self, flags: Tensor, epoch: int, maker: Callable[..., Any], *given: Any) -> Epoch:
        """The epoch of a launch with flags; `maker` gives both to a repetition."""
        self.keep(flags, maker, *given)
        found = Epoch(epoch)
        found.place = len(self.memory)
        self.memory.append(Memory(None))
        return found

    def _write(self, function: Any, *args: Any) -> None:
        self.add((_run_below_autograd, (function,)), (1, 1, 1), args, {}, views=True)

    def _place_of(self, x: Tensor) -> tuple[int, int]:
        """(place in `memory`, bytes behind its beginning) of a tensor."""
        place = self._places.get(_storage(x), -1)
        whole = self.memory[place].tensor if place >= 0 else None
        if whole is None:
            self.refuse()
            return -1, 0
        return place, x.data_ptr() - whole.data_ptr()

    def add(
        self, launch: Launch, grid: tuple[int, int, int], args: Sequence[Any], meta: Mapping[str, Any],
        views: bool = INTERPRET,
    ) -> None:  # fmt: skip
        """A launch that has just run. It takes addresses, or with `views` tensors."""
        if not self.complete:
            return
        constant, pointers, descriptors = [*args, *meta.values()], [], []
        for at, arg in enumerate(args):
            if isinstance(arg, Tensor):
                # A tensor without elements has the address 0.
                constant[at] = arg.new_empty(arg.shape) if views and not arg.numel() else 0
                if arg.numel():
                    place, offset = self._place_of(arg)
                    pointers.append((at, place, offset, (arg.dtype, arg.shape, arg.stride()) if views else None))
            elif type(arg) is Epoch:
                constant[at] = 0
                pointers.append((at, arg.place, 0, None))
            elif hasattr(arg, "block_shape"):
                place, offset = self._place_of(arg.base)
                if offset or INTERPRET:
                    self.refuse()
                constant[at] = None
                descriptors.append((at, place, type(arg), {**vars(arg), "base": None}))
            elif isinstance(arg, tuple):
                self.refuse()
            if not self.memory:  # refused
                return
        self.launches.append((launch, grid, constant, pointers, descriptors))

    def recording(self, results: Any) -> "Recording | None":
        """The recording of a launcher that returned these results; None where it cannot be repeated."""
        made: list[Any] = [(each.maker, each.given) for each in self.memory if each.maker is not None]
        steps = [place for place, each in enumerate(self.memory) if each.maker is not None]
        between = sum(each.tensor.nbytes for each in self.memory if each.owned and each.tensor is not None)
        places: list[int] = []
        for result in (results,) if isinstance(results, Tensor) else results or ():
            place, offset = self._place_of(result) if self.complete else (-1, 0)
            whole = self.memory[place] if place >= 0 else Memory(None)
            if offset or not whole.owned or place in places or whole.tensor is None:
                return None
            if whole.tensor.nbytes != result.nbytes or whole.tensor.dtype is not result.dtype:
                return None
            made[steps.index(place)] = whole.maker, (tuple(result.shape), result.stride(), result.dtype)
            places.append(place)
            between -= result.nbytes
        if not self.complete or between > _MOST_BYTES:
            return None
        return Recording(made, self.launches, places, results)


class Recording:
    """The allocations and launches of a call."""

    __slots__ = ("_launches", "_made", "_places", "_returns")

    def __init__(self, made: Any, launches: Any, places: list[int], results: Any) -> None:
        self._made, self._launches, self._places = made, launches, places
        self._returns = type(results)

    def __call__(self, memory: list[Any], pointers: list[Any], device: torch.device) -> Any:
        """The results for operands `memory`, whose addresses are `pointers`."""
        for maker, given in self._made:
            made = maker(*given)
            if type(made) is tuple:
                made, epoch = made
                memory += made, None
                pointers += made.data_ptr(), epoch
            else:
                memory.append(made)
                pointers.append(made.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index) if not INTERPRET else 0
        for (run, arguments), grid, constant, places, descriptors in self._launches:
            args = constant.copy()
            for at, place, offset, like in places:
                args[at] = pointers[place] + offset if like is None else _view(memory[place], offset, *like)
            for at, place, kind, fields in descriptors:
                args[at] = descriptor = object.__new__(kind)
                descriptor.__dict__.update(fields, base=memory[place])
            run(*grid, stream, *arguments, *args)
        if self._returns is Tensor:
            return memory[self._places[0]]
        return None if self._returns is NoneType else tuple([memory[place] for place in self._places])


class Repeated:
    """A launcher whose equal calls are recorded. `tensors` and `others` pick the fields of a record that are tensors,
    whose places are given, and that are none. The number of recordings is bounded."""

    __slots__ = ("_known", "_others", "_places", "_run", "_seen", "_tensors")
    _MOST = 512

    def __init__(self, run: Callable[..., Any], tensors: Any, places: list[int], others: Any) -> None:
        self._run, self._tensors, self._places, self._others = run, tensors, places, others
        # None if a call cannot be repeated.
        self._known: dict[Hashable, Recording | None] = {}
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """From now on no call is known."""
        self._known.clear()
        self._seen.clear()

    def __call__(self, call: Any, only: bool = False) -> Any:
        """The results of a call; with `only`, None where there is no recording of it."""
        if walking or NVIDIA_LOOKS or profiler_enabled():
            return None if only else self._run(call)
        memory = [*self._tensors(call)]
        key: Any = [self._others(call), torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"]
        pointers: list[int | None] = []
        united, last = 0, None
        for x in memory:
            if x is None:
                key.append(None)
                pointers.append(None)
            else:
                last, pointer = x, x.data_ptr()
                pointers.append(pointer)
                united |= pointer
                key += x.shape, x.stride(), x.dtype
        assert last is not None
        device = last.device
        key = *key, device.index
        # Kernels are compiled for pointers on 16 bytes.
        if united % 16 or not (INTERPRET or torch._C._cuda_getDevice() == device.index):
            return None if only else self._run(call)
        try:
            found = self._known.get(key)
        except TypeError:  # PyTorch's dispatcher makes lists of tuples
            fields = [tuple(field) if isinstance(field, list) else field for field in call]
            return self(tuple.__new__(type(call), fields), only)
        if found is not None:
            return found(memory, pointers, device)
        if only:
            return None
        return self._run(call) if key in self._known else self._first_or_second(key, call, memory)

    def _first_or_second(self, key: Hashable, call: Any, operands: list[Tensor | None]) -> Any:
        if key not in self._seen:
            if len(self._seen) >= self._MOST:
                self._seen.clear()
            self._seen.add(key)
            return self._run(call)
        if len(self._known) >= self._MOST:
            for old in list(self._known)[: self._MOST // 2 + 1]:
                self._known.pop(old, None)
        # A call that fails is not recorded again.
        self._known[key] = None
        given = [None if x is None else alone(x) for x in operands]
        fields = [*call]
        for place, x in zip(self._places, given):
            fields[place] = x
        me, recorder = threading.get_ident(), Recorder(given)
        before, recorders[me] = recorders.get(me), recorder
        try:
            with recorder:
                results = self._run(tuple.__new__(type(call), fields))
        finally:
            del recorders[me]
            if before is not None:
                recorders[me] = before
        self._known[key] = recorder.recording(results)
        return results


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def alone(x: Tensor) -> Tensor:
    """The tensor with a storage of its own over the same memory, so that operands that are views of one tensor, or one
    tensor twice, can be told apart."""
    same: Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach()))
    # DLPack gives dimensions of 1 a stride of its own.
    return same.as_strided(x.shape, x.stride())


def _run_below_autograd(x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
    """A step by PyTorch, which takes the place of a launch."""
    with torch._C._AutoDispatchBelowAutograd():
        function(*args)


def _view(x: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A view of a tensor's memory, for steps that take no addresses: the tensor itself, if it is that view."""
    if x.dtype is dtype:
        if not offset and x.shape == shape and x.stride() == strides:
            return x
        return x.as_strided(shape, strides, x.storage_offset() + offset // dtype.itemsize)
    at = (x.storage_offset() * x.element_size() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), at, shape, strides)
