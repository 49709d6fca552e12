"""Equal calls of an operator: the second one records its launches, and each later one runs these alone.

The host time of a launcher goes into views of its operands, choices, tensor descriptors, lists of arguments and keys of
compiled kernels. All of them follow from shapes, strides, dtypes and options, and take two to four times as long as the
launches. A `Recording` keeps the compiled launches, and for each of their pointers the operand or the allocation that
it points into, and its offset there. It holds no tensor, no memory and no stream, so it serves any operands of its key,
in eager calls and while a CUDA graph captures.

A launcher is recorded only if each of its steps is a launch, or a function of PyTorch that gives tensors on the same
device, of shapes that follow from those of its arguments: a mode of PyTorch's dispatcher looks on, and refuses every
other step, as it refuses a pointer into memory that no step has made. Memory that launches of a stream share, `flags`,
`scratch` and `counters` of `launch`, is asked for anew.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer._core.compiling import walking
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import watched

_guards: Any = torch._C._dynamo.guards
EMPTY = {"cuda": _guards._empty_strided_cuda, "cpu": _guards._empty_strided_cpu}
"""Allocate (shape, strides, dtype) on the current device, in half the time of `torch.empty_strided`."""

_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_EMPTY |= {_aten.new_empty.default, _aten.new_empty_strided.default}
_UNSURE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_UNSURE |= {torch.Tag.inplace_view}
"""Functions of PyTorch that follow from more than their arguments' shapes, or change a tensor's own."""
_MOST_BYTES = 1 << 29
"""Of all that a launcher allocates: while it is recorded, none of it is freed."""
_BESIDE = 2
"""Launches by which a free lags: a kernel may begin while the one before it still reads."""

Launch = tuple[Callable[..., Any], tuple[Any, ...]]
"""A compiled kernel's function, and its arguments between the stream and those of the kernel."""
recorders: "dict[int, Recorder]" = {}
"""The recorder of each thread that has one."""


class Epoch(int):
    """The epoch of a recorded launch, and its place in `Recorder.memory`, beside that of the flags."""

    place: int


class Memory(NamedTuple):
    """A place of memory: the tensor, None for a missing operand and for an epoch; and how a repetition makes it, by
    `maker(*given)`, None for operands, epochs and results of steps."""

    tensor: Tensor | None
    maker: Callable[..., Any] | None = None
    given: tuple[Any, ...] = ()
    owned: bool = False


class Step(NamedTuple):
    """A launch: `run(*grid, stream, *arguments, *args)`. args are the constants, with the addresses, groups and
    descriptors at their places in the list; results are the places of memory that take what `run` returns."""

    launch: Launch
    grid: tuple[int, int, int]
    constants: list[Any]
    pointers: list[Any]
    groups: list[Any]
    descriptors: list[Any]
    results: list[int]

    def places(self) -> list[int]:
        """The places of memory that the step reads or writes."""
        return [*(at[1] for at in self.pointers), *(at[1] for at in self.descriptors), *self.results]


class Recorder(TorchDispatchMode):
    """Looks on while a launcher runs. `memory` begins with the operands; memory that steps make follows."""

    def __init__(self, operands: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.complete, self._bytes = True, 0
        # Allocations stay alive while others are made, so that no address comes twice.
        self.memory = [Memory(x) for x in operands]
        self.steps: list[Step] = []
        self._places = {_storage(x): place for place, x in enumerate(operands) if x is not None}
        self._device = next(x.device for x in operands if x is not None)

    def refuse(self) -> None:
        """The launcher cannot be recorded, and nothing of it is held any longer."""
        self.complete = False
        self.memory, self.steps, self._places = [], [], {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():
            # In inference mode, and below autograd, composite functions arrive whole.
            with self:
                return function.decompose(*args, **kwargs)
        made = function(*args, **kwargs)
        if not self.complete or function.is_view:
            return made
        found = made if isinstance(made, tuple) else (made,)
        if _UNSURE & {*function.tags} or any(type(x) is not Tensor or x.device != self._device for x in found):
            self.refuse()
        elif function in _EMPTY:
            self._own(made, EMPTY[self._device.type], tuple(made.shape), made.stride(), made.dtype)
        else:
            # A function that gives memory which is known writes there, or gives a view.
            new = [x for x in found if _storage(x) not in self._places]
            if new or function._schema.is_mutable:
                launch = _by_pytorch, (function, len(args), tuple(kwargs))
                results = range(len(self.memory), len(self.memory) + len(new))
                self.add(launch, (1, 1, 1), [*args, *kwargs.values()], {}, True, [*results])
                for x in new:
                    self._own(x)
        return made

    def _own(self, made: Tensor, maker: Any = None, *given: Any) -> None:
        """Memory of this call alone."""
        self._bytes += made.nbytes
        if self.complete:
            self.keep(made, maker, *given, owned=True)
        if self._bytes > _MOST_BYTES:
            self.refuse()

    def keep(self, made: Tensor, maker: Any, *given: Any, owned: bool = False) -> None:
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
        views: bool = INTERPRET, results: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """A launch that has just run. It takes addresses, or with `views` tensors."""
        given, groups = [*args, *meta.values()], []
        for at, arg in enumerate(args):
            if isinstance(arg, tuple | list) and any(isinstance(x, Tensor) for x in arg):
                groups.append((at, len(given), len(given) + len(arg), type(arg)))
                given += arg
        constants, pointers, descriptors = given.copy(), [], []
        for at, arg in enumerate(given):
            if not self.complete:
                return
            if isinstance(arg, Tensor):
                # A tensor without elements has the address 0.
                constants[at] = arg.new_empty(arg.shape) if views and not arg.numel() else 0
                if arg.numel():
                    place, offset = self._place_of(arg)
                    like = arg.dtype, arg.shape, arg.stride()
                    pointers.append((at, place, offset, like if views else None))
            elif type(arg) is Epoch:
                constants[at] = 0
                pointers.append((at, arg.place, 0, None))
            elif hasattr(arg, "block_shape"):
                place, offset = self._place_of(arg.base)
                if offset or INTERPRET:
                    self.refuse()
                constants[at] = None
                descriptors.append((at, place, type(arg), {**vars(arg), "base": None}))
        for at, *_ in groups:
            constants[at] = None
        if self.complete:
            self.steps.append(Step(launch, grid, constants, pointers, groups, descriptors, [*results]))

    def recording(self, results: Any) -> "Recording | None":
        """The recording of a launcher that returned these results; None where it cannot be repeated."""
        returned: list[tuple[int, Any]] = []
        for result in (results,) if isinstance(results, Tensor) else results or ():
            place, offset = self._place_of(result) if self.complete else (-1, 0)
            whole = self.memory[place] if place >= 0 else Memory(None)
            if offset or not whole.owned or whole.tensor is None or place in (at for at, _ in returned):
                return None
            if whole.tensor.nbytes != result.nbytes or whole.tensor.dtype is not result.dtype:
                return None
            like: Any = tuple(result.shape), result.stride()
            if whole.maker is not None:
                self.memory[place] = whole._replace(given=(*like, result.dtype))
            elif like == (tuple(whole.tensor.shape), whole.tensor.stride()):
                like = None
            returned.append((place, None if whole.maker is not None else like))
        return Recording(self.memory, self.steps, returned, results) if self.complete else None


class Recording:
    """The allocations and launches of a call. What lies between is allocated as it is needed, and then freed."""

    __slots__ = ("_count", "_last", "_returned", "_returns", "_steps")

    def __init__(self, memory: list[Memory], steps: list[Step], returned: list[tuple[int, Any]], results: Any) -> None:
        first, last = dict[int, int](), dict[int, int]()
        for number, step in enumerate(steps):
            for place in step.places():
                # An epoch comes with its flags, which stand before it.
                place -= memory[place].tensor is None
                first.setdefault(place, number)
                last[place] = number
        kept = {place for place, _ in returned}
        operands = next((place for place, each in enumerate(memory) if each.maker or each.owned), len(memory))
        made: list[list[Any]] = [[] for _ in range(len(steps) + 1)]
        freed: list[list[int]] = [[] for _ in range(len(steps) + 1 + _BESIDE)]
        for place, each in enumerate(memory):
            if each.maker is not None and (place in first or place in kept):
                made[first.get(place, len(steps))].append((place, each.maker, each.given))
            if place >= operands and place in last and place not in kept:
                freed[last[place] + _BESIDE].append(place)
        self._count = len(memory) - operands
        self._steps = list(zip(made, steps, freed))
        self._last = made[-1]
        self._returned, self._returns = returned, type(results)

    def __call__(self, memory: list[Any], pointers: list[Any], device: torch.device) -> Any:
        """The results for operands `memory`, whose addresses are `pointers`."""
        memory += [None] * self._count
        pointers += [0] * self._count
        stream = torch._C._cuda_getCurrentRawStream(device.index) if not INTERPRET else 0
        for made, step, freed in self._steps:
            if made:
                _make(made, memory, pointers)
            (run, arguments), grid, constants, places, groups, descriptors, results = step
            args = constants.copy()
            for at, place, offset, like in places:
                args[at] = pointers[place] + offset if like is None else _view(memory[place], offset, *like)
            for at, place, kind, fields in descriptors:
                args[at] = descriptor = object.__new__(kind)
                descriptor.__dict__.update(fields, base=memory[place])
            if groups:
                for at, begin, end, kind in groups:
                    args[at] = kind(args[begin:end])
                del args[groups[0][1] :]
            found = run(*grid, stream, *arguments, *args)
            if results:
                for place, x in zip(results, found if type(found) is tuple else (found,)):
                    memory[place], pointers[place] = x, x.data_ptr()
            for place in freed:
                memory[place] = None
        _make(self._last, memory, pointers)
        given = [memory[at] if like is None else memory[at].as_strided(*like) for at, like in self._returned]
        return given[0] if self._returns is Tensor else None if self._returns is NoneType else tuple(given)


def _make(made: Sequence[Any], memory: list[Any], pointers: list[Any]) -> None:
    """Allocates places of memory."""
    for place, maker, given in made:
        found = maker(*given)
        if type(found) is tuple:
            found, pointers[place + 1] = found
        memory[place], pointers[place] = found, found.data_ptr()


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
        if walking or watched():
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


def _by_pytorch(x: int, y: int, z: int, stream: int, function: Any, count: int, names: Any, *args: Any) -> Any:
    """A step by PyTorch, which takes the place of a launch."""
    with torch._C._AutoDispatchBelowAutograd():
        return function(*args[:count], **dict(zip(names, args[count:])))


def _view(x: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A view of a tensor's memory, for steps that take no addresses."""
    if not offset and x.dtype is dtype and x.shape == shape and x.stride() == strides:
        return x
    if x.dtype is dtype:
        return x.as_strided(shape, strides, x.storage_offset() + offset // dtype.itemsize)
    at = (x.storage_offset() * x.element_size() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), at, shape, strides)
